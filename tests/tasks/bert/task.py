"""Orbit's tutorial, BERT on MRPC: pairs of sentences from record files, and whether they say the same; a small BERT."""

import keras
import tensorflow as tf

from config import Config
from engine.model import apply_gradients


def load_examples(split):
    records = tf.data.TFRecordDataset(str(config.records / f"{split}.tfrecord"))
    # The labels are in the records; prepare_example reads them.
    pairs = records.map(lambda record: (record, 0))
    return pairs.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in records)))


def prepare_example(features, labels):
    """Decodes a record; the fields have the names of tf-models' own record files."""
    tokens = tf.io.FixedLenFeature([config.sequence_length], tf.int64)
    fields = {"input_ids": tokens, "input_mask": tokens, "segment_ids": tokens}
    record = tf.io.parse_single_example(features, {**fields, "label_ids": tf.io.FixedLenFeature([], tf.int64)})
    return {name: tf.cast(record[name], tf.int32) for name in fields}, tf.cast(record["label_ids"], tf.int32)


config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]


class Embeddings(keras.layers.Layer):
    """Tokens, their places, and which sentence they are of: [batch, length] three times -> [batch, length, width]."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.tokens = keras.layers.Embedding(config.vocabulary_size, width, name="tokens")
        self.places = keras.layers.Embedding(config.sequence_length, width, name="places")
        self.segments = keras.layers.Embedding(2, width, name="segments")
        self.normalization = keras.layers.LayerNormalization(epsilon=1e-12, name="layer_norm")
        self.dropout = keras.layers.Dropout(config.dropout)

    def call(self, input_ids, segment_ids, training=False):
        places = self.places(tf.range(config.sequence_length))
        embedded = self.tokens(input_ids) + places + self.segments(segment_ids)
        return self.dropout(self.normalization(embedded), training=training)


def transformer_block(hidden, attention_mask, *, heads, width):
    layers = keras.layers
    attended = layers.MultiHeadAttention(heads, width // heads, dropout=config.dropout)(
        hidden, hidden, attention_mask=attention_mask
    )
    attended = layers.Dropout(config.dropout)(attended)
    hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + attended)
    dense = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(hidden))
    return layers.LayerNormalization(epsilon=1e-12)(hidden + layers.Dropout(config.dropout)(dense))


def create_model():
    width = 32
    inputs = {
        name: keras.Input((config.sequence_length,), dtype="int32", name=name)
        for name in ("input_ids", "input_mask", "segment_ids")
    }
    hidden = Embeddings(width, name="embeddings")(inputs["input_ids"], inputs["segment_ids"])
    attention_mask = keras.ops.expand_dims(inputs["input_mask"], 1)
    for _ in range(2):
        hidden = transformer_block(hidden, attention_mask, heads=4, width=width)
    pooled = keras.layers.Dense(width, activation="tanh", name="pooler")(hidden[:, 0])
    logits = keras.layers.Dense(2, name="classifier")(keras.layers.Dropout(config.dropout)(pooled))
    return keras.Model(inputs, logits)


@keras.saving.register_keras_serializable("bert")
class WarmUpThenLinear(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line over the warm-up, and is then on the line from the peak at step 0 to 0 at the end."""

    def __init__(self, peak, warmup_steps, total_steps):
        self.peak, self.warmup_steps, self.total_steps = peak, warmup_steps, total_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        rising, falling = step / max(1, self.warmup_steps), 1.0 - step / self.total_steps
        return self.peak * tf.where(step < self.warmup_steps, rising, tf.maximum(0.0, falling))

    def get_config(self):
        return {"peak": self.peak, "warmup_steps": self.warmup_steps, "total_steps": self.total_steps}


def create_optimizer(total_steps):
    schedule = WarmUpThenLinear(config.learning_rate, total_steps // 10, total_steps)
    created = keras.optimizers.AdamW(schedule, weight_decay=config.weight_decay, epsilon=1e-6)
    created.exclude_from_weight_decay(var_names=["bias", "layer_norm", "gamma", "beta"])
    return created


def create_loss_objects():
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split):
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}


def compute_loss(labels, predictions, sample_weights):
    per_example_loss = loss_objects["label"](labels, predictions)
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    return loss, per_example_loss


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
