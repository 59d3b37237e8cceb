"""What replicas hold that differs is made to differ, or to agree, on purpose."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy


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
            pass
        one, other = [value.numpy() for value in train.strategy.experimental_local_results(mean)]
        np.testing.assert_allclose(one, np.mean(before, axis=0), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(task.model.layers[2].kernel.numpy(), frozen)
    assert train.run.objects.average_statistics.func.experimental_get_tracing_count() == 1


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
