"""Two models and two optimizers: a GAN on the digits."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from config import Config
from engine.model import apply_gradients

NOISE = 8


def load_examples(split):
    images, labels = load_digits(return_X_y=True)
    chosen = {"train": slice(0, 320), "validation": slice(320, 360), "test": slice(360, 401)}[split]
    return tf.data.Dataset.from_tensor_slices((images[chosen].astype("float32"), labels[chosen].astype("int32")))


def prepare_example(features, labels, *, training, seed):
    # Drawn here, by example, the noise is the same for any number of replicas.
    return {"image": features / 8.0 - 1.0, "noise": tf.random.stateless_normal([NOISE], seed)}, labels


config: Config
model: dict[str, keras.Model]
optimizer: dict[str, keras.optimizers.Optimizer]
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]


def create_model():
    return {
        "generator": keras.Sequential(
            [
                keras.Input((NOISE,)),
                keras.layers.Dense(32, activation="gelu"),
                keras.layers.Dense(64, activation="tanh"),
            ]
        ),
        "discriminator": keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(1)]
        ),
    }


def create_optimizer(total_steps):
    return {name: keras.optimizers.SGD(0.01, momentum=0.5) for name in ("generator", "discriminator")}


def create_loss_objects():
    return {"real": keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split):
    return {"loss": keras.metrics.Mean()}


def average(per_example_loss, sample_weights):
    return tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )


def losses(features, training):
    """Returns the per-example losses ([share]) of the generator and of the discriminator."""
    made = model["generator"](features["noise"], training=training)
    real_score = model["discriminator"](features["image"], training=training)
    made_score = model["discriminator"](made, training=training)
    real, fake = tf.ones_like(real_score), tf.zeros_like(made_score)
    score = loss_objects["real"]
    return score(real, made_score), score(real, real_score) + score(fake, made_score)


def train_step(batch):
    features, _, sample_weights = batch
    with tf.GradientTape(persistent=True) as tape:
        generator_loss, discriminator_loss = losses(features, training=True)
        parts = {
            "generator": average(generator_loss, sample_weights),
            "discriminator": average(discriminator_loss, sample_weights),
        }
    for name, each in model.items():
        apply_gradients(optimizer[name], tape, parts[name], each.trainable_variables)
    metrics["train"]["loss"].update_state(generator_loss + discriminator_loss, sample_weight=sample_weights)
    return parts["generator"] + parts["discriminator"]


def evaluation_step(split, batch):
    features, _, sample_weights = batch
    generator_loss, discriminator_loss = losses(features, training=False)
    metrics[split]["loss"].update_state(generator_loss + discriminator_loss, sample_weight=sample_weights)
    return average(generator_loss + discriminator_loss, sample_weights)
