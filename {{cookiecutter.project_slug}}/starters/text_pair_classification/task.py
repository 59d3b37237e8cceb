"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

Lines marked TODO(you) are yours to replace; everything works as it is. An edit of a line marked KEEP may give
wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import Config

import keras
import keras_hub
import tensorflow as tf

from engine.data import Records
from engine.errors import BadInput
from engine.model import apply_gradients
from prepare_data import Arguments, check_pairs, check_records, load_preset, make_records

# --- Data -------------------------------------------------------------------------------------------------------------


def load_examples(split: str) -> Records:
    """Returns the examples of "train", "validation" or "test": record files, or a tf.data.Dataset of known length.

    A dataset yields single examples, always in the same order. Do not shuffle, repeat or batch: the engine does.
    """
    # TODO(you): Load your examples.
    sizes: dict[str, Any] = {"sequence_length": config.sequence_length, "vocabulary_size": config.vocabulary_size}
    if config.records == Config.records:  # From the pairs in data/.
        if not config.records.exists():
            make_records(Arguments(**sizes))
        check_pairs(config.records, Arguments.pairs)
    path = config.records / f"{split}.tfrecord"
    check_records(path, **sizes, classes=config.classes)
    return Records(path)


def prepare_example(record: tf.Tensor):
    """Decodes one record. Runs in parallel, on the examples that will be used.

    It turns a tf.train.Example (string, scalar) into token_ids, padding_mask and segment_ids, int32 [sequence_length],
    and the label, int32.
    """
    # TODO(you): Prepare one example.
    tokens = tf.io.FixedLenFeature([config.sequence_length], tf.int64)
    fields = {"input_ids": tokens, "input_mask": tokens, "segment_ids": tokens}
    parsed = tf.io.parse_single_example(record, {**fields, "label_ids": tf.io.FixedLenFeature([], tf.int64)})
    parsed = {name: tf.cast(field, tf.int32) for name, field in parsed.items()}
    features = {
        "token_ids": parsed["input_ids"],
        "padding_mask": parsed["input_mask"],
        "segment_ids": parsed["segment_ids"],
    }
    return features, parsed["label_ids"]


def read_inputs(path: Path) -> Iterable[tuple[int | str, bytes]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is a TFRecord file, each record named by its number.
    """
    yield from enumerate(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
model: keras.Model
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def create_model() -> keras.Model:
    """Returns the model, or a dict of models by name. Its predictions here are logits [batch, classes]."""
    # TODO(you): Build your model.
    encoder = create_encoder()
    if path := config.encoder_weights:
        if path.name.endswith(".weights.h5"):
            encoder.load_weights(path)
        else:
            tf.train.Checkpoint(encoder=encoder).read(str(path)).assert_existing_objects_matched()
    features = {name: keras.Input((config.sequence_length,), dtype="int32", name=name) for name in encoder.input}
    pooled = keras.layers.Dropout(config.dropout)(encoder(features)["pooled_output"])
    initializer = keras.initializers.TruncatedNormal(stddev=0.02)
    # The logits are float32 under mixed precision, too: 16 bits are too few for probabilities.
    classifier = keras.layers.Dense(config.classes, kernel_initializer=initializer, dtype="float32", name="classifier")
    return keras.Model(features, classifier(pooled))


def create_encoder() -> keras_hub.models.BertBackbone:
    """Returns BERT's encoder: token_ids, padding_mask and segment_ids -> "pooled_output", [batch, width], and more."""
    if config.preset:
        encoder = load_preset(keras_hub.models.BertBackbone, config.preset, dropout=config.dropout)
        if encoder.vocabulary_size != config.vocabulary_size:
            raise BadInput(f"--preset {config.preset} needs --vocabulary-size {encoder.vocabulary_size}")
        return encoder
    return keras_hub.models.BertBackbone(
        vocabulary_size=config.vocabulary_size,
        num_layers=config.layers,
        num_heads=config.heads,
        hidden_dim=config.width,
        intermediate_dim=4 * config.width,
        dropout=config.dropout,
        max_sequence_length=max(512, config.sequence_length),
    )


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Returns the optimizer, or a dict of them under the models' names. All epochs together have `total_steps`."""
    # TODO(you): Choose the optimizer and the learning rate over time.
    schedule = WarmUpThenLinear(config.learning_rate, total_steps // 10, total_steps)
    created = keras.optimizers.AdamW(schedule, weight_decay=config.weight_decay, epsilon=1e-6)
    # Variables, not names: Keras would compare a name with those of each replica's copies, such as bias/replica_1:0.
    undecayed = [variable for variable in model.trainable_variables if variable.name in ("bias", "gamma", "beta")]
    created.exclude_from_weight_decay(var_list=undecayed)
    return created


@keras.saving.register_keras_serializable()
class WarmUpThenLinear(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from 0 to the peak during the warm-up, then falls linearly to 0.

    Steps count from 0, so the first update has the rate 0 and the last one peak / (total_steps - warmup_steps), as in
    BERT's own code.
    """

    def __init__(self, peak: float, warmup_steps: int, total_steps: int) -> None:
        self.peak, self.warmup_steps, self.total_steps = peak, warmup_steps, total_steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        rising = step / max(1, self.warmup_steps)
        falling = (self.total_steps - step) / (self.total_steps - self.warmup_steps)
        return self.peak * tf.maximum(0.0, tf.minimum(rising, falling))

    def get_config(self) -> dict[str, float]:
        return {"peak": self.peak, "warmup_steps": self.warmup_steps, "total_steps": self.total_steps}


def create_loss_objects() -> dict[str, keras.losses.Loss]:
    """Returns one loss per term of compute_loss, by name."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per example; others give one for all, and means are divided by the replicas.
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own."""
    # TODO(you): Choose the metrics; update_metrics feeds them.
    f1 = keras.metrics.F1Score(average="micro", threshold=0.5)  # For label 1 against all others.
    f1.update_state([[0.0]], [[0.0]])  # Makes its variables; otherwise a complete step would run for that.
    return {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy(), "f1": f1}


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
    is_one, found = tf.equal(labels, 1), tf.equal(tf.argmax(predictions, axis=-1), 1)
    metrics[split]["f1"].update_state(
        is_one[:, None], tf.cast(found, tf.float32)[:, None], sample_weight=sample_weights
    )


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
