"""Files that are written completely or not at all, and JSON."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import BadInput, CannotWrite
from engine.retries import until_read, until_written

RESUME = "run the same command again, without --fresh; everything saved before is intact"


@contextlib.contextmanager
def writing(path: Path, then: str = RESUME) -> Iterator[None]:
    """Turns an error of the disk into CannotWrite, which names `path`, what to do, and `then` what."""
    import tensorflow as tf  # Imported here, because it takes seconds, and JSON is read before.

    try:
        yield
    except (OSError, tf.errors.OpError) as problem:
        reason = getattr(problem, "strerror", None) or re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", str(problem)).strip()
        if re.search("No space left|quota exceeded|too large", reason):
            raise CannotWrite(f"{path} cannot be written ({reason}): free disk space, then {then}") from problem
        raise CannotWrite(
            f"{path} cannot be written ({reason}): restore the directory and its permissions, then {then}"
        ) from problem


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
    write_atomically(path, lambda temporary: temporary.write_text(as_text(value), encoding="utf-8"))


def read_json(path: Path, flag: str = "") -> dict[str, Any] | None:
    """Returns the JSON object in `path`; None if there is no such file, unless it was given with a `flag`.

    Raises BadInput, which names the flag, if the file contains something else; Unavailable as `read_text` does.
    """
    try:
        value = json.loads(read_text(path))
        if isinstance(value, dict):
            return value
        problem = f"it contains a {type(value).__name__}"
    except (ValueError, OSError, RecursionError) as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_missing and not flag:
            return None
        problem = "it does not exist" if is_missing else getattr(error, "strerror", None) or str(error)
    if flag:
        raise BadInput(f"{flag} {path} is not a JSON object ({problem}): pass the directory of a run, or such a file")
    raise BadInput(f"{path} is not the JSON that a run writes ({problem}): restore it, or start a new run")


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises OSError, or Unavailable after minutes of faults that might have passed."""
    return until_read(lambda: path.read_text(encoding="utf-8"), path)


def exists(path: Path) -> bool:
    """Returns whether there is such a file. Raises Unavailable after minutes of faults that might have passed."""
    return until_read(path.exists, path)


def as_text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sync(*paths: Path) -> None:
    """Returns when the contents of files, and the names in directories, would survive a loss of power."""
    # In threads, because a file system combines requests that arrive at the same time.
    with concurrent.futures.ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(_sync, paths))


def _sync(path: Path) -> None:
    # Windows and some network file systems cannot sync a directory.
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
