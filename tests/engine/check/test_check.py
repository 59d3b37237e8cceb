"""--check finds each fault that is planted in the hooks, names the hook, and has nothing to say against sound ones."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine import user_errors
from engine.check.check import check_task
from engine.check.measure import Measured
from engine.check.results import as_texts, differing_gradients
from engine.data import CompiledSteps
from engine.model import apply_gradients, gather_batch, places_in_batch, rows, sum_over_batch
from engine.model.global_batch import sum_over_replicas

Check = Callable[..., tuple[bool, list[str]]]
ORIGINAL = {name: getattr(task, name) for name in ("train_step", "create_metrics", "compute_loss")}
EXAMPLES, COMPILE_STEPS, UPDATE_METRICS = task.load_examples, train.compile_steps, task.update_metrics


def few_examples(split: str) -> tf.data.Dataset:
    return EXAMPLES(split).take(120)


def without_test(split: str) -> tf.data.Dataset | None:
    """Each split's steps are traced several times in a check, and a test's are those of a validation."""
    return None if split == "test" else few_examples(split)


def linear_model(*extra: keras.layers.Layer, regularizer: Any = None) -> keras.Model:
    dense = keras.layers.Dense(10, kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *extra, dense])


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks the shipped task with some hooks replaced and a small model; returns whether all pass, and the lines."""
    monkeypatch.setattr(task, "load_examples", without_test)
    monkeypatch.setattr(task, "create_model", linear_model)

    def run(hooks: dict[str, Any] | None = None, **settings: Any) -> tuple[bool, list[str]]:
        for name, hook in (hooks or {}).items():
            monkeypatch.setattr(train if name == "compile_steps" else task, name, hook)
        capsys.readouterr()
        passed = check_task(train, task, Config(**settings))
        lines = capsys.readouterr().out.splitlines()
        return passed, [line for line in lines if line.startswith(("ok ", "FAIL"))]

    return run


# --- Sound tasks ------------------------------------------------------------------------------------------------------


def assert_sound(checked: tuple[bool, list[str]], *, compared: bool = True) -> list[str]:
    passed, lines = checked
    assert any("on one replica and on two" in line for line in lines) == compared, "\n".join(lines)
    assert passed, "\n".join(lines)
    assert not [line for line in lines if line.startswith("FAIL")]
    return lines


def test_sound_task_is_left_as_it_is(check: Check, tmp_path: Path) -> None:
    before = {name: getattr(task, name) for name in ("load_examples", "create_optimizer")}
    lines = assert_sound(check(run_dir=tmp_path / "run"))
    assert any(line.endswith("validation changes nothing") for line in lines)
    assert {name: getattr(task, name) for name in before} == before
    assert not list(tmp_path.iterdir())


def model_of_many_layers() -> keras.Model:
    frozen = keras.Sequential([keras.layers.Dense(16), keras.layers.BatchNormalization()], name="backbone")
    frozen.trainable = False
    random = [keras.layers.Dropout(0.3), keras.layers.GaussianNoise(0.2), keras.layers.Dense(12)]
    synchronized = keras.layers.BatchNormalization(synchronized=True)
    return linear_model(frozen, *random, synchronized, regularizer=keras.regularizers.L2(0.1))


@pytest.mark.long
def test_options_an_odd_batch_and_layers_of_many_kinds_are_no_false_alarm(check: Check) -> None:
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
def test_table_that_a_step_reads_as_one_tensor_is_named(check: Check) -> None:
    def model_with_a_table() -> keras.Model:
        ids = [keras.layers.Reshape((64,)), keras.layers.Lambda(lambda pixels: tf.cast(pixels, tf.int32))]
        table = TableReadByKeras(rows.LARGE, 2, name="users")
        return keras.Sequential([keras.Input((8, 8, 1)), *ids, table, keras.layers.Flatten(), keras.layers.Dense(10)])

    hooks = {"create_model": model_with_a_table, "create_optimizer": lambda total_steps: keras.optimizers.SGD(0.1)}
    (line,) = [line for line in assert_sound(check(hooks)) if "as one tensor" in line]
    assert re.match(
        r"ok +task\.py train_step +the step reads the table sequential/users/embeddings as one tensor", line
    )


@pytest.mark.long
def test_batch_that_two_replicas_cannot_share_is_named_with_the_one_used(check: Check) -> None:
    (line,) = [line for line in assert_sound(check(global_batch_size=65)) if "--global-batch-size" in line]
    assert "65 can be shared equally by 1, 5, 13, 65 replicas; one replica and two are compared with 64" in line


@pytest.mark.long
def test_layers_that_cannot_be_switched_off_are_not_compared(check: Check) -> None:
    def flipping_model() -> keras.Model:
        return linear_model(keras.layers.Reshape((8, 8, 1)), keras.layers.RandomFlip(), keras.layers.Flatten())

    lines = assert_sound(check({"create_model": flipping_model}), compared=False)
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
def test_random_layers_inside_layers_are_no_false_alarm(check: Check) -> None:
    assert_sound(check({"create_model": model_with_random_layers_inside_layers}))


def several_datasets(split: str) -> Any:
    few = few_examples(split)
    return {"train": few, "validation": {"easy": few.take(50), "hard": few.skip(50).take(31)}, "test": None}[split]


