"""Which files of the engine may import which, and what each room says that it holds."""

import ast
import graphlib
import re
from pathlib import Path

from rendering import PROJECT

ENGINE = PROJECT / "engine"
GROUND = {"command_line", "console", "errors", "files", "memory", "protocols", "quiet_start", "settings", "tracing"}
GROUND |= {"messages", "retries", "trials", "versions"}
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


def room(name: str) -> str:
    _, *folders, file = name.split(".")
    return folders[0] if folders else "ground" * (file in GROUND)


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


def test_files_import_only_what_their_rooms_may() -> None:
    wrong = []
    for name, path in MODULES.items():
        found = imported(path)
        wrong += [f"{name} imports {other}" for other in found & {"train", "task", "config"}]
        others = (other for other in found if other.startswith("engine."))
        wrong += [f"{name} imports {other}" for other in others if room(other) not in MAY_IMPORT[room(name)]]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {name: imported(path) & MODULES.keys() for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(files).static_order())


def test_each_room_lists_exactly_its_files() -> None:
    for folder in MAY_IMPORT.keys() - {"ground"}:
        listed = re.findall(r"(?m)^(\w+)  +\S", (ENGINE / folder / "__init__.py").read_text(encoding="utf-8"))
        assert sorted(listed) == sorted(path.stem for path in (ENGINE / folder).glob("[a-z]*.py")), folder
