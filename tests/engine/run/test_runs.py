"""Runs of train.py in this process: begun, taken up again, begun with other weights, stopped early, evaluated."""

import csv
import functools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import until
from small import linear_model, small_model

import task
import train
from config import Config
from engine.errors import CannotWrite, Stopped, end_at_signals
from engine.files import read_json, write_json
from engine.model.metrics import ResultNames
from engine.report.report import Report
from engine.report.tables import COLUMNS
from engine.run import start
from engine.run.checkpoint_files import StoredValues, checksums, read_checkpoint
from engine.run.directory import RunDirectory
from engine.run.run import Run
from engine.run.signals import Signals, signals
from engine.run.start import START_ID, _resume, start_run

SHORT = ("--global-batch-size=60", "--simulated-devices=1")
NO_TIMES = {"seconds": 0, "goodput": {}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs train.py with flags; returns its exit code and the last line on stderr."""

    def end(run_dir: Path, *flags: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={run_dir}", *SHORT, *flags])
        return ending.value.code, capsys.readouterr().err.strip().splitlines()[-1]

    return end


def run(run_dir: Path, *flags: str) -> dict[str, Any]:
    """Runs train.py with flags; returns the result."""
    train.main([f"--run-dir={run_dir}", *SHORT, *flags])
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


def killed_after(chunks: int) -> Callable[..., None]:
    """Returns a Signals.check at which the run ends, like a killed one, after so many chunks of steps."""
    left = iter(range(chunks))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise InterruptedError

    return check


def rows(run_dir: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run_dir / "metrics.csv").read_text(encoding="utf-8").splitlines()))


# --- What is reported -------------------------------------------------------------------------------------------------


def test_on_report_sees_the_rows_and_the_averaged_weights_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, traced = [], []

    @tf.function
    def compiled_predictions(features: tf.Tensor) -> dict[str, tf.Tensor]:
        traced.append(features)
        return task.predict_step(features)

    def on_report(row: dict[str, Any], run_dir: Path, settings: Config) -> None:
        # Layers of each kind are called with the weights of one replica, outside the steps.
        compiled_predictions(tf.ones([3, 8, 8, 1]))
        time.sleep(0.6)
        seen.append((row, run_dir, settings.ema_decay, task.model.layers[1].kernel.numpy()))
        tf.summary.image("ones", tf.ones([1, 8, 8, 1]))
        raise ValueError("a mistake")

    monkeypatch.setattr(task, "on_report", on_report, raising=False)
    with_hook = run(tmp_path / "with", "--epochs=2", "--simulated-devices=2", "--ema-decay=0.9")
    printed = capsys.readouterr().out
    assert printed.count("ValueError: a mistake); the run continues") == 1
    assert re.search(r"task\.on_report took [1-9][\d.]* s, beside the times of the epochs", printed)
    assert len(traced) == 1
    assert [(row["epoch"], row["step"], found, ema) for row, found, ema, *_ in seen] == [
        (1, 20, tmp_path / "with", 0.9),
        (2, 40, tmp_path / "with", 0.9),
    ]
    assert seen[-1][0].keys() >= {*COLUMNS, "train/loss", "validation/accuracy"}
    best = read_checkpoint(train.run.best.paths()[-1])[0]
    (kernel,) = [value for name, value in best.items() if value.shape == (64, 10)]
    np.testing.assert_array_equal(seen[-1][-1], kernel)

    (events,) = (tmp_path / "with/tensorboard").glob("events*.v2")
    images = [
        event.step
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.tag == "ones"
    ]
    assert images == [20, 40]
    monkeypatch.delattr(task, "on_report")
    without = run(tmp_path / "without", "--epochs=2", "--simulated-devices=2", "--ema-decay=0.9")
    assert with_hook["weights_sha256"] == without["weights_sha256"]


# --- When is saved, and what is restored ------------------------------------------------------------------------------


@pytest.mark.usefixtures("every_layer")
def test_every_variable_is_restored_on_other_numbers_of_replicas(tmp_path: Path, monkeypatch) -> None:
    at_restore: list[dict[str, np.ndarray]] = []
    run_epochs = train.run_epochs

    def noted() -> None:
        at_restore.append(train.run.checkpoints.state.values())
        run_epochs()

    monkeypatch.setattr(train, "run_epochs", noted)
    before: dict[str, np.ndarray] = {}
    for epochs, replicas in ((1, 2), (2, 1), (3, 4)):
        run(tmp_path, f"--epochs={epochs}", f"--simulated-devices={replicas}", "--ema-decay=0.9")
        restored, saved = at_restore[-1], before
        assert not saved or restored.keys() == saved.keys()
        for name, value in saved.items():
            if name in train.run.checkpoints.state.per_replica:
                # Of the seeds the first replica's stays; all else agrees at the end of an epoch.
                count = 1 if "seed_generator" in name else len(restored[name])
                np.testing.assert_array_equal(restored[name][:count], [value[0]] * count, err_msg=name)
            else:
                np.testing.assert_array_equal(restored[name], value, err_msg=name)
        before = read_checkpoint(train.run.checkpoints.paths()[-1])[0]
    assert [int(row["epoch"]) for row in rows(tmp_path)] == [1, 2, 3]


@pytest.mark.usefixtures("every_layer")
@pytest.mark.long
def test_metrics_that_make_their_variables_late_are_in_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
        return {"loss": keras.metrics.Mean(), "f1": keras.metrics.F1Score(average="macro")}

    def update_metrics(split, labels, predictions, per_example_loss, weights) -> None:
        task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)
        one_hot = tf.one_hot(labels, 10)
        task.metrics[split]["f1"].update_state(one_hot, tf.nn.softmax(predictions), sample_weight=weights)

    flags = ("--epochs=1", "--simulated-devices=2", "--steps-per-execution=3")
    without = run(tmp_path / "without", *flags)
    monkeypatch.setattr(task, "create_metrics", create_metrics)
    monkeypatch.setattr(task, "update_metrics", update_metrics)
    expected = run(tmp_path / "whole", *flags)
    assert expected["weights_sha256"] == without["weights_sha256"]  # To make them changed nothing else.
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(5))
        assert ended(tmp_path / "stopped", *flags)[0] == 42
    assert "metrics/train/f1/f1_score/true_positives" in train.run.checkpoints.state.per_replica
    found = run(tmp_path / "stopped", *flags)
    assert (found["weights_sha256"], found["test/f1"]) == (expected["weights_sha256"], expected["test/f1"])
    assert rows(tmp_path / "stopped")[0]["train/f1"] == rows(tmp_path / "whole")[0]["train/f1"]


def stopped_after(chunks: int) -> Callable[..., None]:
    left = iter(range(chunks))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped by a test")

    return check


def assert_stopped_run_ends_equal(
    stops: tuple[int, ...], folder: Path, flags: tuple[str, ...], ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops a run after so many chunks each time, and compares it with one that is not stopped."""
    expected = run(folder / "whole", *flags)
    for chunks in stops:
        with monkeypatch.context() as stopping:
            stopping.setattr(Signals, "check", stopped_after(chunks))
            assert ended(folder / "stopped", *flags)[0] == 42
    found = run(folder / "stopped", *flags)
    timeless = [
        {name: text for name, text in row.items() if name not in COLUMNS[2:4]} for row in rows(folder / "whole")
    ]
    assert [{name: row[name] for name in timeless[0]} for row in rows(folder / "stopped")] == timeless
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}


