"""Models, optimizers and metrics of unusual kinds work on one replica and on two, or are refused by name."""

import csv
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
from engine.errors import BadInput
from engine.model.build import TaskObjects, build_models, build_optimizers
from engine.model.metrics import ResultNames
from engine.model.rejections import monitor_direction
from engine.model.variables import model_variables

LOAD_EXAMPLES = task.load_examples


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "load_examples", lambda split: LOAD_EXAMPLES(split).take(45))
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features, labels))


def linear_model() -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])


# --- Metrics ----------------------------------------------------------------------------------------------------------


class Total(keras.metrics.Metric):
    """The sum of the predictions; its result is the variable itself."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.total = self.add_variable(shape=(), initializer="zeros", name="total", **options)

    def update_state(self, labels, predictions, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(predictions * sample_weight[:, None]))

    def result(self):
        return self.total


class TotalOfTensorFlow(Total):
    """Has a variable of TensorFlow's own, and says so."""

    def __init__(self) -> None:
        keras.metrics.Metric.__init__(self)
        on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        self.total = tf.Variable(0.0, trainable=False, name="total", **on_read)

    @property
    def variables(self):
        return [self.total]


class HalfLate(Total):
    """Makes one of its variables with the first update, as R2Score does; says so as that does."""

    _built = False

    def update_state(self, labels, predictions, sample_weight=None):
        if not self._built:
            self.of_class = self.add_variable(shape=(10,), initializer="zeros", name="of_class")
            self._built = True
        self.of_class.assign(self.of_class + tf.reduce_sum(predictions * sample_weight[:, None], axis=0))

    def result(self):
        return tf.reduce_sum(self.of_class) + self.total


class Constant(Total):
    def result(self):
        return 0.25


METRICS = {
    "variable": Total,
    "tensorflow": TotalOfTensorFlow,
    "half_late": HalfLate,
    "constant": Constant,
    "r2": keras.metrics.R2Score,
    "many_areas": lambda: keras.metrics.AUC(num_thresholds=10, multi_label=True),
    "f1": lambda: keras.metrics.F1Score(average="macro"),
}


def with_metrics(monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Callable[[], keras.metrics.Metric]]) -> None:
    """Adds metrics to those of training and validation."""

    def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
        created = {} if split == "test" else metrics
        return {"loss": keras.metrics.Mean(), **{name: create() for name, create in created.items()}}

    def update_metrics(split, labels, predictions, per_example_loss, weights) -> None:
        loss, *others = task.metrics[split].values()
        loss.update_state(per_example_loss, sample_weight=weights)
        for metric in others:
            metric.update_state(tf.one_hot(labels, 10), tf.nn.softmax(predictions), sample_weight=weights)

    monkeypatch.setattr(task, "update_metrics", update_metrics)
    monkeypatch.setattr(task, "create_metrics", create_metrics)


def test_metrics_of_every_kind_agree_on_one_replica_and_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with_metrics(monkeypatch, METRICS)
    results = []
    for replicas in (1, 2):
        train.build(Config(simulated_devices=replicas, global_batch_size=20))
        results.append(train.validate())
        assert train.validate() == results[-1]  # They were reset.
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    # Each example's probabilities add up to one, and there are 45 of them.
    totals = {name: results[1][f"validation/{name}"] for name in ("variable", "tensorflow", "half_late", "constant")}
    assert totals == pytest.approx({"variable": 45, "tensorflow": 45, "half_late": 45, "constant": 0.25}, rel=1e-5)
    own = train.run.checkpoints.state.per_replica
    assert {"metrics/train/half_late/half_late/of_class", "metrics/train/r2/r2_score/sum"} <= set(own)
    assert any(name.startswith("metrics/train/tensorflow/total") for name in own)


def test_metric_that_cannot_be_read_on_two_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_metrics(monkeypatch, {"total": lambda: Total(aggregation="none")})
    train.build(Config(simulated_devices=1, global_batch_size=20))
    with pytest.raises(BadInput, match=r"task.create_metrics\('train'\) returned 'total', whose variable total/total"):
        train.build(Config(simulated_devices=2, global_batch_size=20))


# --- Models -----------------------------------------------------------------------------------------------------------


