"""How fast the devices could be, and what a token costs: both are needed for the MFU."""

import functools
import time

import keras
import tensorflow as tf

SIZE = 2048  # The matrices have as many rows and columns.
SECONDS = 0.1  # The shortest time to measure.
ROUNDS = 5  # The best one counts, because other programs may slow down the others.


def floating_point_operations(model: keras.Model, length: int) -> float:
    """Returns the floating point operations that training needs for a token of rows of `length` tokens.

    These are 6 for each parameter, forward and backward, and 12 * layers * width * length for attention (Chowdhery et
    al. 2022, arXiv:2204.02311, appendix B). The embeddings count once: looking them up costs nothing, and their
    product gives the logits.
    """
    return 6.0 * model.count_params() + 12.0 * model.sizes["layers"] * model.sizes["width"] * length


@tf.function(reduce_retracing=True)
def _products(matrix: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    product = matrix
    for _ in tf.range(count):
        product = tf.matmul(product, matrix)
    return tf.reduce_sum(product)


@functools.cache
def measured_peak(dtype: str) -> float:
    """Returns the floating point operations per second of a product of matrices, on one device (a CPU: all cores)."""
    matrix = tf.cast(tf.eye(SIZE), dtype)

    def seconds(count: int) -> float:
        started = time.perf_counter()
        _products(matrix, tf.constant(count)).numpy()
        return time.perf_counter() - started

    count = 1
    seconds(count)  # Compiles.
    while seconds(count) < SECONDS:
        count *= 2
    return 2.0 * SIZE**3 * count / min(seconds(count) for _ in range(ROUNDS))
