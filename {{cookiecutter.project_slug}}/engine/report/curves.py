"""curves.png: the metrics over the epochs."""

import functools
from pathlib import Path
from typing import Any

import matplotlib.figure

from engine.files import write_whole
from engine.model.metrics import Names
from engine.report.rows import is_metric

CURVES = "curves.png"


def draw_curves(run_dir: Path, names: Names, rows: list[dict[str, Any]]) -> None:
    """Draws one panel per metric, its sets over the epochs. Raises CannotWrite."""
    write_whole(run_dir / CURVES, functools.partial(_draw, names, rows))


def _draw(names: Names, rows: list[dict[str, Any]], path: Path) -> None:
    # The figure is made directly: matplotlib.pyplot would choose a window system, and keep every figure in memory.
    columns = dict.fromkeys(name for row in rows for name in names.lines(row) if is_metric(name))
    panels: dict[str, list[str]] = {}
    for column in columns:
        panels.setdefault(names.metric(column), []).append(column)
    figure = matplotlib.figure.Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (metric, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for column in shown:
            points = [(row["epoch"], row[column]) for row in rows if column in row]
            axes.plot(*zip(*points, strict=True), label=column)
        axes.set_xlabel("epoch")
        axes.set_title(metric)
        axes.legend()
    figure.savefig(path, format="png")
