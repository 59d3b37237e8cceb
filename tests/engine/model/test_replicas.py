"""What replicas hold that differs is made to differ, or to agree, on purpose."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.model.averages import MovingAverage
from engine.run.state import weights_sha256


def dropout_model() -> keras.Model:
    inner = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)])
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), inner, keras.layers.Dense(10)])


def masks() -> list[np.ndarray]:
    """Returns what each replica's dropout and noise make of ones."""
    inner = task.model.layers[1]
    made = train.strategy.run(lambda: inner(tf.ones([4, 64]), training=True))
    return [each.numpy() for each in train.strategy.experimental_local_results(made)]


def test_dropout_differs_between_replicas_and_goes_on_after_a_restore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "create_model", dropout_model)

    def build(seed: int = 0) -> None:
        train.build(Config(run_dir=tmp_path, simulated_devices=3, global_batch_size=36, seed=seed))

    build()
    first = masks()
    for index, one in enumerate(first):
        for other in first[index + 1 :]:
            assert not np.array_equal(one, other)
    path = train.run.checkpoints.save(1, {})
    second = masks()

    build()
    np.testing.assert_array_equal(masks(), first)
    build(seed=1)
    assert not np.array_equal(masks(), first)
    train.run.checkpoints.restore(path)
    np.testing.assert_array_equal(masks(), second)


def test_restored_run_with_dropout_ends_bit_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(task, "create_model", dropout_model)
    train.build(Config(run_dir=tmp_path, simulated_devices=2))
    train.train_epoch(0)
    path = train.run.checkpoints.save(1, {})
    train.train_epoch(1)
    fingerprint = weights_sha256(train.run.objects.weights)
    train.run.checkpoints.restore(path)
    assert weights_sha256(train.run.objects.weights) != fingerprint
    train.train_epoch(1)
    assert weights_sha256(train.run.objects.weights) == fingerprint


def test_first_replica_has_the_masks_of_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(task, "create_model", dropout_model)
    found = []
    for replicas in (1, 2):
        train.build(Config(run_dir=tmp_path, simulated_devices=replicas))
        found.append(masks()[0])
    np.testing.assert_array_equal(*found)


def normalized_model() -> keras.Model:
    frozen = keras.layers.Dense(10)
    frozen.trainable = False
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.BatchNormalization(momentum=0.5), frozen]
    )


def test_unsynchronized_statistics_are_averaged_before_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", normalized_model)
    train.build(Config(simulated_devices=3, global_batch_size=36))
    for stack, first, count in train.batches["train"].iterator().take(2):
        train.run_steps["train"](stack, first, count)
    mean = task.model.layers[1].moving_mean.value
    before = [value.numpy() for value in train.strategy.experimental_local_results(mean)]
    assert not np.array_equal(before[0], before[1])
    frozen = task.model.layers[2].kernel.numpy()
    train.run.objects.average_statistics()
    for value in train.strategy.experimental_local_results(mean):
        np.testing.assert_allclose(value.numpy(), np.mean(before, axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(task.model.layers[2].kernel.numpy(), frozen)

    train.train_epoch(0)
    with train.run.evaluation_weights():
        pass
    first, *others = train.strategy.experimental_local_results(mean)
    for other in others:
        np.testing.assert_array_equal(other.numpy(), first.numpy())
    assert train.run.objects.average_statistics.func.experimental_get_tracing_count() == 1


def averaged_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )


def test_each_replica_averages_its_statistics_and_the_evaluation_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", averaged_model)
    train.build(Config(simulated_devices=2, global_batch_size=36, ema_decay=0.9))
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


def layer_called(times: int, **options: Any) -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    features, normalize = keras.layers.Flatten()(inputs), keras.layers.BatchNormalization(**options)
    called = [normalize(number * features) for number in range(1, times + 1)]
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Add()([*called, features])))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_average_of_a_layer_that_is_called_again_is_of_what_it_measured(
    times: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step calls an encoder of two inputs twice, and a discriminator, too.
    monkeypatch.setattr(task, "create_model", lambda: layer_called(times, momentum=0.5))
    train.build(Config(global_batch_size=36, ema_decay=0.9, micro_batches=micro_batches))
    stack, first, _ = next(train.batches["train"].iterator().take(1))
    for _ in range(3):  # The same batch, so that each step measures the same.
        train.run_steps["train"](stack, first, 1)
    features = tf.nest.flatten(stack)[0].numpy()[first].reshape(36, 64).astype(np.float64)
    mean, weight = np.zeros(64), 0.0
    for batch in (features[number::micro_batches] for number in range(micro_batches)):
        for number in range(1, times + 1):
            mean, weight = 0.5 * mean + 0.5 * number * batch.mean(axis=0), 0.5 * weight + 0.5
    layer = next(each for each in task.model.layers if isinstance(each, keras.layers.BatchNormalization))
    with train.run.objects.average.in_place():
        np.testing.assert_allclose(layer.moving_mean.numpy(), mean / weight, rtol=1e-5, atol=1e-6)
        assert layer.moving_variance.numpy().min() >= 0.0


@pytest.mark.parametrize("options", [{"renorm": True}, {"momentum": 1.0}])
def test_average_of_statistics_that_move_in_another_way_can_be_used(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", lambda: layer_called(1, **options))
    train.build(Config(global_batch_size=36, ema_decay=0.9))
    for stack, first, count in train.batches["train"].iterator().take(5):
        train.run_steps["train"](stack, first, count)
    layer = next(each for each in task.model.layers if isinstance(each, keras.layers.BatchNormalization))
    trained = layer.moving_variance.numpy()
    with train.run.objects.average.in_place():
        averaged = layer.moving_variance.numpy()
    assert averaged.min() >= 0.0
    if options == {"momentum": 1.0}:
        np.testing.assert_array_equal(averaged, trained)


def test_resumed_average_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(task, "create_model", averaged_model)
    train.build(Config(run_dir=tmp_path, simulated_devices=2, global_batch_size=36, ema_decay=0.9))
    train.train_epoch(0)
    path = train.run.checkpoints.save(1, {})
    found = []
    for _ in range(2):
        train.run.checkpoints.restore(path)
        train.train_epoch(1)
        with train.run.evaluation_weights():
            found.append((weights_sha256(train.run.objects.weights), train.validate()))
    assert found[0] == found[1]


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


def test_sum_over_replicas_is_rounded_in_one_way_whatever_else_reads_its_parts() -> None:
    # TensorFlow's own sum of three or more begins with a part that nobody else holds.
    train.build(Config(simulated_devices=4))
    squares = tf.constant([1.0, 1.0, 9e14, 1.0])

    @tf.function
    def summed(squares: tf.Tensor, holders: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the sum of a root on each replica, and the roots of the first `holders` replicas."""

        def on_replica() -> tuple[tf.Tensor, tf.Tensor]:
            replica = tf.distribute.get_replica_context()
            part = tf.sqrt(squares[replica.replica_id_in_sync_group])
            return replica.all_reduce("SUM", part), part

        total, parts = train.strategy.run(on_replica)
        held = train.strategy.experimental_local_results(parts)[:holders]
        return train.strategy.experimental_local_results(total)[0], held

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
