"""The console's lines for the numbers of an epoch.

    Each metric as train / validation
    epoch  1/10  loss  1.985 / 0.9777  accuracy 0.2821 / 0.7318  1.8 s      791 examples/s  best

A metric that all sets of the line have is shown once, with their numbers in the order that the first line gives; others
have their full names. Where the line would be too long, the speed is left out; then the monitored metric and the losses
come first, and the rest is in metrics.csv, which the first line says.
"""

from collections.abc import Mapping
from typing import Any

import rich.text

from engine.console import console, digits
from engine.model.metrics import Names

SEPARATOR = " / "
# Of most numbers: "0.6529". The lines of all epochs are one below the other.
WIDTH = 6


class Lines:
    """Prints the lines of one run, all with the same choice of metrics."""

    def __init__(self, names: Names, monitor: str, rest: str) -> None:
        """`monitor` is the number that comes first, `rest` is where all numbers are."""
        self._names = names
        self._monitor = monitor
        self._rest = rest
        self._explained: set[str] = set()

    def print(self, start: str, metrics: Mapping[str, float], *ends: str, is_best: bool) -> None:
        """Prints the metrics, as "<set>/<metric>", between the start and the ends of a line.

        Where not all metrics fit, the ends but the first are left out, the last one first.
        """
        groups, sets = self._groups(metrics)
        # Room for "best" is kept on all lines, so that all show the same metrics.
        room = console.line_width - len(start) - len("  best")
        while ends[1:] and _length([*groups.values(), *ends]) > room:
            ends = ends[:-1]
        shown: list[str] = []
        for group in sorted(groups, key=self._rank):
            if not shown or _length([*shown, groups[group], *ends]) <= room:
                shown.append(groups[group])
        self._explain(sets if any(SEPARATOR in text for text in shown) else [], len(groups) - len(shown))
        # In the order that task.create_metrics gives them.
        chosen = [text for text in groups.values() if text in shown]
        line = rich.text.Text("  ".join([start, *chosen, *ends, *["best"] * is_best]))
        if is_best:
            line.stylize("bold green", len(line) - len("best"))
        console.print(line)

    def _groups(self, metrics: Mapping[str, float]) -> tuple[dict[str, str], list[str]]:
        """Returns a text for each metric that has a line's worth of numbers, and the sets of those that have several.

        The keys are metrics ("loss"), or a number's full name if not all sets have the metric.
        """
        values = self._names.lines(metrics)
        if self._monitor in metrics:  # It may be an element of an array.
            values[self._monitor] = metrics[self._monitor]
        sets = [name for name in self._names.sets if any(value.startswith(f"{name}/") for value in values)]
        groups: dict[str, str] = {}
        for name, value in values.items():
            metric = self._names.metric(name)
            of_sets = [values.get(f"{each}/{metric}") for each in sets]
            if len(sets) > 1 and None not in of_sets:
                groups[metric] = f"{metric} {SEPARATOR.join(digits(each).rjust(WIDTH) for each in of_sets)}"
            else:
                groups[name] = f"{name} {digits(value).rjust(WIDTH)}"
        return groups, sets

    def _rank(self, group: str) -> int:
        if group in (self._monitor, self._names.metric(self._monitor)):
            return 0
        return 1 if group.rsplit("/", 1)[-1].endswith("loss") else 2

    def _explain(self, sets: list[str], left_out: int) -> None:
        """Prints, once, what the numbers are and where the others are."""
        texts = [f"Each metric as {SEPARATOR.join(sets)}"] if sets else []
        texts += [f"{left_out} more in {self._rest}"] if left_out else []
        text = "; ".join(texts)
        if text and text not in self._explained:
            console.print(text, style="dim")
        self._explained.add(text)


def _length(texts: list[str]) -> int:
    """Returns how long they are, each with two spaces before it."""
    return sum(len(text) + 2 for text in texts)


def in_short(names: Names, metrics: Mapping[str, Any]) -> str:
    """Returns the metrics as they stand in a line of the console, with their full names."""
    return "  ".join(f"{name} {digits(value)}" for name, value in names.lines(metrics).items())
