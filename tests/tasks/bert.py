"""Orbit's tutorial, BERT on MRPC: pairs of sentences, and whether they say the same; a small BERT without dropout.

The hooks that it replaces in task.py.
"""

import keras
import tensorflow as tf

from ports import LENGTH, VOCABULARY, sentences


def load_examples(split):
    return tf.data.Dataset.from_tensor_slices(sentences(split))


def prepare_example(features, labels):
    is_token = tf.cast(features != 0, tf.int32)
    is_second = tf.cast(tf.range(LENGTH) > 6, tf.int32) * is_token
    return {"input_ids": features, "input_mask": is_token, "segment_ids": is_second}, labels


def create_model():
    layers, width = keras.layers, 32
    names = ("input_ids", "input_mask", "segment_ids")
    ids, mask, segments = inputs = [keras.Input((LENGTH,), dtype="int32", name=name) for name in names]
    places = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    embedded = layers.Embedding(VOCABULARY, width)(ids) + layers.Embedding(LENGTH, width)(places)
    hidden = layers.LayerNormalization(epsilon=1e-12)(embedded + layers.Embedding(2, width)(segments))
    attended = layers.MultiHeadAttention(4, width // 4)(hidden, hidden, attention_mask=mask[:, None])
    hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + attended)
    dense = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(hidden))
    hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + dense)
    logits = layers.Dense(2)(layers.Dense(width, activation="tanh")(hidden[:, 0]))
    return keras.Model(dict(zip(names, inputs)), logits)


class WarmUpThenLinear(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line over the warm-up, and is then on the line from the peak at step 0 to 0 at the end."""

    def __init__(self, peak, warmup_steps, total_steps):
        self.peak, self.warmup_steps, self.total_steps = peak, warmup_steps, total_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        rising, falling = step / max(1, self.warmup_steps), 1.0 - step / self.total_steps
        return self.peak * tf.where(step < self.warmup_steps, rising, tf.maximum(0.0, falling))


def create_optimizer(total_steps):
    schedule = WarmUpThenLinear(config.learning_rate, total_steps // 10, total_steps)
    created = keras.optimizers.AdamW(schedule, weight_decay=0.01, epsilon=1e-6)
    created.exclude_from_weight_decay(var_names=["bias", "layer_norm", "gamma", "beta"])
    return created
