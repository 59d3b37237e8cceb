"""What the template renders: the right files, clean, and green by their own checks."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import PROJECT, STARTERS, TEMPLATE, Bake, cookiecutter, run


def test_no_jinja_is_left(default_bake: Bake) -> None:
    for name in default_bake.files() - {".github/workflows/ci.yml"}:
        text = (default_bake.folder / name).read_text(encoding="utf-8")
        assert "cookiecutter." not in text, name
        assert "{%" not in text, name


@pytest.mark.parametrize(
    ("slug", "starter"),
    zip(
        ["my_training", "ab", "ten_char_s", "forty_characters_" + "x" * 23, "lm_2", "two_towers"], STARTERS, strict=True
    ),
)
def test_bake_is_lint_clean_as_it_comes(slug: str, starter: str, bake: Callable[..., Bake]) -> None:
    project = bake(project_slug=slug, starter=starter)
    project.run("ruff", "check", ".")
    project.run("ruff", "format", "--check", ".")


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
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["dev"] + extras["ray"] + extras["sweep"]
    assert set(needed) <= set(template["dependencies"])


def test_every_dependency_of_the_project_has_an_upper_bound() -> None:
    # The template's list has the same lines: see the test above.
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for each in project["dependencies"] + extras["gpu"] + extras["ray"] + extras["sweep"]:
        assert re.search(r">=[\d.]+,<[\d.]+$", each), each


def test_rendered_project_needs_no_attribution(default_bake: Bake) -> None:
    notice = (default_bake.folder / "engine/LICENSE").read_text(encoding="utf-8")
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


def test_version_is_one_and_is_written_into_the_project(default_bake: Bake) -> None:
    project, template = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        for folder in (default_bake.folder, TEMPLATE)
    )
    version = template["project"]["version"]
    # In words, so that the unrendered project has it too.
    assert project["tool"]["tf-dist-template"]["version"] == version
    assert json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["_version"] == version


def test_two_lines_say_what_to_do_next(tmp_path: Path) -> None:
    done = cookiecutter(tmp_path / "rendered", project_slug="mine")
    assert done.stdout.splitlines() == [
        'Next, in an environment for it: cd mine && pip install -e ".[dev]"',
        "Then: python train.py",
    ]
