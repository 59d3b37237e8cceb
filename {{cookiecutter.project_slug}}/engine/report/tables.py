"""Tables of numbers as CSV files: metrics.csv, validations.csv, evaluations.csv and steps.csv."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.files import exists, sync, until_read, until_written, write_atomically, writing

# The columns of metrics.csv before the metrics; with several optimizers, each has its "learning_rate/<name>".
COLUMNS = ("epoch", "step", "seconds", "examples_per_second", "learning_rate")
COUNTS = COLUMNS[:2]

Row = dict[str, Any]  # Column -> number; a blank cell has no entry.


def is_metric(column: str) -> bool:
    """Returns whether a column of metrics.csv is a metric."""
    return column.split("/")[0] not in COLUMNS


def read_rows(path: Path, key: str = "epoch") -> list[Row]:
    """Returns the rows of a file, none if it does not exist. Raises BadInput unless their `key`s increase.

    A last row without the end of its line is skipped: a run that was killed has left it, or one is writing it now.
    """
    if not exists(path):
        return []
    rows: list[Row] = []
    try:
        text = until_read(lambda: path.read_text(encoding="utf-8"), path)
        for cells in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True):
            if None in cells or None in cells.values():
                raise ValueError("a row has more or fewer cells than the header")
            row = {name: int(cell) if name in COUNTS else float(cell) for name, cell in cells.items() if cell}
            if row.get(key, -1) <= (rows[-1][key] if rows else -1):
                raise ValueError(f"its {key}s are missing or do not increase")
            rows.append(row)
    except (OSError, ValueError, csv.Error) as problem:
        raise BadInput(
            f"{path} is not what a run writes ({problem}): restore it, move it away, or start a new run"
        ) from problem
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replaces the file. Raises CannotWrite."""
    # A metric that was added or removed at a resume has a column with blank cells.
    columns = dict.fromkeys(name for row in rows for name in row)

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(path, write)


def keep_rows(path: Path, last: int, key: str = "epoch") -> list[Row]:
    """Removes the rows whose `key` is above `last`, and half a row that a killed run has left; returns the rest.

    Raises BadInput as `read_rows` does, CannotWrite as `write_rows` does.
    """
    rows = [row for row in read_rows(path, key) if row[key] <= last]
    if exists(path):
        write_rows(path, rows)
    return rows


def append_row(path: Path, row: Row, *, synced: bool = False) -> None:
    """Appends a row; with `synced` it would survive a loss of power. Raises CannotWrite.

    A long run has 100,000 rows and more, so the file is replaced only if the row, like the first one, has new columns.
    """
    columns, _ = _header(path) if exists(path) else ([], 0)
    if not row.keys() <= set(columns):
        write_rows(path, [*read_rows(path, "step"), row])
        return
    size = until_read(path.stat, path).st_size

    def append() -> None:
        with path.open("a", encoding="utf-8", newline="") as lines:
            if lines.tell() > size:  # An attempt that failed has left a part of the row.
                lines.truncate(size)
            csv.DictWriter(lines, columns, lineterminator="\n").writerow(row)
        if synced:
            sync(path)

    with writing(path):
        until_written(append, path)


def cut_rows(path: Path, step: int) -> None:
    """Removes the rows after a step, and a damaged end that a killed run has left. "step" is the first column.

    Damage does not end a run, because a run resumes without these rows. They are not parsed: a run of a month has 2.6
    million, which take about two seconds. Raises CannotWrite.
    """
    if not exists(path):
        return
    columns, start = _header(path)
    intact = re.compile(rb"(\d+)" + (len(columns) - 1) * rb",[-+.\da-z]*" + rb"\n")

    def cut() -> None:
        end, last = start, -1
        with path.open("r+b") as file:
            file.seek(start)
            for row in file:
                number = int(match[1]) if (match := intact.fullmatch(row)) else -1
                if not last < number <= step:
                    break
                end, last = end + len(row), number
            file.truncate(end)

    with writing(path):
        until_written(cut, path)


def _header(path: Path) -> tuple[list[str], int]:
    """Returns the columns of a file, and the bytes of its first line."""

    def read() -> bytes:
        with path.open("rb") as file:
            return file.readline()

    line = until_read(read, path)
    return next(csv.reader([line.decode(errors="replace")]), []), len(line)
