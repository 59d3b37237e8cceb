"""The moving average of weights and statistics, and a network that follows another."""

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
from engine.model.gradients import apply_gradients, replica_step
from engine.model.optimizers import prepare_optimizer


def test_each_replica_averages_its_statistics_and_the_evaluation_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = keras.layers

    def averaged_model() -> keras.Model:
        both = [layers.BatchNormalization(momentum=0.5, synchronized=each) for each in (False, True)]
        return keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), *both, layers.Dropout(0.5), layers.Dense(10)]
        )

    monkeypatch.setattr(task, "create_model", averaged_model)
    train.build(Config(simulated_devices=2, global_batch_size=36, ema_decay=0.9, micro_batches=2))
    local = train.strategy.experimental_local_results
    means = [layer.moving_mean.value for layer in task.model.layers[1:3]]
    measured = []
    for stack, first, count in train.batches["train"].iterator().take(3):
        for index in range(first, first + count):
            train.run_steps["train"](stack, index, 1)
            measured.append([[value.numpy() for value in local(mean)] for mean in means])
    # The first step's decay is 1 / 10, the second's 2 / 11, the third's 3 / 12. A moving mean is 0 at first.
    expected = np.tensordot([3 / 12 * 2 / 11 * 9 / 10, 3 / 12 * 9 / 11, 9 / 12], np.array(measured, np.float64), 1)
    assert not np.array_equal(*expected[0])
    assert not np.array_equal(*measured[:2])
    with train.run.evaluation_weights():
        for mean, averages in zip(means, expected, strict=True):
            for value in local(mean):
                np.testing.assert_allclose(value.numpy(), np.mean(averages, axis=0), rtol=1e-6, atol=1e-7)
    state, names = train.run.checkpoints.state, {"moving_mean", "moving_variance"}
    assert {f"average/model/sequential/batch_normalization/{name}" for name in names} <= state.per_replica.keys()
    assert not any("seed" in name for name in state.values() if name.startswith("average/"))


def test_average_reaches_what_it_averages() -> None:
    # In float32 each of these moves is rounded to nothing.
    variable, decay, updates = tf.Variable(1.0), 0.9999, 5000
    average = MovingAverage({"weight": variable}, decay)
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


@pytest.mark.parametrize(("replicas", "micro_batches", "compiled"), [(1, 2, False), (2, 4, True)])
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

    step = replica_step(train_step, Config(micro_batches=micro_batches))
    on_replicas(replicas, step, compiled=compiled)([np.ones((4 * replicas, 2), "float32")])
    for variable, start, goal in zip(follower.variables, before, model.variables, strict=True):
        moved = start if "seed" in variable.path else 0.75 * start + 0.25 * goal.numpy()
        for value in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(value.numpy(), moved, rtol=1e-6)
    assert not np.array_equal(follower.variables[0].numpy(), before[0])


def test_follower_of_another_shape_is_refused() -> None:
    with pytest.raises(BadInput, match="a follower whose variables have other shapes than those of the model: make"):
        follow(normalized(4), normalized(), 0.9)
