"""What replicas hold that differs is made to differ, or to agree, on purpose; also of unusual models."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas
from small import linear_model

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model.build import build_models
from engine.model.moments import moments_of_all
from engine.model.objects import TaskObjects
from engine.model.variables import model_variables


def masks() -> list[np.ndarray]:
    """Returns what each replica's dropout and noise make of ones."""
    inner = task.model.layers[1]
    made = train.strategy.run(lambda: inner(tf.ones([4, 64]), training=True))
    return [each.numpy() for each in train.strategy.experimental_local_results(made)]


def test_dropout_differs_between_replicas_and_goes_on_after_a_restore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dropout_model() -> keras.Model:
        inner = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)])
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), inner, keras.layers.Dense(10)])

    monkeypatch.setattr(task, "create_model", dropout_model)

    def build(replicas: int) -> None:
        train.build(Config(run_dir=tmp_path, simulated_devices=replicas))

    build(replicas=2)
    first = masks()
    assert not np.array_equal(*first)
    path = train.run.checkpoints.save(1, {})
    second = masks()

    build(replicas=2)
    np.testing.assert_array_equal(masks(), first)
    train.run.checkpoints.restore(path)
    np.testing.assert_array_equal(masks(), second)
    build(replicas=1)
    np.testing.assert_array_equal(masks()[0], first[0])


