"""Reports: rows survive a resume, and the better score is known by its name."""

import asyncio
import csv
import resource
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
from engine.run.progress import is_better

NAMES = ResultNames({}, [])


def row(epoch: int, **metrics: float) -> dict[str, Any]:
    counters = {"epoch": epoch, "step": 10 * epoch, "seconds": 1.5, "examples_per_second": 20.0, "learning_rate": 0.1}
    return {**counters, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def rows_in(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def opened(run_dir: Path, *, epochs: int, epochs_done: int, validated_step: int = 0) -> Report:
    settings, position = Config(run_dir=run_dir, epochs=epochs), {"epochs_done": epochs_done, "step": 10 * epochs_done}
    return Report(settings, NAMES, "min", **position, validated_step=validated_step, resumed=[])


def test_resumed_report_keeps_the_rows_of_the_epochs_done(tmp_path: Path) -> None:
    report = opened(tmp_path, epochs=3, epochs_done=0)
    for epoch in (1, 2):
        report.epoch(row(epoch, train__loss=1 / 3 / epoch), is_best=True)
    # Killed after the second row and before its checkpoint: the second epoch is done again.
    report = opened(tmp_path, epochs=3, epochs_done=1)
    report.epoch(row(2, train__loss=0.5), is_best=False)
    report.epoch(row(3, train__loss=0.25, validation__auc=0.75), is_best=False)
    found = rows_in(tmp_path)
    assert [(one["epoch"], one["train/loss"]) for one in found] == [("1", repr(1 / 3)), ("2", "0.5"), ("3", "0.25")]
    assert [one["validation/auc"] for one in found] == ["", "", "0.75"]

    report = opened(tmp_path, epochs=4, epochs_done=3)
    report.epoch(row(4, train__loss=0.125), is_best=False)
    assert [one["train/loss"] for one in rows_in(tmp_path)] == [repr(1 / 3), "0.5", "0.25", "0.125"]
    report.draw_curves()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_resumed_report_keeps_the_validations_up_to_the_last_one_done(tmp_path: Path) -> None:
    report = opened(tmp_path, epochs=3, epochs_done=0)
    for step in (5, 10, 15):
        report.validation(step, {"validation/loss": 1 / step}, is_best=False)
    # Killed before a checkpoint said that step 10 was validated.
    report = opened(tmp_path, epochs=3, epochs_done=0, validated_step=5)
    report.validation(10, {"validation/loss": 0.5}, is_best=False)
    with (tmp_path / "validations.csv").open(encoding="utf-8", newline="") as lines:
        assert list(csv.reader(lines)) == [["step", "validation/loss"], ["5", "0.2"], ["10", "0.5"]]


def test_better_is_strictly_better() -> None:
    assert is_better(0.4, 0.5, "min")
    assert not is_better(0.5, 0.5, "min")
    assert is_better(0.6, 0.5, "max")
    assert not is_better(0.5, 0.5, "max")
    assert is_better(0.5, None, "min")
    assert not is_better(float("nan"), 0.5, "max")
    # A score that is never a number still leaves weights to test.
    assert is_better(float("nan"), None, "min")
    assert is_better(0.5, float("nan"), "min")
    assert not is_better(float("nan"), float("nan"), "min")


def test_mean_loss_of_steps_counts_each_example_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 512: the third one has 233 examples of 1,257 and is padded, as is the only one of an evaluation."""
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    monkeypatch.setattr(report_module, "SECONDS_PER_ROW", 1e9)
    shown: dict[str, float] = {}
    took = LiveLine.took

    def took_and_shown(line: LiveLine, *arguments: Any) -> None:
        (each,) = line.tasks
        took(line, *arguments)
        shown[each.description.split()[-1]] = each.fields["sum"] / each.fields["batches"]

    monkeypatch.setattr(LiveLine, "took", took_and_shown)
    flags = ["--epochs=1", "--global-batch-size=512", "--keep-last-batch", "--simulated-devices=2"]
    result = train.main([f"--run-dir={tmp_path / 'run'}", *flags])
    (one,) = rows_in(tmp_path / "run")
    (of_steps,) = csv.DictReader((tmp_path / "run/steps.csv").read_text(encoding="utf-8").splitlines())
    expected = {"train": float(one["train/loss"]), "validation": float(one["validation/loss"])}
    assert shown == pytest.approx({**expected, "test": result["test/loss"]}, rel=1e-5)
    assert float(of_steps["loss"]) == pytest.approx(expected["train"], rel=1e-5)


def test_last_row_of_steps_has_the_rate_of_the_last_epoch(tmp_path: Path) -> None:
    report = opened(tmp_path, epochs=1, epochs_done=0)
    report.steps(10, 1, tf.ones([10]).numpy(), 10.0, 0.5, lambda: {"learning_rate": 0.01})
    report.epoch(row(1, train__loss=1.0), is_best=False)
    report.end()
    (of_steps,) = csv.DictReader((tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines())
    assert (of_steps["loss"], of_steps["steps_per_second"], of_steps["learning_rate"]) == ("1.0", "20.0", "0.1")


def raises(problem: BaseException) -> Callable[..., None]:
    def on_report(*_: Any) -> None:
        raise problem

    return on_report


@pytest.mark.parametrize(
    "hook",
    [
        raises(SystemExit(3)),
        raises(asyncio.CancelledError()),
        raises(tf.errors.CancelledError(None, None, "cancelled")),
        raises(GeneratorExit()),
        raises(OSError(28, "No space left on device")),
        lambda: None,  # It takes no arguments.
    ],
    ids=["exit", "asyncio", "TensorFlow", "generator", "disk", "signature"],
)
def test_on_report_ends_nothing(hook: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = opened(tmp_path, epochs=2, epochs_done=0)
    for epoch in (1, 2):
        report.call_hook(hook, row(epoch), tf.distribute.get_strategy())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("task.on_report failed (")
    assert line.endswith("); the run continues")
    with pytest.raises(KeyboardInterrupt):
        report.call_hook(raises(KeyboardInterrupt()), row(3), tf.distribute.get_strategy())


def test_summary_of_on_report_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys) -> None:
    report = opened(tmp_path, epochs=2, epochs_done=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_report(*_: Any) -> None:
        tf.summary.text("a text", "long" * 1000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))

    try:
        report.call_hook(on_report, row(1), tf.distribute.get_strategy())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "task.on_report failed (task.py: CannotWrite: " in capsys.readouterr().out


def test_much_waiting_is_reported_once_with_what_to_do_but_not_in_the_first_epoch(tmp_path: Path, capsys) -> None:
    report = opened(tmp_path, epochs=5, epochs_done=0)
    # In the third epoch it was no more than half a second.
    for epoch, (waited, seconds) in enumerate(((0.9, 9.0), (0.05, 9.0), (0.5, 1.0), (0.5, 9.0), (0.6, 9.0)), start=1):
        report.epoch({**row(epoch, train__loss=1.0), "seconds": seconds}, is_best=False, waited=waited)
    lines = capsys.readouterr().out.splitlines()
    epochs = [line for line in lines if line.startswith("epoch")]
    assert [line.split("examples/s")[1] for line in epochs] == [
        "  waited 90 %",
        "",
        "  waited 50 %",
        "  waited 50 %",
        "  waited 60 %",
    ]
    lines = [line for line in lines if "went into waiting for batches" in line]
    assert len(lines) == 1
    assert lines[0].startswith("50 % of the training time")
    assert "task.prepare_example" in lines[0]
