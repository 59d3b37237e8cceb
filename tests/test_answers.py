"""Answers that would make a broken project are rejected in one line each, and leave nothing behind."""

import itertools
import json
import re
import runpy
import shutil
import string
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name

from rendering import PROJECT, TEMPLATE, Bake, cookiecutter, run

HOOK = runpy.run_path(str(TEMPLATE / "hooks" / "pre_gen_project.py"))

LETTERS = "must start with a lower-case letter and contain only lower-case letters, digits and underscores"
STANDARD = "is the name of a module of Python's standard library"
FILE = "is the name of a file or folder of the project"
PACKAGE = "is the name of a package that is installed with the project"
UNDERSCORE = "ends with an underscore"

REJECTED_SLUGS = {
    "": LETTERS,
    ".": LETTERS,
    "3d_gan": LETTERS,
    "_private": LETTERS,
    "my-project": LETTERS,
    "my project": LETTERS,
    "my.project": LETTERS,
    "my/project": LETTERS,
    "../evil": LETTERS,
    "projét": LETTERS,
    "Project": LETTERS,
    "project\n": LETTERS,
    'x"; print("INJECTED"); slug="ok': LETTERS,
    "class": "is a Python keyword",
    "match": "is a Python keyword",
    "email": STANDARD,
    "test": FILE,
    "train": FILE,
    "task": FILE,
    "engine": FILE,
    "deploy": FILE,
    "runs": FILE,
    "tensorflow": PACKAGE,
    "keras": PACKAGE,
    "pip": PACKAGE,
    "mdurl": PACKAGE,
    "scikit__learn": PACKAGE,
    "vision_": UNDERSCORE,
    "a__": UNDERSCORE,
    "nul": "is the name of a device on Windows",
    "com1": "is the name of a device on Windows",
    "p" * 41: "has 41 characters: use at most 40",
}

REJECTED_NAMES = {
    'Ada "the first" Lovelace': 'contains " or a backslash',
    "C:\\projects": 'contains " or a backslash',
    '"""': 'contains " or a backslash',
    "two\nlines": "contains a line break or another control character",
    "bell\a": "contains a line break or another control character",
    "  ": "is empty",
    " Ada": "starts or ends with white space",
}


def rejected(tmp_path: Path, **answers: str) -> list[str]:
    """Returns the lines of a rejection, after making sure that it left nothing on disk."""
    output = tmp_path / "output"
    done = cookiecutter(output, **answers)
    assert done.returncode == 1
    assert not list(output.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {
        "output",
        "output.cookiecutterrc",
        "output.template",
        "replay",
    }
    assert "Traceback" not in done.stderr
    assert "INJECTED" not in done.stdout.splitlines()
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("slug", REJECTED_SLUGS)
def test_bad_slug_is_rejected(slug: str, tmp_path: Path) -> None:
    (line,) = rejected(tmp_path, project_slug=slug)
    assert line.startswith(f"ERROR: project_slug {slug!r} {REJECTED_SLUGS[slug]}")


@pytest.mark.parametrize("ending", string.ascii_lowercase + string.digits + "_")
def test_slug_is_a_name_that_packages_may_have(ending: str) -> None:
    for slug in ("qu" + ending, "qu_" + ending, "qu" + 2 * ending):
        try:
            canonicalize_name(slug, validate=True)
            is_name = True
        except InvalidName:
            is_name = False
        problems = HOOK["problems"]({"project_slug": slug, "project_name": "Fine", "author_name": "Fine"})
        assert (problems == []) == is_name, problems


def test_names_that_are_taken_are_those_of_the_project() -> None:
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = itertools.chain(described["dependencies"], *described["optional-dependencies"].values())
    assert {Requirement(each).name.replace("-", "_") for each in needed} <= set(HOOK["PACKAGES"].split())
    entries = {path.stem for path in PROJECT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name for name in entries if re.fullmatch(r"[a-z]\w*", name)} <= HOOK["OWN_FILES"]


@pytest.mark.parametrize("field", ["project_name", "author_name"])
@pytest.mark.parametrize("name", REJECTED_NAMES)
def test_bad_name_is_rejected(field: str, name: str, tmp_path: Path) -> None:
    (line,) = rejected(tmp_path, **{"project_slug": "fine", field: name})
    assert line.startswith(f"ERROR: {field} {name!r} {REJECTED_NAMES[name]}")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    lines = rejected(tmp_path, project_name='a"b', project_slug="9" * 50, author_name="\\")
    assert [line.split()[1] for line in lines] == ["project_slug", "project_slug", "project_name", "author_name"]


def test_hook_rejects_what_skips_the_early_check(tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = cookiecutter(output, project_slug="email", __checked="skipped")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(f"ERROR: project_slug 'email' {STANDARD}")
    assert not list(output.iterdir())


def without_hooks(output: Path, **answers: str) -> subprocess.CompletedProcess[str]:
    """Renders the template as `cookiecutter --accept-hooks no` does."""
    output.mkdir()
    template = output.parent / "template"
    shutil.copytree(TEMPLATE, template, ignore=shutil.ignore_patterns(".git", ".venv*", "build", ".*_cache"))
    config = output.parent / "cookiecutterrc"
    config.write_text(f"replay_dir: {json.dumps(str(output.parent / 'replay'))}\n", encoding="utf-8")
    given = [f"{name}={value}" for name, value in answers.items()]
    options = ["--no-input", "--accept-hooks", "no", "--config-file", config, "--output-dir", output]
    return run("cookiecutter", *options, template, *given, folder=output)


@pytest.mark.parametrize("slug", ["email", "../evil", "vision_"])
def test_bad_slug_is_rejected_without_hooks_too(slug: str, tmp_path: Path) -> None:
    done = without_hooks(tmp_path / "output", project_slug=slug)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith(f"ERROR: project_slug {slug!r} {REJECTED_SLUGS[slug]}")
    assert not list((tmp_path / "output").iterdir())


def test_commands_of_security_page_finish_a_project_that_was_rendered_without_hooks(
    tmp_path: Path, bake: Callable[..., Bake]
) -> None:
    done = without_hooks(tmp_path / "output", project_slug="mine", starter="gan")
    assert done.returncode == 0, done.stderr
    project = Bake(tmp_path / "output" / "mine")
    page = (TEMPLATE / "SECURITY.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```\n(cp .*?)```", page, re.DOTALL)
    assert "starters/gan/." in commands
    project.run("sh", "-ec", commands)
    finished = bake(project_slug="mine", starter="gan")
    assert project.files() == finished.files()
    for name in finished.files():
        assert (project.folder / name).read_bytes() == (finished.folder / name).read_bytes(), name


@pytest.mark.parametrize("name", ["Ada O'Brien", "Zoë Ångström", "李雷", "Ada 😀", "A & B <c>", "{curly}", "100%"])
def test_any_other_name_is_taken_as_it_is(name: str, bake: Callable[..., Bake]) -> None:
    project = bake(project_name=name, author_name=name, project_slug="fine").folder
    described = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert described["authors"] == [{"name": name}]
    assert described["description"].startswith(f"{name}:")
    assert (project / "README.md").read_text(encoding="utf-8").startswith(f"# {name}\n")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Ünïcode Projekt", "unicode_projekt"),
        ("A/B: test", "a_b_test"),
        ("n" * 60, "n" * 40),
        ("n" * 39 + " x", "n" * 39),
    ],
)
def test_slug_is_made_from_the_name(name: str, slug: str, bake: Callable[..., Bake]) -> None:
    assert bake(project_name=name).folder.name == slug
