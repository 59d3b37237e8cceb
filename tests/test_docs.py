"""The pages: made from the code where they can be, and every link and every test that they name is there."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import PAGES
from rendering import PROJECT, TEMPLATE


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TEMPLATE).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            assert re.fullmatch(r"https://[\w.-]+(/[\w./%#?=&~-]*)?", target), target
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_settings_page_is_made_from_the_code() -> None:
    program = "import sys; sys.path.insert(0, 'docs'); import make_settings; print(make_settings.page(), end='')"
    made = subprocess.run([sys.executable, "-c", program], check=True, cwd=TEMPLATE, capture_output=True, text=True)
    assert (PROJECT / "docs" / "settings.md").read_text(encoding="utf-8") == made.stdout, "run make settings"


def test_every_guarantee_names_tests_that_there_are() -> None:
    text = (TEMPLATE / "docs" / "guarantees.md").read_text(encoding="utf-8")
    *sections, not_measured = re.split(r"(?m)^## ", text)[1:]
    assert not_measured.startswith("Not measured")
    for section in sections:
        paragraphs = [each for each in re.split(r"\n\n+", section)[1:] if each.strip()]
        for said, tests in itertools.pairwise(paragraphs):
            is_named = re.fullmatch(r"(?:- `tests/[\w/]+\.py::\w+`\n?)+", tests) or "](" in said
            assert said.startswith("- ") or is_named, said
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) == text.count("::") > 50
    for file, name in named:
        # The tests of the project's own are there and not in the template.
        (path,) = (folder / file for folder in (TEMPLATE, PROJECT) if (folder / file).exists())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, f"{file}::{name}"


def test_number_of_planted_faults_is_that_of_the_test() -> None:
    code = ast.parse((TEMPLATE / "tests/engine/check/test_check.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(each.targets[0]): each.value for each in code.body if isinstance(each, ast.Assign)}
    for page in ("README.md", "docs/guarantees.md"):
        found = f"finds {len(assigned['FAULTS'].keys)} planted faults"
        assert found in (TEMPLATE / page).read_text(encoding="utf-8"), page


def messages(folder: Path) -> list[str]:
    """Returns the texts in the project's code, with a NUL where a value is put in."""
    texts = []
    for file in folder.rglob("*.py"):
        for each in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            pieces = each.values if isinstance(each, ast.JoinedStr) else [each]
            texts.append("".join(str(piece.value) if isinstance(piece, ast.Constant) else "\0" for piece in pieces))
    return texts


def test_texts_in_troubleshooting_are_those_of_the_code() -> None:
    page = (PROJECT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    ours, _, theirs = page.partition("## From TensorFlow")
    quoted = re.findall(r"\*\*`([^`]*)`\*\*", ours)
    assert len(quoted) > 60
    assert "**`" not in theirs
    assert len(quoted) == ours.count("**`")
    texts = messages(PROJECT)
    for text in quoted:
        pattern = ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", " ".join(text.split()))))
        assert any(re.search(pattern, each) for each in texts), text


def test_pictures_fetch_nothing() -> None:
    picture = (TEMPLATE / "docs" / "console.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' )]+", picture)) == {"http://www.w3.org/2000/svg"}
    assert "epoch 12/12" in picture.replace("&#160;", " ")
