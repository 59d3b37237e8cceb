"""Moments of BatchNormalization with a mask, over all replicas. Keras synchronizes only those without one."""

import keras
import tensorflow as tf

KERAS_MOMENTS = keras.layers.BatchNormalization._moments


def synchronize_masked_moments() -> None:
    """Makes BatchNormalization(synchronized=True) count all replicas' examples also when it is called with a mask."""
    keras.layers.BatchNormalization._moments = _synchronized_moments


def _synchronized_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance of the inputs where the mask is true, as Keras squeezes them."""
    replica = tf.distribute.get_replica_context()
    if mask is None or not layer.synchronized or replica is None:
        return KERAS_MOMENTS(layer, inputs, mask)
    is_counted = tf.cast(mask, tf.bool)[..., None]

    def total(values: tf.Tensor) -> tf.Tensor:
        counted = tf.where(is_counted, values, tf.zeros_like(values))
        return replica.all_reduce("SUM", tf.reduce_sum(counted, layer._reduction_axes, keepdims=True))

    count = total(tf.ones_like(inputs)) + keras.config.epsilon()
    mean = total(inputs) / count
    return tf.squeeze(mean), tf.squeeze(total(tf.square(inputs - mean)) / count)
