"""Sums over the global batch and gathered values, against NumPy, on several replicas and in micro-batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas

from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model import apply_gradients, gather_batch, in_micro_batches, in_one_batch, places_in_batch, sum_over_batch
from engine.model.optimizers import prepare_optimizer

EXAMPLES, TOKENS, WIDTH = 16, 3, 2
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(EXAMPLES, TOKENS, WIDTH)).astype("float32")
LABELS = RANDOM.integers(0, 3, (EXAMPLES, TOKENS))  # 0 is a token that does not count.
LABELS[:4] = 0  # So no token of the first of four replicas, nor of some micro-batches, counts.
WEIGHTS = np.array([1.0] * 13 + [0.5, 0.0, 0.0], "float32")
BATCH = FEATURES, LABELS, WEIGHTS


def count_tokens(features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(sample_weights) < 0.0:  # AutoGraph converts it, as it does a hook.
        return tf.constant(0.0)
    return tf.reduce_sum(tf.cast(labels > 0, "float32") * sample_weights[:, None])


class TokenMean:
    """Gradient descent on the mean over the tokens that count of (features @ weight) ** 2."""

    def __init__(self, replicas: int) -> None:
        with create_strategy(Config(simulated_devices=replicas)).scope():
            self.weight = keras.Variable([[1.0], [2.0]])
            self.optimizer = prepare_optimizer(keras.optimizers.SGD(0.5), "float32")
            self.optimizer.build([self.weight])

    def step(self, batch: Any) -> tf.Tensor:
        features, labels, sample_weights = batch
        with tf.GradientTape() as tape:
            loss = self.loss(features, labels, sample_weights)
        apply_gradients(self.optimizer, tape, loss, [self.weight])
        return loss

    def loss(self, features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
        errors = tf.square((features @ self.weight.value)[..., 0])
        errors *= tf.cast(labels > 0, "float32") * sample_weights[:, None]
        examples = sum_over_batch(lambda features, labels, sample_weights: tf.shape(labels)[0])
        return tf.math.divide_no_nan(tf.reduce_sum(errors), sum_over_batch(count_tokens)) * examples / EXAMPLES

    def evaluation_step(self, split: str, batch: Any) -> tf.Tensor:
        return self.loss(*batch)


def token_mean_in_numpy() -> tuple[float, np.ndarray]:
    """Returns the loss, and the weight after a step."""
    weight = np.array([[1.0], [2.0]])
    counted = (LABELS > 0) * WEIGHTS[:, None]
    errors = (FEATURES @ weight)[..., 0]
    gradient = np.einsum("nt,ntw->w", 2 * errors * counted, FEATURES)[:, None] / counted.sum()
    return (errors**2 * counted).sum() / counted.sum(), weight - 0.5 * gradient


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "compiled"), [(1, 4, True), (2, 1, True), (2, 2, False), (4, 2, True)]
)
def test_mean_over_tokens_is_that_of_the_global_batch(replicas: int, micro_batches: int, compiled: bool) -> None:
    mean = TokenMean(replicas)
    step = in_micro_batches(mean.step, Config(micro_batches=micro_batches))
    losses = on_replicas(replicas, step, compiled=compiled)(BATCH)
    loss, weight = token_mean_in_numpy()
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(mean.weight.numpy(), weight, atol=1e-6)


def test_batch_in_which_nothing_counts_leaves_the_weights() -> None:
    mean = TokenMean(2)
    step = in_micro_batches(mean.step, Config(micro_batches=2))
    losses = on_replicas(2, step)((FEATURES, LABELS, np.zeros_like(WEIGHTS)))
    assert sum(map(float, losses)) == 0.0
    assert mean.weight.numpy().ravel().tolist() == [1.0, 2.0]


def test_evaluation_has_the_sum_of_its_batch() -> None:
    step = in_one_batch(TokenMean(2).evaluation_step)
    losses = on_replicas(2, lambda batch: step("validation", batch))(BATCH)
    np.testing.assert_allclose(sum(map(float, losses)), token_mean_in_numpy()[0], rtol=1e-5)


def test_counts_may_be_arrays_or_in_16_bits_and_are_equal_on_all_replicas() -> None:
    def count_labels(features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
        return tf.math.bincount(tf.cast(labels, "int32"), minlength=3, maxlength=3)

    def step(batch: Any) -> tf.Tensor:
        large = sum_over_batch(lambda *parts: tf.constant(40_000.0, tf.float16))  # 80,000 is more than float16 has.
        return large + tf.reduce_sum(tf.stack([1.0, 10.0, 100.0]) * sum_over_batch(count_labels))

    expected = 80_000.0 + np.bincount(LABELS.ravel(), minlength=3) @ [1.0, 10.0, 100.0]
    assert on_replicas(2, in_one_batch(step))(BATCH) == [expected] * 2


def test_sum_outside_a_step_is_refused() -> None:
    with pytest.raises(BadInput, match="sum_over_batch was called outside a step"):
        sum_over_batch(count_tokens)


class Contrast:
    """The loss of each example is its product with the next example of the batch, in a circle."""

    def __init__(self, replicas: int) -> None:
        with create_strategy(Config(simulated_devices=replicas)).scope():
            self.weight = keras.Variable([[1.0, 0.5], [2.0, -1.0]])
            self.optimizer = prepare_optimizer(keras.optimizers.SGD(0.5), "float32")
            self.optimizer.build([self.weight])

    def step(self, batch: Any) -> tf.Tensor:
        features, _, sample_weights = batch
        with tf.GradientTape() as tape:
            values = tf.tanh(features[:, 0] @ self.weight.value)
            partners = (places_in_batch(values) + 1) % EXAMPLES
            products = tf.reduce_sum(values * tf.gather(gather_batch(values), partners), axis=-1)
            loss = tf.nn.compute_average_loss(products, sample_weight=sample_weights, global_batch_size=EXAMPLES)
        apply_gradients(self.optimizer, tape, loss, [self.weight])
        return loss


@pytest.mark.parametrize("replicas", [1, 4])
def test_gathered_values_are_in_order_and_have_gradients(replicas: int) -> None:
    contrast = Contrast(replicas)
    losses = on_replicas(replicas, in_micro_batches(contrast.step, Config()))(BATCH)
    weight = np.array([[1.0, 0.5], [2.0, -1.0]])
    inputs = FEATURES[:, 0]
    values = np.tanh(inputs @ weight)
    after, before = np.roll(values, -1, axis=0), np.roll(values, 1, axis=0)
    loss = (WEIGHTS * (values * after).sum(-1)).sum() / EXAMPLES
    of_values = (WEIGHTS[:, None] * after + np.roll(WEIGHTS, 1)[:, None] * before) / EXAMPLES
    gradient = inputs.T @ (of_values * (1 - values**2))
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(contrast.weight.numpy(), weight - 0.5 * gradient, atol=1e-6)


def test_dtypes_that_no_collective_gathers_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """CollectiveGatherV2, which several workers use, takes only float16, float32, float64, int32 and int64."""
    gathered, all_gather = [], tf.distribute.ReplicaContext.all_gather

    def recorded(self: Any, values: tf.Tensor, axis: int) -> tf.Tensor:
        gathered.append(values.dtype.name)
        return all_gather(self, values, axis)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_gather", recorded)

    def step(batch: Any) -> tf.Tensor:
        total = tf.constant(0.0)
        for dtype in ("bfloat16", "bool", "int8"):
            values = gather_batch(tf.cast(batch[1] % 2, dtype))
            assert values.dtype == dtype
            total += tf.reduce_sum(tf.cast(values, tf.float32))
        return total

    assert on_replicas(2, in_one_batch(step))(BATCH) == [3.0 * (LABELS % 2).sum()] * 2
    assert sorted(gathered) == ["float32"] * 2 + ["int32"] * 4


def test_update_on_a_condition_is_refused_on_several_replicas() -> None:
    def update_on_condition(replicas: int) -> None:
        mean = TokenMean(replicas)

        def step(batch: Any) -> tf.Tensor:
            tf.cond(batch[0][0, 0, 0] > -1e9, lambda: mean.step(batch), lambda: 0.0)
            return tf.constant(0.0)

        on_replicas(replicas, in_micro_batches(step, Config()))(BATCH)

    update_on_condition(1)
    with pytest.raises(BadInput, match=r"inside a tf\.cond or a loop, where replicas cannot wait"):
        update_on_condition(2)


@pytest.mark.parametrize("function", [gather_batch, places_in_batch])
def test_gathering_in_micro_batches_is_refused(function: Callable[[tf.Tensor], tf.Tensor]) -> None:
    step = in_micro_batches(lambda batch: tf.reduce_sum(function(batch[0])), Config(micro_batches=2))
    with pytest.raises(BadInput, match=rf"--micro-batches is 2, .*{function.__name__}: .*: remove --micro-batches"):
        step((tf.ones([4, 1]),) * 3)
