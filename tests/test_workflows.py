"""The workflows of the template and of the generated project: what they run, and that nobody else can change it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from rendering import PROJECT, TEMPLATE

WORKFLOWS = sorted([*TEMPLATE.glob(".github/workflows/*.yml"), *PROJECT.glob(".github/workflows/*.yml")])
each_workflow = pytest.mark.parametrize(
    "path", WORKFLOWS, ids=[f"{path.parts[-4][:2]}-{path.stem}" for path in WORKFLOWS]
)


@each_workflow
def test_actions_are_pinned_by_commit(path: Path) -> None:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        # A tag can be moved to other code; the comment says which one it was.
        assert re.fullmatch(r"- uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@each_workflow
def test_only_a_job_without_our_code_may_write(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert len(checkouts) == ("permissions" not in job)
        for checkout in checkouts:
            assert checkout["with"]["persist-credentials"] is False


def test_same_action_is_the_same_commit_everywhere() -> None:
    used = {use for path in WORKFLOWS for use in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))}
    assert len({use.split("@")[0] for use in used}) == len(used)


@pytest.mark.parametrize(("folder", "job"), [(TEMPLATE, "linux"), (PROJECT, "test")], ids=["template", "project"])
def test_ci_runs_the_oldest_and_newest_python_that_is_allowed(folder: Path, job: str) -> None:
    workflow = yaml.safe_load((folder / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    oldest, *_, newest = workflow["jobs"][job]["strategy"]["matrix"]["python"]
    major, minor = newest.split(".")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={oldest},<{major}.{int(minor) + 1}"


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
