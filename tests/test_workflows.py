"""The workflows of the template and of the generated project: what they run, and that nobody else can change it."""

import json
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rendering import PROJECT, TEMPLATE, run

WORKFLOWS = sorted([*TEMPLATE.glob(".github/workflows/*.yml"), *PROJECT.glob(".github/workflows/*.yml")])


def described(folder: Path) -> dict:
    """Returns the section [project] of a pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_actions_are_pinned_by_one_commit_each() -> None:
    lines = [line.strip() for path in WORKFLOWS for line in path.read_text(encoding="utf-8").splitlines()]
    used = {line for line in lines if "uses:" in line}
    for line in used:
        # A tag can be moved to other code; the comment says which one it was.
        assert re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert len({line.split("@")[0] for line in used}) == len(used) > 0


# What may write, and what: only after another job, which may not, has run our code.
WRITERS = {
    ("release", "release"): {"contents": "write"},
    ("pages", "publish"): {"pages": "write", "id-token": "write"},
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=[f"{path.parts[-4][:2]}-{path.stem}" for path in WORKFLOWS])
def test_workflows_may_read_the_code_and_only_writers_more(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        writes = WRITERS.get((path.stem, name))
        assert job.get("permissions") == writes
        assert bool(job.get("needs")) == bool(writes)
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert checkouts or writes
        for checkout in checkouts:
            assert checkout["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("folder", "job"), [(TEMPLATE, "linux"), (PROJECT, "test")], ids=["template", "project"])
def test_ci_runs_the_oldest_and_newest_python_that_is_allowed(folder: Path, job: str) -> None:
    workflow = yaml.safe_load((folder / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    oldest, *_, newest = workflow["jobs"][job]["strategy"]["matrix"]["python"]
    major, minor = newest.split(".")
    assert described(folder)["requires-python"] == f">={oldest},<{major}.{int(minor) + 1}"


def test_files_and_tests_that_the_workflows_name_are_there() -> None:
    commands = [
        step["run"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    named = [name for command in commands for name in re.findall(r"(?<![\w.])(?:\.ci|tests)/[\w./]+", command)]
    assert named
    assert [name for name in named if not (TEMPLATE / name).exists()] == []
    makefile = (TEMPLATE / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)^make ([\w./]+)", "\n".join(commands)):
        assert re.search(rf"(?m)^{re.escape(target)}:", makefile), target


def test_makefile_accepts_the_python_versions_that_are_allowed() -> None:
    allowed = SpecifierSet(described(TEMPLATE)["requires-python"])
    makefile = (TEMPLATE / "Makefile").read_text(encoding="utf-8")
    (condition,) = re.findall(r"sys\.exit\(None if (.*) else ", makefile)
    for minor in range(9, 17):
        version = eval(condition.replace("sys.version_info", f"(3, {minor}, 1)"))
        assert version == allowed.contains(f"3.{minor}.1"), minor


def test_oldest_tensorflow_that_is_allowed_is_tested_every_week() -> None:
    (tensorflow,) = [each for each in described(TEMPLATE)["dependencies"] if Requirement(each).name == "tensorflow"]
    oldest = re.search(r">=([\d.]+)", tensorflow)
    assert oldest
    workflow = yaml.safe_load((TEMPLATE / ".github/workflows/versions.yml").read_text(encoding="utf-8"))
    installs = [step["run"] for step in workflow["jobs"]["oldest"]["steps"] if "pip install" in step.get("run", "")]
    assert re.findall(r"\"tensorflow==([\d.]+)\.\*\"", "".join(installs)) == [oldest[1]]


def test_release_notes_are_the_section_of_the_version() -> None:
    version = described(TEMPLATE)["version"]
    done = run(sys.executable, ".ci/release_notes.py", f"v{version}", folder=TEMPLATE)
    assert done.returncode == 0, done.stderr
    assert "In task.py" in done.stdout
    assert "\n## " not in done.stdout


def test_tag_that_is_not_the_version_of_the_files_makes_no_release(tmp_path: Path) -> None:
    files = [".ci/release_notes.py", "CHANGELOG.md", "cookiecutter.json", "pyproject.toml"]
    for file in [*files, f"{PROJECT.name}/pyproject.toml"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TEMPLATE / file, tmp_path / file)
    version = described(TEMPLATE)["version"]
    notes = runpy.run_path(str(tmp_path / files[0]))["notes"]
    assert notes(f"v{version}")
    with pytest.raises(SystemExit, match=r"The tag is v9\.9\.9, but pyproject\.toml says"):
        notes("v9.9.9")
    answers = json.loads((tmp_path / "cookiecutter.json").read_text(encoding="utf-8"))
    (tmp_path / "cookiecutter.json").write_text(json.dumps({**answers, "_version": "9.9.9"}), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"but cookiecutter\.json says 9\.9\.9"):
        notes(f"v{version}")
