"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy": a CNN on images.

The hooks that it replaces in task.py. GELU for ReLU and average for max pooling, so that rounding does not grow.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

# The sum of a batch's losses is divided by the size of a full batch, or by the number of examples that are in it.
divides_by_examples = False


def load_examples(split):
    # The tutorial validates on its test images; here it is a tenth of the training images.
    chosen = {"train": slice(0, 360), "validation": slice(360, 400), "test": slice(400, 450)}[split]
    images, labels = load_digits(return_X_y=True)
    return tf.data.Dataset.from_tensor_slices((images[chosen].reshape(-1, 8, 8), labels[chosen].astype("int32")))


def prepare_example(features, labels):
    return tf.cast(features, tf.float32)[..., None] / 16.0, labels


def create_model():
    options = {"activation": "gelu", "kernel_regularizer": keras.regularizers.L2(1e-4)}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", **options),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(32, 3, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(32, **options),
            keras.layers.Dense(10, kernel_regularizer=options["kernel_regularizer"]),
        ]
    )


def create_optimizer(total_steps):
    return keras.optimizers.Adam(config.learning_rate)


def compute_loss(labels, predictions, sample_weights):
    per_example_loss = loss_objects["label"](labels, predictions)
    size = config.global_batch_size
    if divides_by_examples:
        size = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(sample_weights))
    loss = tf.reduce_sum(per_example_loss * sample_weights) / size
    return loss + tf.nn.scale_regularization_loss(model.losses), per_example_loss
