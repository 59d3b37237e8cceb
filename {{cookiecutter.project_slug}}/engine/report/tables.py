"""Tables: the CSV files metrics.csv, validations.csv, evaluations.csv and steps.csv; and --compare."""

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from engine.console import console
from engine.errors import BadInput
from engine.files import exists, read_json, sync, until_read, until_written, write_atomically, writing
from engine.settings import CONFIG, flag, read_config

# The columns of metrics.csv before the metrics; with several optimizers, each has its "learning_rate/<name>".
COLUMNS = ("epoch", "step", "seconds", "examples_per_second", "learning_rate")
COUNTS = COLUMNS[:2]
INTACT = re.compile(rb"\d+(,[-+.\da-z]*)+\n")  # A row that was written completely.

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

    def header() -> str:
        with path.open(encoding="utf-8") as lines:
            return lines.readline()

    columns = next(csv.reader([until_read(header, path)]), []) if exists(path) else []
    if not row.keys() <= set(columns):
        write_rows(path, [*read_rows(path, "step"), row])
        return
    size = until_read(path.stat, path).st_size

    def append() -> None:
        with path.open("a", encoding="utf-8", newline="") as lines:
            lines.truncate(size)  # An attempt that failed may have left a part of the row.
            csv.DictWriter(lines, columns, lineterminator="\n").writerow(row)
        if synced:
            sync(path)

    with writing(path):
        until_written(append, path)


def cut_rows(path: Path, last: int) -> None:
    """Removes the rows whose first column is above `last`, and a damaged end that a killed run has left.

    Damage does not end a run, because a run resumes without these rows. They are not parsed: a run of a month has 2.6
    million, which take about two seconds. Raises CannotWrite.
    """

    def cut() -> None:
        with path.open("r+b") as file:
            header, number = file.readline(), -1
            end = file.tell() if header.startswith(b"step,") else 0
            for row in file:
                is_intact = INTACT.fullmatch(row) and row.count(b",") == header.count(b",")
                if not end or not is_intact or not number < int(row.split(b",")[0]) <= last:
                    break
                end, number = end + len(row), int(row.split(b",")[0])
            file.truncate(end)

    if exists(path):
        with writing(path):
            until_written(cut, path)


# --- Several runs in one table: python train.py --compare runs/a runs/b -----------------------------------------------

DIGITS = range(4, 18)  # 17 significant digits tell any two numbers of 64 bits apart.
# These settings do not affect the results of a run.
NOT_COMPARED = ("run_dir", "fresh", "settings_from", "compare", "check", "evaluate_only", "evaluate_continuously")


def compare(paths: Sequence[Path]) -> None:
    """Prints a table of the runs in some directories: how they ended, and the settings that differ.

    Raises BadInput if a directory contains no run.
    """
    runs = [_facts(path) for path in paths]
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for path in paths:
        table.add_column(str(path), overflow="fold")
    for label in dict.fromkeys(label for run in runs for label in run):
        texts = _as_texts([run.get(label, "") for run in runs])
        if not label.startswith("--") or len(set(texts)) > 1:
            table.add_row(label, *texts)
    console.print(table, soft_wrap=False)


def _facts(path: Path) -> dict[str, Any]:
    """Returns the lines of a run's column: numbers as floats, and everything else as texts."""
    config = read_config(path) if path.is_dir() else None
    if config is None:
        raise BadInput(f"--compare {path} contains no run ({CONFIG} is missing): pass directories of runs")
    settings, rows = config["settings"], read_rows(path / "metrics.csv")
    monitor = settings.get("monitor", "")
    result = read_json(path / "result.json", best_epoch=int, goodput=dict, **{f"best_{monitor}": float}) or {}
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    best = best_point([(row["epoch"], row[monitor]) for row in rows if monitor in row], config["monitor_direction"])
    if result:
        best = result["best_epoch"], result[f"best_{monitor}"]
    return {
        "state": "finished" if result else "unfinished",
        "strategy": config["strategy"],
        "replicas": str(config["replicas"]),
        "epochs": f"{rows[-1]['epoch'] if rows else 0} of {settings.get('epochs', '?')}",
        "time": f"{seconds / 60:,.1f} min" if seconds >= 60 else f"{seconds:.1f} s",
        f"best {monitor}": float(best[1]) if best else "",
        "in epoch": f"{best[0]:g}" if best else "",
        "goodput": f"{100 * result['goodput']['fraction']:.0f} %" if result.get("goodput") else "",
        # The name of an array's element ends in its index.
        **{name: value for name, value in result.items() if re.fullmatch(r"test/(.*/)?(?!\d+$)[^/]+", name)},
        **{flag(name): str(value) for name, value in settings.items() if name not in NOT_COMPARED},
    }


def _as_texts(cells: Sequence[Any]) -> list[str]:
    """Returns the cells of a line; numbers have four digits, or as many as tell different ones apart."""
    by_digits = (
        [f"{cell:.{digits}g}" if isinstance(cell, float) else str(cell) for cell in cells] for digits in DIGITS
    )
    return next(texts for texts in by_digits if len(set(texts)) == len(set(map(str, cells))))


def best_point(points: list[tuple[float, float]], direction: str) -> tuple[float, float] | None:
    """Returns the first (epoch, score) with the best score, as a run chooses its best weights; None without numbers."""
    numbers = [point for point in points if not math.isnan(point[1])]
    return min(numbers, key=lambda point: point[1] if direction == "min" else -point[1], default=None)
