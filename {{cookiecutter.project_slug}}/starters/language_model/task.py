"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

Lines marked TODO(you) are yours to replace; everything works as it is. An edit of a line marked KEEP may give
wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import Config

import keras
import tensorflow as tf

from engine.data import Records
from engine.errors import BadInput
from engine.model import apply_gradients, sum_over_batch
from prepare_data import (
    END,
    FIELDS,
    VOCABULARY_SIZE,
    Arguments,
    check_records,
    check_texts,
    make_records,
    prompt_row,
    serialized,
)
from speed import floating_point_operations, measured_peak
from transformer import Transformer

PROMPTS = ("", "Alice ", "`I wish ")  # Completed after every epoch.

# --- Data -------------------------------------------------------------------------------------------------------------


def load_examples(split: str) -> Records:
    """Returns the examples of "train", "validation" or "test": record files, or a tf.data.Dataset of known length.

    A dataset yields single examples, always in the same order. Do not shuffle, repeat or batch: the engine does.
    """
    # TODO(you): Load your examples.
    if config.records == Config.records:  # From the texts in data/.
        if not config.records.exists():
            make_records(Arguments(sequence_length=config.sequence_length))
        check_texts(config.records, Arguments.texts)
    path = config.records / f"{split}.tfrecord"
    check_records(path, config.sequence_length)
    return Records(path)


def prepare_example(record: tf.Tensor):
    """Decodes one record. Runs in parallel, on the examples that will be used.

    It turns a tf.train.Example (string, scalar) into tokens, documents, positions and the labels, int32
    [sequence_length] each. A label is the next token of the document; -1 is none.
    """
    # TODO(you): Prepare one example.
    field = tf.io.FixedLenFeature([config.sequence_length], tf.int64)
    parsed = tf.io.parse_single_example(record, dict.fromkeys(FIELDS, field))
    features = {name: tf.cast(values, tf.int32) for name, values in parsed.items()}
    labels = features.pop("labels")
    return features, labels


def read_inputs(path: Path) -> Iterable[tuple[int | str, bytes]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is a text file with a prompt on each line, named by its number.
    """
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = prompt_row(line.removesuffix("\n"), config.sequence_length)
            except BadInput as problem:
                raise BadInput(f"{path}, line {number}: {problem}") from problem
            yield number, serialized(row)


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
model: Transformer
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def create_model() -> keras.Model:
    """Returns the model, or a dict of models by name. Its predictions are logits [batch, length, vocabulary]."""
    # TODO(you): Build your model.
    sizes = {"layers": config.layers, "width": config.width, "heads": config.heads}
    return Transformer(VOCABULARY_SIZE, END, **sizes, dropout=config.dropout)


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Returns the optimizer, or a dict of them under the models' names. All epochs together have `total_steps`."""
    # TODO(you): Choose the optimizer and the learning rate over time.
    warmup_steps = total_steps // 20
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, total_steps - warmup_steps, warmup_target=config.learning_rate, warmup_steps=warmup_steps
    )
    # With Adam's default epsilon, 1e-7, rounding decides in which direction a weight without a gradient moves.
    created = keras.optimizers.AdamW(schedule, weight_decay=config.weight_decay, beta_2=0.95, epsilon=1e-6)
    # Variables, not names: Keras would compare a name with those of each replica's copies.
    created.exclude_from_weight_decay(var_list=[each for each in model.trainable_variables if each.name == "scale"])
    return created


def create_loss_objects() -> dict[str, keras.losses.Loss]:
    """Returns one loss per term of compute_loss, by name."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per token; others give one for all, and means are divided by the replicas.
    return {"token": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own."""
    # TODO(you): Choose the metrics; update_metrics feeds them.
    return {"loss": keras.metrics.Mean(), "perplexity": Perplexity()}


class Perplexity(keras.metrics.Mean):
    """Returns the exponential of the mean loss of a token, in nats."""

    def result(self) -> tf.Tensor:
        return keras.ops.exp(super().result())


# --- Steps: what one replica does with a per-replica batch ------------------------------------------------------------


