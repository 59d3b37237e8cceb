"""--check names what is wrong with the examples, their preparation, and the predictions."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from planted import (
    Fault,
    assert_found,
    assert_sound,
    few_examples,
    several_datasets,
)


def broken_features(features, labels, *, training):
    return tf.math.log(features - 1.0), labels


def labels_out_of_range(split):
    return few_examples(split).map(lambda features, label: (features, label + 1))


def negative_labels(split):
    return few_examples(split).map(lambda features, label: (features, label - 1))


def negative_weights(split):
    return few_examples(split).map(lambda features, label: (features, label, -1.0))


def endless_examples(split):
    return few_examples(split).repeat()


def examples_of_unknown_length(split):
    return few_examples(split).filter(lambda features, label: True)


def reshuffled_examples(split):
    return few_examples(split).shuffle(100)


def random_preparation(features, labels, *, training):
    return tf.image.random_flip_left_right(features) if training else features, labels


def preparation_with_numpy(features, labels, *, training):
    noise = tf.numpy_function(lambda: np.random.normal(size=(8, 8, 1)).astype("float32"), [], tf.float32)
    return features / 16.0 + tf.ensure_shape(noise, (8, 8, 1)), labels


def preparation_with_the_time(features, labels, *, training):
    return features / 16.0 + tf.cast(tf.timestamp() % 1.0, tf.float32), labels


def labels_as_texts(features, labels):
    return features / 16.0, tf.strings.as_string(labels)


def mean_reduced_loss():
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


FAULTS = {
    "NaN features": Fault({"prepare_example": broken_features}, "task.py prepare_example", "not finite"),
    "labels too high": Fault({"load_examples": labels_out_of_range}, "task.py load_examples", "labels from"),
    "labels too low": Fault({"load_examples": negative_labels}, "task.py load_examples", "labels from -1"),
    "endless": Fault({"load_examples": endless_examples}, "task.py load_examples", "endless examples"),
    "unknown length": Fault({"load_examples": examples_of_unknown_length}, "task.py load_examples", "unknown number"),
    "unordered": Fault({"load_examples": reshuffled_examples}, "task.py load_examples", "the second time"),
    "tf.image.random": Fault(
        {"prepare_example": random_preparation}, "task.py prepare_example", "tf.image.stateless_random_*"
    ),
    "NumPy in prepare_example": Fault(
        {"prepare_example": preparation_with_numpy}, "task.py prepare_example", "np.random.default_rng(np.abs(seed))"
    ),
    "sample weights below 0": Fault(
        {"load_examples": negative_weights}, "task.py load_examples", "returned a sample weight of -1"
    ),
    "the time in prepare_example": Fault(
        {"prepare_example": preparation_with_the_time},
        "task.py prepare_example",
        "draws different numbers after a resume: take the parameter `seed`",
    ),
    "texts as labels": Fault({"prepare_example": labels_as_texts}, "task.py prepare_example", "map them to numbers"),
    "mean-reduced loss": Fault(
        {"create_loss_objects": mean_reduced_loss}, "task.py create_loss_objects", "use reduction='none'"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_the_hook_named(fault: str, check: Any) -> None:
    assert_found(check, FAULTS[fault], only=("examples",))


def test_dataset_whose_order_changes_is_named(check: Any) -> None:
    def shuffled(split: str) -> Any:
        found = several_datasets(split)
        return {**found, "hard": found["hard"].shuffle(50)} if split == "validation" else found

    passed, lines = check({"load_examples": shuffled}, only=("examples",))
    assert not passed
    assert "task.load_examples('validation') returned other examples the second time" in lines[-1]


def test_examples_that_change_while_they_are_used_are_named(check: Any) -> None:
    read = 0

    def examples_that_change_later(split: str) -> tf.data.Dataset:
        def generate() -> Any:
            nonlocal read
            read += 1
            for features, label in few_examples(split).take(100).as_numpy_iterator():
                yield features + (read if read > 3 else 0), label  # A check reads them three times at first.

        signature = (tf.TensorSpec((8, 8, 1), tf.float32), tf.TensorSpec((), tf.int32))
        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.apply(tf.data.experimental.assert_cardinality(100)) if split == "train" else None

    later = {"load_examples": examples_that_change_later}
    assert_found(check, Fault(later, "task.py load_examples", "other examples the second time"), only=("results",))


@pytest.mark.long
def test_batch_that_two_replicas_cannot_share_is_named_with_the_one_used(check: Any) -> None:
    (line,) = [
        line
        for line in assert_sound(check(only=("examples",), global_batch_size=65), compared=False)
        if "--global-batch-size" in line
    ]
    assert "65 can be shared equally by 1, 5, 13, 65 replicas; one replica and two are compared with 64" in line
