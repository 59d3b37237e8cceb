"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy": a CNN on images of clothes."""

import keras
import numpy as np
import tensorflow as tf

from config import Config
from engine.model import apply_gradients


def load_examples(split):
    with np.load(config.data_dir / "fashion_mnist.npz") as arrays:
        part = "test" if split == "test" else "train"
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    # The tutorial validates on its test images; here it is the last tenth of the training images.
    last = len(images) // 10
    chosen = {"train": slice(0, -last), "validation": slice(-last, None), "test": slice(None)}[split]
    return tf.data.Dataset.from_tensor_slices((images[chosen], labels[chosen].astype("int32")))


def prepare_example(features, labels):
    return tf.cast(features, tf.float32)[..., None] / 255.0, labels


config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]


def create_model():
    regularizer = keras.regularizers.L2(config.regularization)
    activation = "gelu" if config.smooth else "relu"
    pooling = keras.layers.AveragePooling2D if config.smooth else keras.layers.MaxPooling2D
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation=activation, kernel_regularizer=regularizer),
            pooling(2),
            keras.layers.Conv2D(64, 3, activation=activation, kernel_regularizer=regularizer),
            pooling(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation=activation, kernel_regularizer=regularizer),
            keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


def create_optimizer(total_steps):
    return keras.optimizers.Adam(config.learning_rate)


def create_loss_objects():
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split):
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}


def compute_loss(labels, predictions, sample_weights):
    per_example_loss = loss_objects["label"](labels, predictions)
    size = config.global_batch_size
    if config.divide_by == "examples":
        size = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(sample_weights))
    loss = tf.reduce_sum(per_example_loss * sample_weights) / size
    return loss + tf.nn.scale_regularization_loss(model.losses) / config.micro_batches, per_example_loss


def update_metrics(split, labels, predictions, per_example_loss, sample_weights):
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=sample_weights)


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
