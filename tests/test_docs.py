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
from rendering import PROJECT, TEMPLATE, run


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


def assert_tests_are_there(text: str, least: int) -> None:
    """Checks that the tests that a page names, at least so many, are tests of the template or of the project."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) == text.count("::") >= least
    for file, name in named:
        (path,) = (folder / file for folder in (TEMPLATE, PROJECT) if (folder / file).exists())
        assert name.startswith("test_"), name
        assert name in functions(path), f"{file}::{name}"


@functools.cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_every_guarantee_names_tests_that_there_are() -> None:
    text = (TEMPLATE / "docs" / "guarantees.md").read_text(encoding="utf-8")
    *sections, untested = re.split(r"(?m)^## ", text)[1:]
    assert untested.startswith("Untested\n")
    tests = r"(?:- `tests/[\w/]+\.py::\w+`\n?)+"
    for section in sections:
        paragraphs = [each for each in re.split(r"\n\n+", section)[1:] if each.strip()]
        assert re.fullmatch(tests, paragraphs[-1]) or "](" in paragraphs[-1], paragraphs[-1]
        for said, follows in itertools.pairwise(paragraphs):
            # A link leads to a page with tests or figures of its own; a colon, to a list and its tests.
            is_named = re.fullmatch(tests, follows) or "](" in said or said.endswith(":")
            assert said.startswith("- `") or is_named, said
    assert_tests_are_there(text, least=60)


def test_every_pitfall_names_tests_that_there_are() -> None:
    text = (TEMPLATE / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    pitfalls = re.findall(r"(?ms)^- \*\*.*?(?=^- |^\n|^#)", text)
    assert len(pitfalls) == len(re.findall(r"(?m)^- ", text)) > 50
    for pitfall in pitfalls:
        assert re.match(r"(?s)- \*\*.+?\*\*\s+\*(Silent|Error|Hang|Slow)\b", pitfall), pitfall
        assert re.search(r"(?:\n  `tests/[\w/]+\.py::\w+`)+\n\Z", pitfall), pitfall
    assert_tests_are_there(text, least=50)


def test_number_of_planted_faults_is_that_of_the_test() -> None:
    planted = 0
    for path in (TEMPLATE / "tests/engine/check").glob("test_*.py"):
        code = ast.parse(path.read_text(encoding="utf-8"))
        assigned = {ast.unparse(each.targets[0]): each.value for each in code.body if isinstance(each, ast.Assign)}
        planted += len(assigned["FAULTS"].keys) if "FAULTS" in assigned else 0
    for page in ("README.md", "docs/guarantees.md"):
        found = f"finds {planted} planted faults"
        assert found in (TEMPLATE / page).read_text(encoding="utf-8"), page


LOSS_ACCURACY = (slice(2, 4), slice(4, 6))  # The parts of what EPOCH finds.
EPOCH = re.compile(r"(?m)^epoch +(\d+)/(\d+)  loss +(\S+) / +(\S+)  accuracy +(\S+) / +(\S+)  ")


@pytest.mark.long
def test_losses_in_the_readme_are_those_of_its_command(tmp_path: Path) -> None:
    shown = EPOCH.findall((TEMPLATE / "README.md").read_text(encoding="utf-8"))
    assert [(number, epochs) for number, epochs, *_ in shown] == [(str(number), "5") for number in range(1, 6)]
    flags = ("--epochs", "5", "--simulated-devices", "2", "--run-dir", tmp_path)
    done = run("python", "train.py", *flags, folder=PROJECT)
    assert done.returncode == 0, done.stderr
    found = EPOCH.findall(done.stdout)
    assert len(found) == 5
    for one, other in zip(shown, found, strict=True):
        losses, accuracies = ([[float(value) for value in row[part]] for row in (one, other)] for part in LOSS_ACCURACY)
        # CPUs round differently, which may change the last digit, or the class of one example.
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert accuracies[0] == pytest.approx(accuracies[1], abs=0.006)


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
