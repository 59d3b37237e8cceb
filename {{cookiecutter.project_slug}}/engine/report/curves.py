"""curves.png: the results of a run over its epochs."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.axes
import matplotlib.figure
import matplotlib.lines
import matplotlib.ticker
import numpy as np

from engine.files import write_atomically
from engine.model.metrics import ResultNames
from engine.report.tables import Row, is_metric
from engine.settings import Settings

CURVES = "curves.png"
# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
GREY = "#666666"
SPEED = "examples_per_second"
MOST_PANELS = 24  # Panels of metrics in a figure.
LARGEST_LINEAR_RATIO = 20.0  # Falling curves with a larger ratio between their values are drawn on a log scale.
MOST_MARKERS = 40  # A curve of at most this many points shows each of them.

Points = list[tuple[float, float]]  # Epoch, value.


def figure_of_run(
    settings: Settings, names: ResultNames, rows: list[Row], validations: list[Row], resumed: list[int], direction: str
) -> matplotlib.figure.Figure:
    """Returns a panel for each metric, with a line for each dataset; then the learning rate and the speed.

    `rows` come from metrics.csv (at least one), `validations` from validations.csv. The steps from which the run was
    `resumed` are marked, and the best --monitor ("min" or "max", as `direction` says), whose panel comes first.
    """
    monitor, last_epoch = settings.monitor, rows[-1]["epoch"]
    both = sorted([*validations, *rows], key=lambda row: row["step"])
    panels, dropped = _panels(both, names, monitor)
    figure, all_axes = _empty_figure(len(panels))
    best = best_point(_points(both, monitor, rows), direction)
    datasets: dict[str, matplotlib.lines.Line2D] = {}
    marks: dict[str, matplotlib.lines.Line2D] = {}
    for (title, columns), axes in zip(panels.items(), all_axes, strict=True):
        datasets |= _draw_curves(axes, {column: _points(both, column, rows) for column in columns}, names)
        axes.set_title(title, fontweight="bold" if monitor in columns else "normal", parse_math=False)
        axes.set_xlim((0.5, 1.5) if last_epoch == 1 else (min(1, axes.get_xlim()[0]), 1.02 * last_epoch))
        for epoch in epochs_at(resumed, rows):
            marks["resumed"] = axes.axvline(epoch, color=GREY, linestyle=":", linewidth=1)
        if best:
            marks["best"] = axes.axvline(best[0], color="black", linestyle="--", linewidth=0.8)
        if best and monitor in columns:
            axes.plot(*best, marker="*", markersize=14, color=ORANGE, markeredgecolor="black", label="best")
    score = f"; best {monitor} {best[1]:.4g} in epoch {math.ceil(best[0] - 1e-9)}" if best else ""
    more = f"; {dropped} more are in metrics.csv" if dropped else ""
    figure.suptitle(f"{settings.run_dir.name}, epoch {last_epoch}{score}{more}", parse_math=False)
    legend = datasets | marks
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _panels(rows: Iterable[Row], names: ResultNames, monitor: str) -> tuple[dict[str, list[str]], int]:
    """Returns the columns of each panel by its title, and how many panels of metrics were dropped."""
    all_columns = dict.fromkeys(column for row in rows for column in row)
    metrics: dict[str, list[str]] = {names.metric(monitor): []}  # This panel is the first.
    for column in all_columns:
        # An element of an array is drawn if it is monitored.
        if is_metric(column) and (column not in names.arrays or column == monitor):
            metrics.setdefault(names.metric(column), []).append(column)
    metrics = {title: columns for title, columns in metrics.items() if columns}
    panels = dict(itertools.islice(metrics.items(), MOST_PANELS))
    if rates := [column for column in all_columns if column.split("/")[0] == "learning_rate"]:
        panels["learning rate"] = rates
    if SPEED in all_columns:
        panels["examples/s"] = [SPEED]
    return panels, max(0, len(metrics) - MOST_PANELS)


def _empty_figure(count: int) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """Returns a figure of `count` panels without curves."""
    # matplotlib.pyplot would choose a window system, and keep every figure in memory.
    columns = min(count, 2 if count == 4 else 3 if count <= 9 else 4)
    rows = math.ceil(count / columns)
    figure = matplotlib.figure.Figure(figsize=(max(4.2 * columns, 6), 2.9 * rows + 0.9), layout="constrained", dpi=100)
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in cells[count:]:
        empty.remove()
    for axes in cells[:count]:
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, cells[:count]


def _draw_curves(
    axes: matplotlib.axes.Axes, curves: dict[str, Points], names: ResultNames
) -> dict[str, matplotlib.lines.Line2D]:
    """Draws the curve of each column, with a gap where a value is not finite; returns a line for each dataset.

    A panel of metrics has a log scale if only that shows the ends of its curves.
    """
    evaluated = (dataset for dataset in names.datasets if dataset != "train")
    colours = dict(zip(evaluated, itertools.cycle((VERMILLION, GREEN, PURPLE, ORANGE, SKY)), strict=False))
    datasets: dict[str, matplotlib.lines.Line2D] = {}
    for column, points in curves.items():
        dataset = names.dataset(column) or column.split("/")[0]
        colour = GREY if not is_metric(column) else BLUE if dataset == "train" else colours.get(dataset, VERMILLION)
        epochs = [epoch for epoch, _ in points]
        values = [value if math.isfinite(value) else math.nan for _, value in points]
        size = 0.0 if len(points) > MOST_MARKERS else 7.0 if len(points) == 1 else 3.5
        (line,) = axes.plot(
            epochs, values, label=column, color=colour, linewidth=1.6, marker="o" if size else "", markersize=size
        )
        if is_metric(column):
            datasets[dataset] = line
    if datasets and _falls_far(curves.values()):
        axes.set_yscale("log")
    if SPEED in curves:
        axes.set_ylim(bottom=0)
    if len(curves) > 1 and not datasets:  # Several learning rates.
        axes.legend(fontsize="small")
    return datasets


def _falls_far(curves: Iterable[Points]) -> bool:
    """Returns whether curves of positive numbers fall so far that only a log scale shows their ends."""
    finite = [[value for _, value in points if math.isfinite(value)] for points in curves]
    values = [value for of_curve in finite for value in of_curve]
    falls = sum(of_curve[-1] - of_curve[0] for of_curve in finite if of_curve) < 0
    return falls and min(values) > 0 and max(values) / min(values) > LARGEST_LINEAR_RATIO


def _points(rows: Iterable[Row], column: str, epochs: Sequence[Row]) -> Points:
    # Validations within an epoch have no training metrics, so curves of training metrics have no points there.
    values = {row["step"]: float(row[column]) for row in rows if row.get(column) is not None}
    return list(zip(epochs_at(values, epochs), values.values(), strict=True))


def epochs_at(steps: Iterable[int], rows: Sequence[Row]) -> list[float]:
    """Returns the positions of steps on the axis of epochs: 1.5 is in the middle of the second one."""
    ends, epochs = [0, *(row["step"] for row in rows)], [0, *(row["epoch"] for row in rows)]
    return np.interp(list(steps), ends, epochs).tolist()


def best_point(points: Points, direction: str) -> tuple[float, float] | None:
    """Returns the first point with the best score, as a run chooses its best weights; None if there is no number."""
    numbers = [point for point in points if not math.isnan(point[1])]
    return min(numbers, key=lambda point: point[1] if direction == "min" else -point[1], default=None)


def write_figure(path: Path, figure: matplotlib.figure.Figure) -> None:
    """Writes a figure as PNG. Raises CannotWrite."""
    write_atomically(path, functools.partial(figure.savefig, format="png"))
