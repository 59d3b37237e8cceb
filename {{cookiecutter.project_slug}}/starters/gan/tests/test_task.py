"""What is special to a generator and a discriminator: two updates in a step, noise by example, fixed samples."""

import dataclasses
from pathlib import Path

from config import Config

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from distance import Distance


def test_a_step_updates_every_weight_of_both_models(settings: Config) -> None:
    train.build(dataclasses.replace(settings, simulated_devices=2))
    before = {name: [each.numpy() for each in model.trainable_variables] for name, model in task.model.items()}
    stack, first, _ = next(train.batches["train"].iterator().take(1))
    train.run_steps["train"](stack, first, 1)
    for name, model in task.model.items():
        for variable, value in zip(model.trainable_variables, before[name], strict=True):
            assert not np.array_equal(variable.numpy(), value), variable.path


def test_layers_of_both_models_know_whether_they_train(settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    create_model, called = task.create_model, []

    def create_recorded_models():
        class Recorder(keras.layers.Layer):
            def call(self, inputs, training=None):
                called.append((self.name, training))
                return inputs

        models = create_model()
        for name, model in models.items():
            models[name] = keras.Model(model.input, Recorder(name=name)(model.output))
        return models

    monkeypatch.setattr(task, "create_model", create_recorded_models)
    train.build(settings)
    called.clear()
    train.train_epoch()
    assert set(called) == {("generator", True), ("discriminator", True)}
    called.clear()
    train.evaluate_split("validation")
    assert set(called) == {("generator", False), ("discriminator", False)}


def test_noise_differs_by_example_and_not_by_replicas(settings: Config) -> None:
    drawn = []
    for replicas in (1, 4):
        train.build(dataclasses.replace(settings, simulated_devices=replicas))
        batches = train.batches["train"].one_by_one()
        shares = [train.strategy.experimental_local_results(features["noise"]) for features, _, _ in batches]
        drawn.append(np.concatenate([share for batch in shares for share in batch]))
    np.testing.assert_array_equal(*drawn)
    assert len(np.unique(drawn[0])) == drawn[0].size  # No number was drawn twice.


def test_samples_are_the_same_for_the_same_weights_and_seed(settings: Config, tmp_path: Path) -> None:
    train.build(settings)

    def drawn(seed: int) -> bytes:
        task.on_report({"epoch": 7}, tmp_path, dataclasses.replace(settings, seed=seed))
        (path,) = (tmp_path / "samples").iterdir()  # No half-written file is left.
        return path.read_bytes()

    first = drawn(seed=0)
    assert tf.io.decode_png(first).shape == (300, 500, 1)
    assert drawn(seed=0) == first
    assert drawn(seed=1) != first
    train.train_epoch()
    assert drawn(seed=0) != first


def test_distance_is_that_of_the_kernel_and_counts_weights() -> None:
    random = np.random.default_rng(0)
    classes = np.eye(3, dtype="float32")[random.integers(3, size=40)]
    real, made = random.normal(size=(2, 40, 5)).astype("float32")
    made += 2.0
    weights = random.integers(3, size=40).astype("float32")
    distance = Distance(classes=3, size=5, width=2.0, count=20_000)
    for part in (slice(0, 25), slice(25, 40)):
        distance.update_state(classes[part], real[part], made[part], weights[part])

    # The same without random features: the mean of the kernel over all pairs (Gretton et al. 2012, equation 5).
    def mean_kernel(some: np.ndarray, others: np.ndarray) -> float:
        squares = ((some[:, None] - others[None]) ** 2).sum(-1)
        pair_weights = weights[:, None] * weights[None] * (classes @ classes.T)
        return (pair_weights * np.exp(-squares / (2 * 2.0**2))).sum() / weights.sum() ** 2

    expected = mean_kernel(real, real) + mean_kernel(made, made) - 2 * mean_kernel(real, made)
    assert float(distance.result()) == pytest.approx(expected**0.5, rel=0.02)
    distance.reset_state()
    distance.update_state(classes, real, real, weights)
    assert float(distance.result()) == 0.0


def test_inputs_are_read_as_load_examples_returns_them(settings: Config, tmp_path: Path) -> None:
    task.config = settings
    digits = np.stack([features for features, _ in task.load_examples("test").as_numpy_iterator()])
    np.save(tmp_path / "digits.npy", digits)
    names, features = zip(*task.read_inputs(tmp_path / "digits.npy"), strict=True)
    assert names == tuple(range(len(digits)))
    np.testing.assert_array_equal(features, digits)
