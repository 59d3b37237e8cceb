"""A run that is stopped and resumed ends as if it had never been stopped."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import train
from engine.errors import Stopped
from engine.signals import Signals

TIME_COLUMNS = ("seconds", "examples_per_second", "goodput")


@pytest.fixture(scope="module")
def flags(arguments: list[str]) -> list[str]:
    """Two replicas, and one step per execution."""
    return [*arguments, "--simulated-devices=2", "--steps-per-execution=1"]


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was not stopped."""
    run_dir = tmp_path_factory.mktemp("whole")
    train.main([*flags, f"--run-dir={run_dir}"])
    return run_dir


def rows_without_times(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        return [{name: text for name, text in row.items() if name not in TIME_COLUMNS} for row in csv.DictReader(lines)]


def result_without_times(run_dir: Path) -> dict[str, float | str]:
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in result.items() if name not in TIME_COLUMNS}


def test_stopped_run_ends_bit_equal(
    flags: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped as by a signal, in the middle of the second epoch."""
    in_epoch = sum(each.steps_per_epoch for split in ("train", "validation") for each in train.batches.of(split))
    left = iter(range(in_epoch + 1))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped by a test")

    with monkeypatch.context() as stopping:
        stopping.setattr(Signals, "check", check)
        with pytest.raises(SystemExit) as ended:
            train.main([*flags, f"--run-dir={tmp_path}"])
    assert ended.value.code == 42
    assert not (tmp_path / "result.json").exists()
    train.main([*flags, f"--run-dir={tmp_path}"])

    assert rows_without_times(tmp_path) == rows_without_times(whole)
    assert result_without_times(tmp_path) == result_without_times(whole)


def test_finished_run_is_left_as_it_is(
    flags: list[str], whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = times(whole)
    monkeypatch.setattr(train, "train_epoch", None)
    train.main([*flags, f"--run-dir={whole}"])
    assert "Finished already" in capsys.readouterr().out
    assert times(whole) == written


def times(folder: Path) -> dict[Path, int]:
    """Returns the time of each file. Older versions of filelock write the lock file whenever they lock it."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
