"""Console output: a live line, tables of facts, and the result.

A terminal gets colours, tables, and a live line that is erased at the end. A pipe, a log file, a notebook or TERM=dumb
gets plain lines without control characters.
"""

import contextlib
import datetime
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.panel
import rich.progress
import rich.table
import tensorflow as tf
from rich.text import Text

from engine.settings import Settings

PLAIN_WIDTH = 120  # Width of a line if the output is not a terminal and COLUMNS is not set.
DIGITS = 4  # Digits of the numbers that people read; files contain all.
SECONDS_BETWEEN_REFRESHES = 0.2  # Executions may end more often than anybody can read.
SECONDS_BETWEEN_LINES = 180.0  # Without a terminal the live line is printed this often.


class _Console(rich.console.Console):
    """A console whose failure does not end the training."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:  # The output's disk is full, or its reader has ended.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Continues without a console; rich would end the program."""
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is: a process that is killed could not bring a hidden one back."""
        return False

    @property
    def line_width(self) -> int:
        return self.width if self.is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH


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
    *others, last = range(len(rows[0]))
    table = rich.table.Table.grid(*(rich.table.Column(no_wrap=True) for _ in others), padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", ratio=1 if last else None)
    for row in rows:
        table.add_row(*row)
    return table


def print_facts(title: str, facts: Mapping[str, Any], *, boxed: bool = False) -> None:
    """Prints a title, then a name and a value per line; in a terminal long values are wrapped."""
    if not console.is_terminal:
        width = max(map(len, facts))
        console.print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]))
    elif boxed:
        bold = {name: "bold" * name.startswith(("test", "next")) for name in facts}
        table = columns([(Text(name, "cyan"), Text(value, bold[name])) for name, value in facts.items()])
        panel = rich.panel.Panel(table, title=Text(title, style="bold"), title_align="left", expand=False)
        console.print(panel, soft_wrap=False)
    else:
        console.print(title, style="bold")
        console.print(columns([(Text(f"  {name}"), Text(str(each))) for name, each in facts.items()]), soft_wrap=False)


class LiveLine(rich.progress.Progress):
    """The line of the current pass, redrawn about once a second; without a terminal it is printed rarely.

    epoch 3/10  train  41 %  412/1,000 steps  00:42 left  12.3 steps/s  loss 0.4123  GPU 3.2 GB
    """

    def __init__(self, epochs: int, *, can_be_drawn: bool = True) -> None:
        """With --eager it cannot be drawn: it would hide the prompt of a debugger."""
        # FORCE_COLOR, as in CI, does not make a pipe a terminal.
        drawn = can_be_drawn and console.is_interactive and bool(getattr(console.file, "isatty", bool)())
        # Lines that are printed meanwhile appear above this one, except those to a file as stderr.
        redirect_stderr = bool(sys.stderr and sys.stderr.isatty())
        super().__init__(
            console=console, disable=not drawn, redirect_stderr=redirect_stderr, auto_refresh=False, transient=True
        )
        self._epochs, self._is_shown = epochs, False
        self._compiled: set[str] = set()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Lets the line be drawn inside; removes it at the end, before an error is printed."""
        outer, self._is_shown = self._is_shown, True
        try:
            yield
        finally:
            self._is_shown = outer
            self.end()

    def begin(self, name: str, epoch: int | None, done: int, steps: int) -> None:
        """Starts the line of a pass over the dataset `name`, with `done` of its `steps` done already."""
        self.end()
        split = name.split("/")[0]
        title = f"epoch {epoch + 1}/{self._epochs}  {name}" if epoch is not None and split != "test" else name
        note = "" if split in self._compiled else "compiling"
        self.add_task(title, total=steps, completed=done, batches=0.0, sum=0.0, note=note)
        self._compiled.add(split)
        self._drawn = time.monotonic()
        if self._is_shown and not self.disable:
            self.live.start()
            self.refresh()

    def took(self, losses: np.ndarray, batches: float) -> None:
        """Counts steps by their losses ([count]), whose mean is over `batches`; ends the line after the last step."""
        for task in self.tasks:
            task.fields["sum"] += float(np.sum(losses, dtype=np.float64))
            self.update(task.id, advance=len(losses), batches=task.fields["batches"] + batches)
            since, self._drawn = time.monotonic() - self._drawn, time.monotonic()
            if task.finished:
                self.end()
            elif self.live.is_started and since > SECONDS_BETWEEN_REFRESHES:
                self.refresh()
            elif self.disable and self._is_shown and since > SECONDS_BETWEEN_LINES:
                console.print(self.get_renderable().plain)
            else:
                self._drawn -= since

    def end(self) -> None:
        for task in self.tasks:
            self.remove_task(task.id)
        with contextlib.suppress(OSError):
            self.live.stop()

    def refresh(self) -> None:
        try:
            super().refresh()
        except OSError:  # The terminal is gone.
            self.disable = True
            self.end()

    def get_renderable(self) -> Text:
        """Returns the current line. Its speed does not include the first steps, during which they are compiled."""
        if not self.tasks:
            return Text()
        (task,) = self.tasks
        parts = [task.description, f"{task.percentage:.0f} %", f"{task.completed:,}/{task.total:,} steps"]
        if task.speed and task.remaining is not None:
            left = datetime.timedelta(seconds=round(task.remaining / task.speed))
            parts += [f"{str(left).removeprefix('0:')} left", f"{digits(task.speed)} steps/s"]
        batches = task.fields["batches"]
        parts += [f"loss {digits(task.fields['sum'] / batches)}" if batches else task.fields["note"], gpu_memory()]
        text = Text("  ".join(filter(None, parts)), style="cyan", no_wrap=True)
        if not self.disable:  # One column less: a terminal may wrap a full line, which could not be erased.
            text.truncate(console.width - 1, overflow="ellipsis")
        return text


