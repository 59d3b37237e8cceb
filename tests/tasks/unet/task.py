"""A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) on image files and masks: a class for each pixel.

Small: two levels, and one convolution where the paper has two.
"""

import keras
import tensorflow as tf

from config import Config
from engine.model import apply_gradients

SIZE = 32
CLASSES = 3


def load_examples(split):
    images, masks = (sorted(map(str, (config.images / split).glob(f"{kind}_*.png"))) for kind in ("image", "mask"))
    return tf.data.Dataset.from_tensor_slices((images, masks))


def prepare_example(features, labels, *, training, seed):
    image = tf.ensure_shape(tf.io.decode_png(tf.io.read_file(features), channels=3), [SIZE, SIZE, 3])
    mask = tf.ensure_shape(tf.io.decode_png(tf.io.read_file(labels), channels=1), [SIZE, SIZE, 1])
    if training:
        # One seed, so that both are flipped, or neither.
        image = tf.image.stateless_random_flip_left_right(image, seed)
        mask = tf.image.stateless_random_flip_left_right(mask, seed)
    return tf.cast(image, tf.float32) / 127.5 - 1.0, tf.cast(mask[..., 0], tf.int32)


config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]


def convolution(hidden, filters):
    hidden = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    return keras.layers.Activation(config.activation)(hidden)


def create_model():
    inputs = keras.Input((SIZE, SIZE, 3))
    hidden, skipped = inputs, []
    for filters in (8, 16):
        hidden = convolution(hidden, filters)
        skipped.append((filters, hidden))
        hidden = keras.layers.MaxPooling2D()(hidden)
    hidden = convolution(hidden, 32)
    for filters, skip in reversed(skipped):
        hidden = keras.layers.Conv2DTranspose(filters, 2, strides=2)(hidden)
        hidden = convolution(keras.layers.Concatenate()([hidden, skip]), filters)
    return keras.Model(inputs, keras.layers.Conv2D(CLASSES, 1)(hidden))


def create_optimizer(total_steps):
    return keras.optimizers.Adam(config.learning_rate)


def create_loss_objects():
    return {"pixel": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split):
    mean_iou = keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, dtype="float32")
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy(), "mean_iou": mean_iou}


def compute_loss(labels, predictions, sample_weights):
    # [share, height, width] -> [share].
    per_example_loss = tf.reduce_mean(loss_objects["pixel"](labels, predictions), axis=[1, 2])
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    return loss, per_example_loss


def update_metrics(split, labels, predictions, per_example_loss, sample_weights):
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    pixel_weights = tf.ones_like(predictions[..., 0]) * sample_weights[:, None, None]
    metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=pixel_weights)
    metrics[split]["mean_iou"].update_state(labels, predictions, sample_weight=pixel_weights)


def train_step(batch):
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss, per_example_loss = compute_loss(labels, predictions, sample_weights)
    apply_gradients(optimizer, tape, loss, model.trainable_variables)
    update_metrics("train", labels, predictions, per_example_loss, sample_weights)
    return loss


def evaluation_step(split, batch):
    features, labels, sample_weights = batch
    predictions = model(features, training=False)
    loss, per_example_loss = compute_loss(labels, predictions, sample_weights)
    update_metrics(split, labels, predictions, per_example_loss, sample_weights)
    return loss