@pytest.mark.long
def test_stopped_run_with_every_kind_of_state_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    def each_on_its_own() -> keras.Model:
        layers = [keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        layers += [keras.layers.Dropout(0.2), keras.layers.Dense(10, kernel_regularizer="l2")]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    monkeypatch.setattr(task, "create_model", each_on_its_own)
    flags = (
        "--epochs=2",
        "--simulated-devices=3",
        "--steps-per-execution=3",
        "--keep-last-batch",
        "--global-clipnorm=0.5",
    )
    flags += ("--ema-decay=0.9", "--micro-batches=2", "--precision=mixed_float16", "--checkpoint-every-steps=5")
    # In the first epoch, before its validation, and in the second epoch.
    assert_stopped_run_ends_equal((3, 6, 5), tmp_path, flags, ended, monkeypatch)


class Remembering(keras.layers.Layer):
    """Keeps a mean and the state of a generator in variables that Keras does not list."""

    def build(self, shape):
        self.mean = tf.Variable(tf.zeros(shape[1:]), trainable=False, name="mean")
        self.generator = tf.random.Generator.from_seed(7)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
            inputs += 0.1 * self.generator.normal(tf.shape(inputs))
        return inputs - self.mean


def test_stopped_run_with_state_that_keras_does_not_list_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]], capsys
) -> None:
    layers = (keras.layers.Reshape((8, 8)), keras.layers.GRU(4, stateful=True), Remembering(), keras.layers.Dense(10))
    inputs = keras.Input(batch_shape=(30, 8, 8, 1))  # Two replicas' shares of 60.

    def create_model() -> keras.Model:
        return keras.Sequential([inputs, *(type(layer).from_config(layer.get_config()) for layer in layers)])

    monkeypatch.setattr(task, "create_model", create_model)
    flags = ("--epochs=2", "--simulated-devices=2", "--steps-per-execution=6")
    assert_stopped_run_ends_equal((6,), tmp_path, flags, ended, monkeypatch)
    values, _ = read_checkpoint(train.run.checkpoints.paths()[-1])
    kept = {name.split("/")[-1]: value for name, value in values.items() if name.startswith("hidden/")}
    assert kept.keys() == {"rnn_state", "mean", "StateVar"}
    assert not np.array_equal(*kept["mean"])  # Each replica's own.
    # Best weights come with the state that the validation used.
    capsys.readouterr()
    run(tmp_path / "whole", *flags, "--evaluate-only")
    expected = json.loads((tmp_path / "whole" / "result.json").read_text(encoding="utf-8"))["test/loss"]
    assert f"test/loss            {expected}" in capsys.readouterr().out


def test_stopped_run_of_two_models_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tasks"))
    import gan

    monkeypatch.setattr(train, "task", gan)
    monitor = next(iter(gan.create_metrics("validation")))
    flags = ("--epochs=2", "--steps-per-execution=1", f"--monitor=validation/{monitor}", "--monitor-direction=min")
    assert_stopped_run_ends_equal((2, 6), tmp_path, flags, ended, monkeypatch)


def test_damaged_newest_checkpoint_is_printed_and_the_run_ends_equal(tmp_path: Path, capsys) -> None:
    expected = run(tmp_path / "whole", "--epochs=3")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    newest = tmp_path / "damaged" / "checkpoints" / "step-00000060"
    data = newest / "state.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:1000])
    (tmp_path / "damaged" / "result.json").unlink()
    capsys.readouterr()
    found = run(tmp_path / "damaged", "--epochs=3")
    out = capsys.readouterr().out
    assert "step-00000060 is skipped" in out
    assert "resumed from step-00000040" in out
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}


