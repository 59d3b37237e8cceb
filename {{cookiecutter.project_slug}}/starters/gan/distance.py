"""How far the images that a generator makes are from real ones."""

import keras
import numpy as np
import tensorflow as tf


class Distance(keras.metrics.Metric):
    """The maximum mean discrepancy of real and made pairs (image, class): 0 if both are distributed alike, at most 1.5.

    See Gretton et al. 2012 (JMLR 13), with a Gaussian kernel by random Fourier features (Rahimi and Recht 2007, NIPS).
    Their means over all examples are compared, so only sums are kept: any number of batches and replicas gives the same
    result. Few examples differ by chance, so the smaller a split, the larger its distances.
    """

    def __init__(self, classes: int, size: int, width: float = 4.0, count: int = 512) -> None:
        """Images have `size` numbers; `width` is the kernel's, as a Euclidean distance; `count` is that of features."""
        super().__init__(name="distance")
        frequencies = np.random.default_rng(0).normal(scale=1.0 / width, size=(size, count))
        self._frequencies = tf.constant(frequencies, tf.float32)
        self._sum = self.add_variable((classes, 2 * count), "zeros", name="sum")
        self._weight = self.add_variable((), "zeros", name="weight")

    def _features(self, images: tf.Tensor) -> tf.Tensor:
        angles = tf.reshape(images, [-1, self._frequencies.shape[0]]) @ self._frequencies
        return tf.concat([tf.cos(angles), tf.sin(angles)], axis=1) / self._frequencies.shape[1] ** 0.5

    def update_state(self, classes: tf.Tensor, real: tf.Tensor, made: tf.Tensor, sample_weights: tf.Tensor) -> None:
        """Adds classes (one-hot, [n, classes]), real and made images of these ([n, ...]), and their weights ([n])."""
        difference = self._features(real) - self._features(made)
        self._sum.assign_add(tf.matmul(classes * sample_weights[:, tf.newaxis], difference, transpose_a=True))
        self._weight.assign_add(tf.reduce_sum(sample_weights))

    def result(self) -> tf.Tensor:
        return tf.math.divide_no_nan(tf.norm(self._sum), self._weight.value)
