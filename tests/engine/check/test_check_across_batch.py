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
    contrastive,
    count_even,
    label_losses,
    linear_model,
    loss_of_even_labels,
    noise_of_the_step,
    noisy_step,
)

import task
from engine.model import gather_batch, places_in_batch
from engine.model.global_batch import sum_over_replicas


def even_of_replica(labels, weights):
    return count_even(None, labels, weights) * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, "float32")


def even_of_micro_batch(labels, weights):
    (total,) = sum_over_replicas([count_even(None, labels, weights)])
    return total


def of_the_replica(values):
    return values


def with_padding(values):
    """Gathers sample weights as if all examples counted."""
    return tf.ones_like(gather_batch(values)) if values.shape.rank == 1 else gather_batch(values)


def own_places(values):
    return tf.range(tf.shape(values)[0])


def token_model():
    layers = [keras.layers.Reshape((8, 8)), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def tokens(features, labels):
    return features / 16.0, tf.cast(features[:, 4, 0] // 4.0, tf.int32)


def loss_of_tokens(labels, predictions, weights):
    """Divides by the tokens of the replica, most of which exist: two replicas have almost twice the loss."""
    token_losses = label_losses(labels, predictions)
    token_weights = tf.cast(labels != 0, tf.float32) * weights[:, None]
    total = tf.reduce_sum(token_losses * token_weights)
    return tf.math.divide_no_nan(total, tf.reduce_sum(token_weights)), token_losses


def metrics_of_tokens(split, labels, predictions, token_losses, weights):
    token_weights = tf.cast(labels != 0, tf.float32) * weights[:, None]
    task.metrics[split]["loss"].update_state(token_losses, sample_weight=token_weights)
    task.metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=token_weights)


def regularized(labels, predictions, weights):
    """Is right without micro-batches."""
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, weights) + tf.nn.scale_regularization_loss(task.model.losses), per_example_loss


def one_batch_and_a_half(split):
    """Leaves the second replica padding alone in the last batch of the validation."""
    return None if split == "test" else EXAMPLES(split).take(96)


FAULTS = {
    "mean over the examples of a replica that have a term": Fault(
        {"compute_loss": loss_of_even_labels(even_of_replica, tf.math.divide_no_nan)},
        "task.py compute_loss",
        "which a sum of engine.model.sum_over_batch makes right",
    ),
    "mean over the examples of a micro-batch that have a term": Fault(
        {"compute_loss": loss_of_even_labels(even_of_micro_batch, tf.math.divide_no_nan)},
        "task.py compute_loss",
        "--micro-batches 2 alone changes it: it is",
        {"micro_batches": 2},
    ),
    "mean over the tokens of a replica": Fault(
        {"compute_loss": loss_of_tokens, "create_model": token_model, "update_metrics": metrics_of_tokens}
        | {"predict_step": lambda features: {"logits": task.model(features)}, "prepare_example": tokens},
        "task.py compute_loss",
        "which a sum of engine.model.sum_over_batch makes right",
    ),
    "division by 0 on a replica of padding": Fault(
        {"compute_loss": loss_of_even_labels(even_of_replica, tf.divide), "load_examples": one_batch_and_a_half},
        "task.py compute_loss",
        "divide with tf.math.divide_no_nan",
        {"global_batch_size": 64},
    ),
    "negatives of the replica": Fault(
        {"train_step": contrastive(of_the_replica, own_places)},
        "task.py compute_loss",
        "not with the result of engine.model.gather_batch",
    ),
    "padding among the negatives": Fault(
        {"train_step": contrastive(with_padding, places_in_batch)},
        "task.py compute_loss",
        "mask them in a loss that uses engine.model.gather_batch",
    ),
    "regularization of each micro-batch": Fault(
        {"compute_loss": regularized, "create_model": lambda: linear_model(regularizer=L2)},
        "task.py compute_loss",
        "--micro-batches 2 alone changes it: the regularization is added in each micro-batch",
        {"micro_batches": 2},
    ),
    "random numbers from the step's number": Fault(
        {"train_step": noisy_step(noise_of_the_step)},
        "task.py train_step",
        "draw them from a seed of each example, see docs/steps.md",
    ),
}
# Another fault above is found by the same comparison.
LONG = {
    "division by 0 on a replica of padding",
    "mean over the tokens of a replica",
    "mean over the examples of a micro-batch that have a term",
    "negatives of the replica",
    "random numbers from the step's number",
    "regularization of each micro-batch",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in FAULTS]
)
def test_fault_is_found_and_the_hook_named(fault: str, check: Any) -> None:
    assert_found(check, FAULTS[fault], only=("results",))


def mean_over_the_real_examples(labels, predictions, weights):
    """Is right for full batches, and for one replica."""
    per_example_loss = label_losses(labels, predictions)
    mean = tf.math.divide_no_nan(tf.reduce_sum(per_example_loss * weights), tf.reduce_sum(weights))
    return mean / tf.distribute.get_strategy().num_replicas_in_sync, per_example_loss


def test_fault_that_one_batch_shows_is_found_by_its_loss(check: Any) -> None:
    passed, lines = check({"compute_loss": mean_over_the_real_examples}, only=("results",), keep_last_batch=True)
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    one, two = map(
        float, re.search(r"task\.py compute_loss +the loss is (\S+) on one replica and (\S+) on two", line).groups()
    )
    assert one != two


def test_padding_of_one_replica_is_tried_where_no_batch_has_it(check: Any) -> None:
    passed, lines = check({"compute_loss": mean_over_the_real_examples}, only=("results",))
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert "the loss of a batch whose second half is padding is" in line
    assert "divide by a sum of engine.model.sum_over_batch" in line