def test_without_a_whole_checkpoint_nothing_is_deleted(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    run(tmp_path, "--epochs=2")
    for record in tmp_path.glob("checkpoints/*/progress.json"):
        record.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, line = ended(tmp_path, "--epochs=3")
    assert code == 2
    assert "has no usable checkpoint" in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# --- --patience -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_patience_ends_a_run_and_more_of_it_continues_it(tmp_path: Path, monkeypatch, capsys) -> None:
    scores = [0.5, 0.6, 0.55, 0.58, 0.59, 0.7, 0.1, 0.1, 0.1]
    validate = train.validate
    monkeypatch.setattr(train, "validate", lambda epoch=0: {**validate(epoch), "validation/accuracy": scores[epoch]})
    flags = ("--epochs=9", "--monitor=validation/accuracy")
    result = run(tmp_path, *flags, "--patience=2")
    assert (result["epochs"], result["best_epoch"], result["epochs_without_improvement"]) == (4, 2, 2)
    assert len(rows(tmp_path)) == 4
    assert "No better validation/accuracy for 2 epochs: stopped." in capsys.readouterr().out
    train.main([f"--run-dir={tmp_path}", *SHORT, *flags, "--patience=2"])
    assert "Finished already after 4 epochs (more --patience" in capsys.readouterr().out
    result = run(tmp_path, *flags, "--patience=3")
    assert (result["epochs"], result["best_epoch"]) == (5, 2)
    result = run(tmp_path, *flags)
    assert (result["epochs"], result["best_epoch"], result["best_validation/accuracy"]) == (9, 6, 0.7)


# --- --evaluate-only --------------------------------------------------------------------------------------------------


def test_evaluation_is_of_the_best_weights_and_changes_nothing(
    tmp_path: Path, capsys, ended: Callable[..., tuple[int, str]]
) -> None:
    assert "is empty: train first" in ended(tmp_path / "run", "--evaluate-only")[1]
    assert not list(tmp_path.iterdir())
    result = run(tmp_path / "run", "--epochs=2", "--ema-decay=0.9")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    for replicas in (1, 4):
        flags = ("--evaluate-only", f"--simulated-devices={replicas}")  # No setting of the training matters.
        train.main([f"--run-dir={tmp_path / 'run'}", *SHORT, *flags])
        printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
        assert float(printed["test/loss"]) == pytest.approx(result["test/loss"], rel=1e-5)
        assert float(printed["validation/loss"]) == pytest.approx(result["best_validation/loss"], rel=1e-5)
    for run_dir in ("none", "run"):
        train.main([f"--run-dir={tmp_path / run_dir}", *SHORT, "--evaluate-only", f"--init-from={tmp_path / 'run'}"])
        printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
        assert float(printed["test/loss"]) == pytest.approx(result["test/loss"], rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_evaluation_of_damaged_weights_is_refused(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    run(tmp_path, "--epochs=2")
    (tmp_path / "best" / "step-00000040" / "progress.json").unlink()
    code, line = ended(tmp_path, "--evaluate-only")
    assert (code, "best/step-00000040 is damaged" in line) == (2, True)


@pytest.mark.long
def test_evaluation_of_a_run_stopped_in_a_validation_counts_from_the_start(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    flags = ("--epochs=2", "--steps-per-execution=1")
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(20 + 3 + 20 + 2))
        assert ended(tmp_path, *flags)[0] == 42
    assert (
        json.loads((train.run.checkpoints.paths()[-1] / "progress.json").read_text())["steps_of_pass"]["validation"]
        == 2
    )
    train.main([f"--run-dir={tmp_path}", *SHORT, *flags, "--evaluate-only"])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  validation/"))
    assert float(printed["validation/loss"]) == float(rows(tmp_path)[0]["validation/loss"])


def test_evaluation_is_with_the_settings_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    compute_loss = task.compute_loss

    def weighted_loss(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        return loss, per_example_loss * (task.config.global_clipnorm or 1.0)

    monkeypatch.setattr(task, "compute_loss", weighted_loss)
    begun_from = ("--init-from", str(tmp_path / "first"), "--init-partial")
    run(tmp_path / "first", "--epochs=1")
    result = run(tmp_path / "run", "--epochs=1", "--global-clipnorm=7", "--keep-last-batch", *begun_from)
    expected = float(rows(tmp_path / "run")[-1]["validation/loss"])
    found = train.main([f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1", "--evaluate-only"])
    assert found["test/loss"] == pytest.approx(result["test/loss"], rel=1e-5)
    assert found["validation/loss"] == pytest.approx(expected, rel=1e-5)
    train.main([f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1", "--evaluate-continuously"])
    (evaluated,) = validations(tmp_path / "run", "evaluations.csv")
    assert float(evaluated["validation/loss"]) == expected

    for way in ("--evaluate-only", "--evaluate-continuously"):
        code, line = ended(tmp_path / "run", way, "--global-clipnorm=6")
        assert (code, "other settings (--global-clipnorm 7.0 there and 6.0 now): use the run's" in line) == (2, True), (
            line
        )


# --- A run that is moved ----------------------------------------------------------------------------------------------


def test_run_is_resumed_from_where_it_was_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    flags = ("--epochs=2", "--steps-per-execution=5")
    expected = run(tmp_path / "whole", *flags)
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(3))
        assert ended(tmp_path / "before", *flags)[0] == 42  # In the middle of the first epoch.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "before").rename(tmp_path / "elsewhere" / "after")
    found = run(tmp_path / "elsewhere" / "after", *flags)
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "whole"]


def test_lengths_of_executions_and_saves_do_not_affect_results(tmp_path: Path) -> None:
    flags = ("--epochs=2", "--limit-steps=11", "--simulated-devices=2")
    expected = run(tmp_path / "few", *flags, "--steps-per-execution=11")
    others = ("--steps-per-execution=3", "--checkpoint-every-steps=4", "--async-checkpoints")
    found = run(tmp_path / "many", *flags, *others)
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}


# --- --learning-rate of a resume --------------------------------------------------------------------------------------


def test_run_goes_on_with_another_learning_rate_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ended: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(task.config.learning_rate))
    validate = train.validate

    def validate_and_halve(epoch: int = 0) -> dict[str, float]:  # As a hook between epochs may.
        task.optimizer.learning_rate = float(task.optimizer.learning_rate) / 2
        return validate(epoch)

    monkeypatch.setattr(train, "validate", validate_and_halve)

    def starts(run_dir: Path) -> list[tuple[int, float]]:
        recorded = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["starts"]
        return [(start["step"], start["learning_rate"]) for start in recorded]

    flags = ("--epochs=4", "--steps-per-execution=5", "--learning-rate=0.01")
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(4 + 2 + 2))
        assert ended(tmp_path / "run", *flags, "--learning-rate=0.1")[0] == 42  # In the middle of the second epoch.
    assert starts(tmp_path / "run") == [(0, 0.1)]
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    capsys.readouterr()
    config = read_json(tmp_path / "run" / "config.json") or {}
    at_start = config["code_sha256"] | {"gone.py": "0" * 64}
    write_json(tmp_path / "run" / "config.json", config | {"code_sha256": at_start})
    expected = run(tmp_path / "run", *flags)
    assert (read_json(tmp_path / "run" / "config.json") or {})["code_sha256"].items() >= at_start.items()
    _, (step, rate) = starts(tmp_path / "run")
    assert (20 < step < 40, rate) == (True, 0.01)
    assert f"resumed from step-{step:08d}; --learning-rate 0.1 -> 0.01\n" in capsys.readouterr().out
    used = [float(row["learning_rate"]) for row in rows(tmp_path / "run")]
    np.testing.assert_allclose(used, [0.1, 0.01, 0.005, 0.0025], rtol=1e-6)

    # Killed before anything was saved with it, then after: the same bits, and what the hook did to it stays.
    for chunks in (1, 8, 2):
        with monkeypatch.context() as killing, pytest.raises(InterruptedError):
            killing.setattr(Signals, "check", killed_after(chunks))
            run(tmp_path / "killed", *flags)
    found = run(tmp_path / "killed", *flags)
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}
    assert starts(tmp_path / "killed")[-1][1] == 0.01
    assert [float(row["learning_rate"]) for row in rows(tmp_path / "killed")] == used


def test_schedule_may_get_another_shape_in_mid_run_but_not_become_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    def decay_to(last: float) -> Callable[[int], keras.optimizers.Optimizer]:
        schedule = keras.optimizers.schedules.PolynomialDecay
        return lambda total_steps: keras.optimizers.SGD(schedule(0.1, total_steps, last))

    flags = ("--epochs=2", "--steps-per-execution=10")
    with monkeypatch.context() as stopping:
        stopping.setattr(task, "create_optimizer", decay_to(0.0))
        stopping.setattr(Signals, "check", stopped_after(4))
        assert ended(tmp_path, *flags)[0] == 42  # In the middle of the second epoch.
    with monkeypatch.context() as number:
        number.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
        code, line = ended(tmp_path, *flags)
        assert code == 2
        assert "belongs to another model or optimizer (1 variables differ: optimizer/" in line
    monkeypatch.setattr(task, "create_optimizer", decay_to(0.02))
    run(tmp_path, *flags)
    # The new schedule continues at the step that the run has reached.
    np.testing.assert_allclose([float(row["learning_rate"]) for row in rows(tmp_path)], [0.05, 0.02], rtol=1e-6)


def test_changed_learning_rate_is_printed_and_every_optimizer_takes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def cosine(total_steps: int) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(task.config.learning_rate, 100))

    def several(total_steps: int) -> keras.optimizers.Optimizer:
        weights, biases = (
            keras.optimizers.SGD(factor * task.config.learning_rate, name=name)
            for factor, name in ((2, "weights"), (4, "bias"))
        )
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(weights, {".*bias": biases}))

    def train_step(batch) -> tf.Tensor:  # That of the task takes one optimizer.
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.model(batch[0], training=True))
        gradients = tape.gradient(loss, task.model.trainable_variables)
        (optimizer,) = task.optimizer.values() if isinstance(task.optimizer, dict) else [task.optimizer]
        optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
        return loss

    monkeypatch.setattr(task, "train_step", train_step)
    for create_optimizer, printed, rates in (
        (lambda total_steps: keras.optimizers.SGD(0.5), "; --learning-rate 0.003 -> 0.001", [0.5]),
        (cosine, "; --learning-rate 0.003 -> 0.001", None),
        (
            several,
            "; --learning-rate 0.003 -> 0.001; learning_rate/bias 0.012 -> 0.004; learning_rate/weights 0.006 -> 0.002",
            [0.004, 0.002],
        ),
        (
            lambda total_steps: {"model": keras.optimizers.SGD(2 * task.config.learning_rate)},
            "; --learning-rate 0.003 -> 0.001; learning_rate/model 0.006 -> 0.002",
            [0.002],
        ),
    ):
        monkeypatch.setattr(task, "create_optimizer", create_optimizer)
        train.build(Config(run_dir=tmp_path, fresh=True))
        with RunDirectory(tmp_path) as directory:
            start_run(train.run, directory, train.batches)
        train.run.progress.step = 20
        train.run.save()
        for value, expected in ((0.001, printed), (0.003, "")):
            train.build(Config(run_dir=tmp_path, learning_rate=value))
            assert _resume(train.run, train.batches, {})[1] == f"resumed from step-00000020{expected}"
            if rates and value == 0.001:
                assert list(train.run.objects.learning_rates().values()) == pytest.approx(rates)


