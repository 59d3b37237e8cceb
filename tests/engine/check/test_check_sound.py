"""--check has nothing to say against sound tasks."""

import random
import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from planted import (
    DATASETS,
    L2,
    ORIGINAL,
    assert_sound,
    average,
    contrastive,
    count_even,
    few_examples,
    linear_model,
    loss_of,
    loss_of_even_labels,
    noisy_evaluation,
    noisy_step,
    plain_rate,
    update_by_class,
)

import task
from engine.model import gather_batch, places_in_batch, sum_over_batch
from engine.model.global_batch import sum_over_replicas


def test_sound_task_is_left_as_it_is(check: Any, tmp_path: Path) -> None:
    create_optimizer = task.create_optimizer
    lines = assert_sound(check(run_dir=tmp_path / "run"))
    assert any(line.endswith("validation changes nothing") for line in lines)
    assert task.create_optimizer is create_optimizer
    assert task.load_examples("train").cardinality() == 120
    assert not list(tmp_path.iterdir())


def test_step_that_calls_the_optimizer_itself_is_compared(check: Any) -> None:
    def train_step(batch):
        features, labels, sample_weights = batch
        with tf.GradientTape() as tape:
            predictions = task.model(features, training=True)
            loss, losses = task.compute_loss(labels, predictions, sample_weights)
        task.optimizer.apply(tape.gradient(loss, task.model.trainable_variables))
        task.update_metrics("train", labels, predictions, losses, sample_weights)
        return loss

    lines = assert_sound(check({"train_step": train_step}, only=("results", "updates")))
    assert any("the same gradients of 2 variables" in line for line in lines)


class OwnApplyGradients(keras.optimizers.SGD):
    """Does not call its own apply, where the engine sums."""

    def apply_gradients(self, grads_and_vars):
        gradients, variables = zip(*grads_and_vars, strict=True)
        keras.optimizers.SGD.apply(self, gradients, variables)


def test_hooks_with_effects_beside_their_result_are_compared(check: Any) -> None:
    def load_examples(split: str) -> Any:
        random.seed(0)  # Keras draws the seeds of its initializers from here.
        return few_examples(split) if split == "train" else None

    def create_optimizer(total_steps: int) -> Any:
        task.model.layers[1].trainable = False
        return OwnApplyGradients(0.1)

    hooks = {"load_examples": load_examples, "create_optimizer": create_optimizer}
    hooks["create_model"] = lambda: linear_model(keras.layers.Dense(12, activation="tanh"))
    lines = assert_sound(check(hooks, only=("results", "updates")))
    assert any("the same gradients of 2 variables" in line for line in lines)


def model_of_many_layers() -> keras.Model:
    frozen = keras.Sequential([keras.layers.Dense(8), keras.layers.BatchNormalization()], name="backbone")
    frozen.trainable = False
    features = keras.Input((8, 8, 1))
    rows = frozen(keras.layers.Reshape((8, 8))(features))
    attended = keras.layers.MultiHeadAttention(2, 4, dropout=0.2)(rows, rows)
    read = keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2)(attended)
    read_twice = keras.layers.Bidirectional(keras.layers.GRU(4, dropout=0.2))(rows)
    joined = keras.layers.GaussianNoise(0.2)(keras.layers.Concatenate()([read, read_twice]))
    normalized = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dropout(0.3)(joined))
    return keras.Model(features, keras.layers.Dense(10, kernel_regularizer=L2)(keras.layers.ReLU()(normalized)))


@pytest.mark.long
def test_options_an_odd_batch_and_layers_of_many_kinds_are_no_false_alarm(check: Any) -> None:
    options = {"micro_batches": 2, "global_clipnorm": 0.1, "ema_decay": 0.9, "all_reduce": "nccl"}
    only = ("examples", "results", "updates")
    lines = assert_sound(check({"create_model": model_of_many_layers}, only, global_batch_size=33, **options))
    (drawing,) = [line for line in lines if "random in training, so not the same on one replica and two" in line]
    assert {"dropout", "gaussian_noise", "multi_head_attention", "lstm"} <= set(re.split(r"[:,]? ", drawing))


