"""Tables of numbers as CSV files: metrics.csv, validations.csv, evaluations.csv and steps.csv."""

import csv
import io
import math
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import BadInput
from engine.files import exists, read_text, sync, write_atomically, writing
from engine.messages import first_line
from engine.retries import until_read, until_written

# The columns of metrics.csv before the metrics; with several optimizers, each has its "learning_rate/<name>".
COLUMNS = ("epoch", "step", "seconds", "examples_per_second", "learning_rate")
COUNTS = COLUMNS[:2]
BYTES_AT_END = 2**16  # A killed run may have damaged this much.

Row = dict[str, Any]  # Column -> number; a blank cell has no entry.


def is_metric(column: str) -> bool:
    """Returns whether a column of metrics.csv is a metric."""
    return column.split("/")[0] not in COLUMNS


def read_rows(path: Path, key: str = "epoch") -> list[Row]:
    """Returns the rows of a file, none if it does not exist. Raises BadInput unless their `key`s increase.

    A last row without the end of its line is left out: a run that was killed has left it, or one is writing it now.
    """
    if not exists(path):
        return []
    try:
        text = read_text(path)
        rows, problem = _parse(text[: text.rfind("\n") + 1], key)
    except (OSError, ValueError) as error:
        problem = first_line(error)
    if problem:
        raise BadInput(f"{path} is not what a run writes ({problem}): restore it, move it away, or start a new run")
    return rows


def write_rows(path: Path, rows: list[Row]) -> list[str]:
    """Replaces the file; returns its columns. Raises CannotWrite."""
    # A metric that was added or removed at a resume has a column with blank cells.
    columns = list(dict.fromkeys(name for row in rows for name in row))

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(path, write)
    return columns


def keep_rows(path: Path, last: int, key: str = "epoch") -> tuple[list[Row], list[str]]:
    """Removes the rows whose `key` is above `last`, and half a row that a killed run has left.

    Returns the others, and the columns. Raises BadInput as `read_rows` does, CannotWrite as `write_rows` does.
    """
    rows = [row for row in read_rows(path, key) if row[key] <= last]
    return rows, write_rows(path, rows) if exists(path) else []


def append_row(path: Path, row: Row, columns: list[str], *, synced: bool = False) -> list[str]:
    """Appends a row to a file with these columns; returns its columns. Raises CannotWrite.

    With `synced` the row would survive a loss of power. A long run has 100,000 rows and more, so the file is replaced
    only if the row, like the first one, has new columns.
    """
    if not exists(path) or not row.keys() <= set(columns):
        return write_rows(path, [*read_rows(path, "step"), row])
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
    return columns


def cut_rows(path: Path, step: int) -> list[str]:
    """Removes the rows after a step, and a damaged end that a killed run has left; returns the columns.

    Damage does not end a run, because a run resumes without these rows. Raises CannotWrite.
    """
    if not exists(path):
        return []

    def cut() -> list[str]:
        with path.open("r+b") as file:
            columns = next(csv.reader([file.readline().decode(errors="replace")]), [])
            file.truncate(_end(file, columns, step))
        return columns

    with writing(path):
        return until_written(cut, path)


def _end(file: BinaryIO, columns: list[str], step: int) -> int:
    """Returns where the rows after a step begin, or a damaged end. `file` is at the first row, after the header.

    It reads the end and a few rows before it, because a run of weeks writes millions.
    """
    low, high = file.tell(), file.seek(0, io.SEEK_END)
    file.seek(max(low, high - BYTES_AT_END) - 1)
    file.readline()  # A row of which a part is before the end is complete.
    before, place = -1.0, file.tell()
    for row in file:
        number = _step(row, columns)
        if not before < number < math.inf:
            high = place
            break
        before, place = number, place + len(row)
    while low < high:  # What is before `low` stays; no row that begins at `high` or later does.
        middle = (low + high) // 2
        file.seek(middle - 1)
        file.readline()
        if file.tell() < high and _step(file.readline(), columns) <= step:
            low = file.tell()
        else:
            high = middle
    return low


def _step(row: bytes, columns: list[str]) -> float:
    """Returns the step of a row; infinity if it is damaged."""
    cells = row.decode(errors="replace").split(",")
    try:
        numbers = [float(cell.strip() or math.nan) for cell in cells]  # A blank cell has no number.
        is_complete = row.endswith(b"\n") and len(cells) == len(columns)
        return numbers[columns.index("step")] if is_complete else math.inf
    except ValueError:
        return math.inf


def _parse(text: str, key: str) -> tuple[list[Row], str]:
    """Returns the rows before the first damaged one, and why that one is damaged; "" if none is."""
    rows: list[Row] = []
    try:
        for cells in csv.DictReader(io.StringIO(text, newline=""), strict=True):
            if None in cells or None in cells.values():
                return rows, "a row has more or fewer cells than the header"
            row = {name: int(cell) if name in COUNTS else float(cell) for name, cell in cells.items() if cell}
            if row[key] <= (rows[-1][key] if rows else -1):
                return rows, f"its {key}s do not increase"
            rows.append(row)
    except (ValueError, KeyError, csv.Error) as error:
        return rows, first_line(error)
    return rows, ""