# --- --fresh ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_fresh_begins_once_in_all_lives_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ended: Callable[..., tuple[int, str]]
) -> None:
    flags = ("--epochs=1", "--fresh", "--steps-per-execution=5")
    run(tmp_path / "run", "--epochs=1", "--seed=9")
    monkeypatch.setenv(START_ID, "first")
    with monkeypatch.context() as killing, pytest.raises(InterruptedError):
        killing.setattr(Signals, "check", killed_after(2))  # Before anything was saved.
        run(tmp_path / "run", *flags)
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(3))
        assert ended(tmp_path / "run", *flags)[0] == 42
    capsys.readouterr()
    run(tmp_path / "run", *flags)
    assert "resumed from" in capsys.readouterr().out
    # Another start finds it finished, or moves it aside.
    monkeypatch.setenv(START_ID, "second")
    run(tmp_path / "run", "--epochs=1")
    assert "Finished already" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["start_id"] == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]
    run(tmp_path / "run", *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]


# --- Examples by files ------------------------------------------------------------------------------------------------


def test_position_in_an_epoch_by_files_is_of_its_number_of_workers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    load_examples, flags = task.load_examples, ("--epochs=3", "--steps-per-execution=5")
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(4 + 2 + 2))
        assert ended(tmp_path, *flags)[0] == 42
    newest = train.run.checkpoints.paths()[-1]
    # As on two workers.
    record = json.loads((newest / "progress.json").read_text(encoding="utf-8"))
    assert record["workers"] == 1
    (newest / "progress.json").write_text(json.dumps({**record, "workers": 2}), encoding="utf-8")
    (newest / "SHA256SUMS").write_text(checksums(newest), encoding="utf-8")
    with monkeypatch.context() as shards_by_file:
        shards_by_file.setattr(task, "load_examples", lambda split, input_context=None: load_examples(split))
        code, line = ended(tmp_path, *flags)
        assert (code, "from the middle of a pass on 2 worker(s), and there are 1" in line) == (2, True)
        # At the beginning of an epoch there is no position yet.
        shutil.rmtree(newest)
        assert run(tmp_path, *flags)["step"] == 60


