"""The `compile`/`fit` script of tests/loops/keras_fit.py, ported: two inputs, two outputs, weights by output.

The hooks that it replaces in task.py.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def load_examples(split):
    images, labels = load_digits(return_X_y=True)
    last = np.arange(len(images)) % 10
    chosen = {"train": (last != 7) & (last != 0), "validation": last == 7, "test": last == 0}[split]
    return tf.data.Dataset.from_tensor_slices((images[chosen].astype("float32"), labels[chosen].astype("int32")))


def prepare_example(features, labels):
    image = features / 16.0
    inputs = {"top": image[:32], "bottom": image[32:]}
    weights = {"digit": tf.where(labels >= 8, 2.0, 1.0), "ink": tf.where(labels == 0, 0.0, 1.0)}
    # Weights by output travel with the labels; the third part of a batch is for padding alone.
    return inputs, {"digit": labels, "ink": tf.reduce_sum(image, keepdims=True) / 20.0, "weights": weights}


def create_model():
    regularizer = keras.regularizers.L2(1e-3)
    top, bottom = keras.Input((32,), name="top"), keras.Input((32,), name="bottom")
    halves = [keras.layers.Dense(24, "gelu", kernel_regularizer=regularizer)(half) for half in (top, bottom)]
    hidden = keras.layers.Dense(32, "gelu", kernel_regularizer=regularizer)(keras.layers.Concatenate()(halves))
    outputs = {"digit": keras.layers.Dense(10, name="digit")(hidden), "ink": keras.layers.Dense(1, name="ink")(hidden)}
    return keras.Model({"top": top, "bottom": bottom}, outputs)


def create_optimizer(total_steps):
    return keras.optimizers.AdamW(config.learning_rate, weight_decay=0.01, epsilon=1e-5)  # And --global-clipnorm 0.5.


def create_loss_objects():
    return {
        "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        "ink": keras.losses.Huber(reduction="none"),
    }


def create_metrics(split):
    means = {name: keras.metrics.Mean() for name in ("loss", "digit_loss", "ink_loss")}
    return {
        **means,
        "digit_accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "ink_mae": keras.metrics.MeanAbsoluteError(),
    }


def losses_by_output(labels, predictions):
    return {
        name: labels["weights"][name] * loss_object(labels[name], predictions[name])
        for name, loss_object in loss_objects.items()
    }


def compute_loss(labels, predictions, sample_weights):
    losses = losses_by_output(labels, predictions)
    per_example_loss = tf.ensure_shape(losses["digit"] + 0.5 * losses["ink"], sample_weights.shape)
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    loss += tf.nn.scale_regularization_loss(model.losses) / config.micro_batches
    # With the L2 penalty, as Keras reports it. Taken here, before the update changes it.
    return loss, per_example_loss + sum(model.losses)


def update_metrics(split, labels, predictions, per_example_loss, sample_weights):
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    for name, losses in losses_by_output(labels, predictions).items():
        metrics[split][f"{name}_loss"].update_state(losses, sample_weight=sample_weights)
    metrics[split]["digit_accuracy"].update_state(labels["digit"], predictions["digit"], sample_weight=sample_weights)
    # Keras's weighted_metrics.
    ink_weights = labels["weights"]["ink"] * sample_weights
    metrics[split]["ink_mae"].update_state(labels["ink"], predictions["ink"], sample_weight=ink_weights)
