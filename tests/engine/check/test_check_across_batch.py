"""--check finds losses that depend on how the global batch is divided among replicas and micro-batches."""

import re
from typing import Any

import keras
import pytest
import tensorflow as tf
from planted import (
    EXAMPLES,
    L2,
    Fault,
    assert_found,
    average,
    cases,
    contrastive,
    count_even,
    label_losses,
    linear_model,
    loss_of,
    loss_of_even_labels,
    noise_of_the_step,
    noisy_step,
)

import task
from engine.model import gather_batch, places_in_batch, sum_over_batch
from engine.model.global_batch import sum_over_replicas


def even_of_replica(labels, weights):
    return count_even(None, labels, weights) * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, "float32")


def even_of_micro_batch(labels, weights):
    (total,) = sum_over_replicas([count_even(None, labels, weights)])
    return total


def count_even_and_padding(features, labels, weights):
    return tf.reduce_sum(tf.cast(labels % 2 == 0, "float32"))


def even_and_padding_of_batch(labels, weights):
    return sum_over_batch(count_even_and_padding)


def of_the_replica(values):
    return values


def with_padding(values):
    """Gathers sample weights as if all examples counted."""
    return tf.ones_like(gather_batch(values)) if values.shape.rank == 1 else gather_batch(values)


def own_places(values):
    return tf.range(tf.shape(values)[0])


def token_model():
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Reshape((8, 8)), keras.layers.Dense(10)])


def tokens(features, labels):
    """Has labels of one more axis than their losses."""
    return features / 16.0, tf.cast(features[:, 4] // 4.0, tf.int32)


def loss_of_tokens(labels, predictions, weights):
    """Divides by the tokens of the replica, most of which exist: two replicas have almost twice the loss."""
    token_losses = label_losses(labels, predictions)
    token_weights = tf.cast(labels[..., 0] != 0, tf.float32) * weights[:, None]
    total = tf.reduce_sum(token_losses * token_weights)
    return tf.math.divide_no_nan(total, tf.reduce_sum(token_weights)), token_losses


def regularized(losses, weights):
    """Is right without micro-batches."""
    return average(losses, weights) + tf.nn.scale_regularization_loss(task.model.losses)


def one_batch_and_a_half(split):
    """Leaves the second replica padding alone in the last batch of the validation."""
    return None if split == "test" else EXAMPLES(split).take(96)


FAULTS = {
    "mean over the examples of a replica": Fault(
        {"compute_loss": loss_of(lambda losses, weights: tf.reduce_sum(losses * weights) / tf.reduce_sum(weights))},
        *("compute_loss", "by a sum of engine.model.sum_over_batch"),
    ),
    "mean over the examples of a replica that have a term": Fault(
        {"compute_loss": loss_of_even_labels(even_of_replica)},
        "compute_loss",
        "by a sum of engine.model.sum_over_batch",
    ),
    "mean over the examples of a micro-batch that have a term": Fault(
        {"compute_loss": loss_of_even_labels(even_of_micro_batch)},
        "compute_loss",
        "if it agrees without --micro-batches 2, divide by config.global_batch_size",
        {"micro_batches": 2},
        long=True,
    ),
    "mean over the tokens of a replica": Fault(
        {"compute_loss": loss_of_tokens, "create_model": token_model, "prepare_example": tokens},
        "compute_loss",
        "by a sum of engine.model.sum_over_batch",
        long=True,
    ),
    "count that forgets the weights": Fault(
        {"compute_loss": loss_of_even_labels(even_and_padding_of_batch)},
        "compute_loss",
        "in what sum_over_batch counts (test_check_across_batch.py:",
    ),
    "division by 0 on a replica of padding": Fault(
        {"compute_loss": loss_of_even_labels(even_of_replica, tf.divide), "load_examples": one_batch_and_a_half},
        "compute_loss",
        "divide with tf.math.divide_no_nan",
        {"global_batch_size": 64},
        long=True,
    ),
    "negatives of the replica": Fault(
        {"train_step": contrastive(of_the_replica, own_places)},
        "compute_loss",
        "not with the result of engine.model.gather_batch",
        long=True,
    ),
    "padding among the negatives": Fault(
        {"train_step": contrastive(with_padding, places_in_batch)},
        "compute_loss",
        "mask them in a loss that uses engine.model.gather_batch",
    ),
    "regularization of each micro-batch": Fault(
        {"compute_loss": loss_of(regularized), "create_model": lambda: linear_model(regularizer=L2)},
        "compute_loss",
        "if it agrees without --micro-batches 2, divide by config.global_batch_size",
        {"micro_batches": 2},
        long=True,
    ),
    "random numbers from the step's number": Fault(
        {"train_step": noisy_step(noise_of_the_step)},
        "train_step",
        "draw them from a seed of each example, see docs/reproducibility.md",
        long=True,
    ),
}


@pytest.mark.parametrize("fault", cases(FAULTS))
def test_fault_is_found_and_the_hook_named(fault: Fault, check: Any) -> None:
    assert_found(check, fault)


def mean_over_the_real_examples(losses, weights):
    """Is right for full batches, and for one replica."""
    mean = tf.math.divide_no_nan(tf.reduce_sum(losses * weights), tf.reduce_sum(weights))
    return mean / tf.distribute.get_strategy().num_replicas_in_sync


@pytest.mark.parametrize(
    ("keep_last_batch", "line"),
    [
        (True, r"the loss is (\S+) on one replica and (?!\1 )\S+ on two"),
        (False, "the loss of a batch whose second half is padding is .*by a sum of engine.model.sum_over_batch"),
    ],
)
def test_padding_is_found_in_the_last_batch_or_in_one_that_is_half_padded(
    keep_last_batch: bool, line: str, check: Any
) -> None:
    hooks = {"compute_loss": loss_of(mean_over_the_real_examples)}
    passed, lines = check(hooks, only=("results",), keep_last_batch=keep_last_batch)
    assert not passed
    (found,) = [each for each in lines if each.startswith("FAIL")]
    assert re.search(rf"task\.py compute_loss +{line}", found)
