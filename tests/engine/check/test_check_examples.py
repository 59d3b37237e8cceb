"""--check names what is wrong with the examples, their preparation, and the predictions."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from planted import Fault, assert_found, cases, few_examples, several_datasets

import task
import train
from config import Config
from engine.check import check_task


def broken_features(features, labels, *, training):
    return tf.math.log(features - 1.0), labels


def changed_examples(change):
    return {"load_examples": lambda split: few_examples(split).map(change)}


def random_preparation(features, labels, *, training):
    return tf.image.random_flip_left_right(features) if training else features, labels


def preparation_with_numpy(features, labels, *, training):
    noise = tf.numpy_function(lambda: np.random.normal(size=(8, 8, 1)).astype("float32"), [], tf.float32)
    return features / 16.0 + tf.ensure_shape(noise, (8, 8, 1)), labels


def preparation_with_the_time(features, labels, *, training):
    return features / 16.0 + tf.cast(tf.timestamp() % 1.0, tf.float32), labels


def shuffled_validation(split):
    """The second of two validation sets has another order each time."""
    found = several_datasets(split)
    return {**found, "hard": found["hard"].shuffle(50)} if split == "validation" else found


def labels_as_texts(features, labels):
    return features / 16.0, tf.strings.as_string(labels)


FAULTS = {
    "NaN features": Fault({"prepare_example": broken_features}, "prepare_example", "not finite"),
    "endless": Fault(
        {"load_examples": lambda split: few_examples(split).repeat()}, "load_examples", "endless examples"
    ),
    "unknown length": Fault(
        {"load_examples": lambda split: few_examples(split).filter(lambda *_: True)}, "load_examples", "unknown number"
    ),
    "unordered": Fault({"load_examples": shuffled_validation}, "load_examples", "the second time"),
    "tf.image.random": Fault({"prepare_example": random_preparation}, "prepare_example", "tf.image.stateless_random_*"),
    "NumPy in prepare_example": Fault(
        {"prepare_example": preparation_with_numpy}, "prepare_example", "np.random.default_rng(np.abs(seed))"
    ),
    "sample weights below 0": Fault(
        changed_examples(lambda features, label: (features, label, -1.0)),
        "load_examples",
        "returned a sample weight of -1",
    ),
    "the time in prepare_example": Fault(
        {"prepare_example": preparation_with_the_time},
        "prepare_example",
        "draws different numbers after a resume: take the parameter `seed`",
        long=True,
    ),
    "texts as labels": Fault({"prepare_example": labels_as_texts}, "prepare_example", "map them to numbers"),
    "mean-reduced loss": Fault(
        {"create_loss_objects": lambda: {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}},
        "create_loss_objects",
        "use reduction='none'",
    ),
}


@pytest.mark.parametrize("fault", cases(FAULTS))
def test_fault_is_found_and_the_hook_named(fault: Fault, check: Any) -> None:
    assert_found(check, fault, only=("examples",))


def test_examples_that_change_while_they_are_used_are_named(check: Any) -> None:
    read = 0

    def examples_that_change_later(split: str) -> tf.data.Dataset:
        nonlocal read
        read += 1
        late = float(read > 2)
        return few_examples(split).map(lambda features, label: (features + late, label))

    later = {"load_examples": lambda split: examples_that_change_later(split) if split == "train" else None}
    assert_found(check, Fault(later, "load_examples", "other examples the second time"))


@pytest.mark.long
def test_what_cannot_be_served_is_known_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
        numbers = tf.numpy_function(lambda images: images.sum(axis=(1, 2, 3)), [features], tf.float32)
        return {"sum": tf.ensure_shape(numbers, features.shape[:1])}

    monkeypatch.setattr(task, "predict_step", predict_step)
    assert check_task(train, task, Config(), only=("evaluation",))
    assert "serve cannot be exported: no file can contain the Python function of " in capsys.readouterr().out
    # The batch of a server has any size.
    monkeypatch.setattr(task, "predict_step", lambda features: {"zeros": tf.zeros([int(features.shape[0])])})
    assert not check_task(train, task, Config(), only=("evaluation",))
    # Ragged examples of one axis are tensors of unknown length there.
    ragged = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant([[1.0], [2.0, 3.0]] * 80), tf.zeros([160], "int32"))
    )
    monkeypatch.setattr(task, "load_examples", lambda split: ragged)
    monkeypatch.setattr(task, "prepare_example", lambda row, label: (tf.fill([8, 8, 1], tf.reduce_sum(row)), label))
    monkeypatch.setattr(task, "predict_step", lambda features: {"sum": tf.reduce_sum(features, axis=[1, 2, 3])})
    assert check_task(train, task, Config(), only=("evaluation",))
    assert "cannot be exported" not in capsys.readouterr().out.split("zeros")[-1]
