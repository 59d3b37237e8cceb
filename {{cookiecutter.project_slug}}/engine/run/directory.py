"""The directory of one run: whether it may be used, by one program at a time, and files that are written whole."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import tensorflow as tf

from engine.cluster.versions import changes_since, code_sha256
from engine.console import console
from engine.errors import BadInput, CannotWrite

CONFIG = "config.json"
RESULT = "result.json"
CHECKPOINTS = "checkpoints"
BEST = "best"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns whatever the disk refuses inside into CannotWrite, which names `path`."""
    try:
        yield
    except (OSError, tf.errors.OpError) as problem:
        reason = getattr(problem, "strerror", None) or re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", str(problem)).strip()
        if not path.parent.exists():
            what_to_do = "put the directory back, which was moved or deleted"
        elif re.search("no space|too large|quota", reason, re.IGNORECASE):
            what_to_do = "make room"
        else:
            what_to_do = "let it be written"
        raise CannotWrite(
            f"{path} cannot be written ({reason}): {what_to_do}, then start the same command, without --fresh, again; "
            "what was written before is whole"
        ) from problem


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Has `write` write to a temporary path, then renames it to `path`, so that no reader sees half a file.

    Raises:
        CannotWrite: the disk is full, or the directory is gone or read-only.
    """
    temporary = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            write(temporary)
            sync(temporary)
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def sync(*paths: Path) -> None:
    """Returns when the contents of files, and the names in directories, would outlast a loss of power."""
    # Side by side, because a file system makes one write of what is asked for at a time.
    with concurrent.futures.ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # Not all network file systems can, of a directory.
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all. Raises CannotWrite."""
    write_whole(path, lambda temporary: temporary.write_text(as_text(value), encoding="utf-8"))


def as_text(value: Any) -> str:
    """Returns `value` as indented JSON."""
    return json.dumps(value, indent=2) + "\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in `path`, or None if there is no such file. Raises BadInput if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        problem = f"it holds a {type(value).__name__}"
    except FileNotFoundError:
        return None
    except RecursionError:
        problem = "it is nested too deep"
    except (ValueError, OSError) as error:
        problem = str(error)
    raise BadInput(f"{path} is not the JSON that a run writes ({problem}): restore it, or use --fresh")


def recorded_settings(run_dir: Path) -> dict[str, Any] | None:
    """Returns the settings of config.json, or None if there is no such file. Raises BadInput if it holds none."""
    recorded = read_json(run_dir / CONFIG)
    settings = recorded.get("settings") if recorded is not None else {}
    if not isinstance(settings, dict):
        raise BadInput(f"{run_dir / CONFIG} holds no settings: restore it, or use --fresh")
    return settings if recorded is not None else None


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class RunDirectory:
    """The directory of a run, which one program uses at a time."""

    def __init__(self, path: Path) -> None:
        """Changes nothing; the directory need not exist."""
        self.path = path
        self._lock = filelock.FileLock(path / ".lock")

    def check_same_run(
        self, settings: dict[str, Any], may_change: frozenset[str], task_file: Path, *, to_train: bool = True
    ) -> None:
        """Raises BadInput unless the directory is new, or holds a run with these settings. Changes nothing.

        Says so if the run was begun with other code or versions: whether it is another task, only its author knows.

        Args:
            settings: the settings as config.json holds them.
            may_change: the settings in which a resumed run may differ from its beginning.
            task_file: the file task.py, in the project's folder.
            to_train: whether the run is to go on, not only to be evaluated.
        """
        earlier = recorded_settings(self.path) if self._exists() else None
        if earlier is None:
            return
        recorded = read_json(self.path / CONFIG)
        names = (name for name in {**earlier, **settings} if name not in may_change)
        differing = [name for name in names if earlier.get(name) != settings.get(name)]
        if differing:
            changes = ", ".join(
                f"--{name.replace('_', '-')} {earlier.get(name, 'not recorded')} there and "
                f"{settings.get(name, 'no setting')} now"
                for name in differing
            )
            what_to_do = "use the same ones, another --run-dir, or --fresh" if to_train else "use the run's"
            raise BadInput(f"--run-dir {self.path} holds a run with other settings ({changes}): {what_to_do}")
        if changes := changes_since(recorded, task_file.parent):
            goes_on = ". It goes on with what is here now; --fresh trains anew" if to_train else ""
            console.print(f"Since the run in {self.path} began, {', '.join(changes)}{goes_on}")

    def code_sha256(self, task_file: Path) -> dict[str, str]:
        """Returns the fingerprints of the code that the run here was begun with, or is about to be."""
        recorded = (read_json(self.path / CONFIG) or {}).get("code_sha256")
        return {**code_sha256(task_file.parent), **(recorded if isinstance(recorded, dict) else {})}

    def hold(self) -> None:
        """Keeps others out of the directory, if it exists, until `close`; `open` makes it.

        Raises:
            BadInput: it cannot be used, it holds other files than a run's, or another run is using it.
        """
        if self._exists():
            self._hold()

    def close(self) -> None:
        """Lets others use the directory."""
        self._lock.release(force=True)

    def open(self, *, fresh: bool) -> None:
        """Makes the directory; with `fresh`, moves what is there to the first free of run.1, run.2, ..."""
        try:
            if fresh and self._exists():
                self._move_aside()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise BadInput(f"--run-dir {self.path} cannot be made ({problem}): choose another directory") from None
        self._hold()

    def _exists(self) -> bool:
        """Returns whether there is a run in the directory. Raises BadInput if none can be."""
        path = self.path
        try:
            existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
            listed = [each.name for each in path.iterdir()] if existing == path and path.is_dir() else []
        except OSError as problem:
            raise BadInput(f"--run-dir {path} cannot be used ({problem.strerror}): choose another directory") from None
        if not existing.is_dir():
            raise BadInput(f"--run-dir {path}: {existing} is a file: choose another directory")
        if existing != path and not os.access(existing, os.W_OK | os.X_OK):
            raise BadInput(f"--run-dir {path}: {existing} cannot be written: choose another directory")
        # With hidden files only it may be of a run that was killed before it wrote config.json.
        if CONFIG not in listed and not all(name.startswith(".") for name in listed):
            raise BadInput(f"--run-dir {path} holds files and no run (no {CONFIG}): choose another directory")
        return CONFIG in listed

    def _hold(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise BadInput(
                f"--run-dir {self.path} is in use by another run: wait for it to end, or use another --run-dir"
            ) from None
        except NotImplementedError:
            console.print(f"{self.path} is on a file system without locks: let only one run use it")
        except OSError as problem:
            raise BadInput(
                f"--run-dir {self.path} cannot be written ({problem.strerror}): choose another directory"
            ) from None

    def _move_aside(self) -> None:
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise BadInput(f"--fresh cannot move --run-dir {self.path}, in which it was started: start it elsewhere")
        path = self.path.absolute()  # Of a link it is the link that moves.
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        self._lock.release(force=True)
        path.rename(aside)
        (aside / ".lock").unlink(missing_ok=True)
