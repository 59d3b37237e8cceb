"""curves.png: the metrics over the epochs."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.lines
import matplotlib.ticker

from engine.files import write_whole
from engine.model.metrics import ResultNames
from engine.report.tables import is_metric

CURVES = "curves.png"
# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
VALIDATIONS = (VERMILLION, GREEN, PURPLE, ORANGE, SKY)
GREY = "#666666"
MOST_PANELS = 24
# A falling curve with a larger ratio between its ends is drawn on a log scale.
LARGEST_LINEAR_RATIO = 20.0
# Up to so many points a curve shows each of them.
MOST_MARKERS = 40

Points = list[tuple[float, float]]


def draw_curves(run_dir: Path, names: ResultNames, rows: list[dict[str, Any]], **more: Any) -> None:
    """Draws `figure_of_run` to curves.png. Raises CannotWrite."""
    figure = figure_of_run(run_dir.name, names, rows, **more)
    write_whole(run_dir / CURVES, functools.partial(figure.savefig, format="png"))


def figure_of_run(
    title: str,
    names: ResultNames,
    rows: list[dict[str, Any]],
    *,
    validations: Sequence[Mapping[str, Any]] = (),
    resumed: Sequence[int] = (),
    monitor: str = "",
    direction: str = "min",
) -> matplotlib.figure.Figure:
    """Returns a panel for each metric, with a line for each set; then the learning rate and the speed.

    Args:
        title: that of the figure.
        names: those of the metrics.
        rows: those of metrics.csv, at least one.
        validations: rows of validations.csv, which lie between epochs.
        resumed: the steps from which the run was resumed.
        monitor: the metric whose best score is marked in all panels, and whose panel comes first.
        direction: "min" or "max": which of its scores is the best.
    """
    both = sorted([*validations, *rows], key=lambda row: row["step"])
    panels = panels_of(names, both, monitor)
    figure, all_axes = grid(list(panels))
    epochs = Epochs(rows)
    best = best_point(_points(both, monitor, epochs), direction)
    colours = dict(zip([each for each in names.sets if each != "train"], _repeated(VALIDATIONS), strict=False))
    handles: dict[str, matplotlib.lines.Line2D] = {}
    for (panel, columns), axes in zip(panels.items(), all_axes, strict=True):
        for column in columns:
            name = next((each for each in names.sets if column.startswith(f"{each}/")), column.split("/")[0])
            is_set = is_metric(column)
            colour = BLUE if name == "train" else colours.get(name, VERMILLION)
            # A rate and a speed belong to no set.
            (line,) = plot(axes, _points(both, column, epochs), label=column, color=colour if is_set else GREY)
            if is_set:
                handles.setdefault(name, line)
        if any(is_metric(column) for column in columns) and falls_far(axes):
            axes.set_yscale("log")
        if len(columns) > 1 and not is_metric(columns[0]):  # Rates of several optimizers.
            axes.legend(fontsize="small")
        over_epochs(axes, epochs.last)
        if columns == ["examples_per_second"]:
            axes.set_ylim(bottom=0)
        for step in resumed:
            handles["resumed"] = axes.axvline(epochs.at(step), color=GREY, linestyle=":", linewidth=1)
        if best:
            handles["best"] = axes.axvline(best[0], color="black", linestyle="--", linewidth=0.8)
        if monitor in columns and best:
            axes.plot(*best, marker="*", markersize=14, color=ORANGE, markeredgecolor="black", label="best")
        axes.set_title(panel, fontweight="bold" if monitor in columns else "normal", parse_math=False)
    text = f"{title}, epoch {epochs.last:g}"
    if best:
        text += f"; best {monitor} {best[1]:.4g} in epoch {math.ceil(best[0] - 1e-9)}"
    left_out = len(panels_of(names, both, monitor, most=None)) - len(panels)
    if left_out:
        text += f"; {left_out} more are in metrics.csv"
    figure.suptitle(text, parse_math=False)
    order = [*names.sets, *handles]  # The sets first.
    handles = dict(sorted(handles.items(), key=lambda item: order.index(item[0])))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)
    return figure


def panels_of(
    names: ResultNames, rows: Iterable[Mapping[str, Any]], monitor: str, most: int | None = MOST_PANELS
) -> dict[str, list[str]]:
    """Returns the columns of each panel, by its title: the monitored metric's first, the rate and the speed last."""
    columns = dict.fromkeys(name for row in rows for name in row)
    # An element of an array is drawn if it is monitored.
    metrics = [name for name in columns if is_metric(name) and (name in names.lines(columns) or name == monitor)]
    panels: dict[str, list[str]] = {}
    for column in sorted(metrics, key=lambda name: names.metric(name) != names.metric(monitor)):
        panels.setdefault(names.metric(column), []).append(column)
    panels = dict(list(panels.items())[:most])
    rates = [name for name in columns if name.split("/")[0] == "learning_rate"]
    if rates:
        panels["learning rate"] = rates
    if "examples_per_second" in columns:
        panels["examples/s"] = ["examples_per_second"]
    return panels


