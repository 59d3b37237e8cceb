"""Metrics add up in float64: as right after ten million examples as after ten."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
from config import Config
from engine.cluster.strategy import create_strategy
from engine.model.build import set_up
from engine.model.metrics import drifting, metric_results

BATCH = 4_000


class Assigned(keras.metrics.Metric):
    """The mean of the values that are not 0. It adds as Keras's Precision does, and then uses operations of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, values: tf.Tensor, sample_weight: tf.Tensor) -> None:
        self.total.assign(self.total + tf.reduce_sum(values * sample_weight))
        self.count.assign_add(tf.reduce_sum(sample_weight) + tf.constant(0.0) * self.count)

    def result(self) -> tf.Tensor:
        assert self.total.dtype == "float32"
        return tf.math.divide_no_nan(self.total, tf.maximum(tf.constant(1.0), self.count.value))


def create_metrics() -> dict[str, keras.metrics.Metric]:
    return {
        "loss": keras.metrics.Mean(),
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "recall": keras.metrics.Recall(),
        "assigned": Assigned(),
    }


def results(replicas: int, batches: list[tuple[np.ndarray, ...]], steps: int) -> dict[str, float]:
    """Returns the metrics of some batches (values, labels, logits, weights), taken in turn for `steps` steps."""
    settings = Config(simulated_devices=replicas)
    strategy = create_strategy(settings)
    set_up(task, settings)
    with strategy.scope():
        metrics = create_metrics()
    stacks, size = [tf.constant(np.stack(each)) for each in zip(*batches, strict=True)], BATCH // replicas

    def update(index: tf.Tensor) -> None:
        first = size * tf.distribute.get_replica_context().replica_id_in_sync_group
        values, labels, logits, weights = [stack[index][first : first + size] for stack in stacks]
        metrics["loss"].update_state(values, sample_weight=weights)
        metrics["accuracy"].update_state(labels, logits, sample_weight=weights)
        metrics["recall"].update_state(tf.ones_like(values), logits[:, 0], sample_weight=weights)
        metrics["assigned"].update_state(values, sample_weight=weights)

    @tf.function
    def take() -> None:
        for step in tf.range(steps):
            strategy.run(update, args=(step % len(batches),))

    take()
    return metric_results({"validation": metrics}, "validation")


def expected(batches: list[tuple[np.ndarray, ...]], counts: np.ndarray) -> dict[str, float]:
    """Returns the metrics, in float64, of batches of which each is taken `counts` times."""
    values, labels, logits, weights = (np.stack(each).astype(np.float64) for each in zip(*batches, strict=True))
    weights = weights * counts[:, np.newaxis]
    means = {"loss": values, "accuracy": logits.argmax(-1) == labels, "recall": logits[..., 0] > 0.5}
    found = {f"validation/{name}": (each * weights).sum() / weights.sum() for name, each in means.items()}
    return found | {"validation/assigned": found["validation/loss"]}


def random_batches(count: int) -> list[tuple[np.ndarray, ...]]:
    random = np.random.default_rng(0)
    return [
        (
            np.full(BATCH, 2.3025851, np.float32),
            random.integers(0, 3, BATCH),
            random.random((BATCH, 3), np.float32),
            np.ones(BATCH, np.float32),
        )
        for _ in range(count)
    ]


def test_metrics_without_sums_in_float64_are_named() -> None:
    class OfTensorFlow(Assigned):
        variables = (tf.Variable(0.0),)

    set_up(task, Config())
    counts = keras.metrics.MeanIoU(10, dtype="int32")
    metrics = {"train": create_metrics(), "test": {**create_metrics(), "iou": counts, "own": OfTensorFlow()}}
    assert drifting(metrics) == ["iou (int32)", "own (float32)"]


def test_long_pass_gives_the_means_of_numpy() -> None:
    batches, steps = random_batches(5), 10**7 // BATCH
    batches[0][3][0] = 2.0**30  # In float32, most of what is added to this is rounded away.
    for values, *_ in batches[1:]:
        values *= 2
    assert results(4, batches, steps) == pytest.approx(expected(batches, np.full(5, steps // 5)), rel=1e-6)