# --- Examples that have changed ---------------------------------------------------------------------------------------


def test_changed_examples_are_refused_and_used_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ended: Callable[..., tuple[int, str]]
) -> None:
    load_examples, flags = task.load_examples, ("--epochs=4", "--steps-per-execution=1")

    def load(change: str, changed: str = "train") -> Callable[[str], tf.data.Dataset]:
        changes = {
            "fewer": lambda examples: examples.take(180),
            "others": lambda examples: examples.skip(300).take(240),
            "int64": lambda examples: examples.take(240).map(lambda image, label: (image, tf.cast(label, tf.int64))),
        }
        change = changes.get(change, lambda examples: examples.take(240))
        return lambda split: change(load_examples(split)) if split == changed else load_examples(split).take(240)

    def use(*change: str) -> None:
        monkeypatch.setattr(task, "load_examples", load(*change))

    use("")
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(1 + 4 + 3 + 1))  # After step 6, of which 4 are of epoch 1.
        assert ended(tmp_path, *flags)[0] == 42
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(task, "prepare_example", lambda image, label: (image, tf.cast(label, tf.int32)))
    used = "returned other examples than the run has used so far ("
    for change, difference in (
        (("fewer",), f"('train') {used}240 examples then, 180 now): restore the data, use another --run-dir or"),
        (("others",), f"('train') {used}240 examples then and now, not the same ones)"),
        (("int64",), f"('train') {used}(float32[8, 8, 1], int32[]) then, (float32[8, 8, 1], int64[]) now)"),
        (("fewer", "test"), f"('test') {used}240 examples then, 180 now)"),
    ):
        use(*change)
        code, line = ended(tmp_path, *flags)
        assert (code, difference in line) == (2, True), line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    use("fewer")
    with monkeypatch.context() as killing, pytest.raises(InterruptedError):
        killing.setattr(Signals, "check", killed_after(2))
        run(tmp_path, *flags, "--allow-changed-data")
    assert (
        "resumed from step-00000006; 'train' has changed (240 examples then, 180 now); 4 steps per epoch then, 3 now: "
        "the learning-rate schedule spans 12 steps instead of 16, and the training ends after step 15"
    ) in capsys.readouterr().out
    assert used in ended(tmp_path, *flags)[1]  # Nothing was saved since, so the newest checkpoint is of the others.
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(5))
        assert ended(tmp_path, *flags, "--allow-changed-data")[0] == 42
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["data"]
    assert {name: each["examples"] for name, each in data.items()} == {"train": 180, "validation": 179, "test": 240}
    result = run(tmp_path, *flags)
    assert "has changed" not in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path)] == ["4", "9", "12", "15"]
    assert result["step"] == 15


# --- Validation beside training ---------------------------------------------------------------------------------------


