"""Tags every token of sequences of several lengths. It needs --pad-to; `padded_to` pads all to one length instead."""

import keras
import numpy as np
import tensorflow as tf

from config import Config
from engine.model import apply_gradients

TOKENS, TAGS, LONGEST = 40, 5, 64
COUNTS = {"train": 150, "validation": 30, "test": 37}

padded_to: int | None = None


def sequences(split: str) -> list[np.ndarray]:
    """Most are short; 0 stands for padding only."""
    random = np.random.default_rng(len(split))
    return [
        random.integers(1, TOKENS, random.integers(40, LONGEST) if number % 20 == 0 else random.integers(1, 17))
        for number in range(COUNTS[split])
    ]


def load_examples(split: str) -> tf.data.Dataset:
    """Returns texts, which are kept in memory whatever their lengths."""
    texts = [" ".join(map(str, tokens)) for tokens in sequences(split)]
    return tf.data.Dataset.from_tensor_slices((texts, np.arange(len(texts)) % TAGS))


def prepare_example(text, shift):
    tokens = tf.strings.to_number(tf.strings.split(text), tf.int32)
    tags = (tokens + tf.cast(shift, tf.int32)) % TAGS
    if padded_to:
        tokens, tags = (
            tf.ensure_shape(tf.pad(x, [[0, padded_to - tf.shape(x)[0]]]), [padded_to]) for x in (tokens, tags)
        )
    return {"tokens": tokens, "shift": tf.cast(shift, tf.int32)}, tags


config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]


def create_model():
    tokens, shift = keras.Input((None,), dtype="int32", name="tokens"), keras.Input((), dtype="int32", name="shift")
    is_token = keras.ops.not_equal(tokens, 0)
    encoded = keras.layers.Embedding(TOKENS, 16)(tokens)
    encoded = encoded + keras.layers.Embedding(TAGS, 16)(shift)[:, None, :]
    keys = keras.layers.Dense(16, use_bias=False)(encoded)
    encoded = encoded + keras.layers.Attention()([encoded, keys], mask=[is_token, is_token])
    encoded = encoded + keras.layers.Dense(16)(keras.layers.Dense(32, activation="gelu")(encoded))
    return keras.Model({"tokens": tokens, "shift": shift}, keras.layers.Dense(TAGS)(encoded))


def create_optimizer(total_steps):
    return keras.optimizers.SGD(config.learning_rate, momentum=0.9)


def create_loss_objects():
    return {"tag": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split):
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}


def compute_loss(tokens, labels, predictions, sample_weights):
    is_token = tf.cast(tokens != 0, tf.float32)
    per_token = loss_objects["tag"](labels, predictions) * is_token
    per_example_loss = tf.reduce_sum(per_token, axis=1) / tf.maximum(tf.reduce_sum(is_token, axis=1), 1.0)
    per_example_loss = tf.ensure_shape(per_example_loss, sample_weights.shape)
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    return loss, per_example_loss


def update_metrics(split, features, labels, predictions, per_example_loss, sample_weights):
    metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)
    # Token by token, because Keras takes the mean over an axis, of which padding is a part.
    is_token = tf.cast(features["tokens"] != 0, tf.float32)
    labels, predictions = tf.reshape(labels, [-1]), tf.reshape(predictions, [-1, TAGS])
    token_weights = tf.reshape(is_token * sample_weights[:, None], [-1])
    metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=token_weights)


def train_step(batch):
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss, per_example_loss = compute_loss(features["tokens"], labels, predictions, sample_weights)
    apply_gradients(optimizer, tape, loss, model.trainable_variables)
    update_metrics("train", features, labels, predictions, per_example_loss, sample_weights)
    return loss


def evaluation_step(split, batch):
    features, labels, sample_weights = batch
    predictions = model(features, training=False)
    loss, per_example_loss = compute_loss(features["tokens"], labels, predictions, sample_weights)
    update_metrics(split, features, labels, predictions, per_example_loss, sample_weights)
    return loss


def predict_step(features):
    return {"tags": tf.argmax(model(features, training=False), axis=-1)}
