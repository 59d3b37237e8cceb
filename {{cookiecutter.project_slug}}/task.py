"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

Lines marked TODO(you) are yours to replace; everything works as it is. An edit of a line marked KEEP may give
wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import Config

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from engine.model import apply_gradients

# --- Data -------------------------------------------------------------------------------------------------------------

SHAPES = {"digits": (8, 8, 1), "fashion_mnist": (28, 28, 1)}
BRIGHTEST = {"digits": 16.0, "fashion_mnist": 255.0}


def load_examples(split: str) -> tf.data.Dataset:
    """Returns the examples of "train", "validation" or "test", one by one, always in the same order.

    For "validation" and "test" it may also return None, if there is no such split, or a dict of several datasets.

    Each is (features, labels) or (features, labels, weight). Return a tf.data.Dataset of known length, made from arrays
    in memory, paths of files or a generator; or engine.data.Records, for TFRecord files of any size. For image folders,
    return file paths and read them in `prepare_example`. Do not shuffle, repeat or batch: the engine does.

    It is called when a run starts; if the examples change later, `run.reload(split)` in run_epochs calls it again.
    """
    # TODO(you): Load your examples.
    if config.data == "digits":
        images, labels = load_digits(return_X_y=True)
        # The last digit of an image's number decides: seven tenths train, one validates, two test.
        ends = {"train": (1, 2, 3, 4, 6, 8, 9), "validation": (7,), "test": (0, 5)}[split]
        chosen = np.isin(np.arange(len(images)) % 10, ends)
    else:
        train, test = keras.datasets.fashion_mnist.load_data()
        images, labels = test if split == "test" else train
        # One in ten of the training images validates.
        validates = np.arange(len(images)) % 10 == 7
        chosen = {"train": ~validates, "validation": validates, "test": slice(None)}[split]
    images = images[chosen].reshape(-1, *SHAPES[config.data]).astype("float32")
    return tf.data.Dataset.from_tensor_slices((images, labels[chosen].astype("int32")))


def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, training: bool, seed: tf.Tensor):
    """Decodes, scales and, in training, augments one example. Runs in parallel, on the examples that will be used.

    `seed` (int64, [2]) differs for every example and, in training, every pass. Draw random numbers from it with the
    stateless_* functions only, so that they are the same in a resumed run and on any number of replicas. Two draws need
    two seeds, or they are correlated: tf.random.split(seed) returns two. Remove the parameter if nothing is random:
    then complete batches are prepared in one call, if the operations allow it.
    """
    # TODO(you): Prepare one example.
    features = features / BRIGHTEST[config.data]
    if training:
        # A shift by at most one pixel.
        features = tf.image.stateless_random_crop(tf.pad(features, [[1, 1], [1, 1], [0, 0]]), features.shape, seed)
    return features, labels


def read_inputs(path: Path) -> Iterable[tuple[int | str, np.ndarray]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is an .npy file of images, each named by its number.
    """
    return enumerate(np.load(path, mmap_mode="r"))


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
user_state: dict[str, Any]  # JSON values and arrays that every checkpoint keeps, such as what examples are made from
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def create_model() -> keras.Model:
    """Returns the model, or a dict of models by name. Its predictions here are logits [batch, 10].

    Load weights of some of its layers here: encoder.load_weights("encoder.weights.h5").
    """
    # TODO(you): Build your model.
    return keras.Sequential(
        [
            keras.Input(SHAPES[config.data]),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="gelu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same", activation="gelu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10, dtype="float32"),  # Not 16 bits under mixed precision.
        ]
    )


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
    """Returns one loss per term of compute_loss, by name; {} if it needs none of Keras's."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per example; others give one for all, and means are divided by the replicas.
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own.

    A result is a number, an array or a dict of these; each number is a column of metrics.csv.
    """
    # TODO(you): Choose the metrics; update_metrics feeds them.
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}


# --- Steps: what one replica does with a per-replica batch ------------------------------------------------------------


def compute_loss(labels: tf.Tensor, predictions: tf.Tensor, sample_weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this replica's part of the batch's loss (scalar) and the loss of each example ([batch])."""
    per_example_loss = loss_objects["label"](labels, predictions)
    # KEEP: One value per example; a mean, or [batch, batch], would train without an error but wrongly.
    per_example_loss = tf.ensure_shape(per_example_loss, sample_weights.shape)
    # KEEP: Divided by the global batch size, because the gradients of all replicas are summed.
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    # KEEP: Divided by the numbers of replicas and of micro-batches, because each adds the same regularization loss.
    return loss + tf.nn.scale_regularization_loss(model.losses) / config.micro_batches, per_example_loss


def update_metrics(split: str, labels: tf.Tensor, predictions: tf.Tensor, per_example_loss, sample_weights) -> None:
    """Updates the metrics of a split with unscaled values per example and their sample weights."""
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=sample_weights)


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


def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the predictions for prepared features, [n, ...] each, by name; --export and predict.py use it."""
    logits = model(features, training=False)
    return {"label": tf.argmax(logits, axis=-1), "probabilities": tf.nn.softmax(logits)}
