"""What a graph shows of the randomness, the Python and the variables in a function."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.tracing import Traced, look_at


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
        (lambda: tf.random.normal([2]), "RandomStandardNormal"),
        (lambda: tf.random.normal([2], seed=3), "RandomStandardNormal"),
        (lambda: tf.random.shuffle(tf.range(3)), "RandomShuffle"),
        (lambda: tf.random.categorical(tf.ones([1, 3]), 2), "Multinomial"),
        (lambda: tf.image.random_brightness(tf.ones([2, 2, 1]), 0.1), "RandomUniform"),
        (in_a_loop, "RandomUniform"),
        (compiled_by_xla, "RandomUniform"),
        (prepared_in_one_go, "RandomUniform"),
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