def gpu_memory() -> str:
    """Returns the memory that this process uses, at most, of one GPU: "GPU 3.2 GB"; "" without a GPU."""
    used: list[int] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        with contextlib.suppress(ValueError, tf.errors.OpError):  # It belongs to another process, or is not counted.
            used.append(tf.config.experimental.get_memory_info(gpu.name)["current"])
    return f"GPU {max(used) / 1e9:.1f} GB" if used else ""


def goodput_text(goodput: Mapping[str, Any]) -> str:
    """Returns a record of engine/report/goodput.py as a text: "62 % of 40.1 s in 2 starts (starting 25 %, ...)"."""
    total = max(sum(goodput["seconds"].values()), 1e-9)
    others = {kind: each / total for kind, each in goodput["seconds"].items() if kind != "training"}
    largest = sorted(others, key=lambda kind: -others[kind])
    listed = ", ".join(f"{kind} {others[kind]:.0%}" for kind in largest if others[kind] >= 0.005)
    starts = "1 start" if goodput["starts"] == 1 else f"{goodput['starts']} starts"
    text = f"{goodput['fraction']:.0%} of {total:,.1f} s in {starts} were training steps that count ({listed})"
    return text.replace("%", " %")


def print_result(result: dict[str, Any], settings: Settings) -> None:
    """Prints the results in result.json, without elements of arrays ("test/f1/3"), and the commands to type next."""
    test = {name: value for name, value in result.items() if name.split("/")[0] == "test" and value is not None}
    shown = {name: digits(value) for name, value in test.items() if not name.rsplit("/", 1)[-1].isdecimal()}
    run_dir, seconds = settings.run_dir, result["seconds"]
    facts = shown if test else {"test": "none: task.load_examples('test') returned None"}
    if len(test) > len(shown):
        facts["test, arrays"] = f"{len(test) - len(shown)} numbers in result.json"
    best = digits(result.get(f"best_{settings.monitor}"))
    facts["best epoch"] = f"{result.get('best_epoch')} of {result['epochs']}, {settings.monitor} {best}"
    took = f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
    facts["trained"] = f"{result['step']:,} steps in {took}"
    if goodput := result.get("goodput"):
        facts["goodput"] = goodput_text(goodput)
    facts["weights_sha256"] = result["weights_sha256"][: 16 if console.is_terminal else None]
    files = ["result.json", "metrics.csv", "curves.png", "best/", "checkpoints/", *["export/"] * settings.export]
    facts["files"] = f"{run_dir}: {', '.join(files)}"
    # Each command has its own title, so that its line can be copied.
    if not settings.export:
        is_default = run_dir == type(settings).__dataclass_fields__["run_dir"].default
        flag = "" if is_default else f" --run-dir {shlex.quote(str(run_dir))}"
        facts["next: export"] = f"python train.py --export{flag}"
    facts["next: predict"] = f"python predict.py {shlex.quote(str(run_dir))} EXAMPLES"
    folder = run_dir if run_dir.parent == Path() else run_dir.parent  # TensorBoard finds its neighbours there, too.
    facts["next: curves"] = f"tensorboard --logdir {shlex.quote(str(folder))}"
    print_facts("Result, of the best weights", facts, boxed=True)
