"""Processes that share record files give the numbers of one process."""

import itertools
from pathlib import Path

import clusters
import numpy as np
import pytest
import tensorflow as tf
from clusters import NORMALIZED, assert_same_numbers, project_with
from sklearn.datasets import load_digits

# In the place of the task's own; a few records of each segment are in memory at a time.
FROM_RECORDS = """

from engine.data import Records, records, segments

segments.BYTES_OF_BLOCK = 2**11
_init = records.RecordExamples.__init__
records.RecordExamples.__init__ = lambda self, files, hook, memory, *more: _init(
    self, files, hook, memory and 150_000, *more
)


def load_examples(split: str) -> Records:
    return Records(f"{folder}/{{split}}-*.tfrecord")


def prepare_example(record: tf.Tensor, *, training: bool, seed: tf.Tensor):
    image = tf.reshape(tf.io.decode_raw(tf.strings.substr(record, 1, 256), tf.float32), [8, 8, 1]) / 16.0
    if training:
        image += tf.random.stateless_normal([8, 8, 1], seed, stddev=0.1)
    return image, tf.cast(tf.io.decode_raw(record, tf.uint8)[0], tf.int32)
"""
FLAGS = ("--epochs=2", "--global-batch-size=24", "--keep-last-batch", "--validate-every-steps=20")


@pytest.mark.long
def test_workers_and_replicas_agree(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    images, labels = load_digits(return_X_y=True)
    numbers = {"train": [*range(0, 1258, 500), 1258], "validation": [1258, 1500], "test": [1500, 1797]}
    for split, ends in numbers.items():
        for number, (first, end) in enumerate(itertools.pairwise(ends)):
            with tf.io.TFRecordWriter(str(folder / f"{split}-{number}.tfrecord")) as writer:
                for image, label in zip(images[first:end], labels[first:end], strict=True):
                    writer.write(bytes([label]) + image.astype(np.float32).tobytes())
    project = project_with(folder, FROM_RECORDS.format(folder=folder) + NORMALIZED)
    clusters.train(project, tmp_path / "one", 1, *FLAGS, "--simulated-devices=2")
    clusters.train(project, tmp_path / "three", 3, *FLAGS)
    assert_same_numbers(tmp_path / "one", tmp_path / "three")
