"""Answers that would make a broken project are refused in one line each, and leave nothing behind."""

import itertools
import re
import runpy
import string
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name

from rendering import PROJECT, TEMPLATE, Bake, cookiecutter

HOOK = runpy.run_path(str(TEMPLATE / "hooks" / "pre_gen_project.py"))

LETTERS = "has to begin with a lower-case letter and go on with lower-case letters, digits and underscores only"
STANDARD = "is the name of a module of Python's standard library"
FILE = "is a name that the generated project keeps for itself"
PACKAGE = "is the name of a package that is installed with the project"
UNDERSCORE = "ends with an underscore"

REFUSED_SLUGS = {
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
    "p" * 41: "is 41 characters long: 40 are allowed",
}

REFUSED_NAMES = {
    'Ada "the first" Lovelace': 'holds " or a backslash',
    "C:\\projects": 'holds " or a backslash',
    '"""': 'holds " or a backslash',
    "two\nlines": "holds a line break or another control character",
    "bell\a": "holds a line break or another control character",
    "  ": "is empty",
    " Ada": "begins or ends with white space",
}


def refusal(tmp_path: Path, **answers: str) -> list[str]:
    """Returns the lines of a refusal, after making sure that it left nothing on disk."""
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


@pytest.mark.parametrize("slug", REFUSED_SLUGS)
def test_bad_slug_is_refused(slug: str, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, project_slug=slug)
    assert line.startswith(f"ERROR: project_slug {slug!r} {REFUSED_SLUGS[slug]}")


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
@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_bad_name_is_refused(field: str, name: str, tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, **{"project_slug": "fine", field: name})
    assert line.startswith(f"ERROR: {field} {name!r} {REFUSED_NAMES[name]}")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    lines = refusal(tmp_path, project_name='a"b', project_slug="9" * 50, author_name="\\")
    assert [line.split()[1] for line in lines] == ["project_slug", "project_slug", "project_name", "author_name"]


def test_hook_refuses_what_skips_the_early_check(tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = cookiecutter(output, project_slug="email", __checked="skipped")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(f"ERROR: project_slug 'email' {STANDARD}")
    assert not list(output.iterdir())


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
