"""Whole runs whose splits are missing or have several sets, with metrics of arrays and epochs that are no passes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model

import task
import train
from engine.errors import Stopped
from engine.run.signals import Signals

TIMES = ("seconds", "examples_per_second", "goodput")
LOAD_EXAMPLES, CREATE_METRICS, UPDATE_METRICS = task.load_examples, task.create_metrics, task.update_metrics
# Of 120 examples in passes of 6 steps, epochs of 8. Validations after 5, 8, 10, 15 and 16 steps, of 3 and 2 steps.
FLAGS = (
    *("--global-batch-size=20", "--simulated-devices=1", "--steps-per-execution=1", "--ema-decay=0.9"),
    *("--epochs=2", "--steps-per-epoch=8", "--validate-every-steps=5", "--evaluation-batch-size=10"),
    *("--monitor=validation/hard/f1/3", "--checkpoint-every-steps=3"),
)


def several_sets(split: str) -> Any:
    examples = LOAD_EXAMPLES(split)
    if split == "train":
        return examples.take(120)
    return {"easy": examples.take(24), "hard": examples.skip(24).take(13)}


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
        return CREATE_METRICS(split) | ({} if split == "train" else {"f1": keras.metrics.F1Score(average=None)})

    def update_metrics(split: str, labels, predictions, per_example_loss, weights) -> None:
        UPDATE_METRICS(split, labels, predictions, per_example_loss, weights)
        if split != "train":
            task.metrics[split]["f1"].update_state(tf.one_hot(labels, 10), predictions, sample_weight=weights)

    monkeypatch.setattr(task, "load_examples", several_sets)
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_metrics", create_metrics)
    monkeypatch.setattr(task, "update_metrics", update_metrics)


def run(run_dir: Path, *flags: str) -> Any:
    """Runs train.py with flags; returns its result."""
    return train.main([f"--run-dir={run_dir}", *flags])


def rows(run_dir: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (run_dir / name).open(encoding="utf-8", newline="") as lines:
        return [{key: text for key, text in row.items() if key not in TIMES} for row in csv.DictReader(lines)]


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in TIMES}


def stop(monkeypatch: pytest.MonkeyPatch, chunks: int, run_dir: Path, *flags: str) -> None:
    """Runs train.py and stops it, as by a signal, after so many chunks of steps."""
    left = iter(range(chunks))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped")

    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", check)
        with pytest.raises(SystemExit) as ended:
            run(run_dir, *flags)
    assert ended.value.code == 42


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs train.py with flags; returns its one line."""

    def refuse(run_dir: Path, *flags: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(run_dir, *flags)
        assert ended.value.code == 2
        assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refuse


@pytest.mark.long
def test_run_stopped_in_its_second_validation_set_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "whole", *FLAGS)
    out = capsys.readouterr().out
    assert "epochs         2, each of 8 steps; a pass over the examples has 6" in out
    assert "batch          20 examples, 20 on each replica, 10 to evaluate" in out
    assert "examples       train 120, validation/easy 24, validation/hard 13, test/easy 24, test/hard 13" in out
    # Elements of arrays are in the files, not in lines.
    assert "/f1/0" not in out
    # But the monitored one.
    assert all("  validation/hard/f1/3 " in line for line in out.splitlines() if line.startswith(("epoch ", "step ")))
    names = [f"validation/{each}/{name}" for each in ("easy", "hard") for name in ("loss", "accuracy", "f1/0", "f1/9")]
    assert set(names) <= rows(tmp_path / "whole")[0].keys() & rows(tmp_path / "whole", "validations.csv")[0].keys()
    assert [row["step"] for row in rows(tmp_path / "whole")] == ["8", "16"]
    # The schedule is of 16 steps: one to warm up, and 7 of the other 15 are done.
    half = 0.5 * 3e-3 * (1 + np.cos(np.pi * 7 / 15))
    assert [float(row["learning_rate"]) for row in rows(tmp_path / "whole")] == pytest.approx([half, 0.0], abs=1e-8)
    assert [row["step"] for row in rows(tmp_path / "whole", "validations.csv")] == ["5", "10", "15"]
    scores = [
        (float(row["validation/hard/f1/3"]), int(row["step"]))
        for row in [*rows(tmp_path / "whole", "validations.csv"), *rows(tmp_path / "whole")]
    ]
    best = max(score for score, _ in scores)
    assert result["best_validation/hard/f1/3"] == best
    assert {"test/easy/loss", "test/hard/f1/9", "test/easy/accuracy"} <= result.keys()

    # In the second dataset: of the validation after 5 steps, then of the one after 8. Before a validation no stop is
    # asked for; a resume asks once more.
    for until_stopped in (4 + 3 + 1, 1 + 1 + 3 + 3 + 1):
        stop(monkeypatch, until_stopped, tmp_path / "stopped", *FLAGS)
        *_, newest = train.run.checkpoints.paths()
        record = json.loads((newest / "progress.json").read_text())
        assert record["metrics"]["validation/easy"].keys() >= {"validation/easy/loss", "validation/easy/f1/9"}
        assert record["steps_of_pass"]["validation/hard"] == 1
    assert without_times(run(tmp_path / "stopped", *FLAGS)) == without_times(result)
    for name in ("metrics.csv", "validations.csv"):
        assert rows(tmp_path / "stopped", name) == rows(tmp_path / "whole", name)

    evaluated = run(tmp_path / "whole", "--evaluate-only")
    assert evaluated["validation/hard/f1/3"] == pytest.approx(best, rel=1e-6)
    assert {name: evaluated[name] for name in result if name.startswith("test/")} == pytest.approx(
        {name: value for name, value in result.items() if name.startswith("test/")}, rel=1e-6
    )
    capsys.readouterr()
    run(tmp_path / "whole", "--evaluate-continuously", "--steps-per-execution=1")
    # In the order of their steps: 12, 15 (where also a validation was) and 16.
    last = rows(tmp_path / "whole", "evaluations.csv")[-1]
    assert {name: float(last[name]) for name in names} == pytest.approx(
        {name: float(rows(tmp_path / "whole")[-1][name]) for name in names}, rel=1e-6
    )
    assert "/f1/" not in capsys.readouterr().out
    folder = tmp_path / "whole" / "tensorboard"
    shown = {
        (events.parent.relative_to(folder) / value.tag).as_posix()
        for events in folder.rglob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert shown >= {*names, "train/loss"}


def test_run_without_validation_and_test_resumes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    load = {"train": LOAD_EXAMPLES, "validation": lambda _: None, "test": lambda _: None}
    monkeypatch.setattr(task, "load_examples", lambda split: load[split](split))
    flags = ("--global-batch-size=320", "--simulated-devices=1", "--epochs=3", "--ema-decay=0.9", "--patience=5")
    flags += ("--monitor=train/loss", "--steps-per-execution=1")
    result = run(tmp_path / "whole", *flags)
    out = capsys.readouterr().out
    assert result["test"] is None
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["test"] is None
    assert "none: task.load_examples('test') returned None" in out
    assert "examples       train 1258, no validation, no test" in out
    losses = [float(row["train/loss"]) for row in rows(tmp_path / "whole")]
    assert (result["best_epoch"], result["best_train/loss"]) == (losses.index(min(losses)) + 1, min(losses))
    assert not [name for name in rows(tmp_path / "whole")[0] if name.startswith("validation/")]

    stop(monkeypatch, 4, tmp_path / "stopped", *flags)
    assert without_times(run(tmp_path / "stopped", *flags)) == without_times(result)
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    assert "--evaluate-only: task.load_examples returned None for" in refused(tmp_path / "whole", "--evaluate-only")
    line = refused(tmp_path / "whole", "--evaluate-continuously")
    assert "--evaluate-continuously: task.load_examples('validation') returned None, so there is no validation" in line