class ByClass(keras.metrics.Metric):
    """Counts the examples of each class, and of those before it [10]."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = self.add_variable(shape=(10,), initializer="zeros", name="counts")

    def update_state(self, labels, weights):
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(labels, 10) * weights[:, None], axis=0))

    def result(self):
        return tf.cumsum(tf.convert_to_tensor(self.counts))


def metrics_by_class(split: str) -> dict[str, keras.metrics.Metric]:
    return {**ORIGINAL["create_metrics"](split), "by_class": ByClass()}


def update_by_class(*, weighted: bool) -> Callable[..., None]:
    def update_metrics(split, labels, predictions, per_example_loss, weights):
        UPDATE_METRICS(split, labels, predictions, per_example_loss, weights)
        task.metrics[split]["by_class"].update_state(labels, weights if weighted else tf.ones_like(weights))

    return update_metrics


DATASETS = {"load_examples": several_datasets, "create_metrics": metrics_by_class}


@pytest.mark.long
def test_datasets_no_test_and_metrics_by_class_are_no_false_alarm(check: Check) -> None:
    hooks = {**DATASETS, "update_metrics": update_by_class(weighted=True)}
    options = {"evaluation_batch_size": 25, "steps_per_epoch": 50, "validate_every_steps": 20}
    lines = assert_sound(check(hooks, monitor="validation/hard/by_class/3", monitor_direction="max", **options))
    text = "\n".join(lines)
    assert "train 120, validation/easy 50, validation/hard 31 examples of one structure" in text
    (same,) = [line for line in lines if "the same train/loss" in line]
    assert same.endswith("validation/hard/accuracy, train/by_class, validation/easy/by_class, validation/hard/by_class")
    assert "test changes nothing" not in text


@pytest.mark.long
def test_array_that_counts_padding_fails_once_for_each_dataset(check: Check) -> None:
    passed, lines = check({**DATASETS, "update_metrics": update_by_class(weighted=False)}, monitor="train/loss")
    found = [line for line in lines if "depends on examples of weight 0" in line]
    assert not passed
    assert [re.search(r"(\S+)/\d+ depends", line)[1] for line in found] == [
        *("train/by_class", "validation/easy/by_class", "validation/hard/by_class")
    ]


def test_dataset_whose_order_changes_is_named(check: Check) -> None:
    def shuffled(split: str) -> Any:
        found = several_datasets(split)
        return {**found, "hard": found["hard"].shuffle(50)} if split == "validation" else found

    passed, lines = check({"load_examples": shuffled}, monitor="train/loss")
    assert not passed
    assert "task.load_examples('validation') returned other examples the second time" in lines[-1]


@pytest.mark.long
def test_labels_that_only_the_loss_understands_are_no_false_alarm(check: Check) -> None:
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
    assert_sound(check(hooks))


# --- Planted faults ---------------------------------------------------------------------------------------------------


def average(per_example_loss: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.nn.compute_average_loss(
        per_example_loss, sample_weight=weights, global_batch_size=task.config.global_batch_size
    )


def label_losses(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return task.loss_objects["label"](labels, predictions)


def mean_reduced_loss():
    return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def divided_by_local_batch(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    return tf.reduce_mean(per_example_loss * weights), per_example_loss


def divided_twice(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, weights) / tf.distribute.get_strategy().num_replicas_in_sync, per_example_loss


def unscaled_regularization(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, weights) + tf.add_n(task.model.losses), per_example_loss


def rank_trap(labels, predictions, weights):
    per_example_loss = tf.abs(tf.cast(labels, tf.float32) - predictions[:, :1])  # [share] - [share, 1]
    return average(per_example_loss, weights), per_example_loss


def not_a_number(labels, predictions, weights):
    per_example_loss = tf.math.log(label_losses(labels, predictions) * 0.0 - 1.0)
    return average(per_example_loss, weights), per_example_loss


def infinite_gradient(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions) + tf.sqrt(tf.reduce_sum(predictions * 0.0, axis=1))
    return average(per_example_loss, weights), per_example_loss


def broken_features(features, labels, *, training):
    return tf.math.log(features - 1.0), labels


OUTSIDE = {}


def model_made_outside():
    return OUTSIDE["model"]


def metrics_made_outside(split):
    return OUTSIDE[split]


def counting_step(batch):
    OUTSIDE["counter"].assign_add(1)
    return ORIGINAL["train_step"](batch)


def model_with_a_spare_variable():
    class Spare(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = keras.layers.Dense(10), keras.layers.Dense(3, name="spare")

        def build(self, shape):
            self.used.build((None, 64))
            self.spare.build((None, 4))

        def call(self, features):
            return self.used(tf.reshape(features, [-1, 64]))

    return Spare()


def unsynchronized_model():
    return linear_model(keras.layers.BatchNormalization(name="bn"))


def metrics_of_the_scaled_loss(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(average(per_example_loss, weights))
    task.metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=weights)


def metrics_without_weights(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)
    task.metrics[split]["accuracy"].update_state(labels, predictions)


def evaluation_in_training_mode(split, batch):
    features, labels, weights = batch
    loss, per_example_loss = task.compute_loss(labels, task.model(features, training=True), weights)
    task.update_metrics(split, labels, task.model(features, training=True), per_example_loss, weights)
    return loss


def summed_twice(batch):
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        predictions = task.model(features, training=True)
        loss, per_example_loss = task.compute_loss(labels, predictions, weights)
    gradients = tape.gradient(loss, task.model.trainable_variables)
    gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
    task.update_metrics("train", labels, predictions, per_example_loss, weights)
    return loss


def labels_out_of_range(split):
    return few_examples(split).map(lambda features, label: (features, label + 1))


def negative_labels(split):
    return few_examples(split).map(lambda features, label: (features, label - 1))


def endless_examples(split):
    return few_examples(split).repeat()


def examples_of_unknown_length(split):
    return few_examples(split).filter(lambda features, label: True)


def reshuffled_examples(split):
    return few_examples(split).shuffle(100)


def rising_loss(total_steps):
    return keras.optimizers.SGD(-0.1)


class ClippingOptimizer(keras.optimizers.SGD):
    """Clips in its own apply, which gets the sum over the replicas from apply_gradients."""

    def apply(self, grads, trainable_variables=None):
        clipped, _ = tf.clip_by_global_norm(grads, 1e-3)
        return super().apply(clipped, trainable_variables)


class AveragingOptimizer(keras.optimizers.SGD):
    """Divides by the number of replicas in its own apply."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(averaged(grads), trainable_variables)


