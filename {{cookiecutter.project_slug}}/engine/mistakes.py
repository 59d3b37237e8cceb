"""Mistakes in the user's code: what the hooks, their data and what they call raise, as one line with the place.

What the engine raises by itself is a bug, and keeps its traceback.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from engine.errors import BadInput, CannotWrite, Damaged, Diverged, InterruptedStep, PeerLost, Stopped

PROJECT = Path(__file__).parent.parent
# Of the project's Python, what the user does not write.
NOT_THE_USERS = ("engine", "train.py", "launch.py")
# What TensorFlow raises when a connection breaks. No hook does, so it is never taken for a mistake of the user's.
OF_CONNECTIONS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
LONGEST_SENTENCE = 300


@contextlib.contextmanager
def mistakes_named(during: Callable[[], str] = str) -> Iterator[None]:
    """Turns an exception that comes from the user's code into BadInput, which names the place and what was said.

    Raises:
        InterruptedStep: an operation has failed, or a hook that runs in Python, so something has run before it; any
            other one comes from a hook that is being traced, and nothing has run.
    """
    try:
        yield
    except Exception as problem:
        if not is_users(problem):
            raise
        has_run = isinstance(problem, tf.errors.OpError) or tf.config.functions_run_eagerly()
        ending = InterruptedStep if has_run else BadInput
        raise ending(f"{where_raised(problem)}: {first_line(problem)}{f' ({during()})' * bool(during())}") from problem


def is_users(problem: BaseException) -> bool:
    """Returns whether an exception comes from the user's code, or a package that it calls, and not from the engine."""
    ours = (BadInput, Diverged, Stopped, CannotWrite, Damaged, PeerLost, *OF_CONNECTIONS)
    # One worker's failed step ends the others' with its own kind of exception.
    if isinstance(problem, ours) or "Collective ops is aborted" in str(problem):
        return False
    places = _places(problem)
    # The hooks call gradients.py as they call a package; what it raises by itself is a bug all the same.
    own = [file for file, *_ in places if _is_of_project(file) and file.name != "gradients.py"]
    return bool(own) and _is_users_file(own[-1]) and places[-1][0].name != "gradients.py"


def where_raised(problem: BaseException) -> str:
    """Returns file, line and function of the innermost place in the user's code, or in train.py, that it passed."""
    places = [place for place in _places(problem) if _is_of_project(place[0])]
    for is_wanted in (_is_users_file, lambda file: file == PROJECT / "train.py"):
        for file, line, function in reversed(places):
            if is_wanted(file):
                return f"{file.relative_to(PROJECT)}:{line} {function}"
    return "task.py"


def first_line(problem: BaseException) -> str:
    """Returns an exception's kind and the line of its text that says most, without TensorFlow's names of nodes."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(problem))
    # Where a function was defined or called, with the line of code below it: `where_raised` says it shorter.
    text = re.sub(r'^( *)File ".*\n(?:\1 +\S.*\n)*', "", text, flags=re.MULTILINE)
    text = re.sub(r"\[\[.*?\]\](?=\s|$)|\{\{.*?\}\}|\[Op:\w+\](?: name: *)?|, node name: \S+", "", text)
    text = re.sub(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ", "", text)
    lines = [re.sub(r"^\(\d+\) [A-Z_]+: +", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line and not re.match(_SAYS_LITTLE, line)]
    kind = type(problem).__name__
    of_a_kind = [line for line in lines if re.match(rf"({kind}|\w*(Error|Exception))(:|$)", line)]
    sentence = (of_a_kind or lines or [""])[0].rstrip(" .")
    if not of_a_kind:
        sentence = f"{kind}: {sentence}" if sentence else kind
    return sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:LONGEST_SENTENCE]} ..."


_SAYS_LITTLE = (
    r"Graph execution error:|Detected at node |in user code:|Traceback |Stack trace for op|\^+$|• |"
    r"\d+ (root error|successful operations|derived errors)|"
    # Around what a layer of the user's has raised, Keras says what it was called with.
    r"Exception encountered when calling |.*Error encountered:$|Arguments received by "
)


def _places(problem: BaseException) -> list[tuple[Path, int, str]]:
    """Returns file, line and function of every place that an exception says it passed, the innermost one last."""
    places = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(problem.__traceback__)]
    # A compiled function says in the text where what failed was defined.
    places += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(problem))
    return [(Path(file), int(line), function) for file, line, function in places]


def _is_of_project(file: Path) -> bool:
    # The packages may be in the project's folder too, in an environment there.
    return file.is_relative_to(PROJECT) and "site-packages" not in file.parts


def _is_users_file(file: Path) -> bool:
    return file.relative_to(PROJECT).parts[0] not in NOT_THE_USERS
