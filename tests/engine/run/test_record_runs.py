"""Runs whose examples are in record files: killed, resumed, and met with files that are damaged or others."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from record_files import shuffle_in
from short_runs import kill, run
from sklearn.datasets import load_digits

import task
import train
from engine.data import Records

# A batch of 134 = 2 x 67 examples has two segments, and the pipeline of each takes a while to start.
FLAGS = ("--global-batch-size=134", "--simulated-devices=1", "--epochs=1", "--steps-per-execution=2")
IMAGES, LABELS = load_digits(return_X_y=True)


def record(number: int) -> bytes:
    return bytes([LABELS[number]]) + IMAGES[number].astype(np.float32).tobytes()


def write(path: Path, numbers: range) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            writer.write(record(number))


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


def test_killed_damaged_and_changed_files_end_bit_equal_or_are_refused(
    data: Path, tmp_path: Path, ended: Callable[..., tuple[int, str]]
) -> None:
    expected, folder = run(tmp_path / "whole", *FLAGS), tmp_path / "killed"
    flags = (*FLAGS, "--checkpoint-every-steps=3")
    kill(3, folder, *flags)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    counts = {split: each["examples"] for split, each in config["data"].items()}
    assert counts == {"train": 700, "validation": 134, "test": 134}
    path = data / "train-b.tfrecord"
    content = path.read_bytes()

    # Refused while the files are others, with as many records.
    write(path, range(301, 401))
    code, line = ended(folder, *flags)
    told = "ERROR: task.load_examples('train') returned other examples than the run has used so far ("
    assert (code, line.startswith(told)) == (2, True), line
    assert "(700 examples then and now, not the same ones): restore the data" in line

    # A record whose data are damaged ends it when it is read, and nothing is lost.
    spoiled = bytearray(content)
    for number in range(0, 100, 5):
        spoiled[number * 273 + 99] ^= 1
    path.write_bytes(spoiled)
    code, line = ended(folder, *flags)
    told = re.search(rf"ERROR: {path}: record (\d+), counted from 0, at byte (\d+) is damaged", line)
    assert code == 2
    assert told, line
    assert int(told[2]) == 273 * int(told[1])
    assert f"resumes from {folder}/checkpoints/step-" in line

    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # As a copy may have it.
    assert run(folder, *flags) == expected


@pytest.mark.long
def test_check_and_predictions_take_records(data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert train.main([*FLAGS, "--check"])
    assert "train 700, validation 134, test 134 examples of one structure" in capsys.readouterr().out
    result = run(tmp_path / "run", *FLAGS, "--export")
    assert "serve_examples    endpoint of saved_model: features string[None]" in capsys.readouterr().out
    served = tf.saved_model.load(str(tmp_path / "run/export/saved_model")).signatures["serve_examples"]
    outputs = served(features=tf.constant([record(number) for number in range(834, 968)]))
    accuracy = np.mean(outputs["label"].numpy() == LABELS[834:968])
    np.testing.assert_allclose(accuracy, result["test/accuracy"], rtol=1e-5)
