"""Reads and writes again after faults that pass, such as those of a network or of a file system behind it.

Imports no TensorFlow.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from engine.errors import Unavailable, asked_to_stop
from engine.messages import first_line, may_pass

SECONDS_TO_WAIT = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # Before each further attempt: about four minutes.
SECONDS_AFTER_SIGNAL = 4  # At most, because whoever sent it may soon end the process.
Result = TypeVar("Result")


def until_read(read: Callable[[], Result], name: object, *, obeys_signals: bool = False) -> Result:
    """Returns what `read` returns; calls it again, after growing waits, while it raises errors that may pass.

    `name` is what it reads, for messages. Raises other errors as they are; Unavailable if it fails for minutes, or if
    it `obeys_signals` and one has come. Otherwise it continues after a signal, for half a minute at most, because what
    it reads may be needed to save the state.
    """
    try:
        return _again(read, name, "read", obeys_signals=obeys_signals)
    except Exception as problem:
        if not may_pass(problem):
            raise
        raise Unavailable(
            f"{name} still cannot be read, after {len(SECONDS_TO_WAIT)} more attempts in "
            f"{sum(SECONDS_TO_WAIT) / 60:.0f} minutes ({first_line(problem)}): "
            "check the file system or network behind it"
        ) from problem


def until_written(write: Callable[[], Result], name: object) -> Result:
    """Returns what `write` returns; calls it again as `until_read` does. Raises its last error if it fails for minutes.

    `write` must start from the beginning each time.
    """
    return _again(write, name, "written", obeys_signals=False)


def _again(call: Callable[[], Result], name: object, done: str, *, obeys_signals: bool) -> Result:
    for seconds in SECONDS_TO_WAIT:
        try:
            return call()
        except Exception as problem:
            if not may_pass(problem):
                raise
            text = first_line(problem)
        # The exception is gone, and with it the iterator that failed.
        with contextlib.suppress(OSError, ValueError):  # The log may be on the same file system.
            print(f"{name} cannot be {done} ({text}): trying again in {seconds} s", file=sys.stderr, flush=True)
        wait(seconds)
        if asked_to_stop.is_set() and obeys_signals:
            raise Unavailable(f"stopped by a signal while {name} could not be {done} ({text})")
    return call()


def wait(seconds: float) -> None:
    """Waits; only until a signal comes, and for a few seconds if one has come."""
    if asked_to_stop.is_set():
        time.sleep(min(seconds, SECONDS_AFTER_SIGNAL))
    else:
        asked_to_stop.wait(seconds)
