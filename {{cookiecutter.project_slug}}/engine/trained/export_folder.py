"""Replaces the folder of an earlier export, completely or not at all, and nothing that is not of an export."""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from engine.errors import BadInput
from engine.files import sync, writing

SAVED_MODEL, REMOVED = "saved_model", ".removed-export."
# Paths that TensorFlow writes.
OF_SAVED_MODEL = r"(saved_model|fingerprint)\.pb", r"variables(/variables\.(index|data-.*))?", r"assets(/[^/]+)?"


@contextlib.contextmanager
def replaced(path: Path, models: Collection[str]) -> Iterator[Path]:
    """Yields a new folder, which replaces the one at `path` at the end; after an exception `path` is unchanged.

    `models` are the names of the run's models. Raises BadInput if `path` contains anything that no export of them has
    written.
    """
    path = Path(os.path.realpath(path))  # A link is followed, as to a larger disk.
    part, earlier = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "earlier"))
    try:
        with writing(path):
            if earlier.exists() and not path.exists():  # A process was killed between the two renames below.
                earlier.rename(path)
            if foreign := _foreign(path, models):
                raise BadInput(f"--export: {foreign} is not of an export, which would replace it: move it elsewhere")
            _remove(part)
            part.mkdir()
        yield part
        with writing(path):
            sync(*part.rglob("*"), part)
            _remove(earlier)
            if path.exists():
                path.rename(earlier)
            part.rename(path)
    finally:
        with contextlib.suppress(OSError):
            _remove(part)
    with contextlib.suppress(OSError):
        _remove(earlier)


def _foreign(path: Path, models: Collection[str]) -> Path | None:
    """Returns a file that no export has written: `path` itself, or in it; None if there is none."""
    if path.is_file():
        return path
    names = "|".join(map(re.escape, models))
    own = re.compile(rf"({names})\.(keras|weights\.h5)|{SAVED_MODEL}(/({'|'.join(OF_SAVED_MODEL)}))?")
    return next((file for file in path.rglob("*") if not own.fullmatch(file.relative_to(path).as_posix())), None)


def _remove(path: Path) -> None:
    """Removes a folder with its contents, a file, or a link but not its target, if there is one.

    On NFS, files of an earlier export that a server still reads stay. A later export tries them again.
    """
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}{REMOVED}{uuid.uuid4().hex[:8]}"))
        for removed in path.parent.glob(f".*{REMOVED}*"):
            shutil.rmtree(removed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
