"""What a run tells: the console, metrics.csv, TensorBoard and curves.png.

The rows of metrics.csv are the source; the other three show the same numbers. A resumed run keeps the rows up to the
epoch it continues from and writes the rest again.
"""

import csv
import functools
import io
import time
from pathlib import Path
from typing import Any

import matplotlib.figure
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, first_line
from engine.run_directory import write_whole, writing

# The columns that are not metrics, in the order of metrics.csv; metrics follow.
COLUMNS = ("epoch", "step", "seconds", "examples_per_second", "learning_rate")
# curves.png is drawn at the end of a run and, in between, at most this often: TensorBoard is the live view.
SECONDS_BETWEEN_CURVES = 30.0


class Report:
    """One row per epoch, to everywhere."""

    def __init__(self, run_dir: Path, *, epochs: int, epochs_done: int) -> None:
        """Continues the report in `run_dir` after its first `epochs_done` epochs."""
        self.run_dir = run_dir
        self.epochs = epochs
        self.rows = [row for row in _read_rows(run_dir / "metrics.csv") if row["epoch"] <= epochs_done]
        if len(self.rows) < epochs_done:
            console.print(f"{run_dir / 'metrics.csv'} lacks {epochs_done - len(self.rows)} of {epochs_done} epochs")
        with writing(run_dir / "tensorboard"):
            self._summaries = tf.summary.create_file_writer(str(run_dir / "tensorboard"))
        self._curves_drawn = time.monotonic()

    def epoch(self, row: dict[str, Any], *, is_best: bool) -> None:
        """Reports one epoch. `row` has the keys COLUMNS and "<split>/<metric>"."""
        self.rows.append(row)
        metrics = {name: value for name, value in row.items() if name not in COLUMNS}
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        console.print(
            f"epoch {row['epoch']:>{len(str(self.epochs))}}/{self.epochs}  {numbers}  "
            f"{row['seconds']:.1f} s  {row['examples_per_second']:,.0f} examples/s{'  best' if is_best else ''}"
        )
        with writing(self.run_dir / "tensorboard"), self._summaries.as_default(step=row["step"]):
            for name in ("learning_rate", "examples_per_second", *metrics):
                tf.summary.scalar(name, row[name])
            self._summaries.flush()
        write_whole(self.run_dir / "metrics.csv", functools.partial(_write_rows, self.rows))
        if time.monotonic() - self._curves_drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()

    def draw_curves(self) -> None:
        """Draws curves.png: one panel per metric, its splits over the epochs. Nothing, if there are no rows."""
        if not self.rows:
            return
        write_whole(self.run_dir / "curves.png", functools.partial(_draw, self.rows))
        self._curves_drawn = time.monotonic()


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        with io.StringIO(path.read_text(encoding="utf-8"), newline="") as lines:
            rows = [
                {name: int(text) if name in ("epoch", "step") else float(text) for name, text in row.items() if text}
                for row in csv.DictReader(lines, strict=True)
            ]
        epochs = [row["epoch"] for row in rows]
        if epochs == sorted(set(epochs)):
            return rows
        problem = "its epochs do not rise"
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        problem = first_line(error)
    raise BadInput(f"{path} is not what a run writes ({problem}): restore it, move it away, or use --fresh")


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    # A metric that was added or taken away between two resumes has its column, with gaps.
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    # The figure is made directly: matplotlib.pyplot would choose a window system, and keep every figure in memory.
    names = list(dict.fromkeys(name.rsplit("/", 1)[-1] for row in rows for name in row if name not in COLUMNS))
    figure = matplotlib.figure.Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for key in (f"train/{name}", f"validation/{name}", name):
            if having := [row for row in rows if key in row]:
                axes.plot([row["epoch"] for row in having], [row[key] for row in having], label=key)
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.legend()
    figure.savefig(path, format="png")
