"""--check has nothing to say against sound tasks."""

import re
from collections.abc import Callable
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
    label_losses,
    linear_model,
    loss_of_even_labels,
    noisy_evaluation,
    noisy_step,
    plain_rate,
    update_by_class,
)

import task
from engine.model import gather_batch, places_in_batch, rows, sum_over_batch


def test_sound_task_is_left_as_it_is(check: Any, tmp_path: Path) -> None:
    create_optimizer = task.create_optimizer
    lines = assert_sound(check(run_dir=tmp_path / "run"))
    assert any(line.endswith("validation changes nothing") for line in lines)
    assert task.create_optimizer is create_optimizer
    assert task.load_examples("train").cardinality() == 120
    assert not list(tmp_path.iterdir())


def model_of_many_layers() -> keras.Model:
    frozen = keras.Sequential([keras.layers.Dense(16), keras.layers.BatchNormalization()], name="backbone")
    frozen.trainable = False
    random = [keras.layers.Dropout(0.3), keras.layers.GaussianNoise(0.2), keras.layers.Dense(12)]
    synchronized = keras.layers.BatchNormalization(synchronized=True)
    return linear_model(frozen, *random, synchronized, regularizer=keras.regularizers.L2(0.1))


@pytest.mark.long
def test_options_an_odd_batch_and_layers_of_many_kinds_are_no_false_alarm(check: Any) -> None:
    options = {
        "micro_batches": 2,
        "global_clipnorm": 0.1,
        "ema_decay": 0.9,
        "all_reduce": "nccl",
        "global_batch_size": 33,
    }
    lines = assert_sound(check({"create_model": model_of_many_layers}, **options))
    assert any("not the same on one replica and two: dropout, gaussian_noise" in line for line in lines)


class TableReadByKeras(keras.layers.Embedding):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return keras.ops.take(self.embeddings, inputs, axis=0)


@pytest.mark.long
def test_table_that_a_step_reads_as_one_tensor_is_named(check: Any) -> None:
    def model_with_a_table() -> keras.Model:
        ids = [keras.layers.Reshape((64,)), keras.layers.Lambda(lambda pixels: tf.cast(pixels, tf.int32))]
        table = TableReadByKeras(rows.LARGE, 2, name="users")
        return keras.Sequential([keras.Input((8, 8, 1)), *ids, table, keras.layers.Flatten(), keras.layers.Dense(10)])

    hooks = {"create_model": model_with_a_table, "create_optimizer": lambda total_steps: keras.optimizers.SGD(0.1)}
    (line,) = [line for line in assert_sound(check(hooks, only=("results", "updates"))) if "as one tensor" in line]
    assert re.match(
        r"ok +task\.py train_step +the step reads the table sequential/users/embeddings as one tensor", line
    )


@pytest.mark.long
def test_layers_that_cannot_be_switched_off_are_not_compared(check: Any) -> None:
    def flipping_model() -> keras.Model:
        return linear_model(keras.layers.Reshape((8, 8, 1)), keras.layers.RandomFlip(), keras.layers.Flatten())

    lines = assert_sound(check({"create_model": flipping_model}, only=("results", "updates")), compared=False)
    assert any("not compared, because random_flip" in line for line in lines)


def model_with_random_layers_inside_layers() -> keras.Model:
    features = keras.Input((8, 8, 1))
    rows = keras.layers.Reshape((8, 8))(features)
    attended = keras.layers.MultiHeadAttention(2, 4, dropout=0.2)(rows, rows)
    read = keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2)(attended)
    read_twice = keras.layers.Bidirectional(keras.layers.GRU(4, dropout=0.2, activity_regularizer="l2"))(rows)
    joined = keras.layers.ActivityRegularization(l2=0.1)(keras.layers.Concatenate()([read, read_twice]))
    return keras.Model(features, keras.layers.Dense(10)(joined))


@pytest.mark.long
def test_random_layers_inside_layers_are_no_false_alarm(check: Any) -> None:
    assert_sound(check({"create_model": model_with_random_layers_inside_layers}, only=("results", "updates")))


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


@pytest.mark.long
def test_labels_that_only_the_loss_understands_are_no_false_alarm(check: Any) -> None:
    def multiples_and_unknown(split):
        return few_examples(split).map(lambda features, label: (features, tf.where(label == 3, -1, 3 * label)))

    def distance(labels, predictions, weights):
        known = tf.cast(labels >= 0, tf.float32)
        per_example_loss = known * tf.square(tf.cast(labels, tf.float32) - tf.reduce_mean(predictions, axis=1))
        return average(per_example_loss, weights), per_example_loss

    hooks = {
        "load_examples": multiples_and_unknown,
        "compute_loss": distance,
        "create_metrics": lambda split: {"loss": keras.metrics.Mean()},
        "update_metrics": lambda split, labels, predictions, per_example_loss, weights: task.metrics[split][
            "loss"
        ].update_state(per_example_loss, sample_weight=weights),
    }
    assert_sound(check(hooks, only=("examples", "results")))


class ClippingOptimizer(keras.optimizers.SGD):
    """Clips in its own apply, which gets the sum over the replicas from apply_gradients."""

    def apply(self, grads, trainable_variables=None):
        clipped, _ = tf.clip_by_global_norm(grads, 1e-3)
        return super().apply(clipped, trainable_variables)


def rate_from_the_step(batch):
    task.optimizer.learning_rate.assign(0.01 / (1.0 + tf.cast(task.optimizer.iterations, tf.float32)))
    return ORIGINAL["train_step"](batch)


def absolute_error(labels, predictions, weights):
    errors = keras.losses.MeanAbsoluteError(reduction="none")(tf.one_hot(labels, 10), predictions)
    return average(errors, weights), errors


