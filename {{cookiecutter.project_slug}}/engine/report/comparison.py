"""python train.py --compare runs/a runs/b: several runs in one table and one picture. Trains nothing."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import rich.table

from engine.console import console
from engine.errors import BadInput
from engine.files import read_json
from engine.report import curves
from engine.report.curves import Curve, Points
from engine.report.tables import Row, is_metric, read_rows
from engine.settings import CONFIG, flag, recorded_settings

COMPARISON = "comparison.png"
COLOURS = (curves.BLUE, curves.VERMILLION, curves.GREEN, curves.PURPLE, curves.ORANGE, curves.SKY, "black")
WIDTHS = (20, 12)  # The widths of a table's first column, and of the column of a run.
# These settings do not affect the results of a run.
NOT_COMPARED = ("run_dir", "fresh", "settings_from", "compare", "check", "evaluate_only", "evaluate_continuously")


@dataclasses.dataclass(frozen=True)
class Compared:
    """The contents of a run's directory; `result` is empty until the run has finished."""

    name: str
    settings: dict[str, Any]
    direction: str
    rows: list[Row]
    result: dict[str, Any]

    def points(self, column: str) -> Points:
        return [(row["epoch"], row[column]) for row in self.rows if column in row]


def compare(paths: Sequence[Path]) -> None:
    """Prints a table of the runs in some directories, and writes their curves to comparison.png in the current folder.

    Raises BadInput if a directory contains no run; CannotWrite.
    """
    names = [path.absolute().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    runs = [_read(path, name) for path, name in zip(paths, names, strict=True)]
    _print_table(runs)
    if figure := figure_of_runs(runs):
        curves.write_figure(Path(COMPARISON), figure)
        console.print(f"Curves: {Path(COMPARISON).absolute()}")
    else:
        console.print("No run has finished an epoch, so there are no curves yet.")


def _read(path: Path, name: str) -> Compared:
    settings = recorded_settings(path) if path.is_dir() else None
    if settings is None:
        raise BadInput(f"--compare {path} contains no run ({CONFIG} is missing): pass directories of runs")
    direction = (read_json(path / CONFIG) or {}).get("monitor_direction", "min")
    rows, result = read_rows(path / "metrics.csv"), read_json(path / "result.json") or {}
    return Compared(name, settings, direction, rows, result)


def _print_table(runs: Sequence[Compared]) -> None:
    """Prints the outcomes and the differing settings, with as many runs side by side as fit in the console."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_COMPARED)
    differing = [name for name in names if any(run.settings.get(name) != runs[0].settings.get(name) for run in runs)]
    columns = [_facts(run) | {flag(name): str(run.settings.get(name, "")) for name in differing} for run in runs]
    lines = dict.fromkeys(name for each in columns for name in each)
    count = max(1, (console.width - WIDTHS[0]) // WIDTHS[1])
    for start in range(0, len(runs), count):
        side_by_side = slice(start, start + count)
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("", overflow="fold")
        for run in runs[side_by_side]:
            table.add_column(run.name, overflow="fold", max_width=WIDTHS[1] - 2)
        for line in lines:
            table.add_row(line, *(each.get(line, "") for each in columns[side_by_side]))
        console.print(table, soft_wrap=False)


def _facts(run: Compared) -> dict[str, str]:
    monitor, seconds = run.settings.get("monitor", ""), sum(row.get("seconds", 0.0) for row in run.rows)
    best = curves.best_point(run.points(monitor), run.direction)
    if {"best_epoch", f"best_{monitor}"} <= run.result.keys():
        best = run.result["best_epoch"], run.result[f"best_{monitor}"]
    tests = {name: f"{value:.4g}" for name, value in run.result.items() if name.startswith("test/") and _is_line(name)}
    return {
        "state": "finished" if run.result else "unfinished",
        "epochs": f"{run.rows[-1]['epoch'] if run.rows else 0} of {run.settings.get('epochs', '?')}",
        "time": f"{seconds / 60:,.1f} min" if seconds >= 60 else f"{seconds:.1f} s",
        f"best {monitor}": f"{best[1]:.4g}" if best else "",
        "in epoch": f"{best[0]:g}" if best else "",
        "goodput": f"{100 * run.result['goodput']['fraction']:.0f} %" if run.result.get("goodput") else "",
        **tests,
    }


def figure_of_runs(runs: Sequence[Compared]) -> matplotlib.figure.Figure | None:
    """Returns a panel for each metric, with a line for each run, and a dotted line for its training."""
    monitored = {run.settings.get("monitor", "") for run in runs}
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row if is_metric(name))
    bold = {_metric(name) for name in monitored}
    panels, _ = curves.group_by_metric([name for name in names if _is_line(name) or name in monitored], _metric, bold)
    if not panels:
        return None
    drawn = {
        panel: [_curve(number, run, each, len(columns)) for number, run in enumerate(runs) for each in columns]
        for panel, columns in panels.items()
    }
    figure, _, handles = curves.draw_panels(drawn, max(run.rows[-1]["epoch"] for run in runs if run.rows), bold)
    if any(len(columns) > 1 for columns in panels.values()):
        figure.suptitle("validation; dotted: train")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _curve(number: int, run: Compared, column: str, columns_in_panel: int) -> Curve:
    points, line = run.points(column), ("-", "--", "-.")[number // len(COLOURS) % 3]
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": line}
    if column.startswith("train/") and columns_in_panel > 1 and len(points) > 1:
        style |= {"linestyle": ":", "linewidth": 1.0, "marker": ""}
    return Curve(run.name, points, run.name, style)


def _metric(column: str) -> str:
    return column.split("/", 1)[-1]


def _is_line(column: str) -> bool:
    """Returns whether a column is drawn: by its name, it is not an element of an array ("validation/f1/3")."""
    return not column.rsplit("/", 1)[-1].isdigit()