def averaged(gradients):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return [gradient / replicas for gradient in gradients]


class CountingSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Counts in Python how often it is traced."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.01 * self.calls


def noisy_loss(labels, predictions, weights):
    noise = 0.1 * tf.random.normal(tf.shape(predictions))
    return ORIGINAL["compute_loss"](labels, predictions + noise, weights)


def loss_with_numpy(labels, predictions, weights):
    noise = tf.numpy_function(lambda: np.random.normal(size=(1, 10)).astype("float32"), [], tf.float32)
    return ORIGINAL["compute_loss"](labels, predictions + tf.ensure_shape(noise, (1, 10)), weights)


def random_preparation(features, labels, *, training):
    return tf.image.random_flip_left_right(features) if training else features, labels


def preparation_with_numpy(features, labels, *, training):
    noise = tf.numpy_function(lambda: np.random.normal(size=(8, 8, 1)).astype("float32"), [], tf.float32)
    return features / 16.0 + tf.ensure_shape(noise, (8, 8, 1)), labels


class RunningMean(keras.layers.Layer):
    """Keeps a mean in a variable that Keras does not list."""

    def build(self, shape):
        self.mean = tf.Variable(tf.zeros(shape[1:]), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
        return inputs - self.mean


class AddedLoss(keras.layers.Layer):
    """Adds the sum over a replica's share to the loss, not the mean."""

    def call(self, inputs):
        self.add_loss(1e-3 * tf.reduce_sum(tf.square(inputs)))
        return inputs


def compile_without_signature(split, step):
    compiled = COMPILE_STEPS(split, step)
    without = CompiledSteps(tf.function(compiled.function.python_function))  # Each size of a stack is traced.
    without.__dict__["graph"] = compiled.graph
    return without


def unweighted_loss(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=task.config.global_batch_size)
    return loss, per_example_loss


def loss_of_masked_examples(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, tf.cast(weights > 0.0, tf.float32)), per_example_loss


def loss_weighted_twice(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions) * weights
    return average(per_example_loss, weights), per_example_loss


def loss_with_a_term_without_weights(labels, predictions, weights):
    """The second term depends on no label, as the divergence of a variational autoencoder."""
    per_example_loss = label_losses(labels, predictions)
    squares = tf.nn.compute_average_loss(
        tf.reduce_mean(predictions**2, axis=-1), global_batch_size=task.config.global_batch_size
    )
    return average(per_example_loss, weights) + squares, per_example_loss


def loss_without_regularization(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, weights), per_example_loss


def metrics_that_lack_one(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)


def metrics_of_the_training(split, labels, predictions, per_example_loss, weights):
    UPDATE_METRICS("train", labels, predictions, per_example_loss, weights)


class NeverReset(keras.metrics.Mean):
    def reset_state(self):
        pass


def metrics_without_reset(split):
    return {**ORIGINAL["create_metrics"](split), "loss": NeverReset()}


def negative_weights(split):
    return few_examples(split).map(lambda features, label: (features, label, -1.0))


READ = {}


def examples_that_change_later(split):
    """Yields the same examples twice, and others from the third time on."""

    def generate():
        READ[split] = READ.get(split, 0) + 1
        for features, label in few_examples(split).take(100).as_numpy_iterator():
            yield features + (READ[split] if READ[split] > 4 else 0), label

    signature = (tf.TensorSpec((8, 8, 1), tf.float32), tf.TensorSpec((), tf.int32))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(100))


def preparation_with_the_time(features, labels, *, training):
    return features / 16.0 + tf.cast(tf.timestamp() % 1.0, tf.float32), labels


def rate_from_the_loss(batch):
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        predictions = task.model(features, training=True)
        loss, per_example_loss = task.compute_loss(labels, predictions, weights)
    task.optimizer.learning_rate.assign(0.01 * loss)
    apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables)
    task.update_metrics("train", labels, predictions, per_example_loss, weights)
    return loss


