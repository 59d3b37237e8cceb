"""Processes that share record files: the numbers of one process, also if one is killed in the middle of an epoch."""

import itertools
import random
import time
from pathlib import Path

import clusters
import numpy as np
import pytest
import tensorflow as tf
from clusters import NORMALIZED, assert_same_numbers, outcome, project_with
from processes import until
from programs import Program, run_program
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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    images, labels = load_digits(return_X_y=True)
    numbers = {"train": [*range(0, 1258, 500), 1258], "validation": [1258, 1500], "test": [1500, 1797]}
    for split, ends in numbers.items():
        for number, (first, end) in enumerate(itertools.pairwise(ends)):
            with tf.io.TFRecordWriter(str(folder / f"{split}-{number}.tfrecord")) as writer:
                for image, label in zip(images[first:end], labels[first:end], strict=True):
                    writer.write(bytes([label]) + image.astype(np.float32).tobytes())
    return project_with(folder, FROM_RECORDS.format(folder=folder) + NORMALIZED)


@pytest.fixture(scope="module")
def one_process(project: Path) -> Path:
    clusters.train(project, project / "runs" / "one", 1, *FLAGS, "--simulated-devices=2")
    return project / "runs" / "one"


@pytest.mark.long
def test_workers_and_replicas_agree(project: Path, one_process: Path, tmp_path: Path) -> None:
    clusters.train(project, tmp_path / "run", 3, *FLAGS)
    assert_same_numbers(one_process, tmp_path / "run")


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:13]) for path in run_dir.glob("checkpoints/step-*")), default=0)


@pytest.mark.long
def test_killed_run_ends_bit_equal(project: Path, one_process: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    flags = (*FLAGS, "--simulated-devices=2", "--checkpoint-every-steps=5", "--steps-per-execution=3")
    command = ["train.py", f"--run-dir={tmp_path / 'run'}", *flags]
    for life in range(3):
        process = Program(command, project, tmp_path / "log", tmp_path / "log")
        until(lambda step=10 * life + 10: newest_step(tmp_path / "run") >= step)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        assert process.wait() != 0
    done = run_program(command, project)
    assert done.returncode == 0, done.stderr
    assert "resumed from step-" in done.stdout
    assert outcome(tmp_path / "run")[1]["weights_sha256"] == outcome(one_process)[1]["weights_sha256"]
