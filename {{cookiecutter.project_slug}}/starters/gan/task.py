"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

A generator draws digits, and a discriminator learns to tell them from real ones (Goodfellow et al. 2014,
arXiv:1406.2661). Lines marked TODO(you) are yours to replace; everything works as it is. An edit of a line marked KEEP
may give wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import Config

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from distance import Distance
from engine.model import apply_gradients

# --- Data -------------------------------------------------------------------------------------------------------------


def load_examples(split: str) -> tf.data.Dataset:
    """Returns the examples of "train", "validation" or "test", one by one, always in the same order.

    Each is (features, labels) or (features, labels, weight). Return a tf.data.Dataset of known length, made from arrays
    in memory or a generator, or engine.data.Records. Do not shuffle, repeat or batch: the engine does. Here the
    features are the digit to draw, and the labels a real image of it.
    """
    # TODO(you): Load your examples.
    images, digits = load_digits(return_X_y=True)  # [1797, 64], 0 to 16; [1797], 0 to 9
    # The last digit of an image's number decides: seven tenths train, one validates, two test.
    ends = {"train": (1, 2, 3, 4, 6, 8, 9), "validation": (7,), "test": (0, 5)}[split]
    chosen = np.isin(np.arange(len(images)) % 10, ends)
    images = images[chosen].reshape(-1, 8, 8, 1).astype("float32")
    return tf.data.Dataset.from_tensor_slices((digits[chosen].astype("int32"), images))


def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, seed: tf.Tensor):
    """Decodes, scales and, in training, augments one example. Runs in parallel, on the examples that will be used.

    `seed` (int64, [2]) differs for every example and, in training, every pass. Draw random numbers from it with the
    stateless_* functions only, so that they are the same in a resumed run and on any number of replicas. Therefore
    the generator's noise is drawn here. Two draws need two seeds, or they are correlated: tf.random.split(seed) returns
    two.
    """
    # TODO(you): Prepare one example.
    noise = tf.random.stateless_normal([config.noise_size], seed)
    return {"digit": tf.one_hot(features, 10), "noise": noise}, labels / 8.0 - 1.0


