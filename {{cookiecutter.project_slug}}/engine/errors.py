"""How a run ends that does not finish: one line and an exit code. Imports no TensorFlow."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator

# Set it to see where an ending comes from, too.
TRACEBACK = "TRAINING_TRACEBACK"


class ProgramExit(Exception):
    """The program ends before its work is done. The text is one line for the user."""

    exit_code: int


class BadInput(ProgramExit):
    """Something the user gave cannot be used. The text says which, its value, the rule, and what to do."""

    exit_code = 2


class InterruptedStep(BadInput):
    """A step that was running has failed. It may have changed a part of the state, which cannot be saved."""


class Diverged(ProgramExit):
    """The loss stopped being a finite number. The text names the step; nothing after it was saved."""

    exit_code = 3


class Stopped(ProgramExit):
    """A signal asked the run to stop, and its state is saved. The same command goes on with it."""

    exit_code = 42


class CannotWrite(ProgramExit):
    """The disk is full, or the run's directory is gone. The text names the file; older files are complete."""

    exit_code = 1


class PeerLost(ProgramExit):
    """Another process of the cluster is gone, so this one cannot go on. The text names it."""

    exit_code = 1


class Damaged(Exception):
    """A checkpoint cannot be read as it was written. The text is one line: which, and why."""


def end_at_signals() -> None:
    """Lets SIGTERM and Ctrl-C end the program with a line and an exit code, until a run listens to them itself.

    Nothing is lost: whatever changes a run's directory either listens or writes complete files.
    """
    endings = {
        signal.SIGTERM: (Stopped.exit_code, "stopped by SIGTERM; nothing was lost: start the same command again"),
        signal.SIGINT: (130, "Stopped by Ctrl-C. What was saved before is complete."),
    }

    def end(number: int, _: object) -> None:
        code, line = endings[signal.Signals(number)]
        with contextlib.suppress(OSError, RuntimeError):  # Nobody reads it, or another line was being printed.
            print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()
        # An exception could be caught by a library that is being imported.
        os._exit(code)

    for number in endings:
        signal.signal(number, end)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turns an ProgramExit that is raised inside into its line on stderr and its exit code."""
    try:
        yield
    except ProgramExit as ending:
        line = " ".join(str(ending).split())  # A value may hold line breaks.
        if isinstance(ending, Stopped):
            line = f"{line}; the same command, without --fresh, goes on"
        else:
            line = f"ERROR: {line}"
        with contextlib.suppress(OSError):  # Nobody may be reading it.
            if os.environ.get(TRACEBACK):
                traceback.print_exception(ending)
            print(line, file=sys.stderr, flush=True)
        sys.exit(ending.exit_code)
