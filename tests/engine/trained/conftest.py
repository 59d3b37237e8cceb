"""A run of two epochs, which the tests of exports and predictions share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from small import small_model

import task
import train
from engine.report import report

FLAGS = ("--global-batch-size=60", "--simulated-devices=2", "--epochs=2", "--ema-decay=0.9", "--seed=3")


class TrainedRun(NamedTuple):
    path: Path
    weights: dict[str, np.ndarray]  # What task.model had after the training.


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """With the second rate the loss rises."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([total_steps // 2], [0.1, -0.1])
    return keras.optimizers.SGD(rate)


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Two epochs on two replicas with a moving average, of which the first one is the best; tests leave it as it is."""
    path = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", small_model)
        patching.setattr(task, "create_optimizer", create_optimizer)
        patching.setattr(report.Report, "draw_curves", lambda report: None)
        train.main([f"--run-dir={path}", *FLAGS])
    return TrainedRun(path, {variable.path: variable.numpy() for variable in task.model.variables})


@pytest.fixture(scope="session")
def run_dir(trained: TrainedRun) -> Path:
    return trained.path


@pytest.fixture
def copied(run_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the run, with other settings in its config.json, or another type of its examples."""

    def copy(name: str = "run", example: list[Any] | None = None, **settings: Any) -> Path:
        path = shutil.copytree(run_dir, tmp_path / name)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["settings"] |= settings
        config["example"] = example or config["example"]
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return path

    return copy
