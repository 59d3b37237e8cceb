"""The pages: made from the code where they can be, and every link and every test that they name is there."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rendering import PROJECT, TEMPLATE

PAGES = [TEMPLATE / "README.md", TEMPLATE / "CHANGELOG.md", *sorted(TEMPLATE.glob("docs/*.md"))]
PAGES += [PROJECT / "README.md", PROJECT / "deploy" / "README.md"]


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
    assert (TEMPLATE / "docs" / "settings.md").read_text(encoding="utf-8") == made.stdout, "run make settings"


def test_every_guarantee_names_tests_that_there_are() -> None:
    text = (TEMPLATE / "docs" / "guarantees.md").read_text(encoding="utf-8")
    for guarantee in re.split(r"(?m)^- ", text)[1:]:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", guarantee)
        assert named, guarantee
        for file, name in named:
            tree = ast.parse((TEMPLATE / file).read_text(encoding="utf-8"))
            assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, f"{file}::{name}"


def test_texts_in_troubleshooting_are_those_of_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in PROJECT.rglob("*.py") if "tests" not in path.parts)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # Texts that go on in the next line.
    page = (TEMPLATE / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"(?m)^\| `([^`]+)` \|", page.partition("## From TensorFlow")[0])
    assert len(quoted) > 20
    for text in quoted:
        for part in text.split("..."):
            assert part.strip() in code, text


def test_pictures_fetch_nothing() -> None:
    picture = (TEMPLATE / "docs" / "console.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' )]+", picture)) == {"http://www.w3.org/2000/svg"}
    assert "epoch 12/12" in picture.replace("&#160;", " ")
