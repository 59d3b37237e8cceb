"""Runs whose examples are in record files: killed, resumed, and met with files that are damaged or others."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from record_files import shuffle_in
from short_runs import interrupted
from sklearn.datasets import load_digits

import task
import train
from config import Config
from engine.data import Records
from engine.errors import BadInput
from engine.run import RunDirectory

IMAGES, LABELS = load_digits(return_X_y=True)


def write(path: Path, numbers: range) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            writer.write(bytes([LABELS[number]]) + IMAGES[number].astype(np.float32).tobytes())


def prepare(record: tf.Tensor, *, training: bool, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.reshape(tf.io.decode_raw(tf.strings.substr(record, 1, 256), tf.float32), [8, 8, 1]) / 16.0
    if training:
        image += tf.random.stateless_normal([8, 8, 1], seed, stddev=0.1)
    return image, tf.cast(tf.io.decode_raw(record, tf.uint8)[0], tf.int32)


@pytest.fixture
def data(linear: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files; the task reads them, a few at a time."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, numbers in {"a": range(300), "b": range(300, 400), "c": range(400, 700)}.items():
        write(folder / f"train-{name}.tfrecord", numbers)
    write(folder / "validation.tfrecord", range(700, 834))
    write(folder / "test.tfrecord", range(834, 968))
    monkeypatch.setattr(task, "load_examples", lambda split: Records(folder / f"{split}*.tfrecord"))
    monkeypatch.setattr(task, "prepare_example", prepare)
    shuffle_in(monkeypatch, 40_000, block=2**11)
    return folder


def trained(run_dir: Path) -> dict[str, np.ndarray]:
    """Starts a run, or resumes it, and trains an epoch; returns the state."""
    # A batch of 134 = 2 x 67 examples has two segments, and the pipeline of each takes a while to start.
    settings = {"epochs": 1, "global_batch_size": 134, "simulated_devices": 1, "steps_per_execution": 2}
    train.build(Config(run_dir=run_dir, checkpoint_every_steps=3, **settings))
    with RunDirectory(train.config, train.strategy) as directory:
        directory.restore(train.run)
        with directory.recording(train.run):
            train.train_epoch()
    return train.run.checkpoints.state.values()


@pytest.mark.long
def test_killed_damaged_and_changed_files_end_bit_equal_or_are_refused(data: Path, tmp_path: Path) -> None:
    expected, folder = trained(tmp_path / "whole"), tmp_path / "killed"
    with interrupted(3, InterruptedError), pytest.raises(InterruptedError):
        trained(folder)
    path = data / "train-b.tfrecord"
    content = path.read_bytes()

    # Refused while the files are others, with as many records.
    write(path, range(301, 401))
    with pytest.raises(BadInput, match=r"\('train'\) differ from those .* \(700 .* then and now, not the same ones"):
        trained(folder)

    # A record whose data are damaged ends it when it is read, and nothing is lost.
    spoiled = bytearray(content)
    for number in range(0, 100, 5):
        spoiled[number * 273 + 99] ^= 1
    path.write_bytes(spoiled)
    told = rf"record (\d+), counted from 0, of {path} .*record at (\d+)\).* resumes from {folder}/checkpoints/step-"
    with pytest.raises(BadInput, match=told) as ending:
        trained(folder)
    number, place = re.search(told, str(ending.value)).groups()
    assert int(place) == 273 * int(number) + 12  # Where its data begin.

    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # As a copy may have it.
    found = trained(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
