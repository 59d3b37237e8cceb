"""SIGTERM and Ctrl-C: the first lets the running chunk of steps end, for the state to be saved; a second ends at once.

Batch systems and clouds announce with SIGTERM that they take the machine back.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from engine.cluster.workers import Workers
from engine.console import console
from engine.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal, or a program that ends a group of processes, may send the same signal twice.
SECONDS_AS_ONE = 1.0


class Preemption:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._came = 0.0
        self._is_ending = False

    def check(self, workers: Workers) -> None:
        """Raises Stopped, on every worker, if a signal has come to any. Call it between chunks of steps."""
        if stopped := workers.any(self.signal is not None):
            self._is_ending = True
            raise Stopped(f"stopped by {self.signal or 'a signal to ' + ', '.join(stopped)}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals while it lasts, after the strategy is made; in another than the main thread, none."""
        self.signal, self._is_ending = None, False
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets only the main thread take them.
            return
        # Python runs a handler only between two operations of the main thread, and that may be in a long chunk. The
        # number of the signal is written to a pipe at once, and a thread is waiting there.
        reading, written = os.pipe()
        os.set_blocking(written, False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        others = signal.set_wakeup_fd(written)
        thread = threading.Thread(target=self._wait, args=(reading,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(others)
            for number, handler in handlers.items():
                # The end takes a moment, in which one more signal would take the exit code away.
                signal.signal(number, signal.SIG_IGN if self.signal or self._is_ending else handler)
            os.close(written)
            thread.join()
            os.close(reading)

    def _wait(self, reading: int) -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] not in SIGNALS:
                continue
            if self.signal and time.monotonic() < self._came + SECONDS_AS_ONE:
                continue
            if self.signal:
                # Whatever is being written has its temporary name, so nothing on disk is harmed.
                os._exit(128 + numbers[0])
            self.signal, self._came = signal.Signals(numbers[0]).name, time.monotonic()
            console.print(f"{self.signal}: the running steps end, then the state is saved; a second one ends at once")


signals = Preemption()  # Those of this process.
