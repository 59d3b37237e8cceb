"""Sums over the global batch and gathered values, against NumPy, on several replicas and in micro-batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

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
REPLICAS = pytest.mark.parametrize("replicas", [1, 2, 4])


def count_tokens(features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(sample_weights) < 0.0:  # AutoGraph converts it, as it does a hook.
        return tf.constant(0.0)
    return tf.reduce_sum(tf.cast(labels > 0, "float32") * sample_weights[:, None])


def run(replicas: int, step: Callable[[Any], Any], batch: tuple[np.ndarray, ...], *, compiled: bool = True) -> list:
    """Returns what a step returns on each replica."""
    strategy = create_strategy(Config(simulated_devices=replicas))
    size = len(batch[0]) // replicas

    def per_replica(context: Any) -> tuple[tf.Tensor, ...]:
        number = context.replica_id_in_sync_group
        return tuple(tf.constant(part[number * size :][:size]) for part in batch)

    values = strategy.experimental_distribute_values_from_function(per_replica)
    with strategy.scope():
        call = tf.function(lambda values: strategy.run(step, (values,)), autograph=False)
        returned = call(values) if compiled else strategy.run(step, (values,))
    return list(strategy.experimental_local_results(returned))


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


def token_mean_in_numpy(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the loss, and the weight after a step."""
    weight = np.array([[1.0], [2.0]])
    counted = (LABELS > 0) * weights[:, None]
    errors = (FEATURES @ weight)[..., 0]
    gradient = np.einsum("nt,ntw->w", 2 * errors * counted, FEATURES)[:, None] / max(counted.sum(), 1e-9)
    return (errors**2 * counted).sum() / max(counted.sum(), 1e-9), weight - 0.5 * gradient


