"""Models with state of every kind, each in a run that is stopped and ends with the same bits."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, interrupted, rows, run, stop
from small import linear_model
from small_states import read_checkpoint

import task
import train
from config import Config
from engine.errors import Stopped
from engine.run import RunDirectory
from engine.run.progress import Progress
from engine.run.start import saving_on_exit
from engine.run.state import State


def assert_stopped_run_ends_equal(stops: tuple[int, ...], folder: Path, *flags: str) -> None:
    """Stops a run after so many chunks each time, and compares it with one that is not stopped."""
    flags = (*ONE_REPLICA, *flags)
    expected = run(folder / "whole", *flags)
    for chunks in stops:
        stop(chunks, folder / "stopped", *flags)
    assert run(folder / "stopped", *flags) == expected
    for table in (folder / "whole").glob("[mv]*.csv"):
        assert rows(folder / "stopped", table.name) == rows(folder / "whole", table.name)


@pytest.mark.long
def test_stopped_run_with_every_kind_of_state_ends_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_metrics, update_metrics = task.create_metrics, task.update_metrics

    def create_model() -> keras.Model:
        layers = [keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        layers += [keras.layers.Dropout(0.2), keras.layers.Dense(10, kernel_regularizer="l2")]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    def update(split, labels, predictions, per_example_loss, weights) -> None:
        update_metrics(split, labels, predictions, per_example_loss, weights)
        one_hot = tf.one_hot(labels, 10)
        task.metrics[split]["f1"].update_state(one_hot, tf.nn.softmax(predictions), sample_weight=weights)

    monkeypatch.setattr(task, "create_model", create_model)
    # This metric makes its variables with its first update.
    f1 = keras.metrics.F1Score
    monkeypatch.setattr(task, "create_metrics", lambda split: {**create_metrics(split), "f1": f1(average="macro")})
    monkeypatch.setattr(task, "update_metrics", update)
    flags = ("--epochs=2", "--simulated-devices=3", "--steps-per-execution=3", "--keep-last-batch", "--ema-decay=0.9")
    flags += ("--micro-batches=2", "--precision=mixed_float16", "--checkpoint-every-steps=5", "--global-clipnorm=0.5")
    # In the first epoch, and before its validation.
    assert_stopped_run_ends_equal((3, 6), tmp_path, *flags)
    assert "metrics/train/f1/f1_score/true_positives" in train.run.checkpoints.state.per_replica


SHORT = {"epochs": 1, "global_batch_size": 60, "limit_steps": 8, "steps_per_execution": 2}


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_model() -> keras.Model:
        inputs = keras.Input(batch_shape=(30, 8, 8, 1))  # Two replicas' shares of 60.
        layers = [keras.layers.Reshape((2, 32)), keras.layers.SimpleRNN(4, stateful=True, unroll=True), Remembering()]
        return keras.Sequential([inputs, *layers, keras.layers.Dense(10)])

    def start() -> State:
        train.build(Config(run_dir=tmp_path, simulated_devices=2, **SHORT))
        RunDirectory(train.config, train.strategy).restore(train.run)
        train.run.trace(train.run_steps)
        return train.run.checkpoints.state

    monkeypatch.setattr(task, "create_model", create_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.05))
    state = start()
    initial = state.values()
    metrics, expected = train.train_epoch(), state.values()
    state.assign(initial)
    train.run.start(Progress())
    with interrupted(2, Stopped), pytest.raises(Stopped), saving_on_exit(train.run):
        train.train_epoch()

    state = start()
    assert 0 < train.run.progress.step < 8
    assert train.train_epoch() == metrics
    found = state.values()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    kept = {name.split("/")[-1]: value for name, value in found.items() if name.startswith("hidden/")}
    assert kept.keys() == {"rnn_state", "mean", "StateVar"}
    assert not np.array_equal(*kept["mean"])  # Each replica's own.
    # Best weights come with the state that a validation uses.
    best = {name.split("/")[-1] for name in train.run.best.state.values() if name.startswith("hidden/")}
    assert best == {"rnn_state", "mean", "StateVar"}


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


@pytest.mark.long
def test_draws_of_a_validation_change_no_training_and_repeat_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", lambda: linear_model(AlwaysNoisy()))
    flags = ("--epochs=1", "--simulated-devices=2", "--steps-per-execution=1")
    run(tmp_path / "one_validation", *ONE_REPLICA, *flags)
    # It is stopped in a validation, which begins again, because it has drawn numbers.
    assert_stopped_run_ends_equal((10,), tmp_path, *flags, "--validate-every-steps=8")
    found, expected = (
        read_checkpoint(tmp_path / name / "checkpoints" / "step-00000020")[0] for name in ("stopped", "one_validation")
    )
    weights = [name for name in expected if name.startswith("model/")]
    assert weights
    for name in weights:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
