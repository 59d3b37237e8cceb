"""python train.py --compare runs/a runs/b: several runs in one table and one picture. Trains nothing."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import rich.table

from engine.console import console
from engine.errors import BadInput
from engine.files import read_json, write_whole
from engine.report.curves import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, best_point, falls_far, grid, over_epochs
from engine.report.curves import plot as plot_curve
from engine.report.tables import is_metric, read_rows
from engine.settings import CONFIG, recorded_settings

COMPARISON = "comparison.png"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "black")
# Of a table's columns: of the first, and of one run.
WIDTHS = (20, 12)
MOST_PANELS = 24
# Where a run writes, and what says nothing of its numbers.
NOT_COMPARED = ("run_dir", "fresh", "settings_from", "compare", "check", "evaluate_only", "evaluate_continuously")


@dataclasses.dataclass
class Compared:
    """What the directory of a run says of it."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    result: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def monitor(self) -> str:
        return self.settings.get("monitor", "validation/loss")

    def best(self) -> tuple[float, int] | None:
        """Returns the best score and its epoch: of the result, or else of the epochs so far."""
        if self.result and (score := self.result.get(f"best_{self.monitor}")) is not None:
            return score, self.result["best_epoch"]
        points = [(row["epoch"], row[self.monitor]) for row in self.rows if self.monitor in row]
        # Runs of earlier versions have recorded no direction.
        falls = any(word in self.monitor for word in ("loss", "error"))
        point = best_point(points, self.config.get("monitor_direction") or ("min" if falls else "max"))
        return (point[1], int(point[0])) if point else None

    def facts(self) -> dict[str, str]:
        """Returns the lines of the table that are of the run's outcome."""
        done = self.rows[-1]["epoch"] if self.rows else 0
        seconds = sum(row.get("seconds", 0.0) for row in self.rows)
        result, best = self.result or {}, self.best()
        return {
            "state": "finished" if self.result else "running" if _is_locked(self.path / ".lock") else "stopped",
            "epochs": f"{done} of {self.settings.get('epochs', '?')}",
            "time": f"{seconds / 60:,.1f} min" if seconds >= 60 else f"{seconds:.1f} s",
            f"best {self.monitor}": f"{best[0]:.4g}" if best else "",
            "in epoch": str(best[1]) if best else "",
            **{name: f"{value:.4g}" for name, value in result.items() if name.startswith("test/") and _is_line(name)},
        }


def compare(paths: Sequence[Path]) -> None:
    """Prints a table of the runs in some directories, and writes their curves to comparison.png in the current folder.

    Raises:
        BadInput: a directory holds no run, or the current folder is one of a run.
        CannotWrite: the current folder cannot be written.
    """
    runs = [_read(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]
    if Path(CONFIG).exists():
        raise BadInput(f"--compare writes {COMPARISON} to the current folder, which holds a run: start it elsewhere")
    facts = [{**run.facts(), **settings} for run, settings in zip(runs, _differing_settings(runs), strict=True)]
    lines = list(dict.fromkeys(name for each in facts for name in each))
    at_once = max(1, (console.width - WIDTHS[0]) // WIDTHS[1])
    for start in range(0, len(runs), at_once):
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("", overflow="fold")
        for run in runs[start : start + at_once]:
            table.add_column(run.name, overflow="fold", max_width=WIDTHS[1] - 2)
        for line in lines:
            table.add_row(line, *(each.get(line, "") for each in facts[start : start + at_once]))
        console.print(table, soft_wrap=False)
    if not (figure := figure_of_runs(runs)):
        console.print("No run has finished an epoch, so there are no curves yet.")
        return
    write_whole(Path(COMPARISON), functools.partial(figure.savefig, format="png"))
    console.print(f"Curves: {Path(COMPARISON).absolute()}")


def figure_of_runs(runs: Sequence[Compared]) -> matplotlib.figure.Figure | None:
    """Returns a panel for each metric, with a line for each run, and a dotted one for its training."""
    panels: dict[str, list[str]] = {}
    monitored = {run.monitor.split("/", 1)[-1] for run in runs}
    columns = dict.fromkeys(name for run in runs for row in run.rows for name in row if is_metric(name))
    columns = [name for name in columns if _is_line(name) or name in {run.monitor for run in runs}]
    for column in sorted(columns, key=lambda name: name.split("/", 1)[-1] not in monitored):
        panels.setdefault(column.split("/", 1)[-1], []).append(column)
    panels = dict(list(panels.items())[:MOST_PANELS])
    if not panels:
        return None
    figure, all_axes = grid(list(panels))
    handles = {}
    for (panel, shown), axes in zip(panels.items(), all_axes, strict=True):
        for number, run in enumerate(runs):
            for column in shown:
                points = [(row["epoch"], row[column]) for row in run.rows if column in row]
                is_train = column.startswith("train/") and len(shown) > 1
                style = {"linestyle": ":", "linewidth": 1.0, "marker": ""} if is_train and len(points) > 1 else {}
                (line,) = plot_curve(axes, points, color=COLOURS[number % len(COLOURS)], label=run.name, **style)
                if not is_train:
                    line.set_linestyle(("-", "--", "-.")[number // len(COLOURS) % 3])
                    handles.setdefault(run.name, line)
        if falls_far(axes):
            axes.set_yscale("log")
        over_epochs(axes, max(run.rows[-1]["epoch"] for run in runs if run.rows))
        axes.set_title(panel, fontweight="bold" if panel in monitored else "normal", parse_math=False)
    if any(len(shown) > 1 for shown in panels.values()):
        figure.suptitle("validation; dotted: train")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _read(path: Path, name: str) -> Compared:
    if not path.is_dir() or recorded_settings(path) is None:
        raise BadInput(f"--compare {path} holds no run (no {CONFIG}): give directories of runs")
    rows = read_rows(path / "metrics.csv")
    return Compared(path, name, read_json(path / CONFIG) or {}, rows, read_json(path / "result.json"))


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Returns what differs of the paths: their last parts, if these do."""
    whole = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in paths]


def _differing_settings(runs: Sequence[Compared]) -> list[dict[str, str]]:
    """Returns, for each run, the settings of which not all runs have the same value."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_COMPARED)
    differ = [name for name in names if any(run.settings.get(name) != runs[0].settings.get(name) for run in runs)]
    return [
        {"--" + name.replace("_", "-"): _text(run.settings[name]) for name in differ if name in run.settings}
        for run in runs
    ]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_line(column: str) -> bool:
    """Returns whether a column is no element of an array, such as "validation/f1/3": the tasks are not known here."""
    return not column.rsplit("/", 1)[-1].isdigit()


def _is_locked(path: Path) -> bool:
    """Returns whether a running program holds a lock. Writes nothing, and waits for nobody."""
    with contextlib.suppress(ImportError, FileNotFoundError, PermissionError):
        import fcntl  # Not on Windows.

        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
