"""What an exception says: the most telling line of its text, and whether it may pass. Imports no TensorFlow."""

import errno
import os
import re

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


def text_of(problem: BaseException) -> str:
    """Returns an exception's text, or "" if that cannot be made."""
    try:
        return str(problem)
    except Exception:  # noqa: BLE001 - Its class may be the user's.
        return ""


def may_pass(problem: BaseException) -> bool:
    """Returns whether another attempt may help: it is a fault of a network, a server or a disk, and not of the data."""
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
