"""Files that are written completely or not at all, JSON, and attempts that are repeated after faults that pass.

Imports no TensorFlow.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import BadInput, CannotWrite, Unavailable, asked_to_stop, first_line, may_pass

RESUME = "run the same command again, without --fresh; everything saved before is intact"
SECONDS_TO_WAIT = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # Before each further attempt: about four minutes.
SECONDS_AFTER_SIGNAL = 4  # At most, because whoever sent it may soon end the process.
Result = TypeVar("Result")


def until_read(read: Callable[[], Result], name: object, *, obeys_signals: bool = False, done: str = "read") -> Result:
    """Returns what `read` returns; calls it again, after growing waits, while it raises errors that may pass.

    `name` is what it reads, for messages. Raises other errors as they are; Unavailable if it fails for minutes, or if
    it `obeys_signals` and one has come. Otherwise it continues after a signal, for half a minute at most, because what
    it reads may be needed to save the state.
    """
    waits = [*SECONDS_TO_WAIT]
    while True:
        try:
            return read()
        except Exception as problem:
            if not may_pass(problem) or (done == "written" and not waits):
                raise
            text = first_line(problem)
            if not waits:
                raise Unavailable(
                    f"{name} still cannot be read, after {len(SECONDS_TO_WAIT)} more attempts in "
                    f"{sum(SECONDS_TO_WAIT) / 60:.0f} minutes ({text}): check the file system or network behind it"
                ) from problem
        # The exception is gone, and with it the iterator that failed.
        with contextlib.suppress(OSError, ValueError):  # The log may be on the same file system.
            print(f"{name} cannot be {done} ({text}): trying again in {waits[0]} s", file=sys.stderr, flush=True)
        wait(waits.pop(0))
        if asked_to_stop.is_set() and obeys_signals:
            raise Unavailable(f"stopped by a signal while {name} could not be {done} ({text})")


def until_written(write: Callable[[], Result], name: object) -> Result:
    """Returns what `write` returns; calls it again as `until_read` does. Raises its last error if it fails for minutes.

    `write` must start from the beginning each time.
    """
    return until_read(write, name, done="written")


def wait(seconds: float) -> None:
    """Waits; only until a signal comes, and for a few seconds if one has come."""
    if asked_to_stop.is_set():
        time.sleep(min(seconds, SECONDS_AFTER_SIGNAL))
    else:
        asked_to_stop.wait(seconds)


@contextlib.contextmanager
def writing(path: Path, then: str = RESUME) -> Iterator[None]:
    """Turns an error of the disk into CannotWrite, which names `path`, what to do, and `then` what."""
    tensorflow = sys.modules.get("tensorflow")  # Without it, its errors cannot come; importing it would take seconds.
    kinds: tuple[type[Exception], ...] = (OSError, tensorflow.errors.OpError) if tensorflow else (OSError,)
    try:
        yield
    except kinds as problem:
        reason = getattr(problem, "strerror", None) or re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", str(problem)).strip()
        is_full = re.search("No space left|quota exceeded|too large", reason)
        remedy = "free disk space" if is_full else "restore the directory and its permissions"
        raise CannotWrite(f"{path} cannot be written ({reason}): {remedy}, then {then}") from problem


def write_atomically(path: Path, write: Callable[[Path], object], then: str = RESUME) -> None:
    """Calls `write` with a temporary path, and renames that to `path`, so that nobody reads half a file.

    If `path` is a link, it stays one. Raises CannotWrite if the disk is full, or the directory is gone or read-only.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.part")

    def attempt() -> None:
        try:
            write(temporary)
            sync(temporary)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    with writing(path, then):
        until_written(attempt, path)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON. Raises CannotWrite."""
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def read_json(path: Path, **kinds: type) -> dict[str, Any] | None:
    """Returns the JSON object in `path`; None if there is no such file. Absent values of `kinds` are empty ones.

    Raises BadInput if the file contains something else, or a value is not of its kind; Unavailable after minutes of
    faults that might have passed.
    """
    try:
        value = json.loads(until_read(lambda: path.read_text(encoding="utf-8"), path))
        if not isinstance(value, dict):
            raise TypeError(f"it contains a {type(value).__name__}")
        value = {**{name: kind() for name, kind in kinds.items()}, **value}
        if wrong := [name for name, kind in kinds.items() if not isinstance(value[name], kind)]:
            raise ValueError(f"its {wrong[0]} is {value[wrong[0]]!r:.100}")
        return value
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, OSError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise BadInput(f"{path} is not what a run writes ({problem}): restore it, or start a new run")


def exists(path: Path) -> bool:
    """Returns whether there is such a file. Raises Unavailable after minutes of faults that might have passed."""
    return until_read(path.exists, path)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sync(*paths: Path) -> None:
    """Returns when the contents of files, and the names in directories, would survive a loss of power."""

    def sync_one(path: Path) -> None:
        # Windows and some network file systems cannot sync a directory.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # In threads, because a file system combines requests that arrive at the same time.
    with concurrent.futures.ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(sync_one, paths))
