"""The private names of TensorFlow and Keras that the engine uses: each is listed, with a test that fails without it."""

import ast
import re
from pathlib import Path

from pages import sections
from rendering import PROJECT, TEMPLATE

TITLE = "Private names and replaced methods"
ROW = re.compile(r"^\| (`.*`) \| (`.*`) \| [^|]+ \| `(tests/[\w/.]+)::(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall(sections("design.md")[TITLE])
MODULES = ("tensorflow.python", "keras.src")


def private_names(path: Path) -> set[str]:
    """Returns the private names of others that a file uses: as an attribute, by getattr, or imported."""
    tree, names = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            internal = isinstance(node.value, ast.Attribute) and "__internal__" in ast.unparse(node.value)
            names |= {node.attr} if internal or re.match(r"_[a-z]", node.attr) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_[a-z]\w+", node.value):
            names.add(node.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULES):
            names |= {alias.name for alias in node.names}
    return names - {"autograph", "_exit", "_prepare_"}  # os._exit is documented; the last one is a part of our names.


def own_names(path: Path) -> set[str]:
    """Returns the names that a file itself defines: of functions, classes, variables, and attributes of self."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def test_every_private_name_is_listed_with_its_file() -> None:
    files = list((PROJECT / "engine").rglob("*.py"))
    ours = set().union(*map(own_names, files))
    found = {(name, path.relative_to(PROJECT).as_posix()) for path in files for name in private_names(path) - ours}
    listed = {(name, file) for names, places, *_ in ROWS for name in quoted(names) for file in quoted(places)}
    assert found <= listed
    for names, places, *_ in ROWS:
        texts = [(PROJECT / file).read_text(encoding="utf-8") for file in quoted(places)]
        assert all(any(name in text for text in texts) for name in quoted(names)), names
        assert all(any(name in text for name in quoted(names)) for text in texts), places
    assert len(ROWS) <= 16


def test_each_has_a_test_that_would_fail_without_it() -> None:
    for names, _, file, test in ROWS:
        assert re.search(rf"^def {test}\(", (TEMPLATE / file).read_text(encoding="utf-8"), re.MULTILINE), (names, test)


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
