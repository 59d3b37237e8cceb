"""Moments of BatchNormalization over all replicas: also with a mask, and without rounding the variance away."""

import keras
import tensorflow as tf

KERAS_MOMENTS = keras.layers.BatchNormalization._moments


def moments_of_all(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance ([channels]) of the inputs, of all replicas if the layer is synchronized.

    `inputs` are float32 or float64; `mask` ([batch, ...], without the channels) chooses what counts.
    """
    replica = tf.distribute.get_replica_context()
    if not layer.synchronized or replica is None:
        return KERAS_MOMENTS(layer, inputs, mask)

    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]

    def total(values: tf.Tensor) -> tf.Tensor:
        if mask is not None:
            values = tf.where(tf.cast(mask, tf.bool)[..., None], values, tf.zeros_like(values))
        return tf.reduce_sum(values, axes, keepdims=True)

    local = total(inputs)
    rows = tf.ones_like(local) * tf.cast(tf.size(inputs, tf.int64) / tf.size(local, tf.int64), inputs.dtype)
    count = rows if mask is None else total(tf.ones_like(inputs))
    sums, count = tf.unstack(replica.all_reduce("SUM", tf.stack([local, count])))
    mean = tf.math.divide_no_nan(sums, count)
    # Keras computes E[x²] - E[x]², which is rounding alone where the mean is large. The sum of squares has its minimum
    # at the mean, so the gradient by the mean is 0.
    squares = replica.all_reduce("SUM", total(tf.math.squared_difference(inputs, tf.stop_gradient(mean))))
    variance = tf.math.divide_no_nan(squares, count)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