class Epochs:
    """Where a step lies on the axis of epochs."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._ends = [(0, 0), *((row["step"], row["epoch"]) for row in rows)]
        self.last: int = self._ends[-1][1]

    def at(self, step: int) -> float:
        """Returns the epoch, counted in whole ones done."""
        before = [end for end in self._ends if end[0] <= step]
        after = [end for end in self._ends if end[0] > step]
        start, epoch = before[-1]
        end, next_epoch = after[0] if after else (start, epoch)
        return epoch + (next_epoch - epoch) * (step - start) / max(end - start, 1)


def best_point(points: Points, direction: str) -> tuple[float, float] | None:
    """Returns the first point with the best score, as a run chooses its best weights; None if there is no number."""
    numbers = [point for point in points if not math.isnan(point[1])]
    return min(numbers, key=lambda point: point[1] if direction == "min" else -point[1], default=None)


def _points(rows: Iterable[Mapping[str, Any]], column: str, epochs: Epochs) -> Points:
    # Validations between the ends of epochs have no training metrics, so curves of these have no points there.
    return [(epochs.at(row["step"]), float(row[column])) for row in rows if row.get(column) is not None]


def _repeated(values: Sequence[str]) -> list[str]:
    return list(values) * 100


# --- For one run and for several --------------------------------------------------------------------------------------


def grid(titles: Sequence[str]) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """Returns a figure and the axes of its panels, in rows of at most four."""
    # The figure is made directly: matplotlib.pyplot would choose a window system, and keep every figure in memory.
    width = min(len(titles), 2 if len(titles) == 4 else 3 if len(titles) <= 9 else 4)
    height = math.ceil(len(titles) / width)
    figure = matplotlib.figure.Figure(figsize=(max(4.2 * width, 6), 2.9 * height + 0.9), layout="constrained", dpi=100)
    cells = list(figure.subplots(height, width, squeeze=False).flat)
    for empty in cells[len(titles) :]:
        empty.remove()
    return figure, cells[: len(titles)]


def plot(axes: matplotlib.axes.Axes, points: Points, **style: Any) -> list[matplotlib.lines.Line2D]:
    """Draws a curve; where a value is not finite it has a gap."""
    xs = [x for x, _ in points]
    ys = [y if math.isfinite(y) else math.nan for _, y in points]
    size = 7.0 if len(points) == 1 else 3.5
    markers = {"marker": "o", "markersize": size} if len(points) <= MOST_MARKERS else {}
    return axes.plot(xs, ys, **{"linewidth": 1.6, **markers, **style})


def over_epochs(axes: matplotlib.axes.Axes, last: int) -> None:
    """Gives the axes whole epochs and a light grid."""
    axes.set_xlim(0.5 if last == 1 else min(1, axes.get_xlim()[0]), last + (0.5 if last == 1 else 0.02 * last))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def falls_far(axes: matplotlib.axes.Axes) -> bool:
    """Returns whether the curves are of positive numbers that fall so far that only a log scale shows their ends."""
    curves = [[y for y in line.get_ydata() if math.isfinite(y)] for line in axes.get_lines()]
    curves = [curve for curve in curves if curve]
    values = [y for curve in curves for y in curve]
    falls = sum(curve[-1] - curve[0] for curve in curves) < 0
    return falls and min(values) > 0 and max(values) / min(values) > LARGEST_LINEAR_RATIO
