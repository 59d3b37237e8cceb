"""How a program ends before its work is done: one line and an exit code. Imports no TensorFlow."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
asked_to_stop = threading.Event()  # Set as soon as a signal asks a run to stop, until its end.


class ProgramExit(Exception):
    """The program ends before its work is done. The text is one line for the user."""

    exit_code: int
    ag_pass_through = True  # AutoGraph leaves the text as it is, when a hook raises it.


class BadInput(ProgramExit):
    """Something that the user gave cannot be used. The text has its value, the rule, and what to do."""

    exit_code = 2


class InterruptedStep(BadInput):
    """A step failed while it ran. It may have changed a part of the state, so the state cannot be saved."""


class Diverged(ProgramExit):
    """The loss or a variable is no longer finite, or no loss scale is low enough. The text says where."""

    exit_code = 3


class Stopped(ProgramExit):
    """A signal asked the program to stop. The state of a run is saved."""

    exit_code = 42


class CannotWrite(ProgramExit):
    """The disk is full, or the run directory is gone. The text names the file; older files are complete."""

    exit_code = 1


class PeerLost(ProgramExit):
    """Another process is gone. Restarts need not count this end, because they count that one's."""

    exit_code = 43


class CountedLoss(PeerLost):
    """Another process is missing, frozen or stuck, or this one's port is in use: nothing ends that would be counted.

    One of the processes that waited raises it, so that restarts count one failure; the others raise PeerLost.
    """

    exit_code = 44


class Unavailable(BadInput):
    """Examples could not be read for minutes, because of a fault that may pass: the program may be started again."""

    exit_code = 1


class Damaged(Exception):
    """A checkpoint cannot be read as it was written. The text is one line: which, and why."""


def end_at_signals() -> None:
    """Lets SIGTERM and Ctrl-C end the program with a line and an exit code, until a run handles them itself.

    Nothing is lost: all code that changes a run directory either handles signals or writes complete files.
    """
    exits = {
        signal.SIGTERM: (Stopped.exit_code, "stopped by SIGTERM; nothing was lost: start the same command again"),
        signal.SIGINT: (130, "Stopped by Ctrl-C. Everything saved before is complete."),
    }

    def end(number: int, _: object) -> None:
        code, line = exits[signal.Signals(number)]
        with contextlib.suppress(OSError, RuntimeError):  # Nobody reads it, or another line was being printed.
            print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(code)  # A library that is being imported could catch an exception.

    for number in exits:
        signal.signal(number, end)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turns a ProgramExit that is raised inside into its line on stderr and its exit code."""
    try:
        yield
    except ProgramExit as problem:
        line = " ".join(str(problem).split())  # A value may contain line breaks.
        again = f"{line}; to continue, start the same command again, without --fresh"
        line = again if isinstance(problem, Stopped) else f"ERROR: {line}"
        try:
            if os.environ.get("TRAINING_TRACEBACK"):
                traceback.print_exception(problem)
            print(line, file=sys.stderr, flush=True)
        except OSError:  # Nobody reads it, or its disk is full. Python would try again at its end, and exit with 120.
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.exit(problem.exit_code)