def token_weights(labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    """Returns the weight of each token, [batch, length]: its row's sample weight, or 0 without a label."""
    return tf.where(labels >= 0, sample_weights[:, None], 0.0)


def count_tokens(features: dict[str, tf.Tensor], labels: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(token_weights(labels, sample_weights))


def compute_loss(labels: tf.Tensor, predictions: tf.Tensor, sample_weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this replica's part of the batch's loss (scalar) and the loss of each token ([batch, length])."""
    token_losses = loss_objects["token"](tf.where(labels >= 0, labels, 0), predictions)
    weighted = token_losses * token_weights(labels, sample_weights)
    # KEEP: Divided by the tokens of the global batch, over replicas and micro-batches, whose gradients are summed.
    loss = tf.math.divide_no_nan(tf.reduce_sum(weighted), sum_over_batch(count_tokens))
    # KEEP: Divided by the numbers of replicas and of micro-batches, because each adds the same regularization loss.
    return loss + tf.nn.scale_regularization_loss(model.losses) / config.micro_batches, token_losses


def update_metrics(split: str, labels: tf.Tensor, token_losses: tf.Tensor, sample_weights: tf.Tensor) -> None:
    """Updates the metrics of a split with unscaled values per token and their weights."""
    for name in ("loss", "perplexity"):
        metrics[split][name].update_state(token_losses, sample_weight=token_weights(labels, sample_weights))


def train_step(batch) -> tf.Tensor:
    """Updates the model from a per-replica batch; returns this replica's part of the loss (scalar)."""
    # TODO(you): Change the step, and evaluation_step and predict_step with it.
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss, token_losses = compute_loss(labels, predictions, sample_weights)
    # KEEP: Sums the gradients over the replicas, then clips, then updates; add no sum or clipping of your own.
    apply_gradients(optimizer, tape, loss, model.trainable_variables)
    update_metrics("train", labels, token_losses, sample_weights)
    return loss


def evaluation_step(split: str, batch) -> tf.Tensor:
    """Measures the model on a per-replica batch; returns this replica's part of the loss (scalar)."""
    features, labels, sample_weights = batch
    predictions = model(features, training=False)
    loss, token_losses = compute_loss(labels, predictions, sample_weights)
    update_metrics(split, labels, token_losses, sample_weights)
    return loss


def predict_step(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the predictions for prepared features, [n, ...] each, by name; --export and predict.py use it.

    Here it is the completion (string, [n]) of each row's first document, up to the row's length.
    """
    is_prompt = features["documents"] == 1
    tokens = model.complete(features, numbers_of(tf.where(is_prompt, features["tokens"], END)), config.temperature)
    return {"completion": decode(tf.where(is_prompt, END, tokens))}


def decode(tokens: tf.Tensor) -> tf.Tensor:
    """Returns texts (string, [n]) of tokens [n, length], as `encode` in prepare_data.py makes them; END is empty."""
    characters = tf.constant([*(bytes([each]) for each in range(END)), b""])
    return tf.strings.reduce_join(tf.gather(characters, tokens), axis=-1)


def numbers_of(prompts: tf.Tensor) -> tf.Tensor:
    """Returns random numbers from 0 to 1 (float32, [n, length]), which depend on the row and on --seed alone.

    So a completion is the same in any batch, and in any place of it.
    """
    texts = tf.strings.reduce_join(tf.strings.as_string(prompts), axis=-1, separator=" ")
    hashes = tf.strings.to_hash_bucket_fast(texts, 2**62)
    seeds = tf.stack([hashes, tf.fill(tf.shape(hashes), tf.constant(config.seed, tf.int64))], axis=-1)
    length = prompts.shape[1]
    return tf.map_fn(lambda seed: tf.random.stateless_uniform([length], seed), seeds, fn_output_signature=tf.float32)


# --- Reports ----------------------------------------------------------------------------------------------------------


def on_report(row: dict[str, Any], run_dir: Path, settings: Config) -> None:
    """Completes PROMPTS after every epoch, to samples/ and TensorBoard; reports the tokens per second and the MFU.

    MFU (model FLOPs utilization) is the fraction of the devices' speed that training makes use of.
    """
    prompts = [prepare_example(serialized(prompt_row(each, settings.sequence_length)))[0] for each in PROMPTS]
    completions = predict_step(tf.nest.map_structure(lambda *each: tf.stack(each), *prompts))["completion"]
    texts = [prompt + each.decode(errors="replace") for prompt, each in zip(PROMPTS, completions.numpy(), strict=True)]

    tokens_per_second = row["examples_per_second"] * settings.sequence_length  # Padding included.
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    peak = measured_peak(keras.config.dtype_policy().compute_dtype) * (1 if settings.simulated_devices else replicas)
    utilization = tokens_per_second * floating_point_operations(model, settings.sequence_length) / peak
    speed = f"{tokens_per_second:,.0f} tokens/s, MFU {100 * utilization:.0f} % of {peak / 1e9:,.0f} GFLOP/s"
    print(speed)
    tf.summary.scalar("tokens_per_second", tokens_per_second)
    tf.summary.scalar("mfu", utilization)
    tf.summary.text("samples", texts)

    path = run_dir / "samples" / f"epoch-{row['epoch']:04d}.txt"
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")
    part.replace(path)
