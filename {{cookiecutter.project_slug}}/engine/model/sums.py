"""Sums of metrics in float64. Keras adds up in float32, in which a sum of millions of examples drifts by percents."""

from typing import Any

import keras
import tensorflow as tf

KERAS_ADD_VARIABLE = keras.metrics.Metric.add_variable


def sum_in_float64() -> None:
    """Makes each floating variable that a metric adds a `Sum`."""
    keras.metrics.Metric.add_variable = _add_variable


class Sum(keras.Variable):
    """A variable whose value is in float64, and is read in the dtype that its metric asked for.

    `assign_add(x)` and `assign(variable + x)` add in float64. All other code gets the value in the metric's dtype, so
    it computes as it does with Keras's variable.
    """

    read_dtype: str

    @property
    def inner(self) -> tf.Variable:
        """The variable in float64."""
        return super().value

    @property
    def dtype(self) -> str:
        return self.read_dtype

    @property
    def value(self) -> tf.Tensor:
        return tf.cast(self.inner, self.read_dtype)

    def __add__(self, other: Any) -> tf.Tensor:
        result = super().__add__(other)
        result.exact = tf.cast(self.inner, tf.float64) + tf.cast(other, tf.float64)
        return result

    def assign(self, value: Any) -> tf.Tensor:
        return tf.cast(super().assign(getattr(value, "exact", value)), self.read_dtype)

    def assign_add(self, value: Any) -> tf.Tensor:
        # TensorFlow's own is atomic, as parameter servers need it, but does not work outside the replicas.
        if tf.distribute.in_cross_replica_context():
            return self.assign(self + value)
        return self.inner.assign_add(tf.cast(value, tf.float64))


def _add_variable(
    metric: keras.metrics.Metric, shape: Any, initializer: Any, dtype: Any = None, *args: Any, **options: Any
) -> keras.Variable:
    read_dtype = keras.backend.standardize_dtype(dtype)
    if not tf.as_dtype(read_dtype).is_floating:
        return KERAS_ADD_VARIABLE(metric, shape, initializer, dtype, *args, **options)
    variable = KERAS_ADD_VARIABLE(metric, shape, initializer, "float64", *args, **options)
    # Keras has named the variable and listed it among the metric's, so it is not made a second time.
    variable.__class__, variable.read_dtype = Sum, read_dtype
    return variable
