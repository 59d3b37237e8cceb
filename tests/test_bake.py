"""What the template renders: the right files, clean, and green by their own checks."""

import re
import tomllib
from pathlib import Path

import pytest

from rendering import PROJECT, STARTERS, TEMPLATE, Bake, rendered, run, run_cookiecutter

SLUGS = ("my_training", "ab", "tensorflow", "forty_characters_" + "x" * 23, "lm_2", "two_towers")
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


def described(folder: Path) -> dict:
    """Returns what a pyproject.toml contains; the unrendered one is TOML too."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_starter_is_its_own_files_and_nothing_else(tracked: set[str], bakes: dict[str, Bake]) -> None:
    for starter, project in bakes.items():
        folder = f"starters/{starter}/"
        own = {name.removeprefix(folder): name for name in tracked if name.startswith(folder)}
        sources = {name: name for name in tracked if not name.startswith("starters/")} | own
        assert project.files() == set(sources)
        for name in sources.keys() - RENDERED:
            assert (project.folder / name).read_bytes() == (PROJECT / sources[name]).read_bytes(), name
        for name in RENDERED:
            assert not re.search(r"cookiecutter\.|{%", project.read(name)), name
        assert project.read("README.md").count("## The example task\n") == 1


def test_bakes_are_lint_clean_and_pass_their_own_pre_commit(bakes: dict[str, Bake]) -> None:
    # Each file has the settings of the pyproject.toml above it.
    folder = bakes["gan"].folder.parent
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", ".")):
        done = run(*command, folder=folder)
        assert done.returncode == 0, done.stdout
    project = bakes["image_classification"]
    project.run("git", "init", "--quiet")
    project.run("git", "add", ".")
    project.run("pre-commit", "run", "--all-files")


def test_template_lists_what_its_project_needs_with_upper_bounds() -> None:
    template, project = (described(folder)["project"] for folder in (TEMPLATE, PROJECT))
    listed = set(template["dependencies"])
    hub = {each for each in project["dependencies"] if each.startswith("keras-hub")}  # Of one starter.
    assert set(project["dependencies"]) - hub <= listed
    extras = project["optional-dependencies"]
    assert hub.union(extras["dev"], extras["ray"], extras["sweep"]) <= set(template["optional-dependencies"]["test"])
    # make demo installs nothing else.
    assert listed - set(project["dependencies"]) == {"cookiecutter>=2.7.1,<3"}
    for each in project["dependencies"] + extras["gpu"] + extras["ray"] + extras["sweep"]:
        assert re.search(r">=[\d.]+,<[\d.]+$", each), each


# The resume takes half of their time, and tests/engine/run has resumes too.
@pytest.mark.parametrize(
    "chosen", ["--ignore=tests/test_resume.py", pytest.param("tests/test_resume.py", marks=pytest.mark.long)]
)
def test_unrendered_project_passes_its_own_tests(chosen: str, tmp_path: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}")
    done = run("python", "-m", "pytest", *options, chosen, folder=PROJECT)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.long
def test_demo_ends_with_a_good_accuracy_and_says_where_the_files_are() -> None:
    # The environment is the one that runs this test: it is not made again.
    done = run("make", "demo", "--old-file=.venv/installed", folder=TEMPLATE)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"(?m)^  test/accuracy +(\S+)", done.stdout)
    assert float(accuracy) >= 0.97
    (run_dir,) = re.findall(r"(?m)^The run's files are in ([^,]+),", done.stdout)
    assert (TEMPLATE / run_dir / "result.json").exists()


def test_command_line_renders_and_two_lines_say_what_to_do_next(tmp_path: Path) -> None:
    done = run_cookiecutter(tmp_path / "rendered", project_slug="mine")
    assert done.stdout.splitlines() == [
        'Next, in an environment for it: cd mine && pip install -e ".[dev]"',
        "Then: python train.py",
    ]
    assert (tmp_path / "rendered/mine/train.py").exists()
