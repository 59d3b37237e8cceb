"""Answers that would make a broken project are rejected in one line each, and leave nothing behind."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException

from rendering import PROJECT, TEMPLATE, Bake, rendered, run, run_cookiecutter

LETTERS = "must start with a lower-case letter and contain only lower-case letters, digits and underscores"
REJECTED_SLUGS = {
    "": LETTERS,
    "../evil": LETTERS,
    "projét": LETTERS,
    "project\n": LETTERS,
    'x"; print("INJECTED"); slug="ok': LETTERS,
    "vision_": "ends with an underscore",
    "com1": "is the name of a device on Windows",
    "p" * 41: "has 41 characters: use at most 40",
}
REJECTED_NAMES = {
    'Ada "the first" Lovelace': 'contains " or a backslash',
    "C:\\projects": 'contains " or a backslash',
    "two\nlines": "contains a line break or another control character",
    "  ": "is empty",
    " Ada": "starts or ends with white space",
}
REJECTED = {("project_slug", slug): reason for slug, reason in REJECTED_SLUGS.items()}
REJECTED |= {("project_name", name): reason for name, reason in REJECTED_NAMES.items()}


@pytest.mark.parametrize("accept_hooks", [True, False])
def test_bad_answer_is_rejected_and_leaves_nothing(
    accept_hooks: bool, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    for (field, value), reason in REJECTED.items():
        with pytest.raises(FailedHookException) as rejection:
            rendered(tmp_path / "output", accept_hooks=accept_hooks, **{"project_slug": "fine", field: value})
        (line,) = str(rejection.value).splitlines()
        assert line.startswith(f"ERROR: {field} {value!r} {reason}")
        assert [path.name for path in tmp_path.rglob("*")] == ["output"]
    assert capfd.readouterr().out == ""


def test_all_problems_are_reported_at_once_by_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = run_cookiecutter(output, project_name='a"b', project_slug="9" * 50, author_name="\\")
    assert done.returncode == 1
    words = [line.split() for line in (done.stdout + done.stderr).splitlines()]
    fields = ["project_slug", "project_slug", "project_name", "author_name"]
    assert [each[:2] for each in words] == [["ERROR:", field] for field in fields]
    assert not list(output.iterdir())


def test_project_may_have_the_name_of_a_package_a_module_or_a_file(bake: Callable[..., Bake]) -> None:
    for slug in ("tensorflow", "email", "class", "engine"):
        project = bake(project_slug=slug)
        assert tomllib.loads(project.read("pyproject.toml"))["project"]["name"] == f"train-{slug}"
        assert "--epochs" in project.run("python", "train.py", "--help").stdout
        # Where Python looks in the folder above the project's, too, the project hides nothing.
        code = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"
        for package in {slug} - {"class", "engine"}:
            origin = run("python", "-c", code, package, folder=project.folder.parent).stdout.strip()
            assert origin.endswith("__init__.py")


def test_commands_of_security_page_finish_a_project_that_was_rendered_without_hooks(
    tmp_path: Path, bake: Callable[..., Bake]
) -> None:
    project = rendered(tmp_path / "output", accept_hooks=False, project_slug="mine", starter="gan")
    assert project.read("task.py") == (PROJECT / "task.py").read_text(encoding="utf-8")  # Of the first starter.
    page = (TEMPLATE / "SECURITY.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```\n(cp .*?)```", page, re.DOTALL)
    assert "starters/gan/." in commands
    project.run("sh", "-ec", commands)
    finished = bake(project_slug="mine", starter="gan")
    assert project.files() == finished.files()
    for name in finished.files():
        assert (project.folder / name).read_bytes() == (finished.folder / name).read_bytes(), name


def test_project_rendered_again_keeps_a_folder_that_only_has_the_name_of_the_templates(tmp_path: Path) -> None:
    for update in (False, True):
        project = rendered(tmp_path, update=update, project_slug="mine", starter="gan")
        assert not (project.folder / "starters/gan").exists()
        (project.folder / "starters/mine").mkdir(parents=True, exist_ok=True)
    assert [path.name for path in (project.folder / "starters").iterdir()] == ["mine"]


def test_answers_of_a_replay_file_need_no_others(tmp_path: Path) -> None:
    answers = {"project_name": "Mine", "project_slug": "mine", "author_name": "Me", "starter": "gan"}
    (tmp_path / "replay.json").write_text(json.dumps({"cookiecutter": answers}), encoding="utf-8")
    done = run_cookiecutter(tmp_path / "output", "--replay-file", tmp_path / "replay.json")
    assert (done.returncode, (tmp_path / "output/mine/distance.py").exists()) == (0, True), done.stderr


def test_any_other_name_is_taken_as_it_is_and_the_slug_made_from_it(bake: Callable[..., Bake]) -> None:
    # Forty characters of the slug would end with an underscore.
    name = f"Ünïcode A/B: {'n' * 27} x O'Brien & 李雷 😀 <c> {{curly}} 100%"
    project = bake(project_name=name, author_name=name)
    assert project.folder.name == f"unicode_a_b_{'n' * 27}"
    described = tomllib.loads(project.read("pyproject.toml"))["project"]
    assert described["authors"] == [{"name": name}]
    assert described["description"].startswith(f"{name}:")
    assert project.read("README.md").startswith(f"# {name}\n")
