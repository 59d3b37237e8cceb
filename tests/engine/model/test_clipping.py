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
from engine.model.gradients import apply_gradients, in_micro_batches
from engine.model.optimizers import prepare_optimizer

FEATURES = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
LABELS = np.random.default_rng(1).normal(size=(24, 3)).astype("float32") * np.linspace(0.1, 9.0, 24)[:, None]
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "no clipping": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
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


def by_keras(optimizer: keras.optimizers.Optimizer, dtype: str) -> list[np.ndarray]:
    """Returns the weights after some steps of the complete batch on one device, without the engine."""
    model = two_layers(dtype)
    optimizer.build(model.trainable_variables)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(model, FEATURES, LABELS)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
    return model.get_weights()


def by_engine(
    create: Callable[[], keras.optimizers.Optimizer],
    dtype: str,
    replicas: int,
    precision: str = "float32",
    updates_itself: bool = False,
    steps: int = 3,
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

    take = on_replicas(replicas, in_micro_batches(train_step, Config(**settings)))
    for _ in range(steps):
        norms = take((FEATURES, LABELS))
    return model.get_weights(), [float(each) for each in norms]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        one, other = one.astype("float64"), other.astype("float64")
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize(
    ("kind", "dtype", "way"),
    [
        ("clipnorm", "float64", {"replicas": 2, "micro_batches": 2}),
        ("global_clipnorm", "float32", {"replicas": 2}),
        ("clipvalue", "float64", {"replicas": 2, "precision": "mixed_float16"}),
        ("no clipping", "bfloat16", {"replicas": 2, "micro_batches": 2}),
        ("several", "float32", {"replicas": 4, "micro_batches": 2, "precision": "mixed_float16"}),
        ("several", "float32", {"replicas": 2, "updates_itself": True}),
        ("several", "float32", {"replicas": 1, "global_clipnorm": 1e9}),
    ],
    ids=str,
)
def test_clipping_by_the_optimizer_is_that_of_keras_on_one_device(kind: str, dtype: str, way: dict[str, Any]) -> None:
    expected = by_keras(OPTIMIZERS[kind](), dtype)
    found, _ = by_engine(OPTIMIZERS[kind], dtype, **way)
    assert_same(found, expected, 0.05 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize(
    ("limit", "clipvalue", "dtype", "way"),
    [
        (None, None, "float32", {"replicas": 2}),
        (None, None, "float32", {"replicas": 3, "micro_batches": 2, "precision": "mixed_float16"}),
        (1e9, None, "float32", {"replicas": 1}),
        (0.05, None, "float32", {"replicas": 4, "micro_batches": 2}),
        (2.0, 0.1, "float32", {"replicas": 2, "precision": "mixed_float16"}),
        (2.0, 0.1, "float64", {"replicas": 2}),
    ],
    ids=str,
)
def test_sum_of_the_gradients_is_clipped_by_its_norm_and_then_by_the_optimizer(
    limit: float | None, clipvalue: float | None, dtype: str, way: dict[str, Any]
) -> None:
    model = two_layers(dtype)
    with tf.GradientTape() as tape:
        loss = loss_of(model, FEATURES, LABELS)
    gradients = [each.numpy() for each in tape.gradient(loss, model.weights)]
    norm = np.sqrt(sum((each.astype("float64") ** 2).sum() for each in gradients))
    assert norm > 2.0
    clipped = [each * min(1.0, (limit or np.inf) / norm) for each in gradients]
    clipped = [np.clip(each, -clipvalue, clipvalue) for each in clipped] if clipvalue else clipped
    expected = [before - each for before, each in zip(model.get_weights(), clipped, strict=True)]

    # Gradient descent with rate 1 moves the weights by the gradient.
    found, norms = by_engine(
        lambda: keras.optimizers.SGD(1.0, clipvalue=clipvalue), dtype, steps=1, global_clipnorm=limit, **way
    )
    assert_same(found, [each.astype(weight.dtype) for each, weight in zip(expected, found, strict=True)])
    if limit is None and "precision" not in way:
        assert np.isnan(norms).all()  # Nothing needs it.
    else:
        assert norms == pytest.approx([norm] * way["replicas"], rel=1e-5)


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
