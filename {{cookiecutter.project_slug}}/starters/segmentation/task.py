"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) gives each pixel of an image a class. Lines marked TODO(you) are
yours to replace; everything works as it is. An edit of a line marked KEEP may give wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import Config

import keras
import numpy as np
import tensorflow as tf

from engine.model import apply_gradients
from shapes import CLASSES, SIZE, draw

# --- Data -------------------------------------------------------------------------------------------------------------


def load_examples(split: str) -> tf.data.Dataset:
    """Returns the examples of "train", "validation" or "test", one by one, always in the same order.

    Each is (features, labels) or (features, labels, weight). Return a tf.data.Dataset of known length, made from arrays
    in memory, paths of files or a generator; or engine.data.Records. Do not shuffle, repeat or batch: the engine does.
    Here the features are an image [SIZE, SIZE, 3], and the labels its mask [SIZE, SIZE]; both uint8.
    """
    # TODO(you): Load your examples.
    number, seed = {"train": (480, 1), "validation": (90, 2), "test": (90, 3)}[split]
    return tf.data.Dataset.from_tensor_slices(draw(number, seed))


def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, training: bool, seed: tf.Tensor):
    """Decodes, scales and, in training, augments one example. Runs in parallel, on the examples that will be used.

    `seed` (int64, [2]) differs for every example and, in training, every pass. Draw random numbers from it with the
    stateless_* functions only, so that they are the same in a resumed run and on any number of replicas. Two draws need
    two seeds, or they are correlated: tf.random.split(seed) returns two. Remove the parameter if nothing is random:
    then complete batches are prepared in one call, if the operations allow it.
    """
    # TODO(you): Prepare one example.
    if training:
        # One random number for both, because the mask must follow its image.
        is_flipped = tf.random.stateless_uniform([], seed) < 0.5
        features = tf.where(is_flipped, tf.reverse(features, [1]), features)
        labels = tf.where(is_flipped, tf.reverse(labels, [1]), labels)
    return tf.cast(features, tf.float32) / 127.5 - 1.0, tf.cast(labels, tf.int32)


def read_inputs(path: Path) -> Iterable[tuple[int | str, np.ndarray]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is an .npy file of images, each named by its number.
    """
    return enumerate(np.load(path, mmap_mode="r"))


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def convolutions(hidden, filters: int):
    """Applies two convolutions, each normalized over the global batch, to [batch, height, width, channels]."""
    for _ in range(2):
        hidden = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization(momentum=0.9, synchronized=True)(hidden)
        hidden = keras.layers.Activation("gelu")(hidden)
    return hidden


def create_model() -> keras.Model:
    """Returns the model, or a dict of models by name. Its predictions here are logits [batch, SIZE, SIZE, classes].

    Load weights of some of its layers here: encoder.load_weights("encoder.weights.h5").
    """
    # TODO(you): Build your model.
    inputs = keras.Input((SIZE, SIZE, 3))
    hidden, skipped = inputs, []
    for filters in (16, 32):
        hidden = convolutions(hidden, filters)
        skipped.append((filters, hidden))
        hidden = keras.layers.AveragePooling2D(2)(hidden)
    hidden = convolutions(hidden, 64)
    for filters, skip in reversed(skipped):
        hidden = keras.layers.Conv2DTranspose(filters, 2, strides=2)(hidden)
        hidden = convolutions(keras.layers.Concatenate()([hidden, skip]), filters)
    return keras.Model(inputs, keras.layers.Conv2D(len(CLASSES), 1, dtype="float32")(hidden))


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Returns the optimizer, or a dict of them under the models' names. All epochs together have `total_steps`."""
    # TODO(you): Choose the optimizer and the learning rate over time.
    warmup_steps = total_steps // 10
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, total_steps - warmup_steps, warmup_target=config.learning_rate, warmup_steps=warmup_steps
    )
    # With Adam's default epsilon, 1e-7, rounding decides in which direction a weight without a gradient moves.
    return keras.optimizers.AdamW(learning_rate, weight_decay=1e-4, epsilon=1e-5)


