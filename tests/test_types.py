"""mypy on projects: clean as it comes, and of use where a user's edit is wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import STARTERS, Bake, run

# What stands in task.py -> what a user might write in its place, and what mypy says of it.
MISTAKES = {
    "compute_loss(labels, predictions, sample_weights)\n    update_metrics(split": (
        "compute_loss(labels, predictions)\n    update_metrics(split",
        'Missing positional argument "sample_weights" in call to "compute_loss"',
    ),
    "config.learning_rate,": ("config.learning_rat,", '"Config" has no attribute "learning_rat"'),
    'update_metrics("train", labels': ("update_metrics(3, labels", 'Argument 1 to "update_metrics" has incompatible'),
}


def test_mistakes_in_the_task_are_found_and_nothing_else(tmp_path: Path, default_bake: Bake) -> None:
    project = Bake(tmp_path / "project")
    shutil.copytree(default_bake.folder, project.folder)
    for right, (wrong, _) in MISTAKES.items():
        project.replace("task.py", right, wrong)
    # `make lint` checks all other files, which take much longer.
    done = run("mypy", "task.py", folder=project.folder)
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(MISTAKES), done.stdout
    for _, message in MISTAKES.values():
        assert message in done.stdout


@pytest.mark.long
def test_starters_have_no_type_error(bake: Callable[..., Bake], tmp_path: Path) -> None:
    cache = f"--cache-dir={tmp_path / 'mypy'}"  # What mypy finds out about the libraries is the same for all.
    for starter in STARTERS:
        bake(starter=starter).run("mypy", cache)
