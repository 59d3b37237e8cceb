"""A task of another kind: named columns, one number to predict, examples of unequal weight.

The hooks that it replaces in task.py.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_diabetes


def load_examples(split):
    columns, target = load_diabetes(return_X_y=True)  # [442, 10], [442]
    chosen = {"train": slice(0, 300), "validation": slice(300, 350), "test": slice(350, 442)}[split]
    features = {"body": columns[chosen, :4].astype("float32"), "blood": columns[chosen, 4:].astype("float32")}
    labels = (target[chosen].astype("float32") - 150.0) / 77.0
    weights = np.where(labels > 0, 2.0, 1.0).astype("float32")
    return tf.data.Dataset.from_tensor_slices((features, labels, weights))


def prepare_example(features, labels, *, training):
    return {name: column * 20.0 for name, column in features.items()}, labels[None]


class Regressor(keras.Model):
    """Has no variables before its first call."""

    def __init__(self):
        super().__init__()
        self.join = keras.layers.Concatenate()
        self.hidden = keras.layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))
        self.out = keras.layers.Dense(1)

    def call(self, features):
        return self.out(self.hidden(self.join([features["body"], features["blood"]])))


def create_model():
    return Regressor()


def create_optimizer(total_steps):
    return keras.optimizers.SGD(0.05, momentum=0.9)


def create_loss_objects():
    return {"label": keras.losses.Huber(reduction="none")}


def create_metrics(split):
    return {"loss": keras.metrics.Mean(), "error": keras.metrics.MeanSquaredError()}


def compute_loss(labels, predictions, sample_weights):
    per_example_loss = loss_objects["label"](labels, predictions)
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    return loss + tf.nn.scale_regularization_loss(model.losses), per_example_loss


def update_metrics(split, labels, predictions, per_example_loss, sample_weights):
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    metrics[split]["error"].update_state(labels, predictions, sample_weight=sample_weights)


def train_step(batch):
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss, per_example_loss = compute_loss(labels, predictions, sample_weights)
    # Instead of apply_gradients of the engine.
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    update_metrics("train", labels, predictions, per_example_loss, sample_weights)
    return loss