def even_of_batch(labels, weights):
    return sum_over_batch(count_even)


def noise_of_the_example(features):
    seeds = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.reduce_sum(features, [1, 2, 3])), 2**31 - 1)
    return tf.map_fn(
        lambda seed: tf.random.stateless_normal(features.shape[1:], tf.stack([seed, 0])),
        seeds,
        fn_output_signature=tf.float32,
    )


class Sampling(keras.layers.Layer):
    """Adds noise in training and in evaluation, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(0)

    def call(self, inputs):
        return inputs + keras.random.normal(tf.shape(inputs), seed=self.seed)


def loss_of_weighted_mean(labels, predictions, weights):
    """Is divided by the sum of the sample weights of all replicas."""
    per_example_loss = label_losses(labels, predictions)
    total = tf.reduce_sum(weights)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, total)
    return tf.reduce_sum(per_example_loss * weights) / total, per_example_loss


def weighted_examples(split):
    return few_examples(split).map(lambda features, label: (features, label, 0.5 * tf.cast(label % 3, tf.float32)))


def examples_that_hardly_count(split):
    return few_examples(split).enumerate().map(lambda index, example: (*example, tf.cast(index == 21, tf.float32)))


def normalized_model():
    return linear_model(keras.layers.BatchNormalization(synchronized=True), keras.layers.Activation("relu"))


def loss_of_labels_that_exist(labels, predictions, weights):
    per_example_loss = label_losses(tf.maximum(labels, 0), predictions)
    return average(per_example_loss, tf.where(labels >= 0, weights, 0.0)), per_example_loss


RIGHT = {
    "labels that may be missing": {"compute_loss": loss_of_labels_that_exist},
    "mean over the examples that have a term": {
        "compute_loss": loss_of_even_labels(even_of_batch, tf.math.divide_no_nan)
    },
    "negatives of the batch": {"train_step": contrastive(gather_batch, places_in_batch)},
    "random numbers from a seed of each example": {
        "train_step": noisy_step(noise_of_the_example),
        "evaluation_step": noisy_evaluation(noise_of_the_example),
    },
    "weighted mean": {"compute_loss": loss_of_weighted_mean, "load_examples": weighted_examples},
    "weighted mean of equal losses": {
        "compute_loss": loss_of_weighted_mean,
        "create_model": lambda: keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, kernel_initializer="zeros")]
        ),
    },
    "learning rate of the step": {"train_step": rate_from_the_step, "create_optimizer": plain_rate},
    "regularizers of weights and of activities": {
        "create_model": lambda: linear_model(keras.layers.ActivityRegularization(l2=0.1), regularizer=L2)
    },
    "normalized features": {"create_model": normalized_model},
    "clipping in apply": {"create_optimizer": lambda total_steps: ClippingOptimizer(0.1)},
    "weights that are 0 in the second half of each batch": {"load_examples": examples_that_hardly_count},
}


@pytest.mark.long
@pytest.mark.parametrize("hooks", RIGHT.values(), ids=RIGHT)
def test_right_form_is_no_false_alarm(hooks: dict[str, Any], check: Any) -> None:
    only = ("results", "updates", *(["evaluation"] if "evaluation_step" in hooks else []))
    lines = assert_sound(check(hooks, only=only, keep_last_batch=True))
    assert not any("its gradient jumps" in line for line in lines)


@pytest.mark.long
def test_sum_over_the_batch_is_right_with_micro_batches(check: Any) -> None:
    loss = loss_of_even_labels(even_of_batch, tf.math.divide_no_nan)
    assert_sound(check({"compute_loss": loss}, only=("results",), micro_batches=2, keep_last_batch=True))


@pytest.mark.long
@pytest.mark.parametrize("in_training", [True, False])
def test_draws_of_a_seed_generator_in_evaluation_are_named(check: Any, in_training: bool) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.sampling = linear_model(), Sampling()

        def call(self, features, training=None):
            outputs = self.dense(features)
            return outputs if training and not in_training else self.sampling(outputs)

    lines = assert_sound(check({"create_model": Model}, only=("results", "evaluation")), compared=not in_training)
    (line,) = [line for line in lines if "random in validation" in line]
    assert "sampling: draw from a seed of each example, see docs/steps.md" in line


@pytest.mark.long
def test_regularization_that_cannot_be_checked_is_said(check: Any) -> None:
    lines = assert_sound(
        check(
            {
                "compute_loss": lambda *arguments: (
                    tf.nn.scale_regularization_loss(task.model.losses) + loss_of_weighted_mean(*arguments)[0],
                    label_losses(*arguments[:2]),
                ),
                "create_model": lambda: linear_model(regularizer=L2),
            }
        )
    )
    assert any("not checked that the loss contains the regularization" in line for line in lines)


def hinge(labels, predictions, weights):
    errors = keras.losses.Hinge(reduction="none")(tf.one_hot(labels, 10), predictions)
    return average(errors, weights), errors


def quantile(labels, predictions, weights):
    errors = tf.one_hot(labels, 10) - predictions
    losses = tf.reduce_mean(tf.maximum(0.9 * errors, -0.1 * errors), axis=1)
    return average(losses, weights), losses


@pytest.mark.parametrize(
    "loss", [absolute_error, *(pytest.param(each, marks=pytest.mark.long) for each in (hinge, quantile))]
)
def test_loss_whose_gradient_jumps_is_named(loss: Callable, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [
        line for line in assert_sound(check({"compute_loss": loss}, only=("results",))) if "its gradient jumps" in line
    ]
    assert re.match(
        rf"ok    task\.py compute_loss +its gradient jumps \(test_check_sound\.py:\d+ {loss.__name__}\)", line
    )


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