def plain_rate(total_steps):
    return keras.optimizers.SGD(0.1)


def rate_from_the_step(batch):
    task.optimizer.learning_rate.assign(0.01 / (1.0 + tf.cast(task.optimizer.iterations, tf.float32)))
    return ORIGINAL["train_step"](batch)


def loss_wrong_for_padding(labels, predictions, weights):
    """The gradient of a padded batch, and of no other, depends on the replica's batch; the loss does not."""
    per_example_loss = label_losses(labels, predictions)
    filled = tf.reduce_mean(weights)
    grown = predictions * filled + tf.stop_gradient(predictions * (1.0 - filled))
    return average(label_losses(labels, grown), weights), per_example_loss


def frozen_model():
    model = linear_model()
    model.trainable = False
    return model


def absolute_error(labels, predictions, weights):
    errors = keras.losses.MeanAbsoluteError(reduction="none")(tf.one_hot(labels, 10), predictions)
    return average(errors, weights), errors


def labels_as_texts(features, labels):
    return features / 16.0, tf.strings.as_string(labels)


L2 = keras.regularizers.L2(0.1)

# --- Losses across the batch, and random numbers in a step ------------------------------------------------------------


def count_even(features, labels, weights):
    """Counts the examples that a term is for."""
    return tf.reduce_sum(tf.cast(labels % 2 == 0, "float32") * weights)


def loss_of_even_labels(denominator: Callable[..., tf.Tensor], divide: Callable[..., tf.Tensor]) -> Callable:
    """Returns a loss that only the examples with an even label have, as a mean over these."""

    def compute_loss(labels, predictions, weights):
        per_example_loss = label_losses(labels, predictions) * tf.cast(labels % 2 == 0, "float32")
        total = denominator(labels, weights)
        return divide(tf.reduce_sum(per_example_loss * weights), total), per_example_loss

    return compute_loss


def even_of_replica(labels, weights):
    return count_even(None, labels, weights) * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, "float32")


def even_of_micro_batch(labels, weights):
    (total,) = sum_over_replicas([count_even(None, labels, weights)])
    return total


def even_of_batch(labels, weights):
    return sum_over_batch(count_even)


def contrastive(gather: Callable[..., tf.Tensor], places: Callable[..., tf.Tensor]) -> Callable:
    """Returns a step whose loss compares each example with all others, as in SimCLR; a brighter image is its pair."""

    def train_step(batch):
        features, labels, weights = batch
        with tf.GradientTape() as tape:
            one = tf.math.l2_normalize(task.model(features, training=True), axis=1)
            other = tf.math.l2_normalize(task.model(features + 0.1, training=True), axis=1)
            is_padding = gather(weights) == 0.0
            similar = 5.0 * one @ tf.transpose(gather(other)) - 1e9 * tf.cast(is_padding, "float32")
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places(weights), similar)
            loss = average(losses, weights)
        apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables)
        task.update_metrics("train", labels, one, losses, weights)
        return loss

    return train_step


def of_the_replica(values):
    return values


def with_padding(values):
    """Gathers sample weights as if all examples counted."""
    return tf.ones_like(gather_batch(values)) if values.shape.rank == 1 else gather_batch(values)


def token_model():
    layers = [keras.layers.Reshape((8, 8)), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def tokens(features, labels):
    return features / 16.0, tf.cast(features[:, 4, 0] // 4.0, tf.int32)


def loss_of_tokens(labels, predictions, weights):
    """Divides by the tokens of the replica, most of which exist: two replicas have almost twice the loss."""
    token_losses = label_losses(labels, predictions)
    token_weights = tf.cast(labels != 0, tf.float32) * weights[:, None]
    total = tf.reduce_sum(token_losses * token_weights)
    return tf.math.divide_no_nan(total, tf.reduce_sum(token_weights)), token_losses


def metrics_of_tokens(split, labels, predictions, token_losses, weights):
    token_weights = tf.cast(labels != 0, tf.float32) * weights[:, None]
    task.metrics[split]["loss"].update_state(token_losses, sample_weight=token_weights)
    task.metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=token_weights)


def own_places(values):
    return tf.range(tf.shape(values)[0])


def regularized(labels, predictions, weights):
    """Is right without micro-batches."""
    per_example_loss = label_losses(labels, predictions)
    return average(per_example_loss, weights) + tf.nn.scale_regularization_loss(task.model.losses), per_example_loss


def two_models():
    """Returns two models whose variables have equal paths."""

    def model() -> keras.Model:
        layers = [keras.layers.Flatten(), keras.layers.Dense(10, name="dense")]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers], name="sequential")

    return {"one": model(), "other": model()}


def step_of_the_first(batch):
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        predictions = task.model["one"](features, training=True)
        per_example_loss = label_losses(labels, predictions)
        loss = average(per_example_loss, weights)
    apply_gradients(task.optimizer, tape, loss, task.model["one"].trainable_variables)
    task.update_metrics("train", labels, predictions, per_example_loss, weights)
    return loss


