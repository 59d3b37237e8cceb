"""The workflows of the template and of the generated project: what they run, and that nobody else can change it."""

import re
import runpy
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from rendering import PROJECT, TEMPLATE

WORKFLOWS = {
    path: yaml.safe_load(path.read_text(encoding="utf-8"))
    for folder in (TEMPLATE, PROJECT)
    for path in sorted(folder.glob(".github/workflows/*.yml"))
}
MAKEFILE = (TEMPLATE / "Makefile").read_text(encoding="utf-8")
# Of each pyproject.toml.
DESCRIBED = {
    folder: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in (TEMPLATE, PROJECT)
}
# What may write, and what: only after another job, which may not, has run our code.
WRITERS = {
    ("release", "release"): {"contents": "write"},
    ("pages", "publish"): {"pages": "write", "id-token": "write"},
}


def workflow(name: str) -> dict:
    return WORKFLOWS[TEMPLATE / f".github/workflows/{name}.yml"]


def test_workflows_may_read_the_code_and_only_writers_more_with_actions_of_one_commit_each() -> None:
    used = set()
    for path, described in WORKFLOWS.items():
        used |= set(re.findall(r"(?m)^ +- uses: (.*)$", path.read_text(encoding="utf-8")))
        assert described["permissions"] == {"contents": "read"}
        for name, job in described["jobs"].items():
            writes = WRITERS.get((path.stem, name))
            assert job.get("permissions") == writes
            assert bool(job.get("needs")) == bool(writes)
            checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
            assert checkouts or writes
            for checkout in checkouts:
                assert checkout["with"]["persist-credentials"] is False
    for action in used:
        # A tag can be moved to other code; the comment says which one it was.
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert len({action.split("@")[0] for action in used}) == len(used) > 0
    # The job that publishes the pages runs no code of the repository.
    (step,) = workflow("pages")["jobs"]["publish"]["steps"]
    assert step["uses"].startswith("actions/deploy-pages@")


def test_versions_that_are_allowed_are_those_of_ci_and_of_the_makefile() -> None:
    for folder, job in ((TEMPLATE, "linux"), (PROJECT, "test")):
        ci = WORKFLOWS[folder / ".github/workflows/ci.yml"]
        oldest, *_, newest = ci["jobs"][job]["strategy"]["matrix"]["python"]
        major, minor = newest.split(".")
        assert DESCRIBED[folder]["requires-python"] == f">={oldest},<{major}.{int(minor) + 1}"
    allowed = SpecifierSet(DESCRIBED[TEMPLATE]["requires-python"])
    (condition,) = re.findall(r"sys\.exit\(None if (.*) else ", MAKEFILE)
    for minor in range(9, 17):
        version = eval(condition.replace("sys.version_info", f"(3, {minor}, 1)"))
        assert version == allowed.contains(f"3.{minor}.1"), minor
    # The oldest TensorFlow is tested every week.
    (oldest,) = re.findall(r"tensorflow>=([\d.]+)", " ".join(DESCRIBED[TEMPLATE]["dependencies"]))
    installs = [step.get("run", "") for step in workflow("versions")["jobs"]["oldest"]["steps"]]
    assert re.findall(r"\"tensorflow==([\d.]+)\.\*\"", "".join(installs)) == [oldest]


def test_files_and_targets_that_the_workflows_name_are_there() -> None:
    jobs = [job for described in WORKFLOWS.values() for job in described["jobs"].values()]
    commands = "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
    named = re.findall(r"(?<![\w.])(?:\.ci|tests)/[\w./]+", commands)
    assert named
    assert [name for name in named if not (TEMPLATE / name).exists()] == []
    for target in re.findall(r"(?m)^make ([\w./]+)", commands):
        assert re.search(rf"(?m)^{re.escape(target)}:", MAKEFILE), target


def test_release_notes_are_the_section_of_the_version_that_the_files_have() -> None:
    notes = runpy.run_path(str(TEMPLATE / ".ci/release_notes.py"))["notes"]
    found = notes(f"v{DESCRIBED[TEMPLATE]['version']}")
    assert "In task.py" in found
    assert "\n## " not in found
    with pytest.raises(SystemExit, match=r"The tag is v9\.9\.9, but pyproject\.toml says"):
        notes("v9.9.9")
