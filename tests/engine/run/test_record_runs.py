"""Runs whose examples are in record files: killed, resumed, and met with files that are damaged or others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from record_files import shuffle_in
from sklearn.datasets import load_digits
from small import linear_model

import task
import train
from engine.data import Records
from engine.run.signals import Signals

# A batch of 134 = 2 x 67 examples has two segments, and the pipeline of each takes a while to start.
FLAGS = ("--global-batch-size=134", "--simulated-devices=1", "--epochs=2")
SHORT = ("--steps-per-execution=3", "--checkpoint-every-steps=7")
DIGITS = load_digits(return_X_y=True)


def write(path: Path, numbers: range) -> None:
    images, labels = DIGITS
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers:
            writer.write(bytes([labels[number]]) + images[number].astype(np.float32).tobytes())


def prepare(record: tf.Tensor, *, training: bool, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.reshape(tf.io.decode_raw(tf.strings.substr(record, 1, 256), tf.float32), [8, 8, 1]) / 16.0
    if training:
        image += tf.random.stateless_normal([8, 8, 1], seed, stddev=0.1)
    return image, tf.cast(tf.io.decode_raw(record, tf.uint8)[0], tf.int32)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files; the task reads them, a few at a time."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, numbers in {"a": range(500), "b": range(500, 700), "c": range(700, 1258)}.items():
        write(folder / f"train-{name}.tfrecord", numbers)
    write(folder / "validation.tfrecord", range(1258, 1500))
    write(folder / "test.tfrecord", range(1500, 1797))
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "load_examples", lambda split: Records(folder / f"{split}*.tfrecord"))
    monkeypatch.setattr(task, "prepare_example", prepare)
    shuffle_in(monkeypatch, 80_000, block=2**11)
    return folder


def outcome(run_dir: Path) -> dict[str, Any]:
    train.main([f"--run-dir={run_dir}", *FLAGS, *SHORT])
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in result.items() if name not in ("seconds", "goodput")}


def killed_after(chunks: int) -> Callable[..., None]:
    left = iter(range(chunks))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise InterruptedError

    return check


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs train.py with flags; returns its one line, which has to end it with exit code 2."""

    def end(run_dir: Path, *flags: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={run_dir}", *FLAGS, *SHORT, *flags])
        assert ending.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return end


def test_killed_damaged_and_changed_files_end_bit_equal_or_are_refused(
    data: Path, tmp_path: Path, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcome(tmp_path / "whole")

    # Killed in the middle of an epoch.
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "check", killed_after(4))
        with pytest.raises(InterruptedError):
            outcome(tmp_path / "killed")
    config = json.loads((tmp_path / "killed" / "config.json").read_text(encoding="utf-8"))
    assert {split: each["examples"] for split, each in config["data"].items()} == {
        "train": 1258,
        "validation": 242,
        "test": 297,
    }
    path = data / "train-b.tfrecord"
    content = path.read_bytes()

    # Refused while the files are others, with as many records.
    write(path, range(501, 701))
    line = ended(tmp_path / "killed")
    assert line.startswith("ERROR: task.load_examples('train') returned other examples than the run has used so far (")
    assert "(1258 examples then and now, not the same ones): restore the data" in line
    write(path, range(500, 690))
    assert "(1258 examples then, 1248 now)" in ended(tmp_path / "killed")

    # A record whose data are damaged ends it when it is read, and nothing is lost.
    spoiled = bytearray(content)
    spoiled[20 * 273 + 99] ^= 1
    path.write_bytes(spoiled)
    line = ended(tmp_path / "damaged")
    assert f"ERROR: {path}: record 20, counted from 0, at byte 5460 is damaged" in line
    assert f"resumes from {tmp_path}/damaged/checkpoints/step-" in line

    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # As a copy may have it.
    assert outcome(tmp_path / "killed") == expected
    assert outcome(tmp_path / "damaged") == expected

    # An evaluation may be of others.
    write(data / "test.tfrecord", range(1500, 1600))
    assert train.main([f"--run-dir={tmp_path / 'killed'}", "--evaluate-only"])["test/accuracy"] > 0


@pytest.mark.long
def test_check_and_predictions_take_records(data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert train.main([*FLAGS, "--check"])
    assert "train 1258, validation 242, test 297 examples of one structure" in capsys.readouterr().out
    train.main([f"--run-dir={tmp_path / 'run'}", *FLAGS, "--export"])
    assert "serve_examples    endpoint of saved_model: features string[None]" in capsys.readouterr().out
    images, labels = DIGITS
    made = [bytes([label]) + image.astype(np.float32).tobytes() for image, label in zip(images, labels, strict=True)]
    served = tf.saved_model.load(str(tmp_path / "run/export/saved_model")).signatures["serve_examples"]
    outputs = served(features=tf.constant(made[1500:]))
    accuracy = np.mean(outputs["label"].numpy() == labels[1500:])
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    np.testing.assert_allclose(accuracy, result["test/accuracy"], rtol=1e-5)
