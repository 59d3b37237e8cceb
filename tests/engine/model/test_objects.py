"""Models and optimizers of unusual kinds work on any number of replicas, or are refused by name."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas
from small import linear_model

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model.build import TaskObjects, build_models
from engine.model.moments import replace_moments
from engine.model.variables import model_variables

# --- Models -----------------------------------------------------------------------------------------------------------


class WithHelpers(keras.Model):
    """Has layers that are called in training only, besides some that change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.normalization = keras.layers.BatchNormalization(synchronized=True)
        self.dropout = keras.layers.Dropout(0.5)
        self.classes = keras.layers.Dense(10)
        self.helpers = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(10)])

    def call(self, features, training=False):
        features = self.normalization(self.flatten(features), training=training)
        predictions = self.classes(self.dropout(features, training=training))
        return predictions + self.helpers(features) if training else predictions


@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_called_in_training_only_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def create_model() -> keras.Model:
        model = WithHelpers()
        made.append(model.dropout.seed_generator.state.numpy())
        return model

    monkeypatch.setattr(task, "create_model", create_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    train.build(Config(simulated_devices=2))
    values = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    helpers = [name for name in values if "/sequential/" in name]
    assert len(helpers) == 4
    assert set(helpers) <= set(train.run.checkpoints.state.mirrored)
    # To build them drew nothing and measured nothing.
    (seed,) = [name for name in values if "seed_generator_state" in name]
    np.testing.assert_array_equal(values[seed], made[0])
    (mean,) = [name for name in values if name.endswith("moving_mean")]
    assert not values[mean].any()

    for stack, first, count in train.batches["train"].iterator().take(1):
        train.run_steps["train"](stack, first, count)
    after = model_variables(task.model)
    assert all(np.any(after[name].numpy() != values[name]) for name in helpers if name.endswith("kernel"))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_synchronized_normalization_is_that_of_all_replicas_with_a_mask_and_far_from_0(replicas: int) -> None:
    random = np.random.default_rng(0)
    rows, factors = random.normal(1e4, 10.0, (20, 3, 5)).astype("float32"), random.normal(size=(20, 3, 5))
    mask = rows[..., 0] > 1e4
    batch = rows, mask, factors.astype("float32")

    def normalized(layers: list[keras.Layer], batch: Any) -> list[tf.Tensor]:
        """Returns the gradients by the rows of a loss that depends on all normalized rows."""
        rows, mask, factors = batch
        gradients = []
        for layer, options in zip(layers, ({}, {"mask": mask}), strict=True):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                loss = tf.reduce_sum(tf.square(layer(rows, training=True, **options)) * factors)
            gradients.append(tape.gradient(loss, rows))
        return gradients

    def two_layers(**options: Any) -> list[keras.Layer]:
        return [keras.layers.BatchNormalization(momentum=0.0, **options) for _ in range(2)]

    replace_moments()
    with create_strategy(Config(simulated_devices=replicas)).scope():
        layers = two_layers(synchronized=True)
        for layer in layers:
            layer.build(rows.shape)
    found = on_replicas(replicas, lambda batch: tf.stack(normalized(layers, batch), axis=1))(batch)
    # Keras's own, which is not synchronized, on one device in 64 bits.
    exact = rows.astype("float64")
    expected = normalized(two_layers(dtype="float64"), (tf.constant(exact), mask, factors))
    for layer, counted in zip(layers, (exact.reshape(-1, 5), exact[mask]), strict=True):
        np.testing.assert_allclose(layer.moving_mean.numpy(), counted.mean(0), rtol=1e-6)
        np.testing.assert_allclose(layer.moving_variance.numpy(), counted.var(0), rtol=1e-5)
    for number, goal in enumerate(expected):
        gradient = np.concatenate([each[:, number] for each in found])
        np.testing.assert_allclose(gradient, goal, rtol=0, atol=1e-3 * np.abs(goal).max())


def test_encoder_that_a_step_calls_on_each_of_two_views_is_left_as_it_is() -> None:
    views = {name: tf.TensorSpec([4, 3]) for name in ("one", "other")}
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert build_models(encoder, views) is encoder
    with pytest.raises(BadInput, match=r"which does not accept features .*: make its first layer accept"):
        build_models(keras.Sequential([keras.layers.Dense(2)]), views)


# --- Optimizers -------------------------------------------------------------------------------------------------------


def several(bias: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.25, name="weights"), {".*bias": bias})
    )


class Silent(keras.optimizers.SGD):
    @property
    def learning_rate(self):
        raise RuntimeError("there are several")


def learning_rates(optimizer: Any) -> dict[str, float]:
    return TaskObjects(None, optimizer, *[None] * 8).learning_rates()


def test_each_learning_rate_has_its_column() -> None:
    sgd, both = keras.optimizers.SGD(0.25), several(keras.optimizers.Adam(0.5, name="biases"))
    assert learning_rates(sgd) == {"learning_rate": 0.25}
    assert learning_rates({"a": keras.optimizers.LossScaleOptimizer(both), "b": sgd, "c": Silent(0.25)}) == {
        "learning_rate/a/weights": 0.25,
        "learning_rate/a/biases": 0.5,
        "learning_rate/b": 0.25,
    }


def test_several_optimizers_in_one_are_in_the_state_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: several(keras.optimizers.Adam(0.5, name="bias")))
    train.build(Config(simulated_devices=2))
    assert train.run.objects.learning_rates() == {"learning_rate/weights": 0.25, "learning_rate/bias": 0.5}
    assert {"optimizer/bias/iteration", "optimizer/weights/iteration"} <= set(train.run.checkpoints.state.mirrored)
