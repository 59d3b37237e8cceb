"""The README says what is so."""

import json
import re

import jinja2
import pytest

from pages import PAGES
from rendering import PROJECT, STARTERS, TEMPLATE


def code_of(starter: str) -> dict[str, str]:
    """Returns the Python files of a starter's project by their names."""
    own = PROJECT / "starters" / starter
    shared = (path for path in PROJECT.rglob("*.py") if PROJECT / "starters" not in path.parents)
    paths = {path.relative_to(PROJECT): path for path in shared}
    paths |= {path.relative_to(own): path for path in own.rglob("*.py")}
    # The search comes last, because it needs a task.
    names = sorted(paths, key=lambda name: (name.name == "sweep.py", name))
    return {str(name): paths[name].read_text(encoding="utf-8") for name in names}


@pytest.mark.parametrize("starter", STARTERS)
def test_readmes_list_the_todo_hooks_in_file_order(starter: str) -> None:
    marked = [
        (file, re.findall(r"^(?:def|class) (\w+)", code[: found.start()], re.MULTILINE)[-1], found[1])
        for file, code in code_of(starter).items()
        for found in re.finditer(r"^ *# TODO\(you\): (.*)$", code, re.MULTILINE)
    ]
    assert 0 < len(marked) <= 10
    for folder in (TEMPLATE, PROJECT):
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert re.findall(r"^\| `(\w+\.py)` \| `([^`]+)` \| (.*) \|$", readme, re.MULTILINE) == marked


def test_tree_in_the_readme_is_that_of_the_project() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"(?ms)^```\n(train\.py .*?)^```", readme)
    folders = (path for path in PROJECT.glob("[a-z]*") if path.is_dir() and path.name not in ("runs", "starters"))
    there = {path.name for path in PROJECT.glob("[a-z]*.py")} | {f"{path.name}/" for path in folders}
    assert set(re.findall(r"(?m)^(\S+) ", tree)) == there


def test_readme_of_the_project_is_short() -> None:
    readme = jinja2.Template((PROJECT / "README.md").read_text(encoding="utf-8"))
    for starter in STARTERS:
        assert 500 < len(readme.render(cookiecutter={"starter": starter}).split()) <= 1000, starter


def test_readme_of_the_project_leads_to_every_page() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(docs/(\w+\.md)\)", readme)) == {page.name for page in PROJECT.glob("docs/*.md")}


def test_files_that_the_pages_name_are_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"\b(?:engine|tests|deploy|benchmarks|docs|hooks)/[\w/]+(?:\.\w+)?", text)
        missing = [name for name in named if not (TEMPLATE / name).exists() and not (PROJECT / name).exists()]
        assert not missing, (page, missing)


def test_readme_names_both_commands_and_the_flags_there_are() -> None:
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    settings = "".join((PROJECT / name).read_text(encoding="utf-8") for name in ("config.py", "engine/settings.py"))
    assert "make demo" in readme
    assert "make test" in readme
    for flag in re.findall(r"train\.py.*?--([a-z-]+)", readme):
        assert flag == "help" or f"    {flag.replace('-', '_')}: " in settings, flag


def test_step_in_the_readme_is_that_of_task_py() -> None:
    readme, task = (
        (folder / name).read_text("utf-8") for folder, name in ((TEMPLATE, "README.md"), (PROJECT, "task.py"))
    )
    (shown,) = re.findall(r"(?ms)^```python\n(def train_step.*?)^```", readme)
    assert shown in task


# The columns of the tables of speeds, and the programs of the results that they show the fastest of.
SPEEDS = {
    "`train.py`": ["train.py"],
    "Orbit, Keras 3": ["Orbit, Keras 3"],
    "Orbit, tf-keras": ["Orbit, tf-keras"],
    "Keras fit": ["Keras fit, 1 step", "Keras fit, K steps"],
    "tutorial": ["tutorial"],
    "compiled step alone": ["compiled step alone"],
    "Orbit, saving": ["Orbit, Keras 3, saving"],
    "Keras fit, saving": ["Keras fit, K steps, saving"],
}
COLUMNS_OF_README = 6


@pytest.mark.parametrize(("page", "is_complete"), [("README.md", False), ("docs/speed.md", True)])
def test_speeds_are_those_of_the_results(page: str, is_complete: bool) -> None:
    results = json.loads((TEMPLATE / "benchmarks" / "results" / "results.json").read_text(encoding="utf-8"))
    measured = {(row["workload"], row["replicas"], row["workers"], row["shuffle"]): row for row in results["rows"]}
    text = (TEMPLATE / page).read_text(encoding="utf-8")
    (header,) = re.findall(r"^\| \| (`train\.py` \| .*) \|$", text, re.MULTILINE)
    columns = header.split(" | ")
    assert columns == ([*SPEEDS, "measured"] if is_complete else [*SPEEDS][:COLUMNS_OF_README])
    line = r"^\| (\w+), (\d) (replica|processe)s?(, example by example)? \| (.*) \|$"
    shown = re.findall(line, text, re.MULTILINE)
    assert len(shown) == (sum(not workload.startswith("wide") for workload, *_ in measured) if is_complete else 4)
    for workload, number, what, shuffled, cells in shown:
        layout = (int(number), 1) if what == "replica" else (1, int(number))
        row = measured[(workload, *layout, "examples" if shuffled else "gather")]
        expected = [*(fastest(row["programs"], names) for names in SPEEDS.values()), row["measured"]]
        assert cells.split(" | ") == expected[: len(columns)]


def fastest(programs: dict[str, dict], names: list[str]) -> str:
    """Returns the highest of some programs' training steps per second, as the pages show it; "fails" if all failed."""
    rates = [programs[name]["training steps/s"]["median"] for name in names if "error" not in programs[name]]
    return f"{max(rates):,.{0 if max(rates) >= 100 else 1}f}" if rates else "fails"
