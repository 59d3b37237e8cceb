"""What the console shows: lines of epochs, a live line, tables of facts, and the result.

A terminal gets colours, tables, and a live line that vanishes. A pipe, a log file, a notebook or TERM=dumb gets plain
lines without control characters.
"""

import contextlib
import dataclasses
import datetime
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.panel
import rich.progress
import rich.table
import tensorflow as tf
from rich.text import Text

PLAIN_WIDTH = 120  # Of a line, where the output is no terminal and COLUMNS is not set.
DIGITS = 4  # Of the numbers that people read; files keep all.
SECONDS_BETWEEN_REFRESHES = 0.2  # Of the live line: a turn of Python may come more often than anybody can read.
SECONDS_BETWEEN_LINES = 180.0  # Where there is no terminal.
BETWEEN_SETS = " / "


class _Console(rich.console.Console):
    """A console whose failure does not end the training."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:  # The output's disk is full, or its reader has ended.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Goes on without a console; rich would end the program."""
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is: a process that is killed could not bring a hidden one back."""
        return False

    @property
    def line_width(self) -> int:
        """How many characters a line should have at most."""
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


def columns(rows: list[tuple[Text, ...]]) -> rich.table.Table:
    """Returns rows as a table for a terminal, whose last column is wrapped."""
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


class Lines:
    """Prints the lines of one run's epochs, all with the same choice of metrics.

        Each metric as train / validation
        epoch  1/10  loss  1.985 / 0.9777  accuracy 0.2821 / 0.7318  1.8 s      791 examples/s  best

    A metric that all sets of the line have is shown once; others have their full names. Where the line would be too
    long, the ends but the first are left out; then the monitored metric and the losses come first.
    """

    def __init__(self, names: Any, monitor: str, rest: str) -> None:
        """`names` are the metrics', `monitor` is the number that comes first, `rest` is where all numbers are."""
        self._names, self._monitor, self._rest = names, monitor, rest
        self._explained = {""}

    def print(self, start: str, metrics: Mapping[str, float], *ends: str, is_best: bool) -> None:
        """Prints the metrics, as "<set>/<metric>", between the start and the ends of a line."""
        values = self._names.lines(metrics)
        if self._monitor in metrics:  # It may be an element of an array.
            values[self._monitor] = metrics[self._monitor]
        sets = [name for name in self._names.sets if any(value.startswith(f"{name}/") for value in values)]
        texts: dict[str, str] = {}
        for name, value in values.items():
            metric = self._names.metric(name)
            of_sets = [values.get(f"{each}/{metric}") for each in sets]
            key, shared = (name, [value]) if len(sets) < 2 or None in of_sets else (metric, of_sets)
            texts[key] = f"{key} {BETWEEN_SETS.join(f'{digits(each):>6}' for each in shared)}"

        def fits(*groups: str) -> bool:  # Room for "best" is kept on all lines, so that all show the same metrics.
            return len("  ".join([start, *(texts[each] for each in groups), *ends, "best"])) <= console.line_width

        while ends[1:] and not fits(*texts):
            ends = ends[:-1]
        first = (self._monitor, self._names.metric(self._monitor))
        shown: list[str] = []
        for each in sorted(texts, key=lambda each: (each not in first, not each.endswith("loss"))):
            shown += [each] * (not shown or fits(*shown, each))
        chosen = [text for each, text in texts.items() if each in shown]  # In the order of task.create_metrics.
        legend = [f"Each metric as {BETWEEN_SETS.join(sets)}"] * any(BETWEEN_SETS in text for text in chosen)
        legend += [f"{len(texts) - len(chosen)} more in {self._rest}"] * (len(texts) > len(chosen))
        if "; ".join(legend) not in self._explained:
            self._explained.add("; ".join(legend))
            console.print("; ".join(legend), style="dim")
        line = Text("  ".join([start, *chosen, *ends, *["best"] * is_best]))
        line.stylize("bold green" * is_best, -len("best"))
        console.print(line)


def in_short(names: Any, metrics: Mapping[str, Any]) -> str:
    """Returns the metrics as they stand in a line of the console, with their full names."""
    return "  ".join(f"{name} {digits(value)}" for name, value in names.lines(metrics).items())


