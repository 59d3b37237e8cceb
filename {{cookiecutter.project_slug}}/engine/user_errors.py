"""User errors: exceptions of the hooks, their data and the packages they call, as one line with the place.

An exception of the engine itself is a bug, and keeps its traceback.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from engine.errors import BadInput, Damaged, InterruptedStep, ProgramExit, Unavailable
from engine.exceptions import first_line, may_pass, text_of
from engine.versions import PROJECT

# TensorFlow raises these when a connection breaks.
CONNECTION_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# TensorFlow's text if workers that sum together call different operations.
DIFFERENT_CALLS = re.compile(
    "in the collective instance|Collective instance .* expected|Collective ops is aborted by: .*mismatch"
)
# The steps check the ids of embedding tables; see engine/model/rows.py.
OUTSIDE_TABLE = "an id is outside of the table"


@contextlib.contextmanager
def user_errors_named(during: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns an exception of the user's code into BadInput: where it was raised, its text, and the text of `during`.

    If a part of a step may have run, and not only traced a hook, it raises InterruptedStep; for a fault of a network or
    a file system, which may pass, Unavailable.
    """
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
    # When a step fails on one worker, the others get an exception that says only this.
    text = text_of(problem)
    if isinstance(problem, (ProgramExit, Damaged)) or "Collective ops is aborted" in text:
        return False
    if isinstance(problem, tf.errors.OpError) and DIFFERENT_CALLS.search(text):
        return False
    if OUTSIDE_TABLE in text:
        return True
    if isinstance(problem, CONNECTION_ERRORS) and not text_of(problem).startswith("in user code:"):
        # An operation raises it, or else the last line that ran is the user's.
        return _owner(Path(traceback.extract_tb(problem.__traceback__)[-1].filename)) == "user"
    owners = [_owner(file) for file, *_ in _places(problem)]
    # Hooks call engine/model as they call a package.
    callers = [owner for owner in owners if owner not in ("package", "engine/model")]
    if callers[-1:] == ["train.py"]:  # Its epochs are the user's to change; memory may run out in its steps.
        return not isinstance(problem, tf.errors.OpError)
    return callers[-1:] == ["user"] and owners[-1] != "engine/model"


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
