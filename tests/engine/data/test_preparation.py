"""Examples are the same however they are read, and however many are prepared at a time."""

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, whole
from streaming import stream

from config import Config
from engine.data.preparation import Preparation, Prepared
from engine.errors import BadInput
from engine.tracing import unrepeatable

COUNT = 37


def images(_: str) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    weights = random.random(COUNT, np.float32)
    return tf.data.Dataset.from_tensor_slices((random.random((COUNT, 6, 6, 3), np.float32), np.arange(COUNT), weights))


def prepared(prepare_example: Callable[..., Any], examples: tf.data.Dataset) -> tuple[Prepared, list[Any]]:
    """Returns how all examples are prepared, and the results: one by one, and if possible in one go."""
    preparation, count, seed = Preparation(prepare_example, training=False), len(examples), tf.zeros([2], tf.int64)
    made, length = preparation.trace(examples.element_spec), tf.constant(count - 1, tf.int64)
    numbered, places = examples.enumerate(), tf.range(count, dtype=tf.int64)
    one_by_one = numbered.map(lambda place, example: made.one(place, example, length, seed))
    found = [one_by_one.batch(count).get_single_element()]
    if made.batch:
        found.append(made.batch(places, examples.batch(count).get_single_element(), length, seed))
    return made, found


def branching(features, labels):
    if tf.reduce_mean(features) > 0.5:
        features = 1.0 - features
    return features, labels


TOGETHER = [
    lambda features, labels: (tf.image.per_image_standardization(features), tf.one_hot(labels, COUNT)),
    lambda features, labels: ({"a": features[..., 0], "b": tf.transpose(features)}, labels % 7),
    branching,
]


def test_batch_prepared_in_one_go_is_that_of_single_examples() -> None:
    for prepare_example in TOGETHER:
        _, (one_by_one, together) = prepared(prepare_example, images(""))
        tf.nest.assert_same_structure(one_by_one, together)
        for one, other in zip(tf.nest.flatten(together), tf.nest.flatten(one_by_one), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        weights = [weight for *_, weight in images("").as_numpy_iterator()]
        np.testing.assert_array_equal(together[2], [*weights[:-1], 0.0])  # The last one is padding.


def in_python(features, labels):
    doubled = tf.py_function(lambda x: 2.0 * x, [features], tf.float32)
    return tf.ensure_shape(doubled, (6, 6, 3)), labels


def test_what_cannot_be_prepared_in_one_go_is_prepared_one_by_one() -> None:
    spec, ((features, labels, _),) = prepared(in_python, images(""))
    assert spec.batch is None
    np.testing.assert_array_equal(features, [2.0 * each for each, *_ in images("").as_numpy_iterator()])
    np.testing.assert_array_equal(labels, np.arange(COUNT))


def test_larger_set_than_the_shuffle_buffer_is_shuffled_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, buffer_size=3)
    config = Config(global_batch_size=COUNT, seed=1)
    ((_, labels, _),) = whole(batches_of("train", images, lambda features, labels: (features, labels), config))
    assert all(label < place + 3 for place, label in enumerate(labels))
    assert labels.tolist() != sorted(labels)


GENERATOR = np.random.default_rng(0)


def test_value_that_python_draws_once_for_all_examples_is_found() -> None:
    for prepare_example, is_found in (
        (lambda features, labels: (features + np.random.normal(0.0, 0.3, (6, 6, 3)), labels), True),
        (lambda features, labels: (features + GENERATOR.normal(0.0, 0.3, (6, 6, 3)), labels), True),
        (lambda features, labels, *, seed: (features + time.time() % 1, labels), True),
        (lambda features, labels: (features[:: random.choice([1, -1])], labels), True),
        (lambda features, labels: (features + np.random.default_rng(0).random(), labels), False),
        (branching, False),
    ):
        traced = Preparation(prepare_example, training=True).trace(images("").element_spec).traced
        assert traced is not None
        draws, _ = unrepeatable(traced, "prepare_example")
        assert len(draws) == is_found
        assert all(re.match(r"a value .+ comes from Python, once for all examples, because", each) for each in draws)


# What task.load_examples makes of a number, and task.prepare_example of that; whether the number is the weight.
FORMS = {
    "one tensor": (lambda number: number, lambda number: (number, number), False),
    "a dict": (lambda number: {"a": number, "b": number}, lambda both: (both["a"], both["b"]), False),
    "a weight that goes past": (lambda number: (number, number, number), lambda one, other: (one, other), True),
    "a weight that is handed over": (lambda number: (number, number, 7), lambda one, two, _: (one, two, one), True),
    "all parts": (lambda number: (number,) * 4, lambda *parts: (parts[0], parts[3]), False),
    "a seed": (lambda number: (number, number), lambda one, two, *, seed: (one, two + 0 * seed[0]), False),
}


def test_prepare_example_is_given_what_load_examples_gives() -> None:
    for form, (load, prepare_example, is_weighted) in FORMS.items():
        spec, found = prepared(prepare_example, tf.data.Dataset.range(9).map(load))
        assert (spec.batch is not None) == (form != "a seed")
        for features, labels, weights in found:
            np.testing.assert_array_equal(features, np.arange(9), err_msg=form)
            np.testing.assert_array_equal(labels, np.arange(9), err_msg=form)
            np.testing.assert_array_equal(weights, [*(range(8) if is_weighted else [1] * 8), 0], err_msg=form)
            assert weights.dtype == tf.float32


def named_wrongly(features, labels):
    return featurs, labels  # noqa: F821


ONE, TWO = tf.TensorSpec([], tf.int64), (tf.TensorSpec([6, 6, 3]), tf.TensorSpec([], tf.int64))
EXAMPLES_ARE_DESCRIBED = "(task.prepare_example gets examples one by one, the parts of a tuple as arguments"


@pytest.mark.parametrize(
    ("spec", "prepare_example", "reason", "is_raised_by_it"),
    [
        (TWO, named_wrongly, "name 'featurs' is not defined", False),
        (TWO, lambda features, labels: (Path("/missing").read_bytes(), labels), "No such file", False),
        (TWO, lambda one, two: (one["image"], two), "slice", True),
        (ONE, lambda one, two: (one, two), "missing 1 required positional argument: 'two'", True),
        (ONE, lambda one: one, "return (features, labels) or (features, labels, weight)", False),
        (ONE, lambda one: (one, one, [one, one]), "returned sample weights of (2,): each must be one number", False),
        (ONE, lambda one: (one, one, {"a": one}), "sample weights of a dict: each must be one number; return", False),
    ],
)
def test_hook_that_fails_is_refused_and_its_examples_are_described(
    spec: Any, prepare_example: Callable[..., Any], reason: str, is_raised_by_it: bool
) -> None:
    with pytest.raises(BadInput) as refused:
        Preparation(prepare_example, training=True).trace(spec)
    assert reason in str(refused.value)
    assert (EXAMPLES_ARE_DESCRIBED in str(refused.value)) is is_raised_by_it
