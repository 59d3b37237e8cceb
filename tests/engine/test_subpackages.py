"""Which files of the engine may import which, and that each map of files is complete."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

from rendering import PROJECT

ENGINE = PROJECT / "engine"
MAY_IMPORT = {
    "ground": {"ground"},
    "cluster": {"ground", "cluster"},
    "data": {"ground", "data"},
    "model": {"ground", "model"},
    "report": {"ground", "model", "report"},
    "run": {"ground", "cluster", "data", "model", "report", "run"},
    "trained": {"ground", "cluster", "data", "model", "run", "trained"},
    "check": {"ground", "cluster", "data", "model", "run", "check"},
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts)


MODULES = {module(path): path for path in ENGINE.rglob("[a-z]*.py")}


def subpackage(name: str) -> str:
    """Returns the subpackage of a module; "ground" is the files beside the subpackages."""
    _, *folders, _ = name.split(".")
    return folders[0] if folders else "ground"


def imported(path: Path) -> set[str]:
    """Returns the modules that a file imports, those inside its functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is relative"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= modules or {node.module}
    return names


def test_files_import_only_what_their_subpackages_may() -> None:
    wrong = []
    for name, path in MODULES.items():
        names = imported(path)
        wrong += [f"{name} imports {user}" for user in names & {"train", "task", "config"}]
        allowed = MAY_IMPORT[subpackage(name)]
        modules = (module for module in names if module.startswith("engine."))
        wrong += [f"{name} imports {module}" for module in modules if subpackage(module) not in allowed]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {name: imported(path) & MODULES.keys() for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(files).static_order())


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_map_of_a_subpackage_lists_exactly_its_files(name: str) -> None:
    folder = ENGINE if name == "ground" else ENGINE / name
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    files = {path.stem for path in folder.glob("[a-z]*.py")}
    assert sorted(re.findall(r"(?m)^(\w+)  +\S", text)) == sorted(files)
    folders = {path.name for path in folder.iterdir() if list(path.glob("*.py"))}
    assert sorted(re.findall(r"(?m)^(\w+)/  +\S", text)) == sorted(folders)
