"""Reports: rows survive a resume, and the better score is known by its name."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from small import linear_model

import task
import train
from config import Config
from engine.console import LiveLine
from engine.model.metrics import ResultNames
from engine.report import report as report_module
from engine.report.report import Report
from engine.report.tables import read_rows
from engine.run.progress import is_better

NAMES = ResultNames({}, [])


def row(epoch: int, **metrics: float) -> dict[str, Any]:
    counters = {"epoch": epoch, "step": 10 * epoch, "seconds": 1.5, "examples_per_second": 20.0, "learning_rate": 0.1}
    return {**counters, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def opened(run_dir: Path, *, epochs_done: int = 0, validated_step: int = 0) -> Report:
    done = {"epochs": epochs_done, "step": 10 * epochs_done, "validation": validated_step}
    return Report(Config(run_dir=run_dir, epochs=5), NAMES, "min", done, [])


def test_resumed_report_keeps_the_rows_of_the_epochs_done(tmp_path: Path) -> None:
    def end_epoch(report: Report, epoch: int, **metrics: float) -> None:
        report.epoch(row(epoch, **metrics), is_best=False)
        report.validation(10 * epoch + 5, {"validation/loss": 1 / epoch}, is_best=False)

    report = opened(tmp_path)
    end_epoch(report, 1, train__loss=1 / 3)
    for epoch in (2, 3):
        end_epoch(report, epoch, train__loss=0.5)
    with (tmp_path / "metrics.csv").open("a") as lines:
        lines.write("4,40,1.0,2.")  # A kill, after the rows of the second and the third epoch and before a checkpoint.
    report = opened(tmp_path, epochs_done=1, validated_step=15)
    end_epoch(report, 2, train__loss=0.25)
    end_epoch(report, 3, train__loss=0.125, train__new=7.0)
    found = read_rows(tmp_path / "metrics.csv")
    assert [(each["epoch"], each["train/loss"]) for each in found] == [(1, 1 / 3), (2, 0.25), (3, 0.125)]
    assert [each.get("train/new") for each in found] == [None, None, 7.0]
    assert report.rows == found
    assert [each["step"] for each in read_rows(tmp_path / "validations.csv", "step")] == [15, 25, 35]
    report.draw_curves()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_better_is_strictly_better() -> None:
    nan = float("nan")
    for better in ((0.4, 0.5, "min"), (0.6, 0.5, "max"), (0.5, None, "min")):
        assert is_better(*better)
    for other in ((0.5, 0.5, "min"), (0.5, 0.5, "max"), (nan, 0.5, "max"), (nan, None, "min")):
        assert not is_better(*other)


def test_mean_loss_of_steps_counts_each_example_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 512: the third one has 233 examples of 1,257 and is padded."""
    load_examples = task.load_examples
    monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split) if split == "train" else None)
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    monkeypatch.setattr(report_module, "SECONDS_PER_ROW", 1e9)
    monkeypatch.setattr(Report, "draw_curves", lambda report: None)
    shown: dict[str, float] = {}
    took = LiveLine.took

    def took_and_shown(line: LiveLine, *arguments: Any) -> None:
        name = line._title.split()[-1]
        took(line, *arguments)
        shown[name] = line._loss_sum / line._batches

    monkeypatch.setattr(LiveLine, "took", took_and_shown)
    flags = ["--epochs=1", "--global-batch-size=512", "--simulated-devices=2"]
    train.main([f"--run-dir={tmp_path}", *flags, "--keep-last-batch", "--monitor=train/loss"])
    (one,), (of_steps,) = read_rows(tmp_path / "metrics.csv"), read_rows(tmp_path / "steps.csv")
    assert shown == pytest.approx({"train": one["train/loss"]}, rel=1e-5)
    assert of_steps["loss"] == pytest.approx(one["train/loss"], rel=1e-5)


def test_on_report_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(problem: BaseException) -> Callable[..., None]:
        def on_report(*_: Any) -> None:
            raise problem

        return on_report

    strategy = tf.distribute.get_strategy()
    for hook in (
        raises(SystemExit(3)),
        raises(asyncio.CancelledError()),
        raises(OSError(28, "No space left on device")),
        lambda: None,  # It takes no arguments.
    ):
        report = opened(tmp_path)
        for epoch in (1, 2):
            report.call_hook(hook, row(epoch), strategy)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("task.on_report failed (")
        assert line.endswith("); the run continues")
    with pytest.raises(KeyboardInterrupt):
        report.call_hook(raises(KeyboardInterrupt()), row(3), strategy)
