"""Reads and writes again after faults that pass, such as those of a network or of a file system behind it.

Imports no TensorFlow.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from engine.errors import ProgramExit, Unavailable
from engine.exceptions import first_line, may_pass

SECONDS_TO_WAIT = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # Before each further attempt: about four minutes.
Result = TypeVar("Result")


def until_read(read: Callable[[], Result], name: object) -> Result:
    """Returns what `read` returns; calls it again, after growing waits, while it raises errors that may pass.

    `name` is what it reads, for messages. Raises other errors as they are; Unavailable if it fails for minutes.
    """
    try:
        return _again(read, name, "read")
    except Exception as problem:
        if isinstance(problem, ProgramExit) or not may_pass(problem):
            raise
        attempts = f"after {len(SECONDS_TO_WAIT)} more attempts in {sum(SECONDS_TO_WAIT) / 60:.0f} minutes"
        remedy = "check the file system or network behind it"
        raise Unavailable(f"{name} still cannot be read, {attempts} ({first_line(problem)}): {remedy}") from problem


def until_written(write: Callable[[], Result], name: object) -> Result:
    """Returns what `write` returns; calls it again as `until_read` does. Raises its last error if it fails for minutes.

    `write` must start from the beginning each time.
    """
    return _again(write, name, "written")


def _again(call: Callable[[], Result], name: object, done: str) -> Result:
    for seconds in SECONDS_TO_WAIT:
        try:
            return call()
        except Exception as problem:
            if isinstance(problem, ProgramExit) or not may_pass(problem):
                raise
            text = first_line(problem)
        # The exception is gone, and with it the iterator that failed.
        print(f"{name} cannot be {done} ({text}): trying again in {seconds} s", file=sys.stderr, flush=True)
        if stopped_by := _signal_within(seconds):
            raise Unavailable(f"stopped by {stopped_by} while {name} could not be {done} ({text})")
    return call()


def _signal_within(seconds: float) -> str:
    """Waits; returns the name of the signal that ends the wait, or ""."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread.
        time.sleep(seconds)
        return ""
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}

    def interrupt(number: int, frame: Any) -> None:
        handlers[signal.Signals(number)](number, frame)
        raise InterruptedError(signal.Signals(number).name)  # Otherwise Python would sleep again.

    try:
        for number in handlers:
            signal.signal(number, interrupt)
        time.sleep(seconds)
    except InterruptedError as problem:
        return str(problem)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ""
