"""What replicas hold that differs is made to differ, or to agree, on purpose."""

import functools
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config


def dropout_model() -> keras.Model:
    inner = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)])
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), inner, keras.layers.Dense(10)])


def masks() -> list[np.ndarray]:
    """Returns what each replica's dropout and noise make of ones."""
    inner = task.model.layers[1]
    made = train.strategy.run(lambda: inner(tf.ones([4, 64]), training=True))
    return [each.numpy() for each in train.strategy.experimental_local_results(made)]


@pytest.mark.parametrize("replicas", [2, 4])
def test_dropout_differs_between_replicas_and_goes_on_after_a_restore(
    replicas: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "create_model", dropout_model)

    def build(seed: int = 0) -> None:
        train.build(Config(run_dir=tmp_path, simulated_devices=replicas, seed=seed))

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


def test_stopped_run_with_dropout_ends_bit_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(task, "create_model", dropout_model)
    flags = ["--epochs=3", "--simulated-devices=2"]
    train.main([f"--run-dir={tmp_path / 'whole'}", *flags])
    train_epoch = train.train_epoch

    def train_one_epoch(epoch: int, *more: object) -> dict[str, float]:
        if epoch == 1:
            raise InterruptedError
        return train_epoch(epoch, *more)

    with monkeypatch.context() as stopping, pytest.raises(InterruptedError):
        stopping.setattr(train, "train_epoch", train_one_epoch)
        train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
    train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
    whole, stopped = (
        json.loads((tmp_path / name / "result.json").read_text(encoding="utf-8")) for name in ("whole", "stopped")
    )
    assert stopped["weights_sha256"] == whole["weights_sha256"]


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


@pytest.mark.parametrize("replicas", [2, 3])
def test_unsynchronized_statistics_are_averaged_before_evaluation(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", normalized_model)
    train.build(Config(simulated_devices=replicas, global_batch_size=36))
    for stack, first, count in train.batches["train"].feed().take(2):
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
    with train.run.weights_to_keep():
        pass
    first, *others = train.strategy.experimental_local_results(mean)
    for other in others:
        np.testing.assert_array_equal(other.numpy(), first.numpy())
    assert train.run.objects.average_statistics.func.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("replicas", [2, 4])
def test_sum_over_replicas_is_rounded_in_one_way_whatever_else_reads_its_parts(replicas: int) -> None:
    # TensorFlow's own sum of three or more begins with a part that nobody else holds.
    train.build(Config(simulated_devices=replicas, global_batch_size=36))
    squares = tf.constant([1.0, 1.0, 9e14, 1.0])

    @tf.function
    def summed(squares: tf.Tensor, holders: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the sum over the replicas of their shares' sums, and what `holders` of the replicas have summed."""

        def on_replica() -> tuple[tf.Tensor, list[tf.Tensor]]:
            replica = tf.distribute.get_replica_context()
            first = replica.replica_id_in_sync_group * len(squares) // replicas
            parts = [tf.sqrt(squares[first + each]) for each in range(len(squares) // replicas)]
            return replica.all_reduce("SUM", functools.reduce(tf.add, parts)), parts

        total, parts = train.strategy.run(on_replica)
        held = [train.strategy.experimental_local_results(part)[:holders] for part in parts]
        return train.strategy.experimental_local_results(total)[0], held

    sums = {summed(squares, holders)[0].numpy() for holders in range(replicas + 1)}
    assert len(sums) == 1
