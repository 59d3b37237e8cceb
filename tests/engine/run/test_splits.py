"""Runs whose splits are missing or have several sets, with metrics of arrays and epochs that are no passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, rows, run, stop

import task
import train

pytestmark = pytest.mark.usefixtures("linear")


@pytest.mark.long
def test_run_stopped_in_its_second_validation_set_goes_on_with_arrays_and_epochs_that_are_no_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_examples, create_metrics, update_metrics = task.load_examples, task.create_metrics, task.update_metrics

    def several_sets(split: str) -> Any:
        examples = load_examples(split)
        return (
            examples.take(120) if split == "train" else {"easy": examples.take(24), "hard": examples.skip(24).take(13)}
        )

    def with_scores(split: str) -> dict[str, keras.metrics.Metric]:
        return create_metrics(split) | ({} if split == "train" else {"f1": keras.metrics.F1Score(average=None)})

    def update(split: str, labels, predictions, per_example_loss, weights) -> None:
        update_metrics(split, labels, predictions, per_example_loss, weights)
        if split != "train":
            task.metrics[split]["f1"].update_state(tf.one_hot(labels, 10), predictions, sample_weight=weights)

    monkeypatch.setattr(task, "load_examples", several_sets)
    monkeypatch.setattr(task, "create_metrics", with_scores)
    monkeypatch.setattr(task, "update_metrics", update)
    # Of 120 examples in passes of 6 steps, epochs of 8. Validations after 5, 8, 10, 15 and 16 steps, of 3 and 2 steps.
    flags = ("--global-batch-size=20", "--simulated-devices=1", "--steps-per-execution=1", "--epochs=2")
    flags += ("--steps-per-epoch=8", "--validate-every-steps=5", "--evaluation-batch-size=10")
    flags += ("--monitor=validation/hard/f1/3",)
    stop(1 + 4 + 3, tmp_path, *flags)
    record = json.loads((train.run.checkpoints.paths()[-1] / "progress.json").read_text())
    assert record["metrics"]["validation/easy"].keys() >= {"validation/easy/loss", "validation/easy/f1/9"}
    assert record["steps_of_pass"] == {"train": 5, "validation/hard": 1}
    result = run(tmp_path, *flags)
    out = capsys.readouterr().out
    # Elements of arrays are in the files, not in lines; but the monitored one is.
    assert "/f1/0" not in out
    assert all("  validation/hard/f1/3 " in line for line in out.splitlines() if line.startswith(("epoch ", "step ")))
    epochs, within = rows(tmp_path), rows(tmp_path, "validations.csv")
    assert [row["step"] for row in epochs] == ["8", "16"]
    assert [row["step"] for row in within] == ["5", "10", "15"]
    names = [f"validation/easy/{name}" for name in ("loss", "accuracy", "f1/0", "f1/9")]
    assert {name: float(within[0][name]) for name in names} == {
        name: value for name, value in record["metrics"]["validation/easy"].items() if name in names
    }
    assert result["best_validation/hard/f1/3"] == max(float(row["validation/hard/f1/3"]) for row in [*epochs, *within])
    assert {"test/easy/loss", "test/hard/f1/9", "test/easy/accuracy"} <= result.keys()


def test_run_without_validation_and_test_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: Callable[..., tuple[int, str]],
) -> None:
    load_examples = task.load_examples
    monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split) if split == "train" else None)
    result = run(tmp_path, *ONE_REPLICA, "--epochs=2", "--monitor=train/loss")
    assert result["test"] is None
    assert "none: task.load_examples('test') returned None" in capsys.readouterr().out
    losses = [float(row["train/loss"]) for row in rows(tmp_path)]
    assert (result["best_epoch"], result["best_train/loss"]) == (losses.index(min(losses)) + 1, min(losses))
    for way, told in (
        ("--evaluate-only", "--evaluate-only: task.load_examples returned None for"),
        ("--evaluate-continuously", "task.load_examples('validation') returned None, so there is no validation"),
    ):
        code, line = ended(tmp_path, way, "--simulated-devices=1")
        assert (code, told in line) == (2, True), line
