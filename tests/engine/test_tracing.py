"""What a graph shows of the randomness, the Python and the variables in a function."""

import random
import re
import time
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.errors import BadInput
from engine.tracing import Traced, converted, differing_value, look_at, returning_loss, unrepeatable_in_step


def traced(function: Callable[[], object]) -> Traced:
    return look_at(tf.function(function).get_concrete_function().graph)


def in_a_loop():
    total = tf.zeros([])
    for index in tf.range(3):
        if index > 1:
            total += tf.nn.dropout(tf.ones([]), 0.5)
    return total


def compiled_by_xla():
    return tf.function(lambda: tf.random.uniform([]), jit_compile=True)()


def prepared_in_one_go():
    return tf.vectorized_map(tf.image.random_flip_left_right, tf.ones([2, 4, 4, 1]), fallback_to_while_loop=False)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda: tf.random.normal([2], seed=3), "RandomStandardNormal"),
        (lambda: tf.random.shuffle(tf.range(3)), "RandomShuffle"),
        (in_a_loop, "RandomUniform"),
        (compiled_by_xla, "RandomUniform"),
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


def test_python_and_tables_are_found() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def function():
        table.insert(tf.constant(1, tf.int64), tf.numpy_function(np.sum, [tf.ones([2])], tf.float32))
        return table.lookup(tf.constant(1, tf.int64))

    found = traced(function)
    assert len(found.python_calls) == 1
    assert found.python_calls[0].startswith("PyFunc (test_tracing.py:")
    assert len(found.table_changes) == 1
    assert not found.random_operations


# --- Values that Python draws while a hook is traced ------------------------------------------------------------------


def called_in_a_loop(hook: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """Returns a function that calls a hook as the compiled steps do."""

    def function():
        total = tf.zeros([])
        for _ in tf.range(2):
            total += converted(hook)()
        return total

    return function


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (np.random.normal, ["a value of np.random"]),
        (lambda: random.random() + np.random.rand(), ["a value of np.random", "a value of random"]),
        (np.random.default_rng(0).random, []),  # Only tracing it twice shows this one.
        (time.time, []),
    ],
)
def test_draw_from_a_global_generator_while_a_step_is_traced_is_found(draw: Callable, found: list[str]) -> None:
    step = traced(called_in_a_loop(lambda: tf.zeros([]) + draw()))
    assert step.drawn_once == found
    (draws, _) = unrepeatable_in_step(step)
    assert [each.partition(" comes from Python, once for all steps")[0] for each in draws] == found


def in_a_branch(draw: Callable[[], float]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.cond(x > 0.0, lambda: x * draw(), lambda: x)


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("function", "differs"),
    [
        (lambda x: (tf.print(object()), x)[1], False),
        (lambda x: (tf.debugging.assert_positive(x, message=str(object())), x)[1], False),
        (lambda x: x + np.random.default_rng(0).random(), False),
        (lambda x: x + np.random.default_rng().random((8, 8)), True),
        (lambda x: x + time.time() % 1, True),
        (in_a_branch(GENERATOR.random), True),
        (lambda x: tf.exp(x) if next(CHOICES) else tf.abs(x), True),
    ],
)
def test_value_that_differs_when_a_function_is_traced_again_is_found(function: Callable, differs: bool) -> None:
    spec = tf.TensorSpec([])
    one, other = (tf.function(function, autograph=False).get_concrete_function(spec).graph for _ in range(2))
    found = differing_value(one, other)
    assert len(found) == differs
    assert all(each.startswith("a value (test_tracing.py:") for each in found)


CHOICES = iter([True, False])


# --- What a step returns ----------------------------------------------------------------------------------------------


def test_loss_of_any_floating_dtype_is_returned_as_float32() -> None:
    for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64):
        loss = tf.function(returning_loss(lambda batch, dtype=dtype: tf.cast(batch, dtype)))(tf.constant(0.5))
        assert loss.dtype == tf.float32
        assert loss.numpy() == 0.5


def test_anything_else_is_named_with_the_step() -> None:
    for returned, said in (
        (None, "None"),
        (1.0, "1.0"),
        (tf.ones([3]), "<tf.Tensor: shape=(3,), dtype=float32"),
        (tf.constant(1), "<tf.Tensor: shape=(), dtype=int32"),
        ({"loss": tf.constant(1.0)}, "{'loss': <tf.Tensor: shape=(), dtype=float32"),
    ):

        def train_step(batch, returned=returned):
            return returned

        with pytest.raises(BadInput, match=re.escape(f"task.train_step returned {said}")) as rejected:
            returning_loss(train_step)(None)
        assert str(rejected.value).endswith(": return this replica's part of the batch's loss, a scalar float32 tensor")
