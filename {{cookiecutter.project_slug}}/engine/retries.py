"""Reads again after faults that pass, such as those of a network or of a file system behind it."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from engine.console import console
from engine.errors import Unavailable
from engine.user_errors import first_line, may_pass

SECONDS_TO_WAIT = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # Before each further attempt: about four minutes.
Read = TypeVar("Read")


def until_read(read: Callable[[], Read], name: str) -> Read:
    """Returns what `read` returns; calls it again, after growing waits, while it raises errors that may pass.

    `name` is what it reads, for messages. Raises other errors as they are; Unavailable if it fails for minutes.
    """
    for seconds in (*SECONDS_TO_WAIT, None):
        try:
            return read()
        except (OSError, tf.errors.OpError) as problem:
            if not may_pass(problem):
                raise
            text = first_line(problem)
            if seconds is None:
                attempts = f"after {len(SECONDS_TO_WAIT)} more attempts in {sum(SECONDS_TO_WAIT) / 60:.0f} minutes"
                remedy = "check the file system or network behind it"
                raise Unavailable(f"{name} still cannot be read, {attempts} ({text}): {remedy}") from problem
        # The exception is gone, and with it the iterator that failed.
        line = f"{name} cannot be read ({text}): trying again in {seconds} s"
        console.print(line)
        if console.quiet:  # This is a worker that is not the chief.
            print(line, file=sys.stderr, flush=True)
        if stopped_by := _signal_within(seconds):
            raise Unavailable(f"stopped by {stopped_by} while {name} could not be read ({text})")
    raise AssertionError  # The last attempt returns or raises.


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
