"""mypy on the project: clean as it comes, and of use where a user's edit is wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import PROJECT, STARTERS, Bake, run

# What stands in task.py -> what a user might write in its place, and what mypy says of it.
MISTAKES = {
    "compute_loss(labels, predictions, sample_weights)\n    update_metrics(split": (
        "compute_loss(labels, predictions)\n    update_metrics(split",
        'Missing positional argument "sample_weights" in call to "compute_loss"',
    ),
    "config.learning_rate,": ("config.learning_rat,", '"Config" has no attribute "learning_rat"'),
    'update_metrics("train", labels': ("update_metrics(3, labels", 'Argument 1 to "update_metrics" has incompatible'),
}


def test_unrendered_project_has_no_type_error() -> None:
    done = run("mypy", folder=PROJECT)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_starters_have_no_type_error(bake: Callable[..., Bake], tmp_path: Path) -> None:
    cache = f"--cache-dir={tmp_path / 'mypy'}"  # What mypy finds out about the libraries is the same for all.
    for starter in STARTERS[1:]:
        bake(starter=starter).run("mypy", cache)


def test_mistakes_in_the_task_are_found(tmp_path: Path, default_bake: Bake) -> None:
    project = tmp_path / "project"
    shutil.copytree(default_bake.folder, project)
    code = (project / "task.py").read_text(encoding="utf-8")
    for right, (wrong, _) in MISTAKES.items():
        assert right in code
        code = code.replace(right, wrong)
    (project / "task.py").write_text(code, encoding="utf-8")
    done = run("mypy", folder=project)
    assert done.returncode == 1
    for _, message in MISTAKES.values():
        assert message in done.stdout
