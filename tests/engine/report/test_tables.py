"""Tables are appended to, and cut where a resumed run continues."""

import csv
from pathlib import Path

import numpy as np
import pytest

from engine.errors import BadInput
from engine.report.tables import append_row, cut_rows, keep_rows, read_rows

HEADER = "step,epoch,loss,steps_per_second,learning_rate\n"


def row(step: int, epoch: int = 1, **latest: float) -> dict[str, float]:
    return {"step": step, "epoch": epoch, "loss": 1.5, "steps_per_second": 2.0, **(latest or {"learning_rate": 0.1})}


def append(path: Path, *rows: dict[str, float], after: int = 0) -> None:
    cut_rows(path, after)
    for each in rows:
        append_row(path, each)


def written(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, restval="a cell is missing"))
    assert not any(None in each or "a cell is missing" in each.values() for each in rows)
    return rows


def test_rows_after_any_step_are_removed(tmp_path: Path) -> None:
    path, steps = tmp_path / "steps.csv", np.cumsum(np.random.default_rng(0).integers(1, 4000, 60)).tolist()
    text = HEADER + "".join(f"{step},1,{1 / step},2.0,0.1\n" for step in steps)
    for last in (0, *(step + more for step in steps for more in (-1, 0, 1))):
        path.write_text(text, encoding="utf-8")
        cut_rows(path, last)
        assert [int(each["step"]) for each in written(path)] == [step for step in steps if step <= last]


def test_part_of_a_row_that_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    lost_block = "6,1,1.\0\0,2.0,0.1\n"
    for rest in ("6,1,1.", "6,1,1.5,2.0,0.1", "6,1\n", "\0\0\0\n8,1,1.5,2.0,0.1\n", "1,1,1,1,1\n", lost_block):
        path.write_text(f"{HEADER}2,1,1.5,2.0,0.1\n4,1,1.5,2.0,0.1\n{rest}", encoding="utf-8")
        append(path, row(102), after=100)
        assert [each["step"] for each in written(path)] == ["2", "4", "102"]


def test_damaged_header_of_the_steps_ends_no_run(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for text in (b"", b"\xff\xfe\n2,1,1.5,2.0,0.1\n", b"\0" * 9):
        path.write_bytes(text)
        append(path, row(102), after=100)
        assert [row["step"] for row in written(path)] == ["102"]


def test_half_a_row_is_left_out_while_another_program_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,loss\n1,10,0.5\n2,20,0.2")
    assert read_rows(path) == [{"epoch": 1, "step": 10, "loss": 0.5}]
    assert keep_rows(path, 5) == read_rows(path)
    assert path.read_text() == "epoch,step,loss\n1,10,0.5\n"


def test_another_optimizer_gets_its_column_and_the_first_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    append(path, row(2))
    before = path.stat().st_ino
    append(path, row(3), after=2)
    assert path.stat().st_ino == before  # A row is appended; only a new column makes another file.
    append(path, row(4, **{"learning_rate/a": 0.5}), after=3)
    append(path, row(6), after=4)
    assert [each["learning_rate"] for each in written(path)] == ["0.1", "0.1", "", "0.1"]
    assert [each["learning_rate/a"] for each in written(path)] == ["", "", "0.5", ""]


def test_numbers_of_all_kinds_stay(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    rows = "2,1,nan,1e-05,\n4,1,-inf,1.5e+300,0.1\n"
    path.write_text(HEADER + rows, encoding="utf-8")
    cut_rows(path, 100)
    assert path.read_text(encoding="utf-8") == HEADER + rows


def test_damaged_metrics_are_refused(tmp_path: Path) -> None:
    for text, problem in (
        ("epoch,step\n2,4\n1,2\n", "its epochs are missing or do not increase"),
        ("epoch,step\n1,2,3\n", "a row has more or fewer cells than the header"),
        ("step\n1\n", "its epochs are missing or do not increase"),
        ("epoch,step\n1,x\n", "invalid literal for int"),
    ):
        (tmp_path / "metrics.csv").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=rf"metrics\.csv is not what a run writes \((?:{problem}).*: restore it"):
            read_rows(tmp_path / "metrics.csv")
