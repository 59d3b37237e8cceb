"""Reports: rows survive a resume, and the better score is known by its name."""

import csv
from pathlib import Path
from typing import Any

from config import Config
from engine.model.metrics import ResultNames
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