def validations(run_dir: Path, name: str = "validations.csv") -> list[dict[str, str]]:
    return list(csv.DictReader((run_dir / name).read_text(encoding="utf-8").splitlines()))


@pytest.mark.long
def test_run_stopped_in_a_validation_between_epochs_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    # Statistics of each replica's own are averaged before a validation, and must not be a second time.
    def each_on_its_own() -> keras.Model:
        layers = [keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dropout(0.2), keras.layers.Dense(10)])

    monkeypatch.setattr(task, "create_model", each_on_its_own)
    flags = ("--epochs=2", "--simulated-devices=2", "--steps-per-execution=1", "--validate-every-steps=8")
    flags += ("--ema-decay=0.9",)
    # In the validation after 8 steps; then in the second epoch's.
    assert_stopped_run_ends_equal((9, 16 + 20 + 5), tmp_path, flags, ended, monkeypatch)
    assert validations(tmp_path / "stopped") == validations(tmp_path / "whole")


@keras.saving.register_keras_serializable("tests")
class AlwaysNoisy(keras.layers.Layer):
    """Draws noise in evaluations too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, shape: Any) -> None:
        self.generator = tf.random.Generator.from_seed(7)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        noise = self.generator.normal(tf.shape(inputs))
        return inputs + 0.1 * (noise + keras.random.normal(tf.shape(inputs), seed=self.seed_generator))


def test_draws_of_a_validation_change_no_training_and_repeat_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    def noisy_model() -> keras.Model:
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), AlwaysNoisy(), keras.layers.Dense(10)])

    monkeypatch.setattr(task, "create_model", noisy_model)
    flags = ("--epochs=1", "--simulated-devices=2", "--steps-per-execution=1")
    expected = run(tmp_path / "at the end", *flags)["weights_sha256"]
    flags += ("--validate-every-steps=8",)
    assert_stopped_run_ends_equal((9,), tmp_path, flags, ended, monkeypatch)
    assert validations(tmp_path / "stopped") == validations(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "result.json").read_text(encoding="utf-8"))["weights_sha256"] == expected


@pytest.mark.usefixtures("every_layer")
@pytest.mark.long
def test_run_killed_between_validations_finds_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--epochs=2", "--validate-every-steps=2", "--steps-per-execution=2", "--keep-checkpoints=1")
    expected = run(tmp_path / "whole", *flags)

    for chunks in (20, 15, 15):
        with monkeypatch.context() as killing, pytest.raises(InterruptedError):
            killing.setattr(Signals, "check", killed_after(chunks))
            run(tmp_path / "killed", *flags)
    found = run(tmp_path / "killed", *flags)
    assert {**found, **NO_TIMES} == {**expected, **NO_TIMES}
    assert validations(tmp_path / "killed") == validations(tmp_path / "whole")


def test_continuous_evaluation_follows_a_run_and_writes_only_its_own(tmp_path: Path, capsys) -> None:
    result = run(tmp_path, "--epochs=4", "--keep-checkpoints=3", "--ema-decay=0.9")
    own = {"evaluations.csv"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train.main([f"--run-dir={tmp_path}", *SHORT, "--ema-decay=0.9", "--evaluate-continuously"])
    assert "The run has ended." in capsys.readouterr().out
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    new = {path.relative_to(tmp_path).as_posix() for path in after.keys() - before.keys()}
    assert {name for name in new if not name.startswith("tensorboard/evaluation/")} == own
    assert {path: after[path] for path in before} == before
    found = {row["step"]: row["validation/loss"] for row in validations(tmp_path, "evaluations.csv")}
    assert found == {row["step"]: row["validation/loss"] for row in rows(tmp_path)[-3:]}

    # Begun again it has nothing to do, and without an end of the run it waits for as long as it is asked to.
    (tmp_path / "result.json").unlink()
    train.main(
        [f"--run-dir={tmp_path}", *SHORT, "--ema-decay=0.9", "--evaluate-continuously", "--evaluation-timeout=1"]
    )
    out = capsys.readouterr().out
    assert "Nothing new for 1 s" in out
    assert "step-" not in out
    assert result["epochs"] == 4


def test_continuous_evaluation_waits_for_a_run_and_leaves_its_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(evaluator))
    train.main([f"--run-dir={tmp_path / 'run'}", *SHORT, "--evaluate-continuously", "--evaluation-timeout=1"])
    assert "Nothing new for 1 s (--evaluation-timeout)" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_continuous_evaluation_skips_a_checkpoint_that_is_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "--epochs=2", "--keep-checkpoints=3")
    read = StoredValues.read

    def read_late(values: StoredValues, names: list[str]) -> dict[str, tf.Tensor]:
        if values.path.name == "step-00000020":
            shutil.rmtree(values.path)
        return read(values, names)

    monkeypatch.setattr(StoredValues, "read", read_late)
    train.main([f"--run-dir={tmp_path}", *SHORT, "--evaluate-continuously"])
    assert [row["step"] for row in validations(tmp_path, "evaluations.csv")] == ["40"]


@pytest.mark.long
def test_continuous_evaluation_that_cannot_write_says_so(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    run(tmp_path, "--epochs=1")
    (tmp_path / "tensorboard" / "evaluation").write_text("in the way")  # Root may write anywhere else.
    code, line = ended(tmp_path, "--evaluate-continuously")
    assert code == 1
    assert f"{tmp_path}/tensorboard/evaluation cannot be written" in line


@pytest.mark.long
def test_continuous_evaluation_of_a_checkpoint_inside_a_validation_counts_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    flags = ("--epochs=1", "--steps-per-execution=1")
    run(tmp_path / "whole", *flags)
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(20 + 2))
        assert ended(tmp_path / "stopped", *flags)[0] == 42
    train.main(
        [f"--run-dir={tmp_path / 'stopped'}", *SHORT, *flags, "--evaluate-continuously", "--evaluation-timeout=1"]
    )
    (found,) = validations(tmp_path / "stopped", "evaluations.csv")
    assert found["validation/loss"] == rows(tmp_path / "whole")[0]["validation/loss"]


# --- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--async-checkpoints",), marks=pytest.mark.long)], ids=["at once", "in a thread"]
)
def test_deleted_directory_ends_the_run_with_one_line(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    validate = train.validate

    def delete_and_validate(epoch: int = 0) -> dict[str, float]:
        if epoch == 1:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return validate(epoch)

    monkeypatch.setattr(train, "validate", delete_and_validate)
    code, line = ended(tmp_path / "run", "--epochs=3", *flags)
    assert code == 1
    assert "cannot be written" in line
    assert "restore the directory" in line
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    monkeypatch.setattr(task, "create_model", linear_model)
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    run(tmp_path / "run", "--epochs=3", *flags)


def test_divergence_names_the_step_and_the_way_on_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    train_step = task.train_step

    def spoiled_step(batch):
        loss = train_step(batch)
        # The loss is finite in this step, and from the next one on it is not.
        spoil = tf.where(task.optimizer.iterations == 30, float("nan"), 0.0)
        task.model.trainable_variables[0].assign_add(tf.fill([64, 10], spoil))
        return loss

    with monkeypatch.context() as diverging:
        diverging.setattr(task, "train_step", spoiled_step)
        code, line = ended(tmp_path / "run", "--epochs=2", "--checkpoint-every-steps=14")
        assert code == 3
        assert "the loss of train step 11 of epoch 2 is nan" in line
        last = tmp_path / "run" / "checkpoints" / "step-00000028"
        assert (
            f"The last good checkpoint is {last}; nothing later was saved. Start a new --run-dir with --init-from"
            in line
        )
        # Steps in which the loss shows nothing yet, but a save is due.
        code, line = ended(tmp_path / "other", "--epochs=2", "--checkpoint-every-steps=15")
        assert code == 3
        assert "after step 30 the variable model/sequential/dense/kernel is not finite" in line
        assert f"The last good checkpoint is {tmp_path / 'other'}/checkpoints/step-00000020" in line
    for path in tmp_path.glob("*/*/step-*"):
        for name, value in read_checkpoint(path)[0].items():
            assert value.dtype.kind in "iu" or np.isfinite(value).all(), f"{path} {name}"
    run(tmp_path / "new", "--epochs=1", f"--init-from={last}", "--learning-rate=1e-3")


def test_gradients_that_are_never_finite_end_a_float16_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    compute_loss = task.compute_loss

    def without_slope(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        return loss + tf.sqrt(0.0 * tf.reduce_sum(task.model.trainable_variables[0])), per_example_loss

    monkeypatch.setattr(task, "compute_loss", without_slope)
    code, line = ended(tmp_path, "--epochs=9", "--precision=mixed_float16")
    assert code == 3
    assert "the loss scale at step 36 is down to" in line


@pytest.mark.long
def test_lost_files_are_told_and_nothing_more_is_lost(
    tmp_path: Path, ended: Callable[..., tuple[int, str]], capsys
) -> None:
    run(tmp_path / "run", "--epochs=2")
    for lost, reason in (
        ("checkpoints", "is empty although the run has gone far"),
        ("best", "best/step-00000040 is damaged"),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / lost)
        shutil.rmtree(tmp_path / lost / lost)
        for is_replaced in (False, True):
            if is_replaced:
                (tmp_path / lost / lost).write_text("mine")
                reason = f"{lost} is neither a directory nor a link to one"
            before = sorted(tmp_path.joinpath(lost).rglob("*"))
            code, line = ended(tmp_path / lost, "--epochs=3")
            assert (code, reason in line) == (2, True), line
            assert sorted(tmp_path.joinpath(lost).rglob("*")) == before
    (tmp_path / "run" / "metrics.csv").unlink()
    run(tmp_path / "run", "--epochs=3")
    assert "metrics.csv lacks 2 of 2 epochs" in capsys.readouterr().out


BROKEN = [
    ("metrics.csv", "epoch,step\n1,a\n"),
    ("metrics.csv", "step\n1\n"),
    ("metrics.csv", "epoch,step\n1,20,3\n"),
    ("metrics.csv", "epoch\n2\n1\n"),
    ("config.json", "{"),
]


@pytest.mark.long
def test_files_broken_by_hand_are_one_line(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    expected = run(tmp_path / "run", "--epochs=1")
    for number, (file, content) in enumerate(BROKEN):
        broken = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        (broken / file).write_text(content)
        code, line = ended(broken, "--epochs=2")
        assert (code, line.startswith(f"ERROR: {broken / file} ")) == (2, True), line
        assert (broken / "result.json").exists()
    # The result is made again.
    for content in ('{"epochs": "1"}', "{}"):
        (tmp_path / "run" / "result.json").write_text(content)
        assert {**run(tmp_path / "run", "--epochs=1"), **NO_TIMES} == {**expected, **NO_TIMES}


def test_start_that_failed_before_its_reports_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    class Failing(Report):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            raise CannotWrite("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(start, "Report", Failing)
        assert ended(tmp_path / "run") == (1, "ERROR: the disk is full")
    assert run(tmp_path / "run")["epochs"] == run(tmp_path / "other")["epochs"]


def test_fewer_epochs_than_were_begun_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", stopped_after(12))
        assert ended(tmp_path, "--epochs=3", "--steps-per-execution=4")[0] == 42
    assert "--epochs 1: the run already reached epoch 2; pass at least 2" in ended(tmp_path, "--epochs=1")[1]
    assert run(tmp_path, "--epochs=2")["step"] == 40


def test_signal_before_the_first_step_saves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    load_splits = train.load_splits

    def load_and_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # As `timeout` does.
        return load_splits(*arguments, **options)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context() as signalling:
        signalling.setattr(train, "load_splits", load_and_signal)
        end_at_signals()  # As the program does; a notebook's handlers come back.
        code, line = ended(tmp_path, "--epochs=1")
    # One more, while the program ends, does not take the exit code away.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    for number, handler in before.items():
        signal.signal(number, handler)
    assert code == 42
    assert line.startswith(f"stopped by SIGTERM, the state is in {tmp_path / 'checkpoints' / 'step-00000000'}")
    assert run(tmp_path, "--epochs=1")["step"] == 20
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_in_training_saves_and_ends_with_42(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    flags = ("--epochs=1", "--steps-per-execution=5")
    expected = run(tmp_path / "whole", *flags)
    record_losses, interrupted = Run.record_losses, []

    def record_and_interrupt(*arguments: Any) -> None:
        record_losses(*arguments)
        if not interrupted:
            interrupted.append(train.run.progress.step)
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: signals.signal)

    with monkeypatch.context() as interrupting:
        interrupting.setattr(Run, "record_losses", record_and_interrupt)
        code, line = ended(tmp_path / "stopped", *flags)
    assert (interrupted, code) == ([5], 42)
    assert line.startswith(f"stopped by SIGINT, the state is in {tmp_path / 'stopped/checkpoints/step-00000005'}")
    assert run(tmp_path / "stopped", *flags) == {**expected, "seconds": ANY, "goodput": ANY}


def test_own_column_in_a_row_is_reported(tmp_path: Path) -> None:
    start = {"epochs_done": 0, "validated_step": 0, "step": 0, "resumed": []}
    report = Report(Config(run_dir=tmp_path), ResultNames({}, []), "min", **start)
    report.epoch(
        {"epoch": 1, "step": 1, "seconds": 1.0, "examples_per_second": 1.0, "learning_rate": 0.1, "mine": 2.0},
        is_best=False,
    )
    report.draw_curves()
    assert rows(tmp_path)[0]["mine"] == "2.0"


# --- Hooks ------------------------------------------------------------------------------------------------------------


def looping(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook with a loop over a tensor in front, which only AutoGraph makes possible in a graph."""

    @functools.wraps(hook)
    def with_loop(*arguments: Any, **options: Any) -> Any:
        total = 0
        for number in tf.range(3):
            total += number
        with tf.control_dependencies([tf.debugging.assert_equal(total, 3)]):
            return hook(*arguments, **options)

    return with_loop


