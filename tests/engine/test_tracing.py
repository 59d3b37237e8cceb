"""What a graph shows of the randomness, the Python and the variables in a function."""

import random
import re
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.errors import BadInput
from engine.tracing import Traced, converted, differing_value, returning_loss, unrepeatable


def traced(function: Callable[[], object]) -> Traced:
    return Traced(tf.function(function).get_concrete_function().graph)


def in_a_loop():
    total = tf.zeros([])
    for index in tf.range(3):
        if index > 1:
            total += tf.nn.dropout(tf.ones([]), 0.5)
    return total


def prepared_in_one_go():
    return tf.vectorized_map(tf.image.random_flip_left_right, tf.ones([2, 4, 4, 1]), fallback_to_while_loop=False)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda: tf.random.normal([2], seed=3), "RandomStandardNormal"),
        (in_a_loop, "RandomUniform"),
        (prepared_in_one_go, "RandomUniform"),
        (tf.timestamp, "Timestamp"),
    ],
)
def test_operation_that_counts_its_draws_is_found_with_its_place(function: Callable, operation: str) -> None:
    (found, *_) = traced(function).random_operations
    assert found.startswith(f"{operation} (test_tracing.py:")


def test_draws_that_a_seed_repeats_are_left_alone() -> None:
    layer, generator = keras.layers.Dropout(0.5), keras.random.SeedGenerator(1)
    found = traced(
        lambda: (
            tf.random.stateless_normal([2], [1, 2])
            + layer(tf.ones([2]), training=True)
            + keras.random.normal([2], seed=generator)
            + tf.image.stateless_random_flip_left_right(tf.ones([2, 2, 1]), [1, 2])[0, :, 0]
        )
    )
    assert not found.random_operations
    assert len(found.changed) == 2  # The states of the two generators.


def test_variables_that_are_changed_are_told_from_those_that_are_read() -> None:
    read, changed, generator = tf.Variable(1.0, name="read"), tf.Variable(1.0), tf.random.Generator.from_seed(1)

    def function():
        for _ in tf.range(2):
            changed.assign_add(read)
        return generator.normal([])

    found = traced(function)
    assert found.changed.keys() == {id(changed.handle), id(generator.state.handle)}
    assert id(read.handle) in found.used


# --- Values that Python draws while a hook is traced ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda: random.random() + np.random.rand(), ["a value of np.random", "a value of random"]),
        (np.random.default_rng(0).random, []),  # Only tracing it twice shows this one.
    ],
)
def test_draw_from_a_global_generator_while_a_step_is_traced_is_found(draw: Callable, found: list[str]) -> None:
    hook = converted(lambda: tf.zeros([]) + draw())

    def function():
        total = tf.zeros([])
        for _ in tf.range(2):
            total += hook()
        return total

    step = traced(function)
    assert step.drawn_once == found
    (draws, _) = unrepeatable(step, "train_step")
    assert [each.partition(" comes from Python, once for all steps")[0] for each in draws] == found


def test_texts_that_differ_when_a_function_is_traced_again_are_no_values() -> None:
    def function(x: tf.Tensor) -> None:
        tf.debugging.assert_positive(x, message=str(object()))

    one, other = (tf.function(function).get_concrete_function(tf.TensorSpec([])).graph for _ in range(2))
    assert not differing_value(one, other)


# --- What a step returns ----------------------------------------------------------------------------------------------


def test_loss_of_any_floating_dtype_is_returned_as_float32() -> None:
    for dtype in (tf.float16, tf.float64):
        loss = returning_loss(lambda batch, dtype=dtype: tf.cast(batch, dtype))(tf.constant(0.5))
        assert (loss.dtype, float(loss)) == (tf.float32, 0.5)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "None"),
        (1.0, "1.0"),
        (tf.ones([3]), "<tf.Tensor: shape=(3,), dtype=float32"),
        (tf.constant(1), "<tf.Tensor: shape=(), dtype=int32"),
    ],
    ids=str,
)
def test_anything_else_is_named_with_the_step(returned: object, said: str) -> None:
    def train_step(batch):
        return returned

    with pytest.raises(BadInput, match=re.escape(f"task.train_step returned {said}")) as rejected:
        returning_loss(train_step)(None)
    assert str(rejected.value).endswith(": return this replica's part of the batch's loss, a scalar float32 tensor")
