"""Sums over the global batch and gathered values, against NumPy, on several replicas and in micro-batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas, updating

from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model import gather_batch, places_in_batch, replica_step, sum_over_batch
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


class Descent:
    """Gradient descent with rate 0.5 on a loss of a weight and a batch."""

    def __init__(self, replicas: int, start: list[list[float]], loss_of: Callable[..., tf.Tensor]) -> None:
        with create_strategy(Config(simulated_devices=replicas)).scope():
            self.weight = keras.Variable(start)
            optimizer = prepare_optimizer(keras.optimizers.SGD(0.5), "float32")
            optimizer.build([self.weight])
        self.step = updating(optimizer, [self.weight], lambda *batch: loss_of(self.weight.value, *batch))


def token_mean(weight: tf.Tensor, features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    """Returns the mean over the tokens that count of (features @ weight) ** 2."""
    errors = tf.square((features @ weight)[..., 0])
    errors *= tf.cast(labels > 0, "float32") * sample_weights[:, None]
    examples = sum_over_batch(lambda features, labels, sample_weights: tf.shape(labels)[0])
    return tf.math.divide_no_nan(tf.reduce_sum(errors), sum_over_batch(count_tokens)) * examples / EXAMPLES


def contrast(weight: tf.Tensor, features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    """Returns a mean of the product of each example with the next one of the batch, in a circle."""
    values = tf.tanh(features[:, 0] @ weight)
    partners = (places_in_batch(values) + 1) % EXAMPLES
    products = tf.reduce_sum(values * tf.gather(gather_batch(values), partners), axis=-1)
    return tf.nn.compute_average_loss(products, sample_weight=sample_weights, global_batch_size=EXAMPLES)


START = [[1.0], [2.0]]


def token_mean_in_numpy() -> tuple[float, np.ndarray]:
    """Returns the loss, and the weight after a step."""
    weight = np.array(START)
    counted = (LABELS > 0) * WEIGHTS[:, None]
    errors = (FEATURES @ weight)[..., 0]
    gradient = np.einsum("nt,ntw->w", 2 * errors * counted, FEATURES)[:, None] / counted.sum()
    return (errors**2 * counted).sum() / counted.sum(), weight - 0.5 * gradient


@pytest.mark.parametrize(("replicas", "micro_batches", "compiled"), [(1, 4, True), (2, 2, False), (4, 2, True)])
def test_mean_over_tokens_is_that_of_the_global_batch(replicas: int, micro_batches: int, compiled: bool) -> None:
    mean = Descent(replicas, START, token_mean)
    step = replica_step(mean.step, Config(micro_batches=micro_batches))
    losses = on_replicas(replicas, step, compiled=compiled)(BATCH)
    loss, weight = token_mean_in_numpy()
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(mean.weight.numpy(), weight, atol=1e-6)


def test_batch_in_which_nothing_counts_leaves_the_weights() -> None:
    mean = Descent(2, START, token_mean)
    step = replica_step(mean.step, Config(micro_batches=2))
    losses = on_replicas(2, step)((FEATURES, LABELS, np.zeros_like(WEIGHTS)))
    assert sum(map(float, losses)) == 0.0
    assert mean.weight.numpy().ravel().tolist() == [1.0, 2.0]


def test_counts_may_be_arrays_or_in_16_bits_and_are_equal_on_all_replicas() -> None:
    def count_labels(features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
        return tf.math.bincount(tf.cast(labels, "int32"), minlength=3, maxlength=3)

    def step(batch: Any) -> tf.Tensor:
        large = sum_over_batch(lambda *parts: tf.constant(40_000.0, tf.float16))  # 80,000 is more than float16 has.
        return large + tf.reduce_sum(tf.stack([1.0, 10.0, 100.0]) * sum_over_batch(count_labels))

    expected = 80_000.0 + np.bincount(LABELS.ravel(), minlength=3) @ [1.0, 10.0, 100.0]
    assert on_replicas(2, replica_step(step))(BATCH) == [expected] * 2


def test_sum_outside_a_step_is_refused() -> None:
    with pytest.raises(BadInput, match="sum_over_batch was called outside a step"):
        sum_over_batch(count_tokens)


@pytest.mark.parametrize("replicas", [1, 4])
def test_gathered_values_are_in_order_and_have_gradients(replicas: int) -> None:
    weight = np.array([[1.0, 0.5], [2.0, -1.0]])
    found = Descent(replicas, weight.tolist(), contrast)
    losses = on_replicas(replicas, replica_step(found.step, Config()))(BATCH)
    inputs = FEATURES[:, 0]
    values = np.tanh(inputs @ weight)
    after, before = np.roll(values, -1, axis=0), np.roll(values, 1, axis=0)
    loss = (WEIGHTS * (values * after).sum(-1)).sum() / EXAMPLES
    of_values = (WEIGHTS[:, None] * after + np.roll(WEIGHTS, 1)[:, None] * before) / EXAMPLES
    gradient = inputs.T @ (of_values * (1 - values**2))
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(found.weight.numpy(), weight - 0.5 * gradient, atol=1e-6)


def test_dtypes_that_no_collective_gathers_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """CollectiveGatherV2, which several workers use, takes only float16, float32, float64, int32 and int64."""
    gathered, all_gather = set(), tf.distribute.ReplicaContext.all_gather

    def recorded(self: Any, values: tf.Tensor, axis: int) -> tf.Tensor:
        gathered.add(values.dtype.name)
        return all_gather(self, values, axis)

    def step(batch: Any) -> tf.Tensor:
        values = [gather_batch(tf.cast(batch[1] % 2, dtype)) for dtype in ("bfloat16", "bool")]
        assert [each.dtype for each in values] == ["bfloat16", "bool"]
        return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in values])

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_gather", recorded)
    assert on_replicas(2, replica_step(step))(BATCH) == [2.0 * (LABELS % 2).sum()] * 2
    assert gathered == {"float32", "int32"}


def test_update_on_a_condition_is_refused_on_several_replicas() -> None:
    mean = Descent(2, START, token_mean)

    def step(batch: Any) -> tf.Tensor:
        return tf.cond(batch[0][0, 0, 0] > -1e9, lambda: mean.step(batch), lambda: 0.0)

    with pytest.raises(BadInput, match=r"inside a tf\.cond or a loop, where replicas cannot wait"):
        on_replicas(2, replica_step(step, Config()))(BATCH)


def test_gathering_in_micro_batches_is_refused() -> None:
    step = replica_step(lambda batch: tf.reduce_sum(gather_batch(batch[0])), Config(micro_batches=2))
    with pytest.raises(BadInput, match=r"--micro-batches is 2, .*gather_batch: .*: remove --micro-batches"):
        step((tf.ones([4, 1]),) * 3)