def evaluation_of_the_first(split, batch):
    features, labels, weights = batch
    predictions = task.model["one"](features, training=False)
    per_example_loss = label_losses(labels, predictions)
    task.update_metrics(split, labels, predictions, per_example_loss, weights)
    return average(per_example_loss, weights)


def noisy_step(noise: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    def train_step(batch):
        features, labels, weights = batch
        return ORIGINAL["train_step"]((features + noise(features), labels, weights))

    return train_step


def noise_of_the_step(features):
    """Is the same on all replicas, whose examples are others."""
    return tf.random.stateless_normal(tf.shape(features), tf.stack([task.optimizer.iterations.value, 0]))


def noise_of_the_example(features):
    seeds = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.reduce_sum(features, [1, 2, 3])), 2**31 - 1)
    return tf.map_fn(
        lambda seed: tf.random.stateless_normal(features.shape[1:], tf.stack([seed, 0])),
        seeds,
        fn_output_signature=tf.float32,
    )


def noisy_evaluation(noise: Callable[[tf.Tensor], tf.Tensor]) -> Callable:
    original = task.evaluation_step

    def evaluation_step(split, batch):
        features, labels, weights = batch
        return original(split, (features + noise(features), labels, weights))

    return evaluation_step


class Sampling(keras.layers.Layer):
    """Adds noise in training and in evaluation, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(0)

    def call(self, inputs):
        return inputs + keras.random.normal(tf.shape(inputs), seed=self.seed)


FAULTS = {
    "mean-reduced loss": (
        {"create_loss_objects": mean_reduced_loss},
        "task.py create_loss_objects",
        "use reduction='none'",
    ),
    "local batch": ({"compute_loss": divided_by_local_batch}, "task.py compute_loss", "by config.global_batch_size"),
    "divided twice": ({"compute_loss": divided_twice}, "task.py compute_loss", "a second time"),
    "regularization": (
        {"compute_loss": unscaled_regularization, "create_model": lambda: linear_model(regularizer=L2)},
        "task.py compute_loss",
        "tf.nn.scale_regularization_loss",
    ),
    "optimizer with use_ema": (
        {"create_optimizer": lambda total_steps: keras.optimizers.SGD(0.1, use_ema=True)},
        "task.py create_optimizer",
        "use --ema-decay",
    ),
    "model outside the scope": ({"create_model": model_made_outside}, "task.py create_model", "outside"),
    "optimizer outside the scope": (
        {"create_optimizer": lambda total_steps: OUTSIDE["optimizer"]},
        "task.py create_optimizer",
        "outside",
    ),
    "metric outside the scope": ({"create_metrics": metrics_made_outside}, "task.py create_metrics", "outside"),
    "variable outside the scope": ({"train_step": counting_step}, "task.py train_step", "steps_seen"),
    "no gradient": (
        {"create_model": model_with_a_spare_variable},
        "task.py train_step",
        "spare/kernel and 1 more get no gradient",
    ),
    "rank trap": ({"compute_loss": rank_trap}, "task.py compute_loss", "(32, 32)"),
    "NaN loss": ({"compute_loss": not_a_number}, "task.py compute_loss", "the loss is nan"),
    "NaN gradient": ({"compute_loss": infinite_gradient}, "task.py compute_loss", "is not finite"),
    "NaN features": ({"prepare_example": broken_features}, "task.py prepare_example", "not finite"),
    "labels too high": ({"load_examples": labels_out_of_range}, "task.py load_examples", "labels from"),
    "labels too low": ({"load_examples": negative_labels}, "task.py load_examples", "labels from -1"),
    "unsynchronized BatchNorm": ({"create_model": unsynchronized_model}, "task.py create_model", "'bn'"),
    "scaled metric": ({"update_metrics": metrics_of_the_scaled_loss}, "task.py update_metrics", "train/loss is"),
    "training in validation": (
        {
            "evaluation_step": evaluation_in_training_mode,
            "create_model": lambda: linear_model(keras.layers.Dropout(0.3)),
        },
        "task.py evaluation_step",
        "training=False",
    ),
    "unweighted metric": ({"update_metrics": metrics_without_weights}, "task.py update_metrics", "padding"),
    "own sum": ({"train_step": summed_twice}, "task.py train_step", "without a sum of your own"),
    "endless": ({"load_examples": endless_examples}, "task.py load_examples", "endless examples"),
    "unknown length": ({"load_examples": examples_of_unknown_length}, "task.py load_examples", "unknown number"),
    "unordered": ({"load_examples": reshuffled_examples}, "task.py load_examples", "the second time"),
    "averaging in apply": (
        {"create_optimizer": lambda total_steps: AveragingOptimizer(0.1)},
        "task.py create_optimizer",
        "the gradients agree",
    ),
    "schedule that counts": (
        {"create_optimizer": lambda total_steps: keras.optimizers.SGD(CountingSchedule())},
        "task.py create_optimizer",
        "the gradients agree",
    ),
    "tf.random in the step": (
        {"compute_loss": noisy_loss},
        "task.py train_step",
        "RandomStandardNormal (test_check.py:",
    ),
    "NumPy in the step": ({"compute_loss": loss_with_numpy}, "task.py train_step", "PyFunc (test_check.py:"),
    "tf.image.random": (
        {"prepare_example": random_preparation},
        "task.py prepare_example",
        "tf.image.stateless_random_*",
    ),
    "NumPy in prepare_example": (
        {"prepare_example": preparation_with_numpy},
        "task.py prepare_example",
        "np.random.default_rng(np.abs(seed))",
    ),
    "each replica's mean": (
        {"create_model": lambda: linear_model(RunningMean())},
        "task.py create_model",
        "running_mean/Variable, which is per-replica",
    ),
    "gradient of a padded batch": (
        {"compute_loss": loss_wrong_for_padding},
        "task.py train_step",
        "the loss agrees, and the gradient of",
    ),
    "added loss": (
        {"create_model": lambda: linear_model(AddedLoss())},
        "task.py compute_loss",
        "add_loss adds a sum over one replica's batch",
    ),
    "steps that are traced again": (
        {"compile_steps": compile_without_signature},
        "train.py compile_steps",
        "steps were traced more than once",
    ),
    "rising loss": ({"create_optimizer": rising_loss}, "task.py create_optimizer", "it must fall"),
    "loss without sample weights": (
        {"compute_loss": unweighted_loss},
        "task.py compute_loss",
        "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights",
    ),
    "loss that only masks": (
        {"compute_loss": loss_of_masked_examples},
        "task.py compute_loss",
        "the same with sample weights of 1 and of 0.5",
    ),
    "term without weights": (
        {"compute_loss": loss_with_a_term_without_weights},
        "task.py compute_loss",
        "the loss depends on examples of weight 0",
    ),
    "loss weighted twice": (
        {"compute_loss": loss_weighted_twice},
        "task.py compute_loss",
        "once, not twice",
    ),
    "regularizer that is not added": (
        {"compute_loss": loss_without_regularization, "create_model": lambda: linear_model(regularizer=L2)},
        "task.py compute_loss",
        "dense/kernel: add tf.nn.scale_regularization_loss(model.losses)",
    ),
    "activity regularizer that is not added": (
        {
            "compute_loss": loss_without_regularization,
            "create_model": lambda: linear_model(keras.layers.ActivityRegularization(l2=0.1, name="activity")),
        },
        "task.py compute_loss",
        "does not contain the regularization of activity",
    ),
    "metric that is never updated": (
        {"update_metrics": metrics_that_lack_one},
        "task.py update_metrics",
        "train/accuracy is never updated",
    ),
    "metrics of another split": (
        {"update_metrics": metrics_of_the_training},
        "task.py update_metrics",
        "the validation steps update metrics['train']['loss']: update metrics['validation'] there",
    ),
    "metric that is never reset": (
        {"create_metrics": metrics_without_reset},
        "task.py create_metrics",
        "reset_state of train/loss",
    ),
    "sample weights below 0": (
        {"load_examples": negative_weights},
        "task.py load_examples",
        "returned a sample weight of -1",
    ),
    "examples that change later": (
        {"load_examples": examples_that_change_later},
        "task.py load_examples",
        "returned other examples the second time",
    ),
    "the time in prepare_example": (
        {"prepare_example": preparation_with_the_time},
        "task.py prepare_example",
        "draws different numbers after a resume: take the parameter `seed`",
    ),
    "learning rate of one replica's loss": (
        {"train_step": rate_from_the_loss, "create_optimizer": plain_rate},
        "task.py train_step",
        "assigns a value of one replica to optimizer/learning_rate",
    ),
    "frozen model": ({"create_model": frozen_model}, "task.py create_model", "trainable"),
    "texts as labels": ({"prepare_example": labels_as_texts}, "task.py prepare_example", "map them to numbers"),
    "prediction of a batch": (
        {"predict_step": lambda features: {"mean": tf.reduce_mean(task.model(features))}},
        "task.py predict_step",
        "return a row for each example",
    ),
    "softmax of one number": (
        {"predict_step": lambda features: {"probability": tf.nn.softmax(task.model(features)[:, :1])}},
        "task.py predict_step",
        "use a sigmoid",
    ),
    "mean over the examples of a replica that have a term": (
        {"compute_loss": loss_of_even_labels(even_of_replica, tf.math.divide_no_nan)},
        "task.py compute_loss",
        "which a sum of engine.model.sum_over_batch makes right",
    ),
    "mean over the examples of a micro-batch that have a term": (
        {"compute_loss": loss_of_even_labels(even_of_micro_batch, tf.math.divide_no_nan)},
        "task.py compute_loss",
        "--micro-batches 2 alone changes it: it is",
    ),
    "mean over the tokens of a replica": (
        {"compute_loss": loss_of_tokens, "create_model": token_model, "update_metrics": metrics_of_tokens}
        | {"predict_step": lambda features: {"logits": task.model(features)}, "prepare_example": tokens},
        "task.py compute_loss",
        "which a sum of engine.model.sum_over_batch makes right",
    ),
    "division by 0 on a replica of padding": (
        {"compute_loss": loss_of_even_labels(even_of_replica, tf.divide)},
        "task.py compute_loss",
        "divide with tf.math.divide_no_nan",
    ),
    "negatives of the replica": (
        {"train_step": contrastive(of_the_replica, own_places)},
        "task.py compute_loss",
        "not with the result of engine.model.gather_batch",
    ),
    "padding among the negatives": (
        {"train_step": contrastive(with_padding, places_in_batch)},
        "task.py compute_loss",
        "mask them in a loss that uses engine.model.gather_batch",
    ),
    "regularization of each micro-batch": (
        {"compute_loss": regularized, "create_model": lambda: linear_model(regularizer=L2)},
        "task.py compute_loss",
        "--micro-batches 2 alone changes it: the regularization is added in each micro-batch",
    ),
    "network that is never trained": (
        {"create_model": two_models, "train_step": step_of_the_first, "evaluation_step": evaluation_of_the_first}
        | {"predict_step": lambda features: {"logits": task.model["one"](features)}},
        "task.py train_step",
        "sequential/dense/kernel and 1 more get no gradient",
    ),
    "random numbers from the step's number": (
        {"train_step": noisy_step(noise_of_the_step)},
        "task.py train_step",
        "draw them from a seed of each example, see docs/steps.md",
    ),
    "random numbers from the step's number in evaluation": (
        {"evaluation_step": noisy_evaluation(noise_of_the_step)},
        "task.py evaluation_step",
        "draw them from a seed of each example, see docs/steps.md",
    ),
}


OPTIONS = {
    "gradient of a padded batch": {"keep_last_batch": True},
    "mean over the examples of a micro-batch that have a term": {"micro_batches": 2},
    "regularization of each micro-batch": {"micro_batches": 2},
}


# A whole check takes seconds, and these faults do not hide each other.
TOGETHER = [
    ("local batch", "training in validation", "unsynchronized BatchNorm", "rising loss"),
    ("divided twice", "unweighted metric", "no gradient", "prediction of a batch"),
    ("scaled metric", "own sum", "softmax of one number"),
    ("added loss", "steps that are traced again"),
]
ALONE = [(fault,) for fault in FAULTS if not any(fault in group for group in TOGETHER)]
# What finds them finds another fault above, at the price of a whole check.
LONG = [
    ("schedule that counts",),
    ("NumPy in the step",),
    ("loss that only masks",),
    ("loss weighted twice",),
    ("term without weights",),
    ("activity regularizer that is not added",),
    ("metrics of another split",),
    ("metric that is never reset",),
    ("examples that change later",),
    ("division by 0 on a replica of padding",),
    ("random numbers from the step's number in evaluation",),
    ("regularization of each micro-batch",),
    ("network that is never trained",),
]
PLANTED = [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in (*TOGETHER, *ALONE)]


@pytest.mark.parametrize("faults", PLANTED, ids=", ".join)
def test_planted_fault_is_found_and_the_hook_named(faults: tuple[str, ...], check: Check) -> None:
    OUTSIDE["model"] = linear_model()
    OUTSIDE["optimizer"] = keras.optimizers.SGD(0.1)
    OUTSIDE.update({split: ORIGINAL["create_metrics"](split) for split in train.SPLITS})
    READ.clear()
    OUTSIDE["counter"] = tf.Variable(0, name="steps_seen")
    planted = [FAULTS[fault] for fault in faults]
    options = OPTIONS.get(faults[0], {})
    passed, lines = check({name: hook for hooks, _, _ in planted for name, hook in hooks.items()}, **options)
    lines = [line for line in lines if line.startswith("FAIL")]
    assert not passed
    for _, where, text in planted:
        assert any(line.split("  ")[1] == where and text in line for line in lines), "\n".join(lines)
    # One cause does not show as many.
    assert {line.split("  ")[1] for line in lines} == {where for _, where, _ in planted}, "\n".join(lines)


def mean_over_the_real_examples(labels, predictions, weights):
    """Is right for full batches, and for one replica."""
    per_example_loss = label_losses(labels, predictions)
    mean = tf.math.divide_no_nan(tf.reduce_sum(per_example_loss * weights), tf.reduce_sum(weights))
    return mean / tf.distribute.get_strategy().num_replicas_in_sync, per_example_loss


def test_fault_that_one_batch_shows_is_found_by_its_loss(check: Check) -> None:
    passed, lines = check({"compute_loss": mean_over_the_real_examples}, keep_last_batch=True)
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    one, two = map(
        float, re.search(r"task\.py compute_loss +the loss is (\S+) on one replica and (\S+) on two", line).groups()
    )
    assert one != two


def test_padding_of_one_replica_is_tried_where_no_batch_has_it(check: Check) -> None:
    passed, lines = check({"compute_loss": mean_over_the_real_examples})
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert "the loss of a batch whose second half is padding is" in line
    assert "divide by a sum of engine.model.sum_over_batch" in line


def test_gradient_that_differs_with_weights_nearby_too_is_a_fault_and_else_rounding() -> None:
    def measured(gradients: list[float], nearby: list[float]) -> Measured:
        at, near = ([{"kernel": np.array([each, 1.0])} for each in gradients] for gradients in (gradients, nearby))
        rest: dict[str, Any] = {field.name: [] for field in dataclasses.fields(Measured)}
        return Measured(**{**rest, "batches": at, "nearby": near, "rounding": {"kernel": 0.0}})

    one = measured([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.5, 3.6])) == ["kernel"]
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.5, 3.5])) == []
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.6, 3.5])) == []
    assert differing_gradients(one, measured([1.0, 2.0, 3.000003], [1.5, 2.5, 3.500003])) == []


@pytest.mark.long
def test_unsynchronized_layers_are_one_fault_with_micro_batches_too(check: Check) -> None:
    def model() -> keras.Model:
        return linear_model(*(keras.layers.BatchNormalization(name=name) for name in ("first", "second")))

    passed, lines = check({"create_model": model}, micro_batches=2)
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert "the statistics of 'first', 'second' are of one replica's batch" in line
    assert any("the same gradients of" in line for line in lines)


def loss_of_classes_that_there_are_none(labels, predictions, weights):
    per_example_loss = label_losses(labels, predictions) * tf.cast(tf.gather(tf.ones([3]), labels), tf.float32)
    return average(per_example_loss, weights), per_example_loss


@pytest.mark.parametrize(
    ("hooks", "where", "said"),
    [
        (
            {"create_model": lambda: linear_model(keras.layers.Reshape((7, 7)))},
            "linear_model",
            "raised ValueError: The total",
        ),
        ({"create_loss_objects": dict}, "label_losses", "raised KeyError: 'label'"),
        ({}, "loss_of_classes_that_there_are_none", "raised InvalidArgumentError: indices["),
    ],
    ids=["when it is called", "while it is traced", "while it runs"],
)
def test_exception_in_a_hook_is_named_by_line_with_what_it_says(
    hooks: dict, where: str, said: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_errors, "PROJECT", Path(__file__).parent)
    passed, lines = check({"compute_loss": loss_of_classes_that_there_are_none, **hooks})
    assert not passed
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert re.match(rf"FAIL  test_check\.py:\d+ {where}  {re.escape(said)}", line), line


# --- The right forms of planted faults, and lines that are no faults --------------------------------------------------


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
def test_right_form_is_no_false_alarm(hooks: dict[str, Any], check: Check) -> None:
    lines = assert_sound(check(hooks, keep_last_batch=True))
    assert not any("its gradient jumps" in line for line in lines)


def test_sum_over_the_batch_is_right_with_micro_batches(check: Check) -> None:
    loss = loss_of_even_labels(even_of_batch, tf.math.divide_no_nan)
    assert_sound(check({"compute_loss": loss}, micro_batches=2, keep_last_batch=True))


@pytest.mark.parametrize("in_training", [True, pytest.param(False, marks=pytest.mark.long)])
def test_draws_of_a_seed_generator_in_evaluation_are_named(check: Check, in_training: bool) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.sampling = linear_model(), Sampling()

        def call(self, features, training=None):
            outputs = self.dense(features)
            return outputs if training and not in_training else self.sampling(outputs)

    lines = assert_sound(check({"create_model": Model}), compared=not in_training)
    (line,) = [line for line in lines if "random in validation" in line]
    assert "sampling: draw from a seed of each example, see docs/steps.md" in line


@pytest.mark.long
def test_regularization_that_cannot_be_checked_is_said(check: Check) -> None:
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
def test_loss_whose_gradient_jumps_is_named(loss: Callable, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [line for line in assert_sound(check({"compute_loss": loss})) if "its gradient jumps" in line]
    assert re.match(rf"ok    task\.py compute_loss +its gradient jumps \(test_check\.py:\d+ {loss.__name__}\)", line)


def test_draws_of_a_seed_generator_in_the_loss_are_named(check: Check) -> None:
    def create_loss_objects() -> dict[str, Any]:
        OUTSIDE["seed"] = keras.random.SeedGenerator(0)
        return {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")}

    def noisy(labels, predictions, weights):
        noise = 0.1 * keras.random.normal(tf.shape(predictions), seed=OUTSIDE["seed"])
        return ORIGINAL["compute_loss"](labels, predictions + noise, weights)

    hooks = {"create_loss_objects": create_loss_objects, "compute_loss": noisy}
    lines = assert_sound(check(hooks), compared=False)
    (line,) = [line for line in lines if "random in training" in line]
    assert re.search(r"the generator \S*seed_generator_state\S* \(test_check\.py:\d+ noisy\)$", line)


@pytest.mark.long
def test_small_epsilon_is_named_where_updates_differ(check: Check) -> None:
    class Clipping(keras.optimizers.Adam):
        def apply(self, grads, trainable_variables=None):
            clipped, _ = tf.clip_by_global_norm(grads, 1e-6)
            return super().apply(averaged(clipped), trainable_variables)

    for options, is_named in (({}, True), ({"epsilon": 1e-5}, False)):
        passed, lines = check({"create_optimizer": lambda total_steps, options=options: Clipping(0.01, **options)})
        assert not passed
        (line,) = [line for line in lines if line.startswith("FAIL")]
        assert ("pass epsilon=1e-5" in line) == is_named


def test_numbers_are_written_with_the_digits_that_differ() -> None:
    assert as_texts(0.5, 2.0) == ("0.5", "2")
    assert as_texts(0.9956181, 0.9956183) == ("0.9956181", "0.9956183")
    assert as_texts(0.1, 0.1) == ("0.1", "0.1")
