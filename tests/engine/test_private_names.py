"""The private names of TensorFlow and Keras that the engine uses: each is listed, with a test that fails without it."""

import ast
import re
from pathlib import Path

from pages import sections
from rendering import PROJECT, TEMPLATE

ROW = re.compile(r"^\| `([\w.]+)` \| `(engine/[\w/.]+)` \| [^|]+ \| `(tests/[\w/.]+)::(\w+)` \|$", re.MULTILINE)
LISTED = {
    (name.rpartition(".")[2], file): test for name, file, *test in ROW.findall(sections("design.md")["Private names"])
}
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


def own_names() -> set[str]:
    """Returns the private names that the engine itself defines."""
    text = "".join(path.read_text(encoding="utf-8") for path in (PROJECT / "engine").rglob("*.py"))
    return set(re.findall(r"(?:self\.|def |class |^)(_[a-z]\w+)", text, re.MULTILINE))


def test_every_private_name_is_listed_with_its_file() -> None:
    ours = own_names()
    found = {
        (name, path.relative_to(PROJECT).as_posix())
        for path in (PROJECT / "engine").rglob("*.py")
        for name in private_names(path) - ours
    }
    assert found == LISTED.keys()


def test_each_has_a_test_that_would_fail_without_it() -> None:
    for (name, _), (file, test) in LISTED.items():
        assert re.search(rf"^def {test}\(", (TEMPLATE / file).read_text(encoding="utf-8"), re.MULTILINE), (name, test)