@pytest.mark.long
def test_layers_that_cannot_be_switched_off_are_not_compared(check: Any) -> None:
    def flipping_model() -> keras.Model:
        return linear_model(keras.layers.Reshape((8, 8, 1)), keras.layers.RandomFlip(), keras.layers.Flatten())

    lines = assert_sound(check({"create_model": flipping_model}, only=("results", "updates")), compared=False)
    (line,) = [line for line in lines if "random_flip cannot be switched off" in line]
    assert line.startswith("not compared ")


@pytest.mark.long
def test_datasets_no_test_and_metrics_by_class_are_no_false_alarm(check: Any) -> None:
    hooks = {**DATASETS, "update_metrics": update_by_class(weighted=True)}
    options = {"evaluation_batch_size": 25, "steps_per_epoch": 50, "validate_every_steps": 20}
    lines = assert_sound(check(hooks, monitor="validation/hard/by_class/3", monitor_direction="max", **options))
    text = "\n".join(lines)
    assert "train 120, validation/easy 50, validation/hard 31 examples of one structure" in text
    (same,) = [line for line in lines if "the same train/loss" in line]
    assert same.endswith("validation/hard/accuracy, train/by_class, validation/easy/by_class, validation/hard/by_class")
    assert "test changes nothing" not in text


class ClippingOptimizer(keras.optimizers.SGD):
    """Clips in its own apply, which gets the sum over the replicas from apply_gradients."""

    def apply(self, grads, trainable_variables=None):
        clipped, _ = tf.clip_by_global_norm(grads, 1e-3)
        return super().apply(clipped, trainable_variables)


def rate_from_the_step(batch):
    task.optimizer.learning_rate.assign(0.01 / (1.0 + tf.cast(task.optimizer.iterations, tf.float32)))
    return ORIGINAL["train_step"](batch)


def even_of_batch(labels, weights):
    return sum_over_batch(count_even)


def noise_of_the_example(features):
    seeds = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.reduce_sum(features, [1, 2, 3])), 2**31 - 1)
    return tf.map_fn(
        lambda seed: tf.random.stateless_normal(features.shape[1:], tf.stack([seed, 0])),
        seeds,
        fn_output_signature=tf.float32,
    )


def weighted_mean(losses, weights):
    """Is divided by the sum of the sample weights of all replicas."""
    (total,) = sum_over_replicas([tf.reduce_sum(weights)])
    return tf.reduce_sum(losses * weights) / total


def weighted_examples(split):
    return few_examples(split).map(lambda features, label: (features, label, 0.5 * tf.cast(label % 3, tf.float32)))


def model_of_equal_losses():
    """Has the same loss for all examples, so with all sample weights too: only its gradients show these."""
    dense = keras.layers.Dense(10, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), dense])


def examples_that_hardly_count(split):
    return few_examples(split).enumerate().map(lambda index, example: (*example, tf.cast(index == 21, tf.float32)))


def multiples_and_unknown(split):
    return few_examples(split).map(lambda features, label: (features, tf.where(label == 3, -1, 3 * label)))


def distance(labels, predictions, weights):
    """Is right for labels that are no classes, and for missing ones."""
    per_example_loss = tf.square(tf.cast(labels, tf.float32) - tf.reduce_mean(predictions, axis=1))
    return average(per_example_loss, tf.where(labels >= 0, weights, 0.0)), per_example_loss


def metrics_of_many_kinds(split):
    """Has results of 0 and 1, means of numbers of a step, and R2Score, which counts padding without using the count."""
    by_class = {"f1": keras.metrics.F1Score(threshold=0.99), "top": keras.metrics.SparseTopKCategoricalAccuracy(10)}
    by_threshold = {"auc": keras.metrics.AUC(), "recall": keras.metrics.Recall(0.99)}
    rates = {name: keras.metrics.Mean() for name in ("rate", "zero", "one")}
    return {**ORIGINAL["create_metrics"](split), **by_class, **by_threshold, **rates, "r2": keras.metrics.R2Score()}


