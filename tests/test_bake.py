"""What the template renders: the right files, clean, and green by their own checks."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import PROJECT, STARTERS, TEMPLATE, Bake, rendered, run, run_cookiecutter

SLUGS = ("my_training", "ab", "ten_char_s", "forty_characters_" + "x" * 23, "lm_2", "two_towers")
# These are rendered; all other files are copied.
RENDERED = {"README.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def bakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bake]:
    """The project of each starter, with slugs of several lengths, in one folder."""
    folder = tmp_path_factory.mktemp("bakes")
    return {
        starter: rendered(folder, project_slug=slug, starter=starter)
        for slug, starter in zip(SLUGS, STARTERS, strict=True)
    }


def test_no_jinja_is_left(bakes: dict[str, Bake]) -> None:
    for project in bakes.values():
        for name in project.files() - {".github/workflows/ci.yml"}:
            text = project.read(name)
            assert "cookiecutter." not in text, name
            assert "{%" not in text, name


def test_starter_is_its_own_files_and_nothing_else(tracked: set[str], bakes: dict[str, Bake]) -> None:
    for starter, project in bakes.items():
        folder = f"starters/{starter}/"
        own = {name.removeprefix(folder): name for name in tracked if name.startswith(folder)}
        sources = {name: name for name in tracked if not name.startswith("starters/")} | own
        assert project.files() == set(sources)
        for name in sources.keys() - RENDERED:
            assert (project.folder / name).read_bytes() == (PROJECT / sources[name]).read_bytes(), name


def test_rendered_files_differ_in_the_example_task_and_packages_only(bakes: dict[str, Bake]) -> None:
    texts, tasks = set(), set()
    for starter, project in bakes.items():
        readme, needs = (project.read(name) for name in sorted(RENDERED))
        needs = needs.replace(f'name = "{project.folder.name}"', "")
        begin, end = needs.index("dependencies = [\n"), needs.index("  # Pinned")
        rest = needs[end:].replace(f'starter = "{starter}"', "")
        before, task, after = re.split(r"(?s)## The example task\n\n(.*?)\[docs/starter", readme)
        texts.add((before, after, needs[:begin], rest))
        tasks.add(task)
    assert len(texts) == 1
    assert len(tasks) == len(STARTERS)


def test_bakes_are_lint_clean_as_they_come(bakes: dict[str, Bake]) -> None:
    # Each file has the settings of the pyproject.toml above it.
    folder = bakes["gan"].folder.parent
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        done = run(*command, folder=folder)
        assert done.returncode == 0, done.stdout


def test_template_is_lint_clean() -> None:
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        done = run(*command, folder=TEMPLATE)
        assert done.returncode == 0, done.stdout


def test_bake_passes_its_own_pre_commit(bake: Callable[..., Bake]) -> None:
    project = bake()
    project.run("git", "init", "--quiet")
    project.run("git", "add", ".")
    project.run("pre-commit", "run", "--all-files")


def test_template_lists_what_its_project_needs() -> None:
    # The unrendered file is TOML too.
    template, project = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (TEMPLATE, PROJECT)
    )
    listed = set(template["dependencies"])
    hub = {each for each in project["dependencies"] if each.startswith("keras-hub")}  # Of one starter.
    assert set(project["dependencies"]) - hub <= listed
    extras = project["optional-dependencies"]
    assert hub.union(extras["dev"], extras["ray"], extras["sweep"]) <= set(template["optional-dependencies"]["test"])
    # make demo installs nothing else.
    assert listed - set(project["dependencies"]) == {"cookiecutter>=2.7.1,<3"}


def test_every_dependency_of_the_project_has_an_upper_bound() -> None:
    # The template's list has the same lines: see the test above.
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for each in project["dependencies"] + extras["gpu"] + extras["ray"] + extras["sweep"]:
        assert re.search(r">=[\d.]+,<[\d.]+$", each), each


def test_rendered_project_needs_no_attribution() -> None:
    notice = (PROJECT / "engine/LICENSE").read_text(encoding="utf-8")
    # MIT without the condition that makes others keep the notice.
    assert notice.startswith("MIT No Attribution\n")
    assert "shall be included" not in notice
    assert '"{{cookiecutter.project_slug}}/engine/LICENSE"' in (TEMPLATE / "LICENSE").read_text(encoding="utf-8")


def test_unrendered_project_passes_its_own_tests(tmp_path: Path) -> None:
    done = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", folder=PROJECT)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.long
def test_demo_ends_with_a_good_accuracy_and_says_where_the_files_are() -> None:
    # The environment is the one that runs this test: it is not made again.
    done = run("make", "demo", "--old-file=.venv/installed", folder=TEMPLATE)
    assert done.returncode == 0, done.stderr
    (accuracy,) = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("  test/accuracy")]
    assert accuracy >= 0.97
    # Under another make, such as that of `make test-all`, make's own last line comes after it.
    (ending,) = [line for line in done.stdout.splitlines() if line.startswith("The run's files are in ")]
    run_dir = ending.split("The run's files are in ")[1].split(",")[0]
    assert (TEMPLATE / run_dir / "result.json").exists()


def test_version_is_one_and_is_written_into_the_project() -> None:
    # In words, so that the unrendered project has it too.
    project, template = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in (PROJECT, TEMPLATE)
    )
    version = template["project"]["version"]
    assert project["tool"]["tf-dist-template"]["version"] == version
    assert json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["_version"] == version


def test_command_line_renders_and_two_lines_say_what_to_do_next(tmp_path: Path) -> None:
    done = run_cookiecutter(tmp_path / "rendered", project_slug="mine")
    assert done.stdout.splitlines() == [
        'Next, in an environment for it: cd mine && pip install -e ".[dev]"',
        "Then: python train.py",
    ]
    assert (tmp_path / "rendered/mine/train.py").exists()
