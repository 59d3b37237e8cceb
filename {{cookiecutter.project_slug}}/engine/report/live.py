"""What the console shows of a pass that is under way.

In a terminal it is one line, drawn again about once a second, that vanishes when the pass ends:

    epoch 3/10  train  41 %  412/1,000  0:42 left  12.3 steps/s  loss 0.4123  GPU 3.2 GB

Elsewhere a pass that takes minutes prints such a line every few minutes. Nothing is fetched from the devices for it:
the losses have been read already, and TensorFlow counts its GPU memory on the host.
"""

import contextlib
import datetime
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import rich.live
import rich.text
import tensorflow as tf

from engine.console import console, digits

# A turn of Python may come more often than anybody can read.
SECONDS_BETWEEN_REFRESHES = 0.2
# Where there is no terminal.
SECONDS_BETWEEN_LINES = 180.0


class LiveLine:
    """The line of the pass that is under way. It is drawn only inside `shown`."""

    def __init__(self, epochs: int, *, can_be_drawn: bool = True) -> None:
        """It cannot be drawn with --eager: a debugger's prompt would wait below it, unseen."""
        self._epochs = epochs
        self._can_be_drawn = can_be_drawn
        self._is_shown = False
        self._compiled: set[str] = set()  # The splits whose steps have run.
        self._live: rich.live.Live | None = None

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
        self._split = name.split("/")[0]
        has_epoch = epoch is not None and self._split != "test"
        self._title = f"epoch {epoch + 1}/{self._epochs}  {name}" if has_epoch else name
        self._done, self._steps = done, steps
        self._loss_sum, self._losses = 0.0, 0
        self._drawn = time.monotonic()
        # Steps done, and when: where the speed is measured from. The first steps of all are compiled, and left out.
        self._since = (done, self._drawn) if self._split in self._compiled else None
        if self._is_shown and self._can_be_drawn and console.is_live:
            # What is printed meanwhile goes above the line, but stays out of a file that stderr is sent to.
            to_terminal = bool(sys.stderr and sys.stderr.isatty())
            self._live = rich.live.Live(
                console=console, auto_refresh=False, transient=True, redirect_stderr=to_terminal
            )
            with self._failure_ends_it():
                self._live.start()
            self._draw()

    def took(self, losses: np.ndarray) -> None:
        """Counts steps by their losses ([count]); ends the line after the last step."""
        self._done += len(losses)
        self._loss_sum += float(np.sum(losses, dtype=np.float64))
        self._losses += len(losses)
        now = time.monotonic()
        self._since = self._since or (self._done, now)
        self._compiled.add(self._split)
        if self._done >= self._steps:
            self.end()
        elif self._live:
            if now - self._drawn > SECONDS_BETWEEN_REFRESHES:
                self._draw()
        elif self._is_shown and now - self._drawn > SECONDS_BETWEEN_LINES:
            console.print(self._text())
            self._drawn = now

    def end(self) -> None:
        """Removes the line, if there is one."""
        live, self._live = self._live, None
        if live:
            with contextlib.suppress(OSError):
                live.stop()

    def _draw(self) -> None:
        text = rich.text.Text(self._text(), style="cyan", no_wrap=True)
        # One column less: a terminal may wrap a full line, which could not be removed.
        text.truncate(console.width - 1, overflow="ellipsis")
        self._drawn = time.monotonic()
        with self._failure_ends_it():
            if self._live:
                self._live.update(text, refresh=True)

    @contextlib.contextmanager
    def _failure_ends_it(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # The terminal is gone.
            self.end()

    def _text(self) -> str:
        parts = [self._title, f"{100 * self._done // self._steps} %", f"{self._done:,}/{self._steps:,} steps"]
        if self._since is None:
            parts.append("compiling")
        else:
            done, since = self._since
            steps, seconds = self._done - done, time.monotonic() - since
            if steps and seconds > 0:
                left = datetime.timedelta(seconds=round((self._steps - self._done) * seconds / steps))
                parts += [f"{str(left).removeprefix('0:')} left", f"{digits(steps / seconds)} steps/s"]
            parts.append(f"loss {digits(self._loss_sum / self._losses)}" if self._losses else "")
        return "  ".join(filter(None, [*parts, gpu_memory()]))


def gpu_memory() -> str:
    """Returns how much memory this process uses of the GPU on which it uses most: "GPU 3.2 GB", or "" without one."""
    used: list[Any] = []
    for gpu in tf.config.list_logical_devices("GPU"):
        with contextlib.suppress(ValueError, tf.errors.OpError):  # Of another process, or not counted.
            used.append(tf.config.experimental.get_memory_info(gpu.name)["current"])
    return f"GPU {max(used) / 1e9:.1f} GB" if used else ""
