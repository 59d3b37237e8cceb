"""How a run ends before its time: the exit code, the line, and what is kept; and what a run may do beside."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, rows, run

import task
import train
from config import Config
from engine.errors import CannotWrite, end_at_signals
from engine.model.metrics import ResultNames
from engine.report.report import Report
from engine.run import start
from engine.run.checkpoint_files import read_checkpoint

Ended = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.usefixtures("linear")


def test_deleted_directory_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    validate = train.validate

    def move_and_validate(epoch: int = 0) -> dict[str, float]:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        return validate(epoch)

    monkeypatch.setattr(train, "validate", move_and_validate)
    code, line = ended(tmp_path / "run", *ONE_REPLICA, "--epochs=2", "--checkpoint-every-steps=10")
    assert code == 1
    assert "cannot be written" in line
    assert "restore the directory" in line
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert read_checkpoint(tmp_path / "elsewhere" / "checkpoints" / "step-00000010")[1]["step"] == 10


def test_divergence_names_the_step_and_keeps_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    train_step = task.train_step

    def spoiled_step(batch: Any) -> tf.Tensor:
        loss = train_step(batch)
        # The loss is finite in this step, and from the next one on it is not.
        spoil = tf.where(task.optimizer.iterations == 30, float("nan"), 0.0)
        task.model.trainable_variables[0].assign_add(tf.fill([64, 10], spoil))
        return loss

    monkeypatch.setattr(task, "train_step", spoiled_step)
    code, line = ended(tmp_path, *ONE_REPLICA, "--epochs=2", "--checkpoint-every-steps=14")
    assert code == 3
    assert "the loss of train step 11 of epoch 2 is nan" in line
    last = tmp_path / "checkpoints" / "step-00000028"
    told = f"The last good checkpoint is {last}; nothing later was saved. Start a new --run-dir with --init-from {last}"
    assert told in line
    for path in tmp_path.glob("*/step-*"):
        for name, value in read_checkpoint(path)[0].items():
            assert value.dtype.kind in "iu" or np.isfinite(value).all(), f"{path} {name}"


def test_gradients_that_are_never_finite_end_a_float16_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    compute_loss = task.compute_loss

    def without_slope(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        return loss + tf.sqrt(0.0 * tf.reduce_sum(task.model.trainable_variables[0])), per_example_loss

    monkeypatch.setattr(task, "compute_loss", without_slope)
    flags = ("--epochs=1", "--steps-per-epoch=40", "--precision=mixed_float16", "--steps-per-execution=4")
    code, line = ended(tmp_path, *ONE_REPLICA, *flags)
    assert (code, "the loss scale at step 28 is down to" in line) == (3, True), line


def test_start_that_failed_or_was_stopped_before_its_first_step_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    class Failing(Report):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            raise CannotWrite("the disk is full")

    load_splits = train.load_splits

    def load_and_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # As `timeout` does.
        return load_splits(*arguments, **options)

    flags = (*ONE_REPLICA, "--epochs=1")
    with monkeypatch.context() as full:
        full.setattr(start, "Report", Failing)
        assert ended(tmp_path, *flags) == (1, "ERROR: the disk is full")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as signalling:
        signalling.setattr(train, "load_splits", load_and_signal)
        end_at_signals()  # As the program does; a notebook's handlers come back.
        code, line = ended(tmp_path, *flags)
    # One more, while the program ends, does not take the exit code away.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    for number, handler in before.items():
        signal.signal(number, handler)
    assert code == 42
    assert line.startswith(f"stopped by SIGTERM, the state is in {tmp_path / 'checkpoints' / 'step-00000000'}")
    assert run(tmp_path, *flags)["step"] == 20
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- Beside the training ----------------------------------------------------------------------------------------------


def test_own_column_in_a_row_is_reported_and_lost_rows_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = {"epochs_done": 2, "validated_step": 0, "step": 2, "resumed": [2]}
    report = Report(Config(run_dir=tmp_path), ResultNames({}, []), "min", **start)
    assert "metrics.csv lacks 2 of 2 epochs" in capsys.readouterr().out
    report.epoch(
        {"epoch": 3, "step": 3, "seconds": 1.0, "examples_per_second": 1.0, "learning_rate": 0.1, "mine": 2.0},
        is_best=False,
    )
    report.draw_curves()
    assert rows(tmp_path)[0]["mine"] == "2.0"


def test_deterministic_operations_are_used_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("enable_op_determinism", "enable_tensor_float_32_execution"):
        monkeypatch.setattr(tf.config.experimental, name, lambda *value, name=name: asked.append((name, *value)))
    train.build(Config())
    assert not asked
    train.build(Config(deterministic=True))
    assert asked == [("enable_op_determinism",), ("enable_tensor_float_32_execution", False)]


@pytest.mark.long
def test_profile_is_written_and_changes_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*ONE_REPLICA, "--epochs=1", "--steps-per-execution=1")
    plain = run(tmp_path / "plain", *flags)
    profiled = run(tmp_path / "profiled", *flags, "--profile")
    assert profiled["weights_sha256"] == plain["weights_sha256"]
    assert list((tmp_path / "profiled" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))
    assert not (tmp_path / "plain" / "tensorboard" / "plugins").exists()
    assert "pip install xprof" in capsys.readouterr().out
    run(tmp_path / "short", *flags, "--steps-per-execution=20", "--profile")
    assert "--profile: the run had 1 executions of training steps" in capsys.readouterr().out


@pytest.mark.long
def test_waiting_for_batches_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_example, report_epoch = task.prepare_example, Report.epoch
    waited: list[float] = []

    def noted(report: Report, row: dict[str, Any], **options: Any) -> None:
        waited.append(options["waited"])
        report_epoch(report, row, **options)

    def slow(features, labels, *, training, seed):
        features, labels = prepare_example(features, labels, training=training, seed=seed)
        pause = tf.py_function(lambda label: time.sleep(0.003) or label, [labels], labels.dtype)
        return features, tf.ensure_shape(pause, [])

    monkeypatch.setattr(task, "prepare_example", slow)
    monkeypatch.setattr(Report, "epoch", noted)
    run(tmp_path, *ONE_REPLICA, "--epochs=2")
    assert waited[1] > 0.5
