"""What an exception says, as one line: its text and place, whether it may pass, and whether it is the user's.

An exception of the engine itself is a bug, and keeps its traceback. TensorFlow is imported only where an exception is
judged, because programs without it use the rest.
"""

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import PROJECT
from engine.errors import BadInput, Damaged, InterruptedStep, ProgramExit, Unavailable

# Errors of a network or a file system that may pass.
PASSING = [
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EPIPE, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
]
# TensorFlow keeps only the text of an exception in a generator or py_function, and of most errors of a file system.
_PASSING_TEXT = re.compile(
    rf"\[Errno ({'|'.join(map(str, PASSING))})\]|{'|'.join(map(re.escape, map(os.strerror, PASSING)))}"
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


def text_of(problem: BaseException) -> str:
    """Returns an exception's text, or "" if that cannot be made."""
    try:
        return str(problem)
    except Exception:  # noqa: BLE001 - Its class may be the user's.
        return ""


def may_pass(problem: BaseException) -> bool:
    """Returns whether another attempt may help: it is a fault of a network, a server or a disk, and not of the data."""
    if isinstance(problem, ProgramExit):  # It was judged, and its text may quote such a fault.
        return False
    if isinstance(problem, OSError) and problem.errno in PASSING:
        return True
    if isinstance(problem, ConnectionError | TimeoutError):
        return True
    return bool(_PASSING_TEXT.search(f"{type(problem).__name__}: {text_of(problem)}"))


def first_line(problem: BaseException) -> str:
    """Returns an exception's kind and the most telling line of its text, without TensorFlow's names of nodes."""
    lines = [line.strip() for line in _NOISE.sub("", text_of(problem)).splitlines()]
    lines = [line for line in lines if line and not _SAYS_LITTLE.match(line)]
    kind = type(problem).__name__
    with_kind = [line for line in lines if re.match(rf"({kind}|\w*(Error|Exception))(:|$)", line)]
    sentence = (with_kind or [f"{kind}: {line}" for line in lines] or [kind])[0].rstrip(" .:")
    if isinstance(problem, ModuleNotFoundError):
        sentence += ": install the package that has it, and add it to pyproject.toml"
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
    except BaseException as problem:  # asyncio.CancelledError is not an Exception.
        if isinstance(problem, (KeyboardInterrupt, SystemExit, GeneratorExit)) or not is_users(problem):
            raise
        # An operation failed, or hooks run in Python.
        has_run = isinstance(problem, tf.errors.OpError) or tf.config.functions_run_eagerly()
        kind = InterruptedStep if has_run else Unavailable if may_pass(problem) else BadInput
        steps = f" ({text})" if (text := during()) else ""
        raise kind(f"{where_raised(problem)}: {first_line(problem)}{steps}") from problem


def is_users(problem: BaseException) -> bool:
    """Returns whether an exception comes from the user's code or a package that it calls, and not from the engine."""
    import tensorflow as tf

    # When a step fails on one worker, the others get an exception that says only this.
    text = text_of(problem)
    if isinstance(problem, (ProgramExit, Damaged)) or "Collective ops is aborted" in text:
        return False
    if isinstance(problem, tf.errors.OpError) and DIFFERENT_CALLS.search(text):
        return False
    if OUTSIDE_TABLE in text:
        return True
    if is_broken_connection(problem) and not text.startswith("in user code:"):
        # An operation raises it, or else the last line that ran is the user's.
        return _owner(Path(traceback.extract_tb(problem.__traceback__)[-1].filename)) == "user"
    owners = [_owner(file) for file, *_ in _places(problem)]
    # Hooks call engine/model as they call a package.
    callers = [owner for owner in owners if owner not in ("package", "engine/model")]
    if callers[-1:] == ["train.py"]:  # Its epochs are the user's to change; memory may run out in its steps.
        return not isinstance(problem, tf.errors.OpError)
    return callers[-1:] == ["user"] and owners[-1] != "engine/model"


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
    if not isinstance(problem, Exception):  # AutoGraph replaces the frames of others, which are in generated files.
        hooks = (name[4:] for _, _, name in places if name.startswith("tf__"))
        places += [(f"{PROJECT}/task.py", "0", name) for name in hooks]
    if isinstance(problem, SyntaxError) and problem.filename:  # The file was read, and did not run.
        places.append((problem.filename, str(problem.lineno or 0), "<module>"))
    # When a graph fails, the text says where the operation was defined.
    places += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text_of(problem))
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