def test_unsynchronized_statistics_are_averaged_before_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def normalized_model() -> keras.Model:
        layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(10)]
        layers[-1].trainable = False
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    monkeypatch.setattr(task, "create_model", normalized_model)
    train.build(Config(simulated_devices=2))
    mean, frozen = task.model.layers[1].moving_mean.value, task.model.layers[2].kernel.numpy()
    for _ in range(2):
        stack, first, count = next(train.batches["train"].iterator().take(2))
        train.run_steps["train"](stack, first, count)
        before = [value.numpy() for value in train.strategy.experimental_local_results(mean)]
        assert not np.array_equal(before[0], before[1])
        with train.run.evaluation_weights():
            one, other = [value.numpy() for value in train.strategy.experimental_local_results(mean)]
        np.testing.assert_allclose(one, np.mean(before, axis=0), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(one, other)
        after = [value.numpy() for value in train.strategy.experimental_local_results(mean)]
        np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(task.model.layers[2].kernel.numpy(), frozen)
    assert train.run.objects._average_over_replicas.func.experimental_get_tracing_count() == 1


def test_sum_over_replicas_is_rounded_in_one_way_whatever_else_reads_its_parts() -> None:
    # TensorFlow's own sum of three or more begins with a part that nobody else holds.
    strategy = create_strategy(Config(simulated_devices=4))
    squares = tf.constant([1.0, 1.0, 9e14, 1.0])

    @tf.function
    def summed(squares: tf.Tensor, holders: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the sum of a root on each replica, and the roots of the first `holders` replicas."""

        def on_replica() -> tuple[tf.Tensor, tf.Tensor]:
            replica = tf.distribute.get_replica_context()
            part = tf.sqrt(squares[replica.replica_id_in_sync_group])
            return replica.all_reduce("SUM", part), part

        total, parts = strategy.run(on_replica)
        held = strategy.experimental_local_results(parts)[:holders]
        return strategy.experimental_local_results(total)[0], held

    sums = {summed(squares, holders)[0].numpy() for holders in range(5)}
    assert len(sums) == 1


def test_each_set_of_devices_has_one_strategy_and_all_sum_in_one_process() -> None:
    # A second strategy with collectives would abort the process in its first sum.
    def created(replicas: int) -> tf.distribute.Strategy:
        return create_strategy(Config(simulated_devices=replicas))

    def sum_of_ids() -> tf.Tensor:
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce("SUM", tf.cast(replica.replica_id_in_sync_group, tf.float32))

    for replicas in (2, 3, 2, 4):
        strategy = created(replicas)
        assert strategy is created(replicas)
        sums = strategy.experimental_local_results(strategy.run(tf.function(sum_of_ids)))
        assert [float(each) for each in sums] == [sum(range(replicas))] * replicas


# --- Models and optimizers of unusual kinds ---------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_called_in_training_only_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def create_model() -> keras.Model:
        model = WithHelpers()
        made.append(model.dropout.seed_generator.state.numpy())
        return model

    monkeypatch.setattr(task, "create_model", create_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    train.build(Config(simulated_devices=2))
    values = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    helpers = [name for name in values if "/sequential/" in name]
    assert len(helpers) == 4
    assert set(helpers) <= set(train.run.checkpoints.state.mirrored)
    # To build them drew nothing and measured nothing.
    (seed,) = [name for name in values if "seed_generator_state" in name]
    np.testing.assert_array_equal(values[seed], made[0])
    (mean,) = [name for name in values if name.endswith("moving_mean")]
    assert not values[mean].any()

    for stack, first, count in train.batches["train"].iterator().take(1):
        train.run_steps["train"](stack, first, count)
    after = model_variables(task.model)
    assert all(np.any(after[name].numpy() != values[name]) for name in helpers if name.endswith("kernel"))


@pytest.mark.parametrize("replicas", [1, 4])
def test_synchronized_normalization_is_that_of_all_replicas_with_a_mask_and_far_from_0(replicas: int) -> None:
    random = np.random.default_rng(0)
    rows, factors = random.normal(1e4, 10.0, (20, 3, 5)).astype("float32"), random.normal(size=(20, 3, 5))
    mask = rows[..., 0] > 1e4
    batch = rows, mask, factors.astype("float32")

    def normalized(layers: list[keras.Layer], batch: Any) -> list[tf.Tensor]:
        """Returns the gradients by the rows of a loss that depends on all normalized rows."""
        rows, mask, factors = batch
        gradients = []
        for layer, options in zip(layers, ({}, {"mask": mask}), strict=True):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                loss = tf.reduce_sum(tf.square(layer(rows, training=True, **options)) * factors)
            gradients.append(tape.gradient(loss, rows))
        return gradients

    def two_layers(**options: Any) -> list[keras.Layer]:
        return [keras.layers.BatchNormalization(momentum=0.0, **options) for _ in range(2)]

    keras.layers.BatchNormalization._moments = moments_of_all
    with create_strategy(Config(simulated_devices=replicas)).scope():
        layers = two_layers(synchronized=True)
        for layer in layers:
            layer.build(rows.shape)
    found = on_replicas(replicas, lambda batch: tf.stack(normalized(layers, batch), axis=1))(batch)
    # Keras's own, which is not synchronized, on one device in 64 bits.
    exact = rows.astype("float64")
    expected = normalized(two_layers(dtype="float64"), (tf.constant(exact), mask, factors))
    for layer, counted in zip(layers, (exact.reshape(-1, 5), exact[mask]), strict=True):
        np.testing.assert_allclose(layer.moving_mean.numpy(), counted.mean(0), rtol=1e-6)
        np.testing.assert_allclose(layer.moving_variance.numpy(), counted.var(0), rtol=1e-5)
    for number, goal in enumerate(expected):
        gradient = np.concatenate([each[:, number] for each in found])
        np.testing.assert_allclose(gradient, goal, rtol=0, atol=1e-3 * np.abs(goal).max())


def test_encoder_that_a_step_calls_on_each_of_two_views_is_left_as_it_is() -> None:
    views = {name: tf.TensorSpec([4, 3]) for name in ("one", "other")}
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert build_models(encoder, views) is encoder
    with pytest.raises(BadInput, match=r"which does not accept features .*: make its first layer accept"):
        build_models(keras.Sequential([keras.layers.Dense(2)]), views)


def several(bias: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.25, name="weights"), {".*bias": bias})
    )


class Silent(keras.optimizers.SGD):
    @property
    def learning_rate(self):
        raise RuntimeError("there are several")


def test_each_optimizer_is_in_the_state_and_has_a_column_for_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_models() -> dict[str, Any]:
        both = several(keras.optimizers.Adam(0.5, name="biases"))
        return {"a": keras.optimizers.LossScaleOptimizer(both), "b": keras.optimizers.SGD(0.25), "c": Silent(0.25)}

    rates = {"learning_rate/a/weights": 0.25, "learning_rate/a/biases": 0.5, "learning_rate/b": 0.25}
    objects = TaskObjects(task, Config())
    objects.optimizer = of_models()
    assert objects.learning_rates() == rates
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: several(keras.optimizers.Adam(0.5, name="bias")))
    train.build(Config(simulated_devices=2))
    assert train.run.objects.learning_rates() == {"learning_rate/weights": 0.25, "learning_rate/bias": 0.5}
    assert {"optimizer/bias/iteration", "optimizer/weights/iteration"} <= set(train.run.checkpoints.state.mirrored)
