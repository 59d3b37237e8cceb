"""Another task takes the place of task.py; nothing else is touched."""

import shutil
from collections.abc import Callable

import pytest

from rendering import TASKS, Bake


@pytest.mark.parametrize(
    ("task", "metric", "limit"), [("tabular_regression", "test/error", 0.5), ("gan", "test/loss", 10.0)]
)
def test_other_task_trains_on_two_replicas(task: str, metric: str, limit: float, bake: Callable[..., Bake]) -> None:
    project = bake()
    shutil.copy(TASKS / f"{task}.py", project.folder / "task.py")
    settings = ("--epochs", "4", "--simulated-devices", "2", "--monitor", f"validation/{metric.split('/')[1]}")
    project.run("python", "train.py", *settings, "--run-dir", "runs/two")
    assert project.result("runs/two")[metric] < limit
    assert "Finished already" in project.run("python", "train.py", *settings, "--run-dir", "runs/two").stdout

    # One replica gives the same numbers.
    project.run("python", "train.py", *settings, "--run-dir", "runs/one", "--simulated-devices", "1")
    assert project.result("runs/two")[metric] == pytest.approx(project.result("runs/one")[metric], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("task", ["tabular_regression", "gan"])
def test_shipped_tests_pass_with_another_task(task: str, bake: Callable[..., Bake]) -> None:
    project = bake()
    shutil.copy(TASKS / f"{task}.py", project.folder / "task.py")
    project.run("python", "-m", "pytest", "-q")