def test_hooks_may_loop_over_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--epochs=1", "--simulated-devices=2")
    plain = run(tmp_path / "plain", *flags)
    for name in ("prepare_example", "compute_loss", "update_metrics", "train_step", "evaluation_step"):
        monkeypatch.setattr(task, name, looping(getattr(task, name)))
    assert run(tmp_path / "looping", *flags) == plain | {"seconds": ANY, "goodput": ANY}


# --- Speed ------------------------------------------------------------------------------------------------------------


def test_each_function_is_traced_once_in_a_run_and_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short last chunks and batches, saves within epochs, validations and the test are all run by the same graphs."""

    def traces() -> dict[str, int]:
        return {split: steps.trace_count() for split, steps in train.run_steps.items()}

    flags = ["--epochs=3", "--steps-per-execution=4", "--checkpoint-every-steps=7", "--keep-last-batch"]
    expected = run(tmp_path / "whole", *flags)
    assert traces() == {"train": 1, "validation": 1, "test": 1}
    with monkeypatch.context() as stopping, pytest.raises(InterruptedError):
        stopping.setattr(Signals, "check", killed_after(9))
        run(tmp_path / "stopped", *flags)
    found = run(tmp_path / "stopped", *flags)
    assert traces() == {"train": 1, "validation": 1, "test": 1}
    assert found["weights_sha256"] == expected["weights_sha256"]


def test_deterministic_operations_are_used_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("enable_op_determinism", "enable_tensor_float_32_execution"):
        monkeypatch.setattr(tf.config.experimental, name, lambda *value, name=name: asked.append((name, *value)))
    train.build(Config())
    assert not asked
    train.build(Config(deterministic=True))
    assert asked == [("enable_op_determinism",), ("enable_tensor_float_32_execution", False)]


@pytest.mark.long
def test_profile_is_written_and_changes_no_number(tmp_path: Path, capsys) -> None:
    plain = run(tmp_path / "plain", "--epochs=4", "--steps-per-execution=3")
    profiled = run(tmp_path / "profiled", "--epochs=4", "--steps-per-execution=3", "--profile")
    assert profiled["weights_sha256"] == plain["weights_sha256"]
    assert list((tmp_path / "profiled" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))
    assert not (tmp_path / "plain" / "tensorboard" / "plugins").exists()
    assert "pip install xprof" in capsys.readouterr().out
    run(tmp_path / "short", "--epochs=1", "--steps-per-execution=20", "--profile")
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
    run(tmp_path, "--epochs=2")
    assert waited[1] > 0.5
