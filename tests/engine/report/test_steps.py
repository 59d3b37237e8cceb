"""steps.csv: a row a second, appended, and cut where a resumed run goes on."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from engine.errors import CannotWrite
from engine.report.steps import Steps

HEADER = "step,epoch,loss,steps_per_second,learning_rate,gradient_norm\n"
LATEST = {"learning_rate": 0.1, "gradient_norm": 2.0}


def opened(path: Path, step: int = 0) -> Steps:
    steps = Steps(path)
    steps.open(step)
    return steps


def add(steps: Steps, last: int, epoch: int = 1, latest: dict[str, float] = LATEST) -> None:
    assert steps.add(np.array([1.0, 2.0]), 1.0)
    steps.row(last, epoch, latest)


def written(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_short_chunks_share_a_row_which_is_their_mean(tmp_path: Path) -> None:
    steps = opened(tmp_path / "steps.csv")
    due = [steps.add(np.array(losses), 0.375) for losses in ([1.0], [2.0, 4.0], [5.0])]
    assert due == [False, False, True]
    steps.row(4, 1, LATEST)
    assert steps.is_empty
    assert (tmp_path / "steps.csv").read_text() == f"{HEADER}4,1,3.0,{4 / 1.125},0.1,2.0\n"


def test_rows_after_the_step_that_a_run_goes_on_from_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    steps = opened(path)
    for last in (2, 4, 6):
        add(steps, last)
    steps = opened(path, step=4)
    assert [row["step"] for row in written(path)] == ["2", "4"]
    add(steps, 5, epoch=2)
    assert [(row["step"], row["epoch"]) for row in written(path)] == [("2", "1"), ("4", "1"), ("5", "2")]


@pytest.mark.parametrize(
    "rest", ["6,1,1.", "6,1,1.5,2.0,0.1,2.0", "6,1\n", "\0\0\0\n8,1,1.5,2.0,0.1,2.0\n", "1,1,1,1,1,1\n"]
)
def test_what_a_killed_run_has_left_of_a_row_is_removed(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"{HEADER}2,1,1.5,2.0,0.1,2.0\n4,1,1.5,2.0,0.1,2.0\n{rest}", encoding="utf-8")
    steps = opened(path, step=100)
    add(steps, 102)
    assert [row["step"] for row in written(path)] == ["2", "4", "102"]


def test_a_row_is_appended_and_the_file_is_not_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    steps = opened(path)
    add(steps, 2)
    before = path.stat().st_ino
    add(steps, 4)
    assert path.stat().st_ino == before
    opened(path, step=4)  # Nothing is cut.
    assert path.stat().st_ino == before


def test_another_optimizer_gets_its_columns_and_what_is_not_finite_is_blank(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    add(opened(path), 2)
    steps = opened(path, step=2)
    add(steps, 4, latest={"gradient_norm/a": math.inf, "learning_rate/a": 0.5})
    first, second = written(path)
    assert (first["gradient_norm"], first["learning_rate/a"]) == ("2.0", "")
    assert (second["gradient_norm"], second["gradient_norm/a"], second["learning_rate/a"]) == ("", "", "0.5")
    add(opened(path, step=4), 6)
    assert [row["gradient_norm"] for row in written(path)] == ["2.0", "", "2.0"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    steps = opened(tmp_path / "steps.csv")
    add(steps, 2)
    (tmp_path / "steps.csv").unlink()
    (tmp_path / "steps.csv").symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match=r"steps\.csv cannot be written \(No space left on device\)"):
        add(steps, 4)
