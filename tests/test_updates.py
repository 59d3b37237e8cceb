"""docs/updating.md: an update to a newer version of the template keeps what the user wrote, by git and by cruft."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pages import sections
from rendering import PROJECT, TEMPLATE

URL = "https://github.com/org/tf-dist-template"
KEPT = {"task.py", "tests/test_task.py"}

# File of the project -> the text that an edit replaces, and by what.
USERS = {
    "task.py": ("# TODO(you): Build your model.", "# Mine."),
    "tests/test_task.py": ('"""', '"""Mine. '),
    "config.py": ("    # Any setting of engine", "    width: int = 8\n\n    # Any setting of engine"),
    "train.py": ("        run.end_epoch(", "        print(train_metrics)  # Mine.\n        run.end_epoch("),
}
TEMPLATES = {
    "task.py": ("# TODO(you): Choose the losses;", "# TODO(you): Choose a loss;"),
    "tests/test_task.py": ("\nimport ", "\nimport this\nimport "),
    "config.py": ('"""Your settings.', '"""Your own settings.'),
    "train.py": ("srun ... python train.py  ", "mpirun ... python train.py"),
    "engine/errors.py": ('"""', '"""Newer. '),
    "deploy/kubernetes.yaml": ("# ", "# Newer. "),
    ".github/workflows/ci.yml": ("name: ", "name: newer "),
}
# What the user deletes, and a file that the template adds where it was.
DELETED = ["deploy", ".github", "tests/test_task.py"]
DELETE = f"git rm -r --quiet {' '.join(DELETED)} && git commit --quiet -m without"
STARTER = "gan"


Shell = Callable[..., str]
Versions = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the template's two versions."""
    return tmp_path_factory.mktemp("git")  # cookiecutter clones only what has such a name.


@pytest.fixture(scope="module")
def shell(home: Path) -> Shell:
    """Runs the commands of a block in a folder, with a template of two versions in the place of the published one."""
    environment = {
        **os.environ,
        **{f"GIT_{role}_{what}": "ada@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "HOME": str(home),  # Away from the developer's git, cookiecutter and cruft.
        "GIT_CONFIG_NOSYSTEM": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }

    def execute(block: str, folder: Path, *, status: int = 0) -> str:
        commands = block.replace(URL, (home / "template").as_uri())
        # The questions of cookiecutter: name, folder, author, starter; then that of `cruft link`, for the commit.
        options = {"env": environment, "input": "\n\n\n3\n\n", "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-ec", commands], cwd=folder, check=False, **options)
        assert done.returncode == status, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return execute


@pytest.fixture(scope="module")
def versions(home: Path, shell: Shell) -> Versions:
    """Makes a repository of the template with the tags v0.1.0 and v0.2.0; returns what each renders, by file name."""
    template = home / "template"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "__pycache__", ".*_cache", "benchmarks")
    shutil.copytree(TEMPLATE, template, ignore=ignored)
    project = template / PROJECT.name
    shell("git init --quiet --initial-branch main", template)
    made = {}
    for version in ("0.1.0", "0.2.0"):
        pyproject = (project / "pyproject.toml").read_text(encoding="utf-8")
        (project / "pyproject.toml").write_text(
            re.sub(r'(?<=\[tool.tf-dist-template\]\nversion = ")[^"]+', version, pyproject), encoding="utf-8"
        )
        if version == "0.2.0":
            own = project / "starters" / STARTER
            for name in TEMPLATES:
                edit(own if (own / name).exists() else project, name, TEMPLATES)
            (project / "engine/newer.py").write_text('"""Newer."""\n', encoding="utf-8")
            (project / "deploy/slurm.sh").unlink()
        shell(f"git add --all && git commit --quiet -m {version} && git tag v{version}", template)
        answers = f"--no-input --default-config --output-dir ../{version} . starter={STARTER}"
        shell(f"cookiecutter {answers}", template)
        made[version] = texts(home / version / "my_training")
    return made


def edit(folder: Path, name: str, edits: dict[str, tuple[str, str]]) -> None:
    """Replaces the first occurrence of an edit's text in a file."""
    before = (folder / name).read_text(encoding="utf-8")
    assert edits[name][0] in before, (name, edits[name][0])
    (folder / name).write_text(before.replace(*edits[name], 1), encoding="utf-8")


def texts(folder: Path) -> dict[str, str]:
    """Returns the files of a project, without git's and cruft's own, by name."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths} | {
        ".cruft.json": ""
    }


def commands(section: str) -> list[str]:
    return re.findall(r"(?ms)^```\n(.*?)^```", sections("updating.md")[section])


def user_works(folder: Path, shell: Shell) -> None:
    for name in USERS:
        edit(folder, name, USERS)
    (folder / "mine.py").write_text("MINE = 1\n", encoding="utf-8")
    shell("git add --all && git commit --quiet -m mine", folder)


def assert_updated(folder: Path, versions: Versions, *, deleted: Sequence[str] = ()) -> None:
    """Fails if the project is anything but the new version with the user's edits, and his old task."""
    expected = versions["0.2.0"] | {name: versions["0.1.0"][name] for name in KEPT} | {"mine.py": "MINE = 1\n"}
    for name, replacement in USERS.items():
        expected[name] = expected[name].replace(*replacement, 1)
    gone = {name for name in expected if any(Path(name).is_relative_to(each) for each in deleted)}
    assert len(gone) > 3 or not deleted
    found = texts(folder)
    assert found.keys() == expected.keys() - gone
    assert {name for name in found if found[name] != expected[name]} == set()


def test_update_with_git_alone(home: Path, tmp_path: Path, shell: Shell, versions: Versions) -> None:
    begin, render, merge = commands("With git alone")
    folder = tmp_path / "my_training"
    shutil.copytree(home / "0.1.0" / "my_training", folder)
    shell(begin, folder)
    user_works(folder, shell)
    shell("git switch --quiet --create without", folder)
    shell(DELETE, folder)
    shell("git switch --quiet -", folder)
    shell(render + merge, folder)
    assert_updated(folder, versions)
    assert shell("git status --porcelain", folder) == ""

    # The same for somebody who has deleted files.
    shell("git switch --quiet without", folder)
    said = shell(merge, folder, status=1)
    assert "CONFLICT (modify/delete): deploy/kubernetes.yaml" in said
    assert "deleted by us:" in shell("git status", folder)
    (resolve,) = commands("Files that you have deleted")
    shell(resolve, folder)
    assert shell("git status --porcelain", folder) == ""
    assert_updated(folder, versions, deleted=DELETED)


@pytest.mark.long
@pytest.mark.parametrize("beginning", ["create", "link"])
def test_update_with_cruft(beginning: str, home: Path, tmp_path: Path, shell: Shell, versions: Versions) -> None:
    create, link, update = commands("With cruft")
    folder = tmp_path / "my_training"
    if beginning == "create":
        shell(create, tmp_path)
    else:
        shutil.copytree(home / "0.1.0" / "my_training", folder)
        shell(link, folder)
    assert texts(folder) == versions["0.1.0"]
    shell("git init --quiet", folder)
    user_works(folder, shell)
    if beginning == "create":  # What was deleted stays so.
        shell(DELETE, folder)
    check, update = update.splitlines()
    shell("cruft check --checkout v0.1.0", folder)
    shell(check, folder, status=1)
    shell(update, folder)
    assert_updated(folder, versions, deleted=DELETED if beginning == "create" else ())
    shell(check, folder)
