"""Runs that are made once, of two epochs on two replicas, and others in whose place nothing is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from made_up_runs import Objects
from short_runs import FLAGS, random_model, run, stop
from small import linear_model

import task
import train
from config import Config
from engine.cluster.workers import Workers
from engine.data.splits import Splits
from engine.report import report
from engine.run.training import Run


def use_random_model(patching: pytest.MonkeyPatch) -> None:
    patching.setattr(task, "create_model", random_model)
    use_momentum(patching)


def use_momentum(patching: pytest.MonkeyPatch) -> None:
    """Gives the task an optimizer that is traced faster than its own."""
    patching.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.05, momentum=0.9))
    patching.setattr(report.Report, "draw_curves", lambda report: None)  # Fixtures of sessions begin before `quick`.


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patching:
        use_random_model(patching)
        run(folder, *FLAGS)
    return folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped in the validation after 16 steps."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patching:
        use_random_model(patching)
        stop(20, folder, *FLAGS, "--steps-per-execution=1")
    return folder


@pytest.fixture
def same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the task the model of those runs."""
    use_random_model(monkeypatch)


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the task a model and an optimizer that are traced fast."""
    monkeypatch.setattr(task, "create_model", linear_model)
    use_momentum(monkeypatch)


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs train.py with flags; returns its exit code and the last line on stderr."""

    def end(run_dir: Path, *flags: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={run_dir}", *flags])
        return ending.value.code, capsys.readouterr().err.strip().splitlines()[-1]

    return end


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """Begins a run, with settings, of objects that are made up."""

    def begin(**settings: Any) -> Run:
        (tmp_path / "run").mkdir(exist_ok=True)
        config = Config(run_dir=tmp_path / "run", **settings)
        strategy = tf.distribute.get_strategy()
        return Run(strategy, Workers(strategy), Objects(config), Splits.__new__(Splits))

    return begin
