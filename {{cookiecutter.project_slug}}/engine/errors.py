"""How a program ends before its work is done, one line and an exit code, and what an exception says, as one line.

An exception of the engine itself is a bug, and keeps its traceback. TensorFlow is imported only where an exception is
judged, because programs without it use the rest.
"""

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import PROJECT

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

    def end(number: int, _: object) -> None:
        line = f"stopped by {signal.Signals(number).name}; nothing was lost: start the same command again"
        with contextlib.suppress(OSError, RuntimeError):  # Nobody reads it, or another line was being printed.
            print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()
        # A library that is being imported could catch an exception.
        os._exit(Stopped.exit_code if number == signal.SIGTERM else 130)

    for number in SIGNALS:
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


# --- What an exception says -------------------------------------------------------------------------------------------

# Errors of a network or a file system that may pass.
PASSING = (
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
)
# TensorFlow keeps only the text of an exception in a generator or py_function, and of most errors of a file system.
_PASSING_TEXT = re.compile(
    rf"\[Errno ({'|'.join(map(str, PASSING))})\]|{'|'.join(map(os.strerror, PASSING))}"
    r"|\b\w*(Connection|Timeout|BrokenPipe|Unavailable|DeadlineExceeded)\w*Error\b"
)

LONGEST_SENTENCE = 300
# Parts of a message that say nothing, or that `where_raised` says in fewer words.
_NOISE = re.compile(
    r'\x1b\[[\d;]*m|^( *)File ".*\n(?:\1 +\S.*\n)*|^ *\(\d+\) [A-Z_]+: +'
    r"|\[\[.*?\]\](?=\s|$)|\{\{.*?\}\}|\[Op:\w+\](?: name: *)?|, node name: \S+"
    r"|\w+\.<locals>\.|\btf__(?=\w+\()"  # AutoGraph's names of functions.
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: ",
    re.MULTILINE,
)
_SAYS_LITTLE = re.compile(
    r"Graph execution error:|Detected at node |in user code:|Traceback |Stack trace for op|\^+$|• "
    r"|\d+ (root error|successful operations|derived errors)"
    # Keras puts these lines around an exception of a layer.
    r"|(\w+: )?Exception encountered when calling |.*Error encountered:$|Arguments received by "
)

# TensorFlow's text if workers that sum together call different operations.
DIFFERENT_CALLS = re.compile(
    "in the collective instance|Collective instance .* expected|Collective ops is aborted by: .*mismatch"
)
# The steps check the ids of embedding tables; see engine/model/rows.py.
OUTSIDE_TABLE = "an id is outside of the table"


def may_pass(problem: BaseException) -> bool:
    """Returns whether another attempt may help: it is a fault of a network, a server or a disk, and not of the data."""
    if isinstance(problem, ProgramExit):  # It was judged, and its text may quote such a fault.
        return False
    text = f"{type(problem).__name__}: {problem}"
    return isinstance(problem, ConnectionError | TimeoutError) or bool(_PASSING_TEXT.search(text))


def first_line(problem: BaseException) -> str:
    """Returns an exception's kind and the most telling line of its text, without TensorFlow's names of nodes."""
    lines = [line.strip() for line in _NOISE.sub("", str(problem)).splitlines()]
    lines = [line for line in lines if line and not _SAYS_LITTLE.match(line)]
    kind = type(problem).__name__
    with_kind = [line for line in lines if re.match(rf"({kind}|\w*(Error|Exception))(:|$)", line)]
    sentence = (with_kind or [f"{kind}: {line}" for line in lines] or [kind])[0].rstrip(" .:")
    return sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:LONGEST_SENTENCE]} ..."


@contextlib.contextmanager
def user_errors_named(during: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns an exception of the user's code into BadInput: where it was raised, its text, and the text of `during`.

    If a part of a step may have run, and not only traced a hook, it raises InterruptedStep; for a fault of a network or
    a file system, which may pass, Unavailable.
    """
    import tensorflow as tf

    try:
        yield
    except (Exception, SystemExit) as problem:
        if not is_users(problem):
            raise
        # An operation failed, or hooks run in Python.
        has_run = isinstance(problem, tf.errors.OpError) or tf.config.functions_run_eagerly()
        kind = InterruptedStep if has_run else Unavailable if may_pass(problem) else BadInput
        steps = f" ({text})" if (text := during()) else ""
        raise kind(f"{where_raised(problem)}: {first_line(problem)}{steps}") from problem


def is_users(problem: BaseException) -> bool:
    """Returns whether an exception comes from the user's code or a package that it calls, and not from the engine."""
    import tensorflow as tf

    text = str(problem)
    # When a step fails on one worker, the others get an exception that says only that the sums are aborted.
    is_of_cluster = "Collective ops is aborted" in text or DIFFERENT_CALLS.search(text)
    if is_of_cluster or isinstance(problem, (ProgramExit, Damaged)):
        return False
    if OUTSIDE_TABLE in text:
        return True
    frames = traceback.extract_tb(problem.__traceback__)
    raised_by = _owner(Path(frames[-1].filename)) if frames else "package"
    if is_broken_connection(problem) and not text.startswith("in user code:"):
        return raised_by == "user"  # An operation raises it, or else the last line that ran is the user's.
    owners = [_owner(file) for file, *_ in _places(problem)]
    # Hooks call engine/model as they call a package.
    callers = [owner for owner in owners if owner not in ("package", "engine/model")]
    if callers[-1:] == ["train.py"]:  # Its epochs are the user's to change; memory may run out in its steps.
        return not isinstance(problem, tf.errors.OpError)
    return callers[-1:] == ["user"] and raised_by != "engine/model"


def is_broken_connection(problem: BaseException) -> bool:
    """Returns whether TensorFlow raised it, and also raises it when a connection to another process breaks."""
    import tensorflow as tf

    errors = tf.errors
    kinds = (errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError, errors.InternalError)
    return isinstance(problem, (*kinds, errors.UnavailableError))


def where_raised(problem: BaseException) -> str:
    """Returns file, line and function of the innermost place in the user's code, or else in train.py."""
    for owner in ("user", "train.py"):
        for file, line, function in reversed(_places(problem)):
            if _owner(file) == owner:
                return f"{file.relative_to(PROJECT)}{f':{line}' if line else ''} {function}"
    return "task.py"


def _places(problem: BaseException) -> list[tuple[Path, int, str]]:
    """Returns file, line and function of every place that an exception has passed, the innermost one last."""
    frames = traceback.extract_tb(problem.__traceback__)
    places = [(frame.filename, str(frame.lineno), frame.name) for frame in frames]
    if isinstance(problem, SyntaxError) and problem.filename:  # The file was read, and did not run.
        places.append((problem.filename, str(problem.lineno or 0), "<module>"))
    # When a graph fails, the text says where the operation was defined.
    places += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(problem))
    return [(Path(file), int(line), function) for file, line, function in places]


def _owner(file: Path) -> str:
    """Returns whose file it is: "user", "package", or the part of the project that the user does not write."""
    # The project's folder may contain an environment.
    if not file.is_relative_to(PROJECT) or "site-packages" in file.parts:
        return "package"
    first, *more = file.relative_to(PROJECT).parts
    if first == "engine":
        return "engine/model" if more[0] in ("model", "tracing.py") else "engine"  # Both call hooks.
    return first if first in ("train.py", "launch.py", "predict.py") else "user"
