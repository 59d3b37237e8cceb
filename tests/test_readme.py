"""The README says what is so."""

import json
import re

from rendering import PROJECT, TEMPLATE


def test_readmes_list_the_todo_hooks_in_file_order() -> None:
    marked = [
        (path.name, todo)
        for path in sorted(PROJECT.rglob("*.py"))
        for todo in re.findall(r"^ *# TODO\(you\): (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert 0 < len(marked) <= 10
    for folder in (TEMPLATE, PROJECT):
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert re.findall(r"^\| `(\w+\.py)` \| `[^`]+` \| (.*) \|$", readme, re.MULTILINE) == marked


def test_hooks_stand_under_the_functions_that_the_readme_names() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    for file, name, todo in re.findall(r"^\| `(\w+\.py)` \| `([^`]+)` \| (.*) \|$", readme, re.MULTILINE):
        code = (PROJECT / file).read_text(encoding="utf-8")
        before = code[: code.index(f"# TODO(you): {todo}")]
        assert re.findall(r"^(?:def|class) (\w+)", before, re.MULTILINE)[-1] == name


def test_readme_shows_every_file_and_every_room_of_the_project() -> None:
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    rooms = (path.parent for path in PROJECT.glob("engine/*/__init__.py"))
    for name in (*(path.name for path in PROJECT.glob("*.py")), *(f"{path.name}/" for path in rooms)):
        assert re.search(rf"^ *{name} ", readme, re.MULTILINE), name


def test_readme_names_both_commands_and_the_flags_there_are() -> None:
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    settings = "".join((PROJECT / name).read_text(encoding="utf-8") for name in ("config.py", "engine/settings.py"))
    assert "make demo" in readme
    assert "make test" in readme
    for flag in re.findall(r"train\.py.*?--([a-z-]+)", readme):
        assert flag == "help" or f"    {flag.replace('-', '_')}: " in settings, flag


def test_speeds_are_those_of_the_results() -> None:
    results = json.loads((TEMPLATE / "benchmarks" / "results" / "results.json").read_text(encoding="utf-8"))
    measured = {(row["workload"], row["replicas"], row["workers"]): row["programs"] for row in results["rows"]}
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\w+), (\d) (replica|processe)s? \| (.*) \|$", readme, re.MULTILINE)
    assert len(shown) == sum(not workload.startswith("wide") for workload, _, _ in measured)
    columns = (
        ["train.py"],
        ["Orbit, Keras 3"],
        ["Keras fit, 1 step", "Keras fit, K steps"],
        ["tutorial"],
        ["bare limit"],
    )
    for workload, number, what, cells in shown:
        programs = measured[(workload, int(number), 1) if what == "replica" else (workload, 1, int(number))]
        for names, cell in zip(columns, cells.split(" | "), strict=True):
            rates = [programs[name]["training steps/s"]["median"] for name in names if "error" not in programs[name]]
            assert cell == (f"{max(rates):,.{0 if max(rates) >= 100 else 1}f}" if rates else "fails")
