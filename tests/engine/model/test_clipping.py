"""Clipping, by --global-clipnorm and by the optimizer itself, and variables of several dtypes."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas

from config import Config
from engine.cluster.strategy import create_strategy
from engine.model.build import build_optimizers
from engine.model.gradients import apply_gradients, replica_step
from engine.model.optimizers import prepare_optimizer

FEATURES = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
LABELS = np.random.default_rng(1).normal(size=(24, 3)).astype("float32") * np.linspace(0.1, 9.0, 24)[:, None]
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.AdamW(0.1, epsilon=0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.AdamW(0.1, epsilon=0.1, clipvalue=0.2),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, global_clipnorm=0.3), {".*bias": keras.optimizers.AdamW(0.1, clipvalue=0.2)}
        )
    ),
}


def two_layers(dtype: str) -> keras.Model:
    """Returns a model of two dense layers, the first of them with this dtype."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, dtype=dtype, name="first"), keras.layers.Dense(3, name="second")]
    return keras.Sequential([keras.Input((4,)), *layers])


def loss_of(model: keras.Model, features: Any, labels: Any) -> tf.Tensor:
    """Returns the part of the batch's loss that these examples have."""
    return tf.reduce_sum(tf.square(model(features, training=True) - tf.cast(labels, tf.float32))) / len(FEATURES)


def by_keras(
    optimizer: keras.optimizers.Optimizer, dtype: str, global_clipnorm: float | None
) -> tuple[list[np.ndarray], float]:
    """Returns the weights after some steps of the complete batch on one device, without the engine, and the norm."""
    model = two_layers(dtype)
    optimizer.build(model.trainable_variables)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(model, FEATURES, LABELS)
        gradients = [tf.cast(each, "float64") for each in tape.gradient(loss, model.weights)]
        norm = tf.linalg.global_norm(gradients)
        if global_clipnorm:
            gradients, _ = tf.clip_by_global_norm(gradients, global_clipnorm)
        optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
    return model.get_weights(), float(norm)


def by_engine(
    create: Callable[[], keras.optimizers.Optimizer],
    dtype: str,
    replicas: int,
    precision: str = "float32",
    updates_itself: bool = False,
    **settings: Any,
) -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights after the same steps on replicas, and the norm that each got in the last one.

    A step that `updates_itself` calls Keras alone.
    """
    with create_strategy(Config(simulated_devices=replicas)).scope():
        model = two_layers(dtype)
        # A hook may return the same optimizer twice.
        optimizer = build_optimizers(prepare_optimizer(create(), "float32"), model, precision)

    def train_step(batch: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(model, *batch)
        if updates_itself:
            optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
            return loss
        return apply_gradients(optimizer, tape, loss, model.trainable_variables)

    take = on_replicas(replicas, replica_step(train_step, Config(**settings)))
    for _ in range(3):
        norms = take((FEATURES, LABELS))
    return model.get_weights(), [float(each) for each in norms]


@pytest.mark.parametrize(
    ("kind", "dtype", "way"),
    [
        ("clipnorm", "float64", {"replicas": 2, "micro_batches": 2}),
        ("global_clipnorm", "float32", {"replicas": 2}),
        ("clipvalue", "float64", {"replicas": 2, "global_clipnorm": 2.0}),
        ("several", "float32", {"replicas": 4, "micro_batches": 2, "precision": "mixed_float16"}),
        ("several", "float32", {"replicas": 2, "updates_itself": True}),
        ("several", "float32", {"replicas": 2, "precision": "mixed_float16", "global_clipnorm": 0.5}),
    ],
    ids=str,
)
def test_clipping_by_the_optimizer_is_that_of_keras_on_one_device(kind: str, dtype: str, way: dict[str, Any]) -> None:
    limit = way.get("global_clipnorm")
    expected, norm = by_keras(OPTIMIZERS[kind](), dtype, limit)
    found, norms = by_engine(OPTIMIZERS[kind], dtype, **way)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())
    if not way.get("updates_itself"):
        # Without a limit or a loss scale nothing needs the norm.
        is_computed = limit or "precision" in way
        assert norms == pytest.approx([norm if is_computed else np.nan] * way["replicas"], rel=1e-5, nan_ok=True)
    assert not limit or norm > limit


def test_norm_is_that_of_the_gradients_when_the_loss_scale_grows() -> None:
    variable = keras.Variable([1.0, 1.0, 1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), dynamic_growth_steps=2)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value)
        return apply_gradients(optimizer, tape, loss, [variable])

    before = float(optimizer.dynamic_scale.numpy())
    assert [float(step()) for _ in range(4)] == pytest.approx([3**0.5] * 4)
    assert float(optimizer.dynamic_scale.numpy()) == 4 * before