def read_inputs(path: Path) -> Iterable[tuple[int | str, np.ndarray]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is an .npy file of digits, each named by its number.
    """
    return enumerate(np.load(path, mmap_mode="r"))


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
model: dict[str, keras.Model]
optimizer: dict[str, keras.optimizers.Optimizer]
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def create_model() -> dict[str, keras.Model]:
    """Returns the model, or a dict of models by name.

    The generator makes images [batch, 8, 8, 1], from -1 to 1, of the features. The discriminator takes images and the
    digits that they should show, and gives logits [batch, 1], which are high for a real image.
    """
    # TODO(you): Build your model.
    digit, noise = keras.Input((10,), name="digit"), keras.Input((config.noise_size,), name="noise")
    hidden = keras.layers.Concatenate()([digit, noise])
    hidden = keras.layers.Dense(4 * 4 * 32, activation="gelu")(hidden)
    hidden = keras.layers.Reshape((4, 4, 32))(hidden)
    hidden = keras.layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="gelu")(hidden)
    made = keras.layers.Conv2D(1, 3, padding="same", activation="tanh", dtype="float32")(hidden)
    generator = keras.Model({"digit": digit, "noise": noise}, made)

    digit, image = keras.Input((10,), name="digit"), keras.Input((8, 8, 1), name="image")
    hidden = keras.layers.Conv2D(32, 3, padding="same", activation="gelu")(image)
    hidden = keras.layers.Conv2D(64, 4, strides=2, padding="same", activation="gelu")(hidden)
    hidden = keras.layers.Flatten()(hidden)
    hidden = keras.layers.Dense(64, activation="gelu")(hidden)
    # One score for each digit, of which the given digit's counts (Miyato and Koyama 2018, arXiv:1802.05637).
    scores = keras.layers.Dense(10, dtype="float32")(hidden)
    score = keras.layers.Dot(axes=1, dtype="float32")([scores, digit])
    return {"generator": generator, "discriminator": keras.Model({"digit": digit, "image": image}, score)}


def create_optimizer(total_steps: int) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizer, or a dict of them under the models' names. All epochs together have `total_steps`."""
    # TODO(you): Choose the optimizer and the learning rate over time.
    # With Adam's default epsilon, 1e-7, rounding decides in which direction a weight without a gradient moves.
    return {
        name: keras.optimizers.Adam(config.learning_rate, beta_1=config.beta_1, beta_2=0.99, epsilon=1e-5)
        for name in ("generator", "discriminator")
    }


def create_loss_objects() -> dict[str, keras.losses.Loss]:
    """Returns one loss per term of compute_loss, by name."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per example; others give one for all, and means are divided by the replicas.
    return {"is_real": keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own."""
    # TODO(you): Choose the metrics; update_metrics feeds them.
    losses = {f"{name}_loss": keras.metrics.Mean() for name in ("generator", "discriminator")}
    return {**losses, "distance": Distance(classes=10, size=8 * 8)}


# --- Steps: what one replica does with a per-replica batch ------------------------------------------------------------


def compute_loss(features: dict[str, tf.Tensor], labels: tf.Tensor, predictions, sample_weights, *, training: bool):
    """Returns, by model, this replica's part of the batch's loss (scalar) and the loss of each example ([batch]).

    Each model has a loss of its own: the generator's falls as the discriminator's rises.
    """
    digit, is_real = features["digit"], loss_objects["is_real"]
    with tf.GradientTape() as tape:
        tape.watch(labels)
        real_score = model["discriminator"]({"digit": digit, "image": labels}, training=training)
    made_score = model["discriminator"]({"digit": digit, "image": predictions}, training=training)
    # Keeps the discriminator from rising steeply around the few real images (Mescheder et al. 2018, arXiv:1801.04406).
    penalty = tf.reduce_sum(tape.gradient(real_score, labels) ** 2, axis=[1, 2, 3])
    per_example_losses = {
        "generator": is_real(tf.ones_like(made_score), made_score),
        "discriminator": is_real(tf.ones_like(real_score), real_score)
        + is_real(tf.zeros_like(made_score), made_score)
        + config.gradient_penalty * penalty,
    }
    losses = {}
    for name, per_example_loss in per_example_losses.items():
        # KEEP: One value per example; a mean, or [batch, batch], would train without an error but wrongly.
        per_example_loss = tf.ensure_shape(per_example_loss, sample_weights.shape)
        # KEEP: Divided by the global batch size, because the gradients of all replicas are summed.
        loss = tf.nn.compute_average_loss(
            per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
        )
        # KEEP: Divided by the numbers of replicas and of micro-batches, because each adds the same regularization loss.
        losses[name] = loss + tf.nn.scale_regularization_loss(model[name].losses) / config.micro_batches
    return losses, per_example_losses


def update_metrics(split: str, features, labels, predictions, per_example_losses, sample_weights) -> None:
    """Updates the metrics of a split with unscaled values per example and their sample weights."""
    for name, per_example_loss in per_example_losses.items():
        metrics[split][f"{name}_loss"].update_state(per_example_loss, sample_weight=sample_weights)
    metrics[split]["distance"].update_state(features["digit"], labels, predictions, sample_weights)


def train_step(batch) -> tf.Tensor:
    """Updates both models from a per-replica batch; returns this replica's part of their losses' sum (scalar)."""
    # TODO(you): Change the step, and evaluation_step and predict_step with it.
    features, labels, sample_weights = batch
    with tf.GradientTape(persistent=True) as tape:
        predictions = model["generator"](features, training=True)
        losses, per_example_losses = compute_loss(features, labels, predictions, sample_weights, training=True)
    for name in ("discriminator", "generator"):
        # KEEP: Sums the gradients over the replicas, then clips, then updates; add no sum or clipping of your own.
        apply_gradients(optimizer[name], tape, losses[name], model[name].trainable_variables)
    update_metrics("train", features, labels, predictions, per_example_losses, sample_weights)
    return losses["generator"] + losses["discriminator"]


def evaluation_step(split: str, batch) -> tf.Tensor:
    """Measures both models on a per-replica batch; returns this replica's part of their losses' sum (scalar)."""
    features, labels, sample_weights = batch
    predictions = model["generator"](features, training=False)
    losses, per_example_losses = compute_loss(features, labels, predictions, sample_weights, training=False)
    update_metrics(split, features, labels, predictions, per_example_losses, sample_weights)
    return losses["generator"] + losses["discriminator"]


def on_report(row: dict[str, Any], run_dir: Path, settings: Config) -> None:
    """Draws the same digits from the same noise after every epoch, to samples/ and TensorBoard."""
    rows = 6
    noise = tf.random.stateless_normal([rows * 10, settings.noise_size], seed=[settings.seed, 0])
    images = predict_step({"digit": tf.tile(tf.eye(10), [rows, 1]), "noise": noise})["image"]
    images = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]])
    # [rows * 10, 10, 10, 1] -> [rows, 10, 10, 10] -> one image with a column for each digit, enlarged.
    grid = tf.transpose(tf.reshape(images, [rows, 10, 10, 10]), [0, 2, 1, 3])
    grid = tf.image.resize(tf.reshape(grid, [rows * 10, 100, 1]), [rows * 50, 500], method="nearest")
    tf.summary.image("samples", grid[None])
    path = run_dir / "samples" / f"epoch-{row['epoch']:04d}.png"
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(tf.io.encode_png(tf.cast(tf.round(grid * 255.0), tf.uint8)).numpy())
    part.replace(path)


def predict_step(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the predictions for prepared features, [n, ...] each, by name; --export and predict.py use it.

    Here they are images ([n, 8, 8, 1], 0 to 1) of the digits, made from the noise.
    """
    return {"image": model["generator"](features, training=False) / 2.0 + 0.5}
