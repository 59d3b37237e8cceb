"""The moving average of weights and statistics, and a network that follows another."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model.averages import MovingAverage, follow
from engine.model.gradients import apply_gradients, in_micro_batches
from engine.model.optimizers import prepare_optimizer
from engine.run.state import weights_sha256


def test_each_replica_averages_its_statistics_and_the_evaluation_their_mean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = keras.layers

    def averaged_model() -> keras.Model:
        both = [layers.BatchNormalization(momentum=0.5, synchronized=each) for each in (False, True)]
        return keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), *both, layers.Dropout(0.5), layers.Dense(10)]
        )

    monkeypatch.setattr(task, "create_model", averaged_model)
    train.build(Config(run_dir=tmp_path, simulated_devices=2, global_batch_size=36, ema_decay=0.9))
    local = train.strategy.experimental_local_results
    means = [layer.moving_mean.value for layer in task.model.layers[1:3]]
    measured = []
    stack, first, count = next(train.batches["train"].iterator().take(3))
    for step in range(3):
        train.run_steps["train"](stack, first + step % count, 1)
        measured.append([[value.numpy() for value in local(mean)] for mean in means])
    # What each step has measured itself, which moves the moving mean halfway, as its momentum is 0.5.
    before = np.concatenate([np.zeros_like(measured[:1]), measured[:-1]])
    of_steps = (np.array(measured, np.float64) - 0.5 * before) / 0.5
    # The first step's stands for the initial weights too. The second step's decay is 2 / 11, the third's 3 / 12.
    expected = np.average(of_steps, axis=0, weights=[3 / 12 * 2 / 11, 3 / 12 * 9 / 11, 9 / 12])
    assert not np.array_equal(*expected[0])
    with train.run.evaluation_weights():
        for mean, averages in zip(means, expected, strict=True):
            for value in local(mean):
                np.testing.assert_allclose(value.numpy(), np.mean(averages, axis=0), rtol=1e-6, atol=1e-7)
    with train.run.objects.average.in_place():
        train.run_steps["train"](stack, first, 1)  # A hook may use the model as it likes.
    trained = [[value.numpy() for value in local(mean)] for mean in means]
    with train.run.objects.average.in_place():
        pass
    np.testing.assert_array_equal([[value.numpy() for value in local(mean)] for mean in means], trained)
    names = {f"average/model/sequential/batch_normalization/moving_{kind}" for kind in ("mean", "variance")}
    assert names <= train.run.checkpoints.state.per_replica.keys()
    averages = {*train.run.checkpoints.state.mirrored, *train.run.checkpoints.state.per_replica}
    assert not any("seed" in name for name in averages if name.startswith("average/"))

    path, found = train.run.checkpoints.save(1, {}), []
    for _ in range(2):
        train.run_steps["train"](stack, first, 1)
        found.append(weights_sha256(train.run.objects.weights))
        with train.run.evaluation_weights():
            found.append(weights_sha256(train.run.objects.weights))
        train.run.checkpoints.restore(path)
    assert found[:2] == found[2:]
    assert len({*found, weights_sha256(train.run.objects.weights)}) == 3


def test_average_of_statistics_is_of_what_the_layer_measured_in_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"again": {"momentum": 0.5}, "renorm": {"renorm": True}, "still": {"momentum": 1.0}}

    def create_model() -> keras.Model:
        inputs = keras.Input((8, 8, 1))
        features = keras.layers.Flatten()(inputs)
        again, renorm, still = (
            keras.layers.BatchNormalization(name=name, **options) for name, options in kinds.items()
        )
        # A step calls an encoder of two inputs twice, and a discriminator, too.
        called = [again(features), again(2 * features), renorm(features), still(features)]
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Add()(called)))

    monkeypatch.setattr(task, "create_model", create_model)
    train.build(Config(global_batch_size=36, ema_decay=0.9, micro_batches=2))
    stack, first, _ = next(train.batches["train"].iterator().take(1))
    for _ in range(3):  # The same batch, so that each step measures the same.
        train.run_steps["train"](stack, first, 1)
    features = tf.nest.flatten(stack)[0].numpy()[first].reshape(36, 64).astype(np.float64)
    mean, weight = np.zeros(64), 0.0
    for batch in (features[0::2], features[1::2]):
        for number in (1, 2):
            mean, weight = 0.5 * mean + 0.5 * number * batch.mean(axis=0), 0.5 * weight + 0.5
    trained = task.model.get_layer("still").moving_variance.numpy()
    with train.run.objects.average.in_place():
        np.testing.assert_allclose(
            task.model.get_layer("again").moving_mean.numpy(), mean / weight, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(task.model.get_layer("still").moving_variance.numpy(), trained)
        assert all(task.model.get_layer(name).moving_variance.numpy().min() >= 0.0 for name in kinds)


def test_average_reaches_what_it_averages() -> None:
    # In float32 each of these moves is rounded to nothing.
    variable, decay, updates = tf.Variable(1.0), 0.9999, 5000
    average = MovingAverage({"weight": variable}, {}, decay)
    variable.assign(1.0005)

    @tf.function
    def update() -> None:
        for _ in tf.range(updates):
            average.update()

    update()
    goal = np.float64(variable.numpy())
    numbers = np.arange(updates)
    left = np.prod(np.minimum(decay, (1 + numbers) / (10 + numbers)))
    np.testing.assert_allclose(average.averages["weight"], goal + (1.0 - goal) * left, rtol=1e-13)


def normalized(width: int = 3) -> keras.Model:
    layers = [keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    return keras.Sequential([keras.Input((2,)), *layers])


@pytest.mark.parametrize(("replicas", "micro_batches", "compiled"), [(1, 2, False), (2, 1, True), (2, 4, True)])
def test_follower_moves_once_after_the_update(replicas: int, micro_batches: int, compiled: bool) -> None:
    strategy = create_strategy(Config(simulated_devices=replicas))
    with strategy.scope():
        model, follower = normalized(), normalized()
        optimizer = prepare_optimizer(keras.optimizers.SGD(0.1), "float32")
        optimizer.build(model.trainable_variables)
    before = [each.numpy() for each in follower.variables]

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch[0]))
        apply_gradients(optimizer, tape, loss, model.trainable_variables)
        follow(follower, model, decay=0.75)
        return loss

    step = in_micro_batches(train_step, Config(micro_batches=micro_batches))
    on_replicas(replicas, step, compiled=compiled)([np.ones((4 * replicas, 2), "float32")])
    for variable, start, goal in zip(follower.variables, before, model.variables, strict=True):
        moved = start if "seed" in variable.path else 0.75 * start + 0.25 * goal.numpy()
        for value in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(value.numpy(), moved, rtol=1e-6)
    assert not np.array_equal(follower.variables[0].numpy(), before[0])


def test_follower_of_another_shape_is_refused() -> None:
    with pytest.raises(BadInput, match="a follower whose variables have other shapes than those of the model: make"):
        follow(normalized(4), normalized(), 0.9)
