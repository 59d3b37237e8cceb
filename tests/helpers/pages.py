"""Python blocks of the pages in docs/, put into the modules of the project that they are for."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from rendering import PROJECT, TEMPLATE

# Every page, of the template and of the project.
PAGES = [TEMPLATE / "CHANGELOG.md", TEMPLATE / "SECURITY.md"]
PAGES += [page for folder in (TEMPLATE, PROJECT) for page in (folder / "README.md", *sorted(folder.glob("docs/*.md")))]
PAGES += sorted(PROJECT.glob("starters/*/docs/*.md"))


def sections(name: str) -> dict[str, str]:
    """Returns the sections of a page, of the template's or the project's docs, by their titles."""
    (file,) = (folder / "docs" / name for folder in (TEMPLATE, PROJECT) if (folder / "docs" / name).exists())
    page = file.read_text(encoding="utf-8")
    return dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", page))


def blocks(text: str) -> list[str]:
    """Returns the Python blocks of a text."""
    return re.findall(r"(?ms)^```python\n(.*?)^```", text)


def untested(page: dict[str, str], file: str) -> list[str]:
    """Returns the sections with code whose titles a file of tests does not contain."""
    tests = Path(file).read_text(encoding="utf-8")
    return [title for title, text in page.items() if blocks(text) and f'"{title}"' not in tests]


def put(block: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Runs a block as a part of a module, whose names are again what they were after the test."""
    for name in re.findall(r"(?m)^(?:def |class )?(\w+)(?:\(| = |:)", block):
        monkeypatch.setattr(module, name, getattr(module, name, None), raising=False)
    # In a file of its own, because AutoGraph reads the source of what it converts.
    file = folder / f"{module.__name__}_{len(list(folder.glob('*.py')))}.py"
    file.write_text(block, encoding="utf-8")
    exec(compile(block, file, "exec"), vars(module))  # noqa: S102


def put_section(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Runs the blocks of a section as parts of the modules that they are for."""
    import config  # Here, because only tests of the engine have a project at hand.
    import task
    import train

    module = task
    for before, block in re.findall(r"(?ms)(.*?)^```python\n(.*?)^```", text):
        for name in re.findall(r"In `(task|train)\.py`", before):
            module = {"task": task, "train": train}[name]
        put(block, config if "class Config" in block else module, monkeypatch, folder)
    monkeypatch.setattr(train, "Config", config.Config)