def create_loss_objects() -> dict[str, keras.losses.Loss]:
    """Returns one loss per term of compute_loss, by name."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per pixel; others give one for all, and means are divided by the replicas.
    return {"pixel": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own."""
    # TODO(you): Choose the metrics; update_metrics feeds them.
    return {
        "loss": keras.metrics.Mean(),
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        # It counts pixels in float32, because the default, integers, would round weights down.
        "mean_iou": keras.metrics.MeanIoU(len(CLASSES), sparse_y_pred=False, dtype="float32"),
    }


# --- Steps: what one replica does with a per-replica batch ------------------------------------------------------------


def compute_loss(labels: tf.Tensor, predictions: tf.Tensor, sample_weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this replica's part of the batch's loss (scalar) and the loss of each example ([batch]).

    The loss of an example is the mean over its pixels of class weight times cross-entropy. It is not divided by the sum
    of the class weights: each replica knows that sum for its own examples only, so the parts of several replicas, each
    divided by another sum, would not add up to the loss of the global batch.
    """
    pixel_weights = tf.gather(tf.constant(config.class_weights), labels)
    per_example_loss = tf.reduce_mean(pixel_weights * loss_objects["pixel"](labels, predictions), axis=[1, 2])
    # KEEP: One value per example; a mean, or [batch, batch], would train without an error but wrongly.
    per_example_loss = tf.ensure_shape(per_example_loss, sample_weights.shape)
    # KEEP: Divided by the global batch size, because the gradients of all replicas are summed.
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    # KEEP: Divided by the numbers of replicas and of micro-batches, because each adds the same regularization loss.
    return loss + tf.nn.scale_regularization_loss(model.losses) / config.micro_batches, per_example_loss


def update_metrics(split: str, labels: tf.Tensor, predictions: tf.Tensor, per_example_loss, sample_weights) -> None:
    """Updates the metrics of a split with unscaled values per example and their sample weights.

    A pixel has the weight of its example, so that padding does not count; class weights are used in the loss only.
    """
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    pixel_weights = tf.broadcast_to(sample_weights[:, tf.newaxis, tf.newaxis], labels.shape)
    for name in ("accuracy", "mean_iou"):
        metrics[split][name].update_state(labels, predictions, sample_weight=pixel_weights)


def train_step(batch) -> tf.Tensor:
    """Updates the model from a per-replica batch; returns this replica's part of the loss (scalar)."""
    # TODO(you): Change the step, and evaluation_step and predict_step with it.
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss, per_example_loss = compute_loss(labels, predictions, sample_weights)
    # KEEP: Sums the gradients over the replicas, then clips, then updates; add no sum or clipping of your own.
    apply_gradients(optimizer, tape, loss, model.trainable_variables)
    update_metrics("train", labels, predictions, per_example_loss, sample_weights)
    return loss


def evaluation_step(split: str, batch) -> tf.Tensor:
    """Measures the model on a per-replica batch; returns this replica's part of the loss (scalar)."""
    features, labels, sample_weights = batch
    predictions = model(features, training=False)
    loss, per_example_loss = compute_loss(labels, predictions, sample_weights)
    update_metrics(split, labels, predictions, per_example_loss, sample_weights)
    return loss


def on_report(row: dict[str, Any], run_dir: Path, settings: Config) -> None:
    """Shows validation images in TensorBoard after every epoch, each above its mask and the predicted one."""
    examples = load_examples("validation").take(8).map(lambda *each: prepare_example(*each, training=False, seed=None))
    images, masks = examples.batch(8).get_single_element()
    shades = tf.stack([masks, predict_step(images)["mask"]], axis=1) / (len(CLASSES) - 1)
    shades = tf.repeat(tf.cast(shades, tf.float32)[..., tf.newaxis], 3, axis=-1)
    panels = tf.concat([images[:, tf.newaxis] / 2.0 + 0.5, shades], axis=1)  # [8, 3, SIZE, SIZE, 3]
    tf.summary.image("validation", tf.reshape(panels, [8, 3 * SIZE, SIZE, 3]), max_outputs=8)


def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the predictions for prepared features, [n, ...] each, by name; --export and predict.py use it.

    Here it is the class of each pixel (int32, [n, SIZE, SIZE]).
    """
    return {"mask": tf.argmax(model(features, training=False), axis=-1, output_type=tf.int32)}
