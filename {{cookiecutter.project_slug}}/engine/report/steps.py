"""steps.csv: what an epoch's line cannot show. About a row a second, each the mean over the steps since the last."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.files import writing
from engine.report.tables import write_rows

STEPS = "steps.csv"
# Chunks of steps may be far shorter.
SECONDS_PER_ROW = 1.0


class Steps:
    """The rows of steps.csv. A row is appended: a long run has 100,000 and more."""

    def __init__(self, path: Path) -> None:
        """Reads and writes nothing; `open` does."""
        self._path = path
        self._columns: list[str] = []
        self._forget()

    def open(self, step: int) -> None:
        """Cuts off the rows after a step, and what a killed run has left of a row."""
        rows, is_whole = _read(self._path)
        kept = [row for row in rows if row["step"] <= step]
        self._columns = list(dict.fromkeys(name for row in kept for name in row))
        if not is_whole or len(kept) < len(rows):
            write_rows(self._path, kept)

    def add(self, losses: np.ndarray, seconds: float) -> bool:
        """Counts the steps of a chunk, with the losses of each ([count]); returns whether a row is due."""
        self._loss += float(np.sum(losses, dtype=np.float64))
        self._count += len(losses)
        self._seconds += seconds
        return self._seconds >= SECONDS_PER_ROW

    def row(self, step: int, epoch: int, latest: dict[str, float]) -> dict[str, Any]:
        """Appends and returns the row of the steps since the last one. `latest` holds the other columns.

        What of these is not finite is left blank, as the norm of a step that mixed_float16 has skipped.
        """
        row = {
            "step": step,
            "epoch": epoch,
            "loss": self._loss / self._count,
            "steps_per_second": self._count / max(self._seconds, 1e-9),
            **{name: value if math.isfinite(value) else None for name, value in latest.items()},
        }
        self._forget()
        if not row.keys() <= set(self._columns):  # The first row, or one of a run that got another optimizer.
            rows, _ = _read(self._path)
            columns = dict.fromkeys([*self._columns, *row])
            self._columns = list(columns)
            write_rows(self._path, [{**dict.fromkeys(columns), **each} for each in [*rows, row]])
        else:
            with writing(self._path), self._path.open("a", encoding="utf-8", newline="") as lines:
                csv.DictWriter(lines, self._columns, lineterminator="\n").writerow(row)
        return row

    @property
    def is_empty(self) -> bool:
        """Whether there were no steps since the last row."""
        return self._count == 0

    def _forget(self) -> None:
        self._loss, self._count, self._seconds = 0.0, 0, 0.0


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns the rows up to the first that cannot be read, and whether that is all of them.

    Unlike metrics.csv it is no source of what the run does next, so a damaged file does not end it.
    """
    if not path.exists():
        return [], True
    with writing(path):
        text = path.read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    rows: list[dict[str, Any]] = []
    try:
        for cells in csv.DictReader(io.StringIO(whole, newline=""), strict=True):
            if None in cells or None in cells.values():
                raise ValueError("a row of another length")
            row = {
                name: int(cell) if name in ("step", "epoch") else float(cell) for name, cell in cells.items() if cell
            }
            if rows and row["step"] <= rows[-1]["step"]:
                raise ValueError("a step that does not rise")
            row["epoch"]
            rows.append(row)
    except (ValueError, KeyError, csv.Error):
        return rows, False
    return rows, whole == text