class LiveLine(rich.progress.Progress):
    """The line of a pass that is under way, drawn again about once a second; without a terminal printed rarely.

    epoch 3/10  train  41 %  412/1,000 steps  00:42 left  12.3 steps/s  loss 0.4123  GPU 3.2 GB
    """

    def __init__(self, epochs: int, *, can_be_drawn: bool = True) -> None:
        """It cannot be drawn with --eager: a debugger's prompt would wait below it, unseen."""
        # FORCE_COLOR, as in CI, makes no terminal of a pipe.
        drawn = can_be_drawn and console.is_interactive and bool(getattr(console.file, "isatty", bool)())
        # What is printed meanwhile goes above the line, but stays out of a file that stderr is sent to.
        how = {"redirect_stderr": bool(sys.stderr and sys.stderr.isatty()), "auto_refresh": False, "transient": True}
        super().__init__(console=console, disable=not drawn, **how)
        self._epochs, self._is_shown, self._compiled = epochs, False, set()

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
        """Begins the line of a pass over the set `name`, of which some of its steps may be done already."""
        self.end()
        split = name.split("/")[0]
        title = f"epoch {epoch + 1}/{self._epochs}  {name}" if epoch is not None and split != "test" else name
        note = "" if split in self._compiled else "compiling"
        self.add_task(title, total=steps, completed=done, losses=0, sum=0.0, note=note)
        self._compiled.add(split)
        self._drawn = time.monotonic()
        if self._is_shown and not self.disable:
            self.live.start()
            self.refresh()

    def took(self, losses: np.ndarray) -> None:
        """Counts steps by their losses ([count]); ends the line after the last step."""
        for task in self.tasks:
            task.fields["sum"] += float(np.sum(losses, dtype=np.float64))
            self.update(task.id, advance=len(losses), losses=task.fields["losses"] + len(losses))
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
        """Removes the line, if there is one."""
        for task in self.tasks:
            self.remove_task(task.id)
        with contextlib.suppress(OSError):
            self.live.stop()

    def refresh(self) -> None:
        """Draws the line anew."""
        try:
            super().refresh()
        except OSError:  # The terminal is gone.
            self.disable = True
            self.end()

    def get_renderable(self) -> Text:
        """Returns the line as it is now. What was done when the first steps ended, which compiles, is no speed."""
        if not self.tasks:
            return Text()
        (task,) = self.tasks
        parts = [task.description, f"{task.percentage:.0f} %", f"{task.completed:,}/{task.total:,} steps"]
        if task.speed:
            left = datetime.timedelta(seconds=round(task.remaining / task.speed))
            parts += [f"{str(left).removeprefix('0:')} left", f"{digits(task.speed)} steps/s"]
        losses = task.fields["losses"]
        parts += [f"loss {digits(task.fields['sum'] / losses)}" if losses else task.fields["note"], gpu_memory()]
        text = Text("  ".join(filter(None, parts)), style="cyan", no_wrap=True)
        if not self.disable:  # One column less: a terminal may wrap a full line, which could not be removed.
            text.truncate(console.width - 1, overflow="ellipsis")
        return text


def gpu_memory() -> str:
    """Returns how much memory this process uses of the GPU on which it uses most: "GPU 3.2 GB", or "" without one."""
    used: list[Any] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        with contextlib.suppress(ValueError, tf.errors.OpError):  # Of another process, or not counted.
            used.append(tf.config.experimental.get_memory_info(gpu.name)["current"])
    return f"GPU {max(used) / 1e9:.1f} GB" if used else ""


def print_result(result: dict[str, Any], settings: Any) -> None:
    """Prints the test, the best epoch, where the files are, and what to type next: in a terminal, in a panel.

    `result` is what result.json holds. The elements of arrays, "test/f1/3", are left to it.
    """
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
    facts["weights_sha256"] = result["weights_sha256"][: 16 if console.is_terminal else None]
    files = ["result.json", "metrics.csv", "curves.png", "best/", "checkpoints/", *["export/"] * settings.export]
    facts["files"] = f"{run_dir}: {', '.join(files)}"
    # A title of its own for each, so that a line can be copied.
    if not settings.export:
        is_default = run_dir in [each.default for each in dataclasses.fields(settings) if each.name == "run_dir"]
        flag = "" if is_default else f" --run-dir {shlex.quote(str(run_dir))}"
        facts["next: export"] = f"python train.py --export{flag}"
    facts["next: predict"] = f"python predict.py {shlex.quote(str(run_dir))} EXAMPLES"
    folder = run_dir if run_dir.parent == Path() else run_dir.parent  # Where TensorBoard finds its neighbours too.
    facts["next: curves"] = f"tensorboard --logdir {shlex.quote(str(folder))}"
    print_facts("Result, of the best weights", facts, boxed=True)
