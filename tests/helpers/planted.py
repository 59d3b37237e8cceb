"""Faults that are planted in the hooks of task.py, and what sound and faulty hooks are made of."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import task
from engine.model import apply_gradients

ORIGINAL = {
    name: getattr(task, name)
    for name in ("train_step", "evaluation_step", "create_metrics", "compute_loss", "update_metrics")
}
EXAMPLES = task.load_examples
L2 = keras.regularizers.L2(0.1)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Hooks with a fault, the hook that --check must name, and a part of the line."""

    hooks: dict[str, Any]
    where: str
    text: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = ("results",)
    long: bool = False  # Another fault is found by the same comparison.


def cases(faults: dict[str, Fault]) -> list[Any]:
    return [pytest.param(each, id=name, marks=pytest.mark.long if each.long else ()) for name, each in faults.items()]


def assert_found(check: Callable[..., tuple[bool, list[str]]], *faults: Fault, only: tuple[str, ...] = ()) -> None:
    """Checks with these faults planted together: each must be found, its hook named, and nothing else fail."""
    hooks = {name: hook for fault in faults for name, hook in fault.hooks.items()}
    passed, lines = check(hooks, only=only or faults[0].only, **faults[0].settings)
    failed = [re.split(" {2,}", line, maxsplit=2)[1:] for line in lines if line.startswith("FAIL")]
    failed = [(re.sub(r"^(task|train)\.py(:\d+)? ", "", where), text) for where, text in failed]
    assert not passed
    for fault in faults:
        assert any(where == fault.where and fault.text in text for where, text in failed), "\n".join(lines)
    # One cause does not show as many.
    assert {where for where, _ in failed} == {fault.where for fault in faults}, "\n".join(lines)


def assert_sound(checked: tuple[bool, list[str]], *, compared: bool = True) -> list[str]:
    passed, lines = checked
    assert any("on one replica and on two" in line for line in lines) == compared, "\n".join(lines)
    assert passed, "\n".join(lines)
    assert not [line for line in lines if line.startswith("FAIL")]
    return lines


def few_examples(split: str) -> tf.data.Dataset:
    return EXAMPLES(split).take(120)


def linear_model(*extra: keras.layers.Layer, regularizer: Any = None) -> keras.Model:
    dense = keras.layers.Dense(10, kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *extra, dense])


def average(per_example_loss: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    return tf.nn.compute_average_loss(
        per_example_loss, sample_weight=weights, global_batch_size=task.config.global_batch_size
    )


def label_losses(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return task.loss_objects["label"](labels, predictions)


def loss_of(total: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable:
    """Returns a loss that is a function of the examples' losses and weights."""

    def compute_loss(labels, predictions, weights):
        per_example_loss = label_losses(labels, predictions)
        return total(per_example_loss, weights), per_example_loss

    return compute_loss


def averaged(gradients):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return [gradient / replicas for gradient in gradients]


def plain_rate(total_steps):
    return keras.optimizers.SGD(0.1)


# --- Several datasets, and metrics by class ---------------------------------------------------------------------------


def several_datasets(split: str) -> Any:
    few = few_examples(split)
    return {"train": few, "validation": {"easy": few.take(50), "hard": few.skip(50).take(31)}, "test": None}[split]


def metrics_by_class(split: str) -> dict[str, keras.metrics.Metric]:
    return {**ORIGINAL["create_metrics"](split), "by_class": keras.metrics.F1Score(average=None)}


def update_by_class(*, weighted: bool) -> Callable[..., None]:
    def update_metrics(split, labels, predictions, per_example_loss, weights):
        ORIGINAL["update_metrics"](split, labels, predictions, per_example_loss, weights)
        by_class = task.metrics[split]["by_class"]
        by_class.update_state(tf.one_hot(labels, 10), predictions, sample_weight=weights if weighted else None)

    return update_metrics


DATASETS = {"load_examples": several_datasets, "create_metrics": metrics_by_class}


# --- Losses across the batch, and random numbers in a step ------------------------------------------------------------


def count_even(features, labels, weights):
    """Counts the examples that a term is for."""
    return tf.reduce_sum(tf.cast(labels % 2 == 0, "float32") * weights)


def loss_of_even_labels(denominator: Callable[..., tf.Tensor], divide: Callable = tf.math.divide_no_nan) -> Callable:
    """Returns a loss that only the examples with an even label have, as a mean over these."""

    def compute_loss(labels, predictions, weights):
        per_example_loss = label_losses(labels, predictions) * tf.cast(labels % 2 == 0, "float32")
        total = denominator(labels, weights)
        return divide(tf.reduce_sum(per_example_loss * weights), total), per_example_loss

    return compute_loss


def contrastive(gather: Callable[..., tf.Tensor], places: Callable[..., tf.Tensor]) -> Callable:
    """Returns a step whose loss compares each example with all others, as in SimCLR; a brighter image is its pair."""

    def train_step(batch):
        features, labels, weights = batch
        with tf.GradientTape() as tape:
            one = tf.math.l2_normalize(task.model(features, training=True), axis=1)
            other = tf.math.l2_normalize(task.model(features + 0.1, training=True), axis=1)
            is_padding = gather(weights) == 0.0
            similar = 5.0 * one @ tf.transpose(gather(other)) - 1e9 * tf.cast(is_padding, "float32")
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places(weights), similar)
            loss = average(losses, weights)
        apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables)
        task.update_metrics("train", labels, one, losses, weights)
        return loss

    return train_step


def noisy_step(noise: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    def train_step(batch):
        features, labels, weights = batch
        return ORIGINAL["train_step"]((features + noise(features), labels, weights))

    return train_step


def noise_of_the_step(features):
    """Is the same on all replicas, whose examples are others."""
    return tf.random.stateless_normal(tf.shape(features), tf.stack([task.optimizer.iterations.value, 0]))


def noisy_evaluation(noise: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    def evaluation_step(split, batch):
        features, labels, weights = batch
        return ORIGINAL["evaluation_step"](split, (features + noise(features), labels, weights))

    return evaluation_step