class WithHelpers(keras.Model):
    """Has layers that are called in training only, besides some that change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.normalization = keras.layers.BatchNormalization(synchronized=True)
        self.dropout = keras.layers.Dropout(0.5)
        self.classes = keras.layers.Dense(10)
        self.helpers = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(10)])

    def call(self, features, training=False):
        features = self.normalization(self.flatten(features), training=training)
        predictions = self.classes(self.dropout(features, training=training))
        return predictions + self.helpers(features) if training else predictions


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_called_in_training_only_are_trained(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def create_model() -> keras.Model:
        model = WithHelpers()
        made.append(model.dropout.seed_generator.state.numpy())
        return model

    monkeypatch.setattr(task, "create_model", create_model)
    train.build(Config(simulated_devices=replicas, global_batch_size=20))
    values = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    helpers = [name for name in values if "/sequential/" in name]
    assert len(helpers) == 4
    assert set(helpers) <= set(train.run.checkpoints.state.mirrored)
    # To build them drew nothing and measured nothing.
    (seed,) = [name for name in values if "seed_generator_state" in name]
    np.testing.assert_array_equal(values[seed], made[0])
    (mean,) = [name for name in values if name.endswith("moving_mean")]
    assert not values[mean].any()

    train.train_epoch(0)
    after = model_variables(task.model)
    assert all(np.any(after[name].numpy() != values[name]) for name in helpers if name.endswith("kernel"))


class Masked(keras.Model):
    """Normalizes some rows of an image only."""

    def __init__(self) -> None:
        super().__init__()
        self.normalization = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
        self.classes = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])

    def call(self, features, training=False):
        rows = features[..., 0]
        return self.classes(self.normalization(rows, training=training, mask=rows[..., 3] > 8))


def test_synchronized_normalization_with_a_mask_counts_the_rows_of_all_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task, "create_model", Masked)
    found = []
    for replicas in (1, 2, 4):
        train.build(Config(simulated_devices=replicas, global_batch_size=20))
        metrics = train.train_epoch(0) | train.validate()
        mean = task.model.normalization.moving_mean.value
        for each in train.strategy.experimental_local_results(mean):
            np.testing.assert_array_equal(each.numpy(), mean.numpy())
        found.append((metrics, {name: each.numpy() for name, each in model_variables(task.model).items()}))
    for metrics, weights in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-5)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, found[0][1][name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_synchronized_variance_is_right_far_from_0(replicas: int) -> None:
    rows = np.random.default_rng(0).normal(1e4, 10.0, (20, 3, 5)).astype(np.float32)
    mask = rows[..., 0] > 1e4
    train.build(Config(simulated_devices=replicas, global_batch_size=20))
    with train.strategy.scope():
        plain, masked = (keras.layers.BatchNormalization(synchronized=True, momentum=0.0) for _ in range(2))
        plain.build(rows.shape)
        masked.build(rows.shape)

    @tf.function
    def normalize() -> None:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = slice(index * 20 // replicas, (index + 1) * 20 // replicas)
        plain(tf.constant(rows)[own], training=True)
        masked(tf.constant(rows)[own], training=True, mask=tf.constant(mask)[own])

    train.strategy.run(normalize)
    exact = rows.astype(np.float64)
    for layer, counted in ((plain, exact.reshape(-1, 5)), (masked, exact[mask])):
        np.testing.assert_allclose(layer.moving_mean.numpy(), counted.mean(0), rtol=1e-6)
        np.testing.assert_allclose(layer.moving_variance.numpy(), counted.var(0), rtol=1e-5)


# --- Optimizers -------------------------------------------------------------------------------------------------------


def several(bias: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.25, name="weights"), {".*bias": bias})
    )


class Silent(keras.optimizers.SGD):
    @property
    def learning_rate(self):
        raise RuntimeError("there are several")


def learning_rates(optimizer: Any) -> dict[str, float]:
    return TaskObjects(None, optimizer, *[None] * 8).learning_rates()


def test_each_learning_rate_has_its_column() -> None:
    sgd, adam = keras.optimizers.SGD(0.25), keras.optimizers.Adam(0.5)
    assert learning_rates(sgd) == {"learning_rate": 0.25}
    assert learning_rates({"a": sgd, "b": adam}) == {"learning_rate/a": 0.25, "learning_rate/b": 0.5}
    both = several(keras.optimizers.Adam(0.5, name="biases"))
    assert learning_rates(both) == {"learning_rate/weights": 0.25, "learning_rate/biases": 0.5}
    assert learning_rates(keras.optimizers.LossScaleOptimizer(both)) == learning_rates(both)
    assert learning_rates({"a": both, "b": sgd}) == {
        "learning_rate/a/weights": 0.25,
        "learning_rate/a/biases": 0.5,
        "learning_rate/b": 0.25,
    }
    assert learning_rates(Silent(0.25)) == {}
    assert learning_rates({"a": Silent(0.25), "b": sgd}) == {"learning_rate/b": 0.25}


def test_several_optimizers_in_one_train_and_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: several(keras.optimizers.Adam(0.5, name="bias")))
    results = [
        train.main([f"--run-dir={tmp_path / str(replicas)}", "--epochs=1", f"--simulated-devices={replicas}"])
        for replicas in (1, 2)
    ]
    assert results[1]["test/loss"] == pytest.approx(results[0]["test/loss"], rel=1e-5)
    with (tmp_path / "2" / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["learning_rate/weights"], row["learning_rate/bias"]) == ("0.25", "0.5")
    assert "learning_rate" not in row
    assert {"optimizer/bias/iteration", "optimizer/weights/iteration"} <= set(train.run.checkpoints.state.mirrored)


def test_optimizer_that_averages_is_refused_inside_another() -> None:
    with pytest.raises(BadInput, match=r"an optimizer with use_ema=True, which is wrong on several replicas"):
        build_optimizers(several(keras.optimizers.Adam(use_ema=True)), linear_model(), "float32")


@pytest.mark.parametrize(
    ("name", "metric", "direction"),
    [
        ("loss", keras.metrics.Mean, "min"),
        ("mae", keras.metrics.MeanAbsoluteError, "min"),
        ("accuracy", keras.metrics.SparseCategoricalAccuracy, "max"),
        ("anything", keras.metrics.AUC, "max"),
        ("wer", keras.metrics.Mean, None),
    ],
)
def test_direction_is_the_one_that_keras_knows(name: str, metric: type, direction: str | None) -> None:
    names, monitor = ResultNames({"validation": {name: metric()}}, ["validation"]), f"validation/{name}"
    assert monitor_direction(names, monitor, "max") == "max"
    if direction:
        assert monitor_direction(names, monitor, "auto") == direction
        return
    with pytest.raises(BadInput, match=r"--monitor validation/wer: .* pass --monitor-direction min or max"):
        monitor_direction(names, monitor, "auto")


def test_encoder_that_a_step_calls_on_each_of_two_views_is_left_as_it_is() -> None:
    views = {name: tf.TensorSpec([4, 3]) for name in ("one", "other")}
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert build_models(encoder, views) is encoder
    with pytest.raises(BadInput, match=r"which does not accept features .*: make its first layer accept"):
        build_models(keras.Sequential([keras.layers.Dense(2)]), views)