def update_many_kinds(split, labels, predictions, per_example_loss, weights):
    ORIGINAL["update_metrics"](split, labels, predictions, per_example_loss, weights)
    metrics, probabilities = task.metrics[split], tf.nn.softmax(predictions)
    for name in ("auc", "recall"):
        metrics[name].update_state(labels == 3, probabilities[:, 3], sample_weight=weights)
    metrics["f1"].update_state(tf.one_hot(labels, 10), probabilities, sample_weight=weights)
    metrics["top"].update_state(labels, probabilities, sample_weight=weights)
    metrics["r2"].update_state(tf.cast(labels, tf.float32)[:, None], predictions[:, :1], sample_weight=weights)
    for name, value in {"rate": 0.01, "zero": 0.0, "one": 1.0}.items():
        metrics[name].update_state(value)


RIGHT = {
    "metrics of many kinds": {"create_metrics": metrics_of_many_kinds, "update_metrics": update_many_kinds},
    "labels that only the loss understands": {"compute_loss": distance, "load_examples": multiples_and_unknown},
    "mean over the examples that have a term": {"compute_loss": loss_of_even_labels(even_of_batch)},
    "negatives of the batch": {"train_step": contrastive(gather_batch, places_in_batch)},
    "random numbers from a seed of each example": {
        "train_step": noisy_step(noise_of_the_example),
        "evaluation_step": noisy_evaluation(noise_of_the_example),
    },
    "weighted mean of equal losses": {
        "compute_loss": loss_of(weighted_mean),
        "create_model": model_of_equal_losses,
        "load_examples": weighted_examples,
    },
    "learning rate of the step": {"train_step": rate_from_the_step, "create_optimizer": plain_rate},
    "regularizers of weights and of activities": {
        "create_model": lambda: linear_model(keras.layers.ActivityRegularization(l2=0.1), regularizer=L2)
    },
    "clipping in apply": {"create_optimizer": lambda total_steps: ClippingOptimizer(0.1)},
    "weights that are 0 in the second half of each batch": {"load_examples": examples_that_hardly_count},
}


@pytest.mark.long
@pytest.mark.parametrize("hooks", RIGHT.values(), ids=RIGHT)
def test_right_form_is_no_false_alarm(hooks: dict[str, Any], check: Any) -> None:
    with_examples = ["examples"] if "load_examples" in hooks else []
    with_evaluation = ["evaluation"] if "evaluation_step" in hooks else []
    only = (*with_examples, "results", *with_evaluation, "updates")
    assert_sound(check(hooks, only=only, keep_last_batch=True))


class Sampling(keras.layers.Layer):
    """Adds noise in evaluation, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(0)

    def call(self, inputs, training=False):
        return inputs if training else inputs + keras.random.normal(tf.shape(inputs), seed=self.seed)


@pytest.mark.long
def test_draws_of_a_seed_generator_in_evaluation_are_named(check: Any) -> None:
    lines = assert_sound(check({"create_model": lambda: linear_model(Sampling())}, only=("results", "evaluation")))
    (line,) = [line for line in lines if "random in validation" in line]
    assert line.startswith("not compared ")
    assert "or draw from a seed of each example, see docs/reproducibility.md" in line
    assert "sampling: call the model with training=False, " in line


@pytest.mark.long
def test_draws_of_a_seed_generator_in_the_loss_are_named(check: Any) -> None:
    seeds = []

    def create_loss_objects() -> dict[str, Any]:
        seeds.append(keras.random.SeedGenerator(0))
        return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}

    def noisy(labels, predictions, weights):
        noise = 0.1 * keras.random.normal(tf.shape(predictions), seed=seeds[-1])
        return ORIGINAL["compute_loss"](labels, predictions + noise, weights)

    hooks = {"create_loss_objects": create_loss_objects, "compute_loss": noisy}
    lines = assert_sound(check(hooks, only=("results",)), compared=False)
    (line,) = [line for line in lines if "random in training" in line]
    assert re.search(r"the generator \S*seed_generator_state\S* \(test_check_sound\.py:\d+ noisy\)$", line)
