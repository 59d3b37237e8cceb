"""python train.py --compare runs/a runs/b: several runs in one table. Trains nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table

from engine.console import console
from engine.errors import BadInput
from engine.files import read_json
from engine.report.curves import best_point
from engine.report.tables import read_rows
from engine.settings import CONFIG, flag, recorded_settings

LONGEST_CELL = 30  # Longer texts, such as paths, are wrapped.
GAP = 2  # Columns between the texts of two runs.
DIGITS = range(4, 18)  # 17 significant digits tell any two numbers of 64 bits apart.
# These settings do not affect the results of a run.
NOT_COMPARED = ("run_dir", "fresh", "settings_from", "compare", "check", "evaluate_only", "evaluate_continuously")


def compare(paths: Sequence[Path]) -> None:
    """Prints a table of the runs in some directories: how they ended, and the settings that differ.

    As many runs stand side by side as fit in the console. Raises BadInput if a directory contains no run.
    """
    names = [path.absolute().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    runs = [_facts(path) for path in paths]
    names_of_lines = dict.fromkeys(line for run in runs for line in run)
    lines = {line: _as_texts([run.get(line, "") for run in runs]) for line in names_of_lines}
    lines = {line: texts for line, texts in lines.items() if not line.startswith("--") or len(set(texts)) > 1}
    width = min(LONGEST_CELL, max(len(text) for texts in (names, *lines.values()) for text in texts))
    count = max(1, (console.width - max(map(len, lines)) - GAP) // (width + GAP))
    for start in range(0, len(runs), count):
        side_by_side = slice(start, start + count)
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        table.add_column("", no_wrap=True)
        for name in names[side_by_side]:
            table.add_column(name, overflow="fold", max_width=width)
        for line, texts in lines.items():
            table.add_row(line, *texts[side_by_side])
        console.print(table, soft_wrap=False)


def _facts(path: Path) -> dict[str, Any]:
    """Returns the lines of a run's column: numbers as floats, and everything else as texts."""
    settings = recorded_settings(path) if path.is_dir() else None
    if settings is None:
        raise BadInput(f"--compare {path} contains no run ({CONFIG} is missing): pass directories of runs")
    config, result = read_json(path / CONFIG) or {}, read_json(path / "result.json") or {}
    rows, monitor = read_rows(path / "metrics.csv"), settings.get("monitor", "")
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    scores = [(row["epoch"], row[monitor]) for row in rows if monitor in row]
    best = best_point(scores, config.get("monitor_direction", "min"))
    if {"best_epoch", f"best_{monitor}"} <= result.keys():
        best = result["best_epoch"], result[f"best_{monitor}"]
    tests = {name: float(value) for name, value in result.items() if name.startswith("test/")}
    return {
        "state": "finished" if result else "unfinished",
        "strategy": config.get("strategy", ""),
        "replicas": str(config.get("replicas", "")),
        "epochs": f"{rows[-1]['epoch'] if rows else 0} of {settings.get('epochs', '?')}",
        "time": f"{seconds / 60:,.1f} min" if seconds >= 60 else f"{seconds:.1f} s",
        f"best {monitor}": float(best[1]) if best else "",
        "in epoch": f"{best[0]:g}" if best else "",
        "goodput": f"{result['goodput']['fraction']:.0%}".replace("%", " %") if result.get("goodput") else "",
        # The name of an array's element ends in its index.
        **{name: value for name, value in tests.items() if not name.rsplit("/", 1)[-1].isdigit()},
        **{flag(name): str(value) for name, value in settings.items() if name not in NOT_COMPARED},
    }


def _as_texts(cells: Sequence[Any]) -> list[str]:
    """Returns the cells of a line; numbers have four digits, or as many as tell different ones apart."""
    by_digits = ([f"{cell:.{digits}g}" if isinstance(cell, float) else cell for cell in cells] for digits in DIGITS)
    return next(texts for texts in by_digits if len(set(texts)) == len(set(map(str, cells))))
