"""curves.png: the results of a run over its epochs."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from engine.model.metrics import ResultNames
from engine.report.tables import Row, best_point, is_metric
from engine.settings import Settings

# Okabe and Ito's colours, which colour-blind people can tell apart; the first one is for "train".
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#666666"
SPEED = "examples_per_second"
MOST_PANELS = 24  # Panels of metrics in a figure.
LARGEST_LINEAR_RATIO = 20.0  # Losses with a larger ratio between their values are drawn on a log scale.

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
    panels = _panels(both, names, monitor)

    def epochs_at(steps: list[int]) -> list[float]:
        """Returns the positions of steps on the axis of epochs: 1.5 is in the middle of the second one."""
        return np.interp(steps, [0, *(row["step"] for row in rows)], [0, *(row["epoch"] for row in rows)]).tolist()

    def points(column: str) -> Points:
        # Validations within an epoch have no training metrics, so curves of training metrics have no points there.
        has_value = [row for row in both if row.get(column) is not None]
        epochs = epochs_at([row["step"] for row in has_value])
        return [(epoch, float(row[column])) for epoch, row in zip(epochs, has_value, strict=True)]

    best = best_point(points(monitor), direction)
    # matplotlib.pyplot would choose a window system, and keep every figure in memory.
    width, height = min(len(panels), 3), math.ceil(len(panels) / 3)
    figure = matplotlib.figure.Figure(figsize=(max(4.2 * width, 6), 2.9 * height + 0.9), layout="constrained", dpi=100)
    legend: dict[str, Any] = {}
    for number, (title, columns) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(height, width, number)
        legend |= _draw_curves(axes, {column: points(column) for column in columns}, names)
        axes.set_title(title, fontweight="bold" if monitor in columns else "normal", parse_math=False)
        axes.set_xlim((0.5, 1.5) if last_epoch == 1 else (min(1, axes.get_xlim()[0]), 1.02 * last_epoch))
        for epoch in epochs_at(resumed):
            legend["resumed"] = axes.axvline(epoch, color=GREY, linestyle=":", linewidth=1)
        if best:
            legend["best"] = axes.axvline(best[0], color="black", linestyle="--", linewidth=0.8)
        if best and monitor in columns:
            axes.plot(*best, marker="*", markersize=14, color="#E69F00", markeredgecolor="black", label="best")
    score = f"; best {monitor} {best[1]:.4g} in epoch {math.ceil(best[0] - 1e-9)}" if best else ""
    figure.suptitle(f"{settings.run_dir.name}, epoch {last_epoch}{score}", parse_math=False)
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _panels(rows: Iterable[Row], names: ResultNames, monitor: str) -> dict[str, list[str]]:
    """Returns the columns of each panel by its title."""
    all_columns = dict.fromkeys(column for row in rows for column in row)
    metrics: dict[str, list[str]] = {names.metric(monitor): []}  # This panel is the first.
    for column in all_columns:
        # An element of an array is drawn if it is monitored.
        if is_metric(column) and (column not in names.arrays or column == monitor):
            metrics.setdefault(names.metric(column), []).append(column)
    panels = dict(itertools.islice(metrics.items(), MOST_PANELS))
    panels["learning rate"] = [column for column in all_columns if column.split("/")[0] == "learning_rate"]
    panels["examples/s"] = [column for column in all_columns if column == SPEED]
    return {title: columns for title, columns in panels.items() if columns}


def _draw_curves(axes: matplotlib.axes.Axes, curves: dict[str, Points], names: ResultNames) -> dict[str, Any]:
    """Draws the curve of each column, with a gap where a value is not finite; returns a line for each dataset."""
    colours = dict(zip(names.datasets, itertools.cycle(COLOURS), strict=False))
    datasets: dict[str, Any] = {}
    for column, points in curves.items():
        dataset = names.dataset(column) or column.split("/")[0]
        epochs, values = np.reshape(points, (-1, 2)).T
        values[~np.isfinite(values)] = math.nan
        (line,) = axes.plot(epochs, values, ".-", label=column, color=colours.get(dataset, GREY), linewidth=1.6)
        if is_metric(column):
            datasets[dataset] = line
    finite = [value for points in curves.values() for _, value in points if math.isfinite(value)]
    if any("loss" in column for column in curves) and 0 < LARGEST_LINEAR_RATIO * min(finite, default=0) < max(finite):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return datasets
