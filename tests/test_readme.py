"""The README says what is so."""

import re

from rendering import PROJECT, TEMPLATE

TABLE_ROW = r"^\| `\w+\.py` \| `[^`]+` \| .* \|$"


def test_readme_lists_the_todo_hooks_of_the_project() -> None:
    # The project's own test holds its table to its TODO lines.
    ours, of_project = (
        re.findall(TABLE_ROW, (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
        for folder in (TEMPLATE, PROJECT)
    )
    assert ours == of_project
    assert 0 < len(ours) <= 10


def test_readme_shows_every_file_of_the_project() -> None:
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    for path in (*PROJECT.glob("*.py"), *PROJECT.glob("engine/[a-z]*.py")):
        assert re.search(rf"^ *{path.name} ", readme, re.MULTILINE), path.name


def test_readme_names_both_commands_and_the_flags_there_are() -> None:
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    config = (PROJECT / "config.py").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme
    for flag in re.findall(r"train\.py.*?--([a-z-]+)", readme):
        assert flag == "help" or f"    {flag.replace('-', '_')}: " in config, flag
