"""Console output: a live line, tables of facts, and the result.

A terminal gets colours, tables, and a live line that is erased at the end. A pipe, a log file, a notebook or TERM=dumb
gets plain lines without control characters.
"""

import datetime
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.live
import rich.panel
import rich.table
from rich.text import Text

from engine.settings import Settings

DIGITS = 4  # Digits of the numbers that people read; files contain all.
SECONDS_BETWEEN_REFRESHES = 0.2  # Executions may end more often than anybody can read.
SECONDS_BETWEEN_LINES = 180.0  # Without a terminal the live line is printed this often.


class _Console(rich.console.Console):
    """A console whose failure does not end the training."""

    def __exit__(self, *problem: object) -> None:
        """Writes what was printed, as `print` and the live line do at their end."""
        try:
            super().__exit__(*problem)
        except OSError:  # The output's disk is full, or its reader has ended.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Continues without a console; rich would end the program."""
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is: a process that is killed could not bring a hidden one back."""
        return False


# Lines are not wrapped, and "[32]" is text, not a style. A notebook gets the same lines as a pipe.
console = _Console(soft_wrap=True, highlight=False, markup=False, force_jupyter=False)


def digits(value: Any) -> str:
    """Returns a number with about four digits: "0.0941", "1.200", "1,258"; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if 10**DIGITS <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.{DIGITS}f}" if 1e-3 <= abs(value) < 1 else f"{value:#.{DIGITS}g}".rstrip(".")


def columns(rows: Sequence[tuple[Text, ...]]) -> rich.table.Table:
    """Returns rows as a table for a terminal, with the last column wrapped."""
    table = rich.table.Table.grid(*(rich.table.Column(no_wrap=True) for _ in rows[0][:-1]), padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*row)
    return table


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Prints a title, then a name and a value per line; in a terminal in a box, with long values wrapped."""
    if not console.is_terminal:
        width = max(map(len, facts))
        console.print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]))
        return
    bold = {name: "bold" * name.startswith(("test", "next")) for name in facts}
    table = columns([(Text(name, "cyan"), Text(str(value), bold[name])) for name, value in facts.items()])
    panel = rich.panel.Panel(table, title=Text(title, "bold"), title_align="left", expand=False)
    console.print(panel, soft_wrap=False)


class LiveLine:
    """The line of the current pass, redrawn a few times a second; without a terminal it is printed rarely.

    epoch 3/10  train  41 %  412/1,000 steps  00:42 left  12.3 steps/s  loss 0.4123
    """

    def __init__(self, epochs: int, *, can_be_drawn: bool = True) -> None:
        """With --eager it cannot be drawn: it would hide the prompt of a debugger."""
        # FORCE_COLOR, as in CI, does not make a pipe a terminal.
        self.is_drawn = can_be_drawn and console.is_interactive and bool(getattr(console.file, "isatty", bool)())
        # Lines that are printed meanwhile appear above this one, except those to a file as stderr.
        redirect_stderr = bool(sys.stderr and sys.stderr.isatty())
        self._live = rich.live.Live(
            console=console, auto_refresh=False, transient=True, redirect_stderr=redirect_stderr
        )
        self._epochs = epochs

    def close(self) -> None:
        """Removes the line, before an error is printed."""
        self._live.stop()

    def begin(self, name: str, epoch: int | None, done: int, steps: int) -> None:
        """Starts the line of a pass over the dataset `name`, with `done` of its `steps` done already."""
        is_test = name.startswith("test")
        self._title = name if epoch is None or is_test else f"epoch {epoch + 1}/{self._epochs}  {name}"
        self._done, self._steps = done, steps
        self._loss_sum, self._batches = 0.0, 0.0
        self._first: tuple[float, int] | None = None  # When the first execution ended, and the steps done by then.
        self._drawn = time.monotonic()
        if self.is_drawn:
            self._live.start()
            self._draw()

    def took(self, losses: np.ndarray, batches: float) -> None:
        """Counts steps by their losses ([count]), whose mean is over `batches`; removes the line after the last."""
        now, interval = time.monotonic(), SECONDS_BETWEEN_REFRESHES if self.is_drawn else SECONDS_BETWEEN_LINES
        self._done += len(losses)
        self._loss_sum += float(np.sum(losses, dtype=np.float64))
        self._batches += batches
        self._first = self._first or (now, self._done)
        if self._done >= self._steps:
            self._live.stop()
        elif now - self._drawn > interval:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        """Draws the line. Its speed does not include the first execution, which may include compiling."""
        parts = [self._title, f"{100 * self._done / self._steps:.0f} %", f"{self._done:,}/{self._steps:,} steps"]
        if self._first and self._done > self._first[1]:
            seconds_per_step = (time.monotonic() - self._first[0]) / (self._done - self._first[1])
            left = datetime.timedelta(seconds=round((self._steps - self._done) * seconds_per_step))
            parts += [f"{str(left).removeprefix('0:')} left", f"{digits(1 / seconds_per_step)} steps/s"]
        parts.append(f"loss {digits(self._loss_sum / self._batches)}" if self._batches else "starting")
        text = Text("  ".join(parts), style="cyan", no_wrap=True)
        if self.is_drawn:
            # One column less: a terminal may wrap a full line, which could not be erased.
            text.truncate(console.width - 1, overflow="ellipsis")
            self._live.update(text, refresh=True)
        else:
            console.print(text.plain)


def goodput_text(goodput: Mapping[str, Any]) -> str:
    """Returns `Goodput.record` as a text: "62 % of 40.1 s in 2 starts were ... (starting 25 %, ...)"."""
    seconds, total = goodput["seconds"], sum(goodput["seconds"].values())
    percents = {kind: f"{kind} {100 * seconds[kind] / total:.0f} %" for kind in sorted(seconds, key=seconds.get)[::-1]}
    training = percents.pop("training").removeprefix("training ")
    lost = ", ".join(text for text in percents.values() if " 0 %" not in text)
    return f"{training} of {total:,.1f} s in {goodput['starts']} starts were training steps that count ({lost})"


def print_result(result: dict[str, Any], settings: Settings) -> None:
    """Prints the results in result.json, without elements of arrays ("test/f1/3"), and the commands to type next."""
    run_dir, best = settings.run_dir, digits(result.get(f"best_{settings.monitor}"))
    facts = {
        name: digits(value)
        for name, value in result.items()
        if name.startswith("test/") and not name.rsplit("/", 1)[-1].isdecimal()
    }
    if "test" in result:
        facts["test"] = "none: task.load_examples('test') returned None"
    facts["best epoch"] = f"{result.get('best_epoch')} of {result['epochs']}, {settings.monitor} {best}"
    facts["trained"] = f"{result['step']:,} steps in {datetime.timedelta(seconds=round(result['seconds']))}"
    if (goodput := result.get("goodput")) and goodput["starts"] > 1:
        facts["goodput"] = goodput_text(goodput)
    facts["weights_sha256"] = result["weights_sha256"][: 16 if console.is_terminal else None]
    facts["files"] = str(run_dir)
    # Each command has its own title, so that its line can be copied.
    if not settings.export:
        facts["next: export"] = f"python train.py --export --run-dir {shlex.quote(str(run_dir))}"
    facts["next: predict"] = f"python predict.py {shlex.quote(str(run_dir))} EXAMPLES"
    # TensorBoard finds the runs beside it there, too.
    facts["next: curves"] = f"tensorboard --logdir {shlex.quote(str(run_dir.parent))}"
    print_facts("Result, of the best weights", facts)
