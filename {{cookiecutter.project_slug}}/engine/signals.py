"""SIGTERM and Ctrl-C: the first one ends the program after the running steps, a second one at once.

Batch systems and clouds send SIGTERM before they take the machine back. Imports no TensorFlow.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from engine.console import console
from engine.errors import SIGNALS, Stopped, asked_to_stop

SECONDS_AS_ONE = 1.0  # A terminal, or a program that ends a group of processes, may send the same signal twice.


class Signals:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._pipe: tuple[int, ...] = ()  # Its ends for reading and for writing, while this listens.

    def check(self, names_where: Callable[[bool], list[str]]) -> None:
        """Raises Stopped, on every worker, if any of them got a signal. Call it between executions.

        `names_where` returns the names of the workers that call it with True.
        """
        if stopped := names_where(self.signal is not None):
            self.signal = self.signal or f"a signal to {', '.join(stopped)}"
            raise Stopped(f"stopped by {self.signal}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handles the signals inside it. Python allows that only in the main thread; in another, nothing happens."""
        self._forget()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Python runs a handler only between two operations of the main thread, which may be in a long execution. But it
        # writes the signal's number to a pipe at once, and a thread reads that.
        self._pipe = reading, writing = os.pipe()
        os.set_blocking(writing, False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        earlier = signal.set_wakeup_fd(writing)
        thread = threading.Thread(target=self._wait, args=(reading,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in handlers.items():
                # While the program ends, one more signal would change the exit code. A notebook continues.
                in_notebook = handler in (signal.default_int_handler, signal.SIG_DFL)
                signal.signal(number, signal.SIG_IGN if self.signal and not in_notebook else handler)
            os.close(writing)
            thread.join()
            os.close(reading)
            self._pipe = ()
            self._forget()

    def _forget(self) -> None:
        self.signal = None
        asked_to_stop.clear()

    def leave(self) -> None:
        """Stops listening in a process that was forked, such as one of a multiprocessing.Pool in a hook."""
        if self._pipe:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for end in self._pipe:  # The thread of the first process waits until all have closed it.
                os.close(end)
            self._pipe = ()

    def _wait(self, reading: int) -> None:
        first = None
        while numbers := os.read(reading, 1):
            if numbers[0] not in SIGNALS:
                continue
            if first is None:
                first, name = time.monotonic(), signal.Signals(numbers[0]).name
                self.signal = self.signal or name
                asked_to_stop.set()
                console.print(f"{name}: the running steps end, then the program; a second signal ends it at once")
            elif time.monotonic() > first + SECONDS_AS_ONE:
                # The files that are being written still have temporary names.
                os._exit(128 + numbers[0])


signals = Signals()  # The signals of this process.
if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=signals.leave)
