"""Panels of curves over the epochs, for curves.png and for comparison.png."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
MOST_PANELS = 24  # Panels of metrics in a figure.
LARGEST_LINEAR_RATIO = 20.0  # Falling curves with a larger ratio between their values are drawn on a log scale.
MOST_MARKERS = 40  # A curve of at most this many points shows each of them.

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line in a panel, with its entry in the figure's legend, if any, and its style for matplotlib."""

    label: str
    points: Points
    legend: str | None
    style: Mapping[str, Any]


# --- One run ----------------------------------------------------------------------------------------------------------


def figure_of_run(
    settings: Settings, names: ResultNames, rows: list[Row], validations: list[Row], resumed: list[int], direction: str
) -> matplotlib.figure.Figure:
    """Returns a panel for each metric, with a line for each dataset; then the learning rate and the speed.

    `rows` come from metrics.csv (at least one), `validations` from validations.csv. The steps from which the run was
    `resumed` are marked, and the best --monitor ("min" or "max", as `direction` says), whose panel comes first.
    """
    monitor = settings.monitor
    both = sorted([*validations, *rows], key=lambda row: row["step"])
    columns = dict.fromkeys(name for row in both for name in row)
    # An element of an array is drawn if it is monitored.
    metrics = [name for name in columns if is_metric(name) and (name not in names.arrays or name == monitor)]
    panels, dropped = group_by_metric(metrics, names.metric, {names.metric(monitor)})
    rates = [name for name in columns if name.split("/")[0] == "learning_rate"]
    panels |= {"learning rate": rates} if rates else {}
    panels |= {"examples/s": ["examples_per_second"]} if "examples_per_second" in columns else {}
    curves = {panel: [_curve(column, names, both, rows) for column in shown] for panel, shown in panels.items()}
    last = rows[-1]["epoch"]
    figure, all_axes, handles = draw_panels(curves, last, [panel for panel in panels if monitor in panels[panel]])
    best = best_point(_points(both, monitor, rows), direction)
    for shown, axes in zip(panels.values(), all_axes, strict=True):
        if len(shown) > 1 and shown == rates:
            axes.legend(fontsize="small")
        if shown == ["examples_per_second"]:
            axes.set_ylim(bottom=0)
        for epoch in epochs_at(resumed, rows):
            handles["resumed"] = axes.axvline(epoch, color=GREY, linestyle=":", linewidth=1)
        if best:
            handles["best"] = axes.axvline(best[0], color="black", linestyle="--", linewidth=0.8)
        if best and monitor in shown:
            axes.plot(*best, marker="*", markersize=14, color=ORANGE, markeredgecolor="black", label="best")
    score = f"; best {monitor} {best[1]:.4g} in epoch {math.ceil(best[0] - 1e-9)}" if best else ""
    more = f"; {dropped} more are in metrics.csv" if dropped else ""
    figure.suptitle(f"{settings.run_dir.name}, epoch {last}{score}{more}", parse_math=False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _curve(column: str, names: ResultNames, rows: Sequence[Row], epochs: Sequence[Row]) -> Curve:
    points = _points(rows, column, epochs)
    if not is_metric(column):  # A learning rate or the speed belongs to no dataset.
        return Curve(column, points, None, {"color": GREY})
    dataset = names.dataset(column) or column.split("/")[0]
    evaluated = (each for each in names.datasets if each != "train")
    colours = dict(zip(evaluated, itertools.cycle((VERMILLION, GREEN, PURPLE, ORANGE, SKY)), strict=False))
    return Curve(column, points, dataset, {"color": BLUE if dataset == "train" else colours.get(dataset, VERMILLION)})


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


# --- For one run and for several --------------------------------------------------------------------------------------


def group_by_metric(
    columns: Iterable[str], metric: Callable[[str], str], monitored: Collection[str]
) -> tuple[dict[str, list[str]], int]:
    """Returns the columns of each panel by metric, the monitored metrics first, and how many panels were dropped."""
    panels: dict[str, list[str]] = {}
    for column in sorted(columns, key=lambda name: metric(name) not in monitored):
        panels.setdefault(metric(column), []).append(column)
    return dict(list(panels.items())[:MOST_PANELS]), max(0, len(panels) - MOST_PANELS)


def draw_panels(
    panels: Mapping[str, Sequence[Curve]], last_epoch: int, bold: Collection[str]
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes], dict[str, matplotlib.lines.Line2D]]:
    """Draws each panel's curves below its title; returns the figure, its axes, and a line for each name in the legend.

    A panel of metrics has a log scale if only that shows the ends of its curves.
    """
    # matplotlib.pyplot would choose a window system, and keep every figure in memory.
    count = len(panels)
    columns = min(count, 2 if count == 4 else 3 if count <= 9 else 4)
    rows = math.ceil(count / columns)
    figure = matplotlib.figure.Figure(figsize=(max(4.2 * columns, 6), 2.9 * rows + 0.9), layout="constrained", dpi=100)
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in cells[count:]:
        empty.remove()
    handles: dict[str, matplotlib.lines.Line2D] = {}
    for (title, curves), axes in zip(panels.items(), cells, strict=False):
        for curve in curves:
            line = _plot(axes, curve)
            if curve.legend:
                handles[curve.legend] = line
        if any(curve.legend for curve in curves) and _falls_far(curves):
            axes.set_yscale("log")
        axes.set_xlim((0.5, 1.5) if last_epoch == 1 else (min(1, axes.get_xlim()[0]), 1.02 * last_epoch))
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontweight="bold" if title in bold else "normal", parse_math=False)
    return figure, cells[:count], handles


def _plot(axes: matplotlib.axes.Axes, curve: Curve) -> matplotlib.lines.Line2D:
    """Draws a curve, with a gap where a value is not finite."""
    xs = [x for x, _ in curve.points]
    ys = [y if math.isfinite(y) else math.nan for _, y in curve.points]
    markers = {"marker": "o", "markersize": 7.0 if len(xs) == 1 else 3.5} if len(xs) <= MOST_MARKERS else {}
    return axes.plot(xs, ys, label=curve.label, **{"linewidth": 1.6, **markers, **curve.style})[0]


def _falls_far(curves: Iterable[Curve]) -> bool:
    """Returns whether curves of positive numbers fall so far that only a log scale shows their ends."""
    finite = [[y for _, y in curve.points if math.isfinite(y)] for curve in curves]
    values = [y for ys in finite for y in ys]
    falls = sum(ys[-1] - ys[0] for ys in finite if ys) < 0
    return falls and min(values) > 0 and max(values) / min(values) > LARGEST_LINEAR_RATIO


def write_figure(path: Path, figure: matplotlib.figure.Figure) -> None:
    """Writes a figure as PNG. Raises CannotWrite."""
    write_atomically(path, functools.partial(figure.savefig, format="png"))
