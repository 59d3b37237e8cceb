"""The pages: their links lead somewhere, and what they say of tests, settings and messages is what there is."""

import ast
import re
from pathlib import Path

import pytest

from rendering import PROJECT, TEMPLATE, run

DOCS = TEMPLATE / "docs"
PAGES = sorted([TEMPLATE / "README.md", TEMPLATE / "CHANGELOG.md", *DOCS.glob("*.md"), *PROJECT.glob("**/*.md")])


def text_of(page: Path) -> str:
    """Returns a page without its blocks of code, in which nothing is a link or a heading."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Returns what a link can name in a page, as GitHub makes it of headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", text_of(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TEMPLATE)))
def test_links_lead_somewhere(page: Path) -> None:
    text = text_of(page)
    links = re.findall(r"\]\(([^)\s]*)\)", text)
    # A link that is broken over a line, or written with a space, is none to Markdown.
    assert len(links) == text.count("](")
    for link in links:
        if re.match(r"[a-z]+:", link):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./~%=?&+#-]*)?", link), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        root = PROJECT if PROJECT in page.parents else TEMPLATE
        assert target.is_relative_to(root), f"{link} leads out of the folder that a reader has"
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_guarantee_names_tests_that_exist() -> None:
    guarantees = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    *sections, not_measured = re.split(r"(?m)^## ", guarantees)[1:]
    assert not_measured.startswith("Not measured")
    for section in sections:
        assert re.search(r"(?m)^- `tests/", section), f"no test is named: {section.splitlines()[0]}"
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", guarantees):
        (file,) = [root / path for root in (TEMPLATE, PROJECT) if (root / path).exists()]
        functions = [each.name for each in ast.parse(file.read_text("utf-8")).body if isinstance(each, ast.FunctionDef)]
        assert name.startswith("test_") and name in functions, f"{path}::{name}"


def test_number_of_planted_faults_is_that_of_the_test() -> None:
    code = ast.parse((TEMPLATE / "tests/engine/check/test_check.py").read_text(encoding="utf-8"))
    assigned = [each for each in code.body if isinstance(each, ast.Assign)]
    (faults,) = [each.value for each in assigned if [getattr(name, "id", "") for name in each.targets] == ["FAULTS"]]
    for page in (TEMPLATE / "README.md", DOCS / "guarantees.md"):
        assert f"finds {len(faults.keys)} planted faults" in page.read_text(encoding="utf-8")


def test_page_of_settings_is_that_of_the_code(tmp_path: Path) -> None:
    done = run("python", DOCS / "make_settings.py", tmp_path / "settings.md", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    made, page = ((folder / "settings.md").read_text(encoding="utf-8") for folder in (tmp_path, DOCS))
    assert page == made, "run python docs/make_settings.py"
    assert "| `--monitor-direction` `auto`, `min`, `max` | `auto` | no | no | Whether lower" in page
    assert "| `--learning-rate` X | `0.003` | yes | no | Peak learning rate" in page


def messages_of(folder: Path) -> list[str]:
    """Returns the texts in the project's code, with a NUL where a value is put in."""
    texts = []
    for file in folder.rglob("*.py"):
        for each in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            pieces = each.values if isinstance(each, ast.JoinedStr) else [each]
            texts.append("".join(str(piece.value) if isinstance(piece, ast.Constant) else "\0" for piece in pieces))
    return texts


def test_messages_that_troubleshooting_explains_are_those_of_the_code() -> None:
    ours, theirs = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("## From TensorFlow")
    explained = re.findall(r"(?s)\*\*`([^`]*)`\*\*", ours)
    assert len(explained) > 50
    assert "**`" not in theirs
    texts = messages_of(PROJECT)
    patterns = {each: ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", " ".join(each.split())))) for each in explained}
    assert [each for each, pattern in patterns.items() if not any(re.search(pattern, text) for text in texts)] == []
