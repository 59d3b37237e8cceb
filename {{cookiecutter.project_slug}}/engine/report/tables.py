"""Rows of numbers as CSV files: metrics.csv, validations.csv and evaluations.csv."""

import csv
import io
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.files import write_whole
from engine.user_errors import first_line

# The columns that are not metrics, in the order of metrics.csv; metrics follow. Of several optimizers each has its
# learning rate, as "learning_rate/<name>".
COLUMNS = ("epoch", "step", "seconds", "examples_per_second", "learning_rate")


def is_metric(column: str) -> bool:
    """Returns whether a column of metrics.csv is a metric."""
    return column.split("/")[0] not in COLUMNS


def read_rows(path: Path, key: str = "epoch") -> list[dict[str, Any]]:
    """Returns the rows of a file, none if it does not exist. Raises BadInput unless their `key`s rise."""
    if not path.exists():
        return []
    try:
        with io.StringIO(path.read_text(encoding="utf-8"), newline="") as lines:
            rows = [
                {name: int(text) if name in ("epoch", "step") else float(text) for name, text in row.items() if text}
                for row in csv.DictReader(lines, strict=True)
            ]
        keys = [row[key] for row in rows]
        if keys == sorted(set(keys)):
            return rows
        problem = f"its {key}s do not rise"
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        problem = first_line(error)
    raise BadInput(f"{path} is not what a run writes ({problem}): restore it, move it away, or use --fresh")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the whole file anew. Raises CannotWrite."""

    def write(temporary: Path) -> None:
        # A metric that was added or taken away between two resumes has its column, with gaps.
        columns = dict.fromkeys(name for row in rows for name in row)
        with temporary.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)
