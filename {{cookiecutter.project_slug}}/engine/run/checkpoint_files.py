"""The files of one checkpoint: their names, and how they are read without being changed."""

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.errors import Damaged, Unavailable, first_line
from engine.files import file_sha256, until_read
from engine.run.state import as_array

PROGRESS = "progress.json"
INDEX, DATA = "state.index", "state.data-00000-of-00001"
ARRAYS = "user_state.npz"  # Only if the task keeps arrays.
CHECKSUMS = "SHA256SUMS"


def checkpoint_paths(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory, oldest first."""
    try:
        # A glob hides errors in Python 3.13, and a run without checkpoints starts over.
        names = until_read(lambda: os.listdir(directory), directory)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    found = (directory / name for name in names if re.fullmatch(r"step-\d{8,}(\.\d+)?", name))
    return sorted((path for path in found if until_read(path.is_dir, path)), key=place)


def step_of(path: Path) -> int:
    return place(path)[0]


def place(path: Path) -> tuple[int, int]:
    step, _, number = path.name.removeprefix("step-").partition(".")
    return int(step), int(number or 0)


class StoredValues(Mapping[str, np.ndarray]):
    """The values in a checkpoint, each read when it is asked for: together they may not fit into memory twice.

    Attributes:
        kinds: name -> dtype and shape.
    """

    def __init__(self, path: Path) -> None:
        """Reads the index. Raises Damaged or Unavailable as `read_record` does."""
        self.path = path

        def kinds() -> dict[str, tuple[tf.DType, tuple[int, ...]]]:
            with plain_name(path / "state") as prefix, _absence_checked(path):
                reader = tf.train.load_checkpoint(prefix)
                dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
                return {name: (dtype, tuple(shapes[name])) for name, dtype in dtypes.items()}

        with _damage_named(path):
            self.kinds = until_read(kinds, path)

    def check(self) -> None:
        """Reads each value once, which compares its checksum. Raises as the constructor does."""
        for name in self.kinds:
            self.read([name])

    def read(self, names: Sequence[str]) -> dict[str, tf.Tensor]:
        """Returns some of the values, in host memory. Raises as the constructor does."""

        def read() -> dict[str, tf.Tensor]:
            with plain_name(self.path / "state") as prefix, _absence_checked(self.path), tf.device("CPU:0"):
                dtypes = [self.kinds[name][0] for name in names]
                # A variable takes over the memory of such a tensor. Making one of an array needs twice its memory.
                tensors = tf.raw_ops.RestoreV2(
                    prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
                )
                return dict(zip(names, tensors, strict=True))

        with _damage_named(self.path):
            return until_read(read, self.path)

    def __getitem__(self, name: str) -> np.ndarray:
        return as_array(self.read([name])[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a checkpoint's record and, with the other files in place, the checksums."""
    kept = record.get("user_state", {})
    if arrays := {name: value for name, value in kept.items() if isinstance(value, np.ndarray)}:
        # In their places in the order, and by number in the file, because names may be any text.
        record = {**record, "user_state": {**kept, **dict.fromkeys(arrays)}, "arrays": [*arrays]}
        np.savez(path / ARRAYS, *arrays.values())
    (path / PROGRESS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (path / CHECKSUMS).write_text(checksums(path), encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's record. Raises Damaged unless it is as written, Unavailable if it cannot be read."""

    def read() -> dict[str, Any]:
        if (path / CHECKSUMS).read_text(encoding="utf-8") != checksums(path):
            raise Damaged(f"{path} is damaged ({PROGRESS}, {INDEX} or {ARRAYS} has changed)")
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        if names := record.pop("arrays", []):
            with np.load(path / ARRAYS) as arrays:
                record["user_state"] |= {name: arrays[f"arr_{number}"] for number, name in enumerate(names)}
        return record

    with _damage_named(path):
        return until_read(read, path)


@contextlib.contextmanager
def _absence_checked(path: Path) -> Iterator[None]:
    """TensorFlow takes any error for a file that is absent; this raises it, or an OSError if the files are there."""
    try:
        yield
    except tf.errors.NotFoundError as problem:
        if all((path / name).stat() for name in (INDEX, DATA)):
            raise OSError(errno.EIO, first_line(problem)) from problem


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as problem:
        raise Damaged(f"{path} is damaged ({first_line(problem)})") from problem
    except (OSError, tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as problem:
        # If this counted as damage, the next save would remove the checkpoint.
        raise Unavailable(f"{path} cannot be read ({first_line(problem)}): restore access to it") from problem
    except (tf.errors.OpError, LookupError, ValueError, RuntimeError) as problem:
        raise Damaged(f"{path} is damaged ({first_line(problem)})") from problem


@contextlib.contextmanager
def plain_name(prefix: Path) -> Iterator[str]:
    """Yields a prefix under which TensorFlow can read the same files.

    It reads a name as a pattern, and finds nothing in "exp[1]" or "a\\b" (tensorflow#34290).
    """
    if not re.search(r"[][\\*?]", str(prefix)):
        yield str(prefix)
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in prefix.parent.iterdir():
            if file.name.startswith(f"{prefix.name}."):
                Path(folder, f"state{file.name.removeprefix(prefix.name)}").symlink_to(file.absolute())
        yield str(Path(folder, "state"))


def checksums(path: Path) -> str:
    """Returns checksums of the record and the index, as sha256sum writes them; that contains the tensors' checksums."""
    names = (PROGRESS, INDEX, *[ARRAYS] * (path / ARRAYS).exists())
    return "".join(f"{file_sha256(path / name)}  {name}\n" for name in names)