@REPLICAS
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_mean_over_tokens_is_that_of_the_global_batch(replicas: int, micro_batches: int) -> None:
    mean = TokenMean(replicas)
    step = in_micro_batches(mean.step, Config(micro_batches=micro_batches))
    losses = run(replicas, step, (FEATURES, LABELS, WEIGHTS))
    loss, weight = token_mean_in_numpy(WEIGHTS)
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(mean.weight.numpy(), weight, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_eager_steps_have_the_same_sums(micro_batches: int) -> None:
    mean = TokenMean(2)
    step = in_micro_batches(mean.step, Config(micro_batches=micro_batches))
    losses = run(2, step, (FEATURES, LABELS, WEIGHTS), compiled=False)
    np.testing.assert_allclose(sum(map(float, losses)), token_mean_in_numpy(WEIGHTS)[0], rtol=1e-5)


@REPLICAS
def test_batch_in_which_nothing_counts_leaves_the_weights(replicas: int) -> None:
    mean = TokenMean(replicas)
    step = in_micro_batches(mean.step, Config(micro_batches=2))
    losses = run(replicas, step, (FEATURES, LABELS, np.zeros_like(WEIGHTS)))
    assert sum(map(float, losses)) == 0.0
    assert mean.weight.numpy().ravel().tolist() == [1.0, 2.0]


@REPLICAS
def test_evaluation_has_the_sum_of_its_batch(replicas: int) -> None:
    step = in_one_batch(TokenMean(replicas).evaluation_step)
    losses = run(replicas, lambda batch: step("validation", batch), (FEATURES, LABELS, WEIGHTS))
    np.testing.assert_allclose(sum(map(float, losses)), token_mean_in_numpy(WEIGHTS)[0], rtol=1e-5)


@REPLICAS
def test_counts_may_be_arrays_and_are_equal_on_all_replicas(replicas: int) -> None:
    def step(batch: Any) -> tf.Tensor:
        return tf.reduce_sum(tf.stack([1.0, 10.0, 100.0]) * sum_over_batch(count_labels))

    def count_labels(features: tf.Tensor, labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
        return tf.math.bincount(tf.cast(labels, "int32"), minlength=3, maxlength=3)

    expected = np.bincount(LABELS.ravel(), minlength=3) @ [1.0, 10.0, 100.0]
    assert run(replicas, in_one_batch(step), (FEATURES, LABELS, WEIGHTS)) == [expected] * replicas


def test_counts_in_16_bits_are_added_in_32() -> None:
    def step(batch: Any) -> tf.Tensor:
        return sum_over_batch(lambda *parts: tf.constant(40_000.0, tf.float16))

    assert run(2, in_one_batch(step), (FEATURES, LABELS, WEIGHTS)) == [80_000.0] * 2


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


@REPLICAS
def test_gathered_values_are_in_order_and_have_gradients(replicas: int) -> None:
    contrast = Contrast(replicas)
    losses = run(replicas, in_micro_batches(contrast.step, Config()), (FEATURES, LABELS, WEIGHTS))
    weight = np.array([[1.0, 0.5], [2.0, -1.0]])
    inputs = FEATURES[:, 0]
    values = np.tanh(inputs @ weight)
    after, before = np.roll(values, -1, axis=0), np.roll(values, 1, axis=0)
    loss = (WEIGHTS * (values * after).sum(-1)).sum() / EXAMPLES
    of_values = (WEIGHTS[:, None] * after + np.roll(WEIGHTS, 1)[:, None] * before) / EXAMPLES
    gradient = inputs.T @ (of_values * (1 - values**2))
    np.testing.assert_allclose(sum(map(float, losses)), loss, rtol=1e-5)
    np.testing.assert_allclose(contrast.weight.numpy(), weight - 0.5 * gradient, atol=1e-6)


@pytest.mark.parametrize(("dtype", "passed"), [("bfloat16", "float32"), ("bool", "int32"), ("int8", "int32")])
def test_dtypes_that_no_collective_gathers_are_cast(dtype: str, passed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CollectiveGatherV2, which several workers use, takes only float16, float32, float64, int32 and int64."""
    gathered, all_gather = [], tf.distribute.ReplicaContext.all_gather

    def recorded(self: Any, values: tf.Tensor, axis: int) -> tf.Tensor:
        gathered.append(values.dtype.name)
        return all_gather(self, values, axis)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_gather", recorded)

    def step(batch: Any) -> tf.Tensor:
        values = gather_batch(tf.cast(batch[1] % 2, dtype))
        assert values.dtype == dtype
        return tf.reduce_sum(tf.cast(values, tf.float32))

    expected = float((LABELS % 2).sum())
    assert run(2, in_one_batch(step), (FEATURES, LABELS, WEIGHTS)) == [expected] * 2
    assert set(gathered) == {passed}


@pytest.mark.parametrize("replicas", [1, 2])
def test_update_on_a_condition_is_refused_on_several_replicas(replicas: int) -> None:
    mean = TokenMean(replicas)

    def step(batch: Any) -> tf.Tensor:
        tf.cond(batch[0][0, 0, 0] > -1e9, lambda: mean.step(batch), lambda: 0.0)
        return tf.constant(0.0)

    if replicas == 1:
        run(replicas, in_micro_batches(step, Config()), (FEATURES, LABELS, WEIGHTS))
        return
    with pytest.raises(BadInput, match=r"inside a tf\.cond or a loop, where replicas cannot wait"):
        run(replicas, in_micro_batches(step, Config()), (FEATURES, LABELS, WEIGHTS))


@pytest.mark.parametrize("function", [gather_batch, places_in_batch])
def test_gathering_in_micro_batches_is_refused(function: Callable[[tf.Tensor], tf.Tensor]) -> None:
    step = in_micro_batches(lambda batch: tf.reduce_sum(function(batch[0])), Config(micro_batches=2))
    with pytest.raises(BadInput, match=rf"--micro-batches is 2, .*{function.__name__}: .*: remove --micro-batches"):
        step((tf.ones([4, 1]),) * 3)
