"""--eager and --limit-steps: hooks that can be looked into, and whole runs in seconds."""

import csv
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model

import task
import train
from engine.data.batches import Batches
from engine.data.stacks import StackIterator

OPTIONS = (
    "--epochs=2",
    "--global-batch-size=60",
    "--limit-steps=3",
    "--simulated-devices=2",
    "--steps-per-execution=2",
)
FLOAT16 = ("--simulated-devices=1", "--precision=mixed_float16")
# Each of them changes the results, so that --eager gives others if it lacks one.
EACH_WITH_AN_EFFECT = ("--micro-batches=6", "--global-clipnorm=0.1", "--ema-decay=0.9")


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)


def run(run_dir: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Returns the result and the rows of a run."""
    result = train.main([f"--run-dir={run_dir}", *OPTIONS, *flags])
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        return result, list(csv.DictReader(lines))


def line_of(capsys: pytest.CaptureFixture[str], run_dir: Path, *flags: str) -> str:
    """Returns the one line of a run that ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train.main([f"--run-dir={run_dir}", *OPTIONS, *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.long
@pytest.mark.parametrize(("flags", "tolerance"), [((), 1e-5), (FLOAT16, 1e-2)], ids=["float32", "float16"])
def test_hooks_in_python_give_the_numbers_of_compiled_ones(
    flags: tuple[str, ...], tolerance: float, tmp_path: Path
) -> None:
    expected, expected_rows = run(tmp_path / "compiled", *flags)
    found, rows = run(tmp_path / "eager", "--eager", *flags)
    for name in ("train/loss", "train/accuracy", "validation/loss"):
        values = [[float(row[name]) for row in each] for each in (rows, expected_rows)]
        assert values[0] == pytest.approx(values[1], rel=tolerance), name
    assert found["test/loss"] == pytest.approx(expected["test/loss"], rel=tolerance)
    assert found["step"] == expected["step"] == 6


def test_hooks_in_python_are_clipped_averaged_and_taken_in_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A BatchNormalization has the statistics of a micro-batch, and gradient descent shows how long a gradient is.
    monkeypatch.setattr(task, "create_model", lambda: linear_model(keras.layers.BatchNormalization()))
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))

    def losses(name: str, *flags: str) -> np.ndarray:
        _, (row,) = run(tmp_path / name, "--epochs=1", "--simulated-devices=1", *flags)
        return np.array([float(row["train/loss"]), float(row["validation/loss"])])

    expected = losses("compiled", *EACH_WITH_AN_EFFECT)
    np.testing.assert_allclose(losses("eager", "--eager", *EACH_WITH_AN_EFFECT), expected, rtol=1e-5)
    for missing in EACH_WITH_AN_EFFECT:
        others = [flag for flag in EACH_WITH_AN_EFFECT if flag != missing]
        changed = losses(f"without{missing.split('=')[0]}", *others)
        assert np.abs(changed / expected - 1.0).max() > 1e-3, missing


def test_hooks_in_python_see_values_and_the_next_build_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Any]] = {"train_step": [], "prepare_example": []}
    train_step, prepare_example = task.train_step, task.prepare_example

    def noted_step(batch):
        loss = train_step(batch)
        seen["train_step"].append(loss)
        return loss

    def noted_preparation(features, labels, *, training: bool, seed: tf.Tensor):
        seen["prepare_example"].append(labels)
        return prepare_example(features, labels, training=training, seed=seed)

    monkeypatch.setattr(task, "train_step", noted_step)
    monkeypatch.setattr(task, "prepare_example", noted_preparation)
    run(tmp_path / "eager", "--eager", "--epochs=1", "--simulated-devices=1")
    assert len(seen["train_step"]) == 3
    assert all(0 < float(loss) < 10 for loss in seen["train_step"])
    assert len(seen["prepare_example"]) > 3 * 60
    assert all(0 <= int(label) < 10 for label in seen["prepare_example"])

    seen["train_step"].clear()
    run(tmp_path / "compiled", "--epochs=1", "--simulated-devices=1")
    assert len(seen["train_step"]) < 3
    assert not any(hasattr(loss, "numpy") for loss in seen["train_step"])


def test_mistake_in_a_hook_in_python_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_step = task.train_step

    def mistaken_step(batch):
        train_step(batch)
        return {}["loss"]

    monkeypatch.setattr(task, "train_step", mistaken_step)
    line = line_of(capsys, tmp_path / "run", "--eager", "--simulated-devices=1")
    assert "KeyError: 'loss' (in train steps 1 to 2 of epoch 1)" in line


@pytest.mark.parametrize("more", [(), ("--steps-per-epoch=30", "--keep-last-batch")], ids=["passes", "epochs"])
def test_limited_run_takes_so_many_steps_of_everything(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    totals: list[int] = []
    create_optimizer = task.create_optimizer
    monkeypatch.setattr(
        task, "create_optimizer", lambda total_steps: totals.append(total_steps) or create_optimizer(total_steps)
    )
    sizes: list[float] = []
    update_metrics = task.update_metrics

    def counted(split: str, labels, predictions, per_example_loss, weights) -> None:
        update_metrics(split, labels, predictions, per_example_loss, weights)
        if split == "validation":
            tf.py_function(lambda total: sizes.append(float(total)), [tf.reduce_sum(weights)], [])

    monkeypatch.setattr(task, "update_metrics", counted)
    result, rows = run(tmp_path / "run", *more)
    assert [row["step"] for row in rows] == ["3", "6"]
    assert totals == [6]
    # 179 examples in two whole batches of 60 and one of 59, in each of two epochs: the same ones.
    assert sum(sizes) == 2 * 179
    assert result["step"] == 6
    out = capsys.readouterr().out
    assert "limited        to 3 steps of each dataset (--limit-steps)" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["limit_steps"] == 3


def test_limited_evaluation_is_of_the_first_batches_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    monkeypatch.setattr(task, "create_model", lambda: keras.Sequential(layers))
    made: list[str] = []
    new_iterator = Batches._new_iterator

    def counted(batches: Batches, *place: int) -> StackIterator:
        made.append(batches.name)
        return new_iterator(batches, *place)

    monkeypatch.setattr(Batches, "_new_iterator", counted)
    options = ("--limit-steps=1", "--learning-rate=1e-30", "--steps-per-execution=1")
    _, rows = run(tmp_path / "run", *options, "--epochs=3")
    assert made.count("validation") == 1  # It serves all epochs.
    losses = {row["validation/loss"] for row in rows}
    assert len(losses) == 1
    again = train.main([f"--run-dir={tmp_path / 'run'}", "--evaluate-only"])
    assert again["validation/loss"] == pytest.approx(float(losses.pop()), rel=1e-6)
    whole = train.main([f"--run-dir={tmp_path / 'run'}", "--evaluate-only", "--limit-steps=100"])["validation/loss"]
    assert whole != pytest.approx(float(rows[0]["validation/loss"]), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--eager", "--jit"), "--jit compiles the hooks, which --eager does not: remove one of the two"),
        (("--eager", "--check"), "--check compiles the hooks, which --eager does not: remove one of the two"),
        (("--eager", "--export"), "--export compiles the hooks, which --eager does not: remove one of the two"),
        (("--eager", "--strategy=multi_worker"), "--strategy multi_worker cannot be combined with --eager"),
        (("--limit-steps=0",), "--limit-steps 0 must be from 1 to"),
    ],
    ids=["jit", "check", "export", "cluster", "no steps"],
)
def test_debugging_that_cannot_be_is_refused(
    flags: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in line_of(capsys, tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()
