"""The directory of one run: whether it may be used, and files that are written whole or not at all."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.console import console
from engine.errors import BadInput

CONFIG = "config.json"
RESULT = "result.json"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Has `write` write to a temporary path, then renames it to `path`, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in `path`, or None if there is no such file. Raises BadInput if it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        problem = f"it holds a {type(value).__name__}"
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = str(error)
    raise BadInput(f"{path} is not the JSON that a run writes ({problem}): restore it, or use --fresh")


def check_run_directory(
    run_dir: Path, settings: dict[str, Any], may_change: frozenset[str], task_file: Path, *, fresh: bool
) -> None:
    """Raises BadInput unless `run_dir` is new, or (without `fresh`) holds a run with these settings. Changes nothing.

    Says so if the run was begun with another task.py: whether it is another task, only its author knows.

    Args:
        run_dir: the run's directory; need not exist.
        settings: the settings as config.json holds them.
        may_change: the settings in which a resumed run may differ from its beginning.
        task_file: the file task.py.
        fresh: whether what is there will be moved aside.
    """
    try:
        existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    except OSError as problem:
        raise BadInput(f"--run-dir {run_dir} cannot be used ({problem.strerror}): choose another directory") from None
    if not existing.is_dir():
        raise BadInput(f"--run-dir {run_dir}: {existing} is a file: choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BadInput(f"--run-dir {run_dir}: {existing} cannot be written: choose another directory")
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if not (run_dir / CONFIG).exists():
        raise BadInput(f"--run-dir {run_dir} holds files and no run (no {CONFIG}): choose another directory")
    if fresh:
        return
    recorded = read_json(run_dir / CONFIG)
    earlier = recorded.get("settings") or {}
    names = (name for name in {**earlier, **settings} if name not in may_change)
    differing = [name for name in names if earlier.get(name) != settings.get(name)]
    if differing:
        changes = ", ".join(
            f"--{name.replace('_', '-')} {earlier.get(name, 'not recorded')} there and "
            f"{settings.get(name, 'no setting')} now"
            for name in differing
        )
        raise BadInput(
            f"--run-dir {run_dir} holds a run with other settings ({changes}): use the same ones, another --run-dir, "
            "or --fresh"
        )
    if recorded.get("task_sha256") != file_sha256(task_file):
        console.print(f"{task_file.name} has changed since the run in {run_dir} began: --fresh trains the new one")


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def open_run_directory(run_dir: Path, *, fresh: bool) -> None:
    """Makes `run_dir`; with `fresh`, moves what is there to the first free of `run_dir`.1, .2, ..."""
    try:
        if fresh and run_dir.exists() and any(run_dir.iterdir()):
            run_dir = run_dir.resolve()  # "." has no name to change.
            number = 1
            while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
                number += 1
            run_dir.rename(aside)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"--run-dir {run_dir} cannot be made ({problem}): choose another directory") from None
