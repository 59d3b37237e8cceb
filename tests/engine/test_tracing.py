"""What a graph shows of the randomness, the Python and the variables in a function."""

import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.errors import BadInput
from engine.model.traced_once import TakenFromPython, code_of_steps
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


def test_draws_from_one_seed_are_named_and_draws_from_its_parts_are_not() -> None:
    def correlated(seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_uniform([2], seed) + tf.random.stateless_normal([2], seed)

    def independent(seed: tf.Tensor) -> tf.Tensor:
        parts = tf.random.split(seed)
        return tf.random.stateless_uniform([2], parts[0]) + tf.random.stateless_uniform([2], parts[1])

    found, none = (
        Traced(tf.function(draw).get_concrete_function(tf.TensorSpec([2], tf.int32)).graph).shared_seeds
        for draw in (correlated, independent)
    )
    (text,) = found
    assert re.match(r"two draws from one seed \(test_tracing.py:\d+ correlated\), \(test_tracing.py:\d+ ", text)
    assert none == []


def test_function_that_tensorflow_defines_without_a_graph_is_passed_over() -> None:
    loss = keras.losses.CTC(reduction="none")
    assert not traced(lambda: loss(tf.ones([2, 4], tf.int32), tf.zeros([2, 16, 5]))).random_operations


# --- What the steps take from Python ----------------------------------------------------------------------------------


def task_with(**more: object) -> SimpleNamespace:
    """A task whose step calls a function, which uses a number."""

    def train_step(batch):
        def inner():
            return helper(batch)  # noqa: F821 - A name of the task.

        return inner()

    def scaled(batch):
        return batch.shape * RATE  # noqa: F821 - A name of the task.

    layers = [keras.layers.Dense(1, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential([keras.Input([1]), *layers], name="all")
    return SimpleNamespace(train_step=train_step, helper=scaled, model=model, RATE=0.5, OTHER=1, **more)


def test_change_that_has_no_effect_is_named_once() -> None:
    task = task_with()
    taken = TakenFromPython(task)
    task.OTHER = 2  # No step uses it.
    assert taken.changes() == []
    task.RATE, task.model.layers[0].trainable = 0.25, False
    assert [text.split(",")[0] for text in taken.changes()] == [
        "task.RATE has become 0.25",
        "first.trainable has become False",
    ]
    assert taken.changes() == []


def test_compiled_function_in_a_step_is_rejected() -> None:
    task = task_with()
    task.batch = task.shape = tf.function(task.helper)  # No step uses it: these are other names than the globals.
    assert len(code_of_steps(task)) == 3
    task.helper = tf.function(task.helper)
    with pytest.raises(BadInput, match=r"^task\.helper is a tf.function, which would keep the models"):
        code_of_steps(task)


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
