"""The state of a run on disk: save, restore, keep the newest.

A checkpoint is a directory, `step-00000135/`: every variable under its name in TensorFlow's own format (`state.index`,
`state.data-*`, for tf.train.load_checkpoint), counts and scores (`progress.json`), the arrays that the task keeps
(`user_state.npz`), and `SHA256SUMS`. It is written
under a temporary name, synced to disk and renamed, and never overwritten: the same step saved again is
`step-00000135.1`. So every checkpoint is complete when it gets its name. Checksums reveal later damage before any
variable is changed.
"""

import concurrent.futures
import contextlib
import functools
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, Damaged, Diverged
from engine.files import sync, until_written, writing
from engine.model.variables import is_of_metrics
from engine.run.checkpoint_files import (
    StoredValues,
    checkpoint_paths,
    place,
    read_record,
    step_of,
    write_record,
)
from engine.run.progress import Progress
from engine.run.state import State, Values, is_finite, read_variable


class Writer:
    """Writes files in order, in a thread, while the training continues."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._pending: list[concurrent.futures.Future] = []

    def submit(self, write: Callable[[], None]) -> None:
        """Calls `write`, unless one before it failed: a checkpoint may name weights that were not written."""

        def write_after(before: list[concurrent.futures.Future]) -> None:
            for earlier in before:
                earlier.result()
            write()

        self._pending.append(self._thread.submit(write_after, list(self._pending)))

    def wait(self, *, at_most: int = 0) -> None:
        """Returns when at most `at_most` writes are pending. Raises CannotWrite, once, if a write failed."""
        if len(self._pending) > at_most:
            pending, self._pending = self._pending, []
            for write in pending:
                write.result()


class Checkpoints:
    """The newest `keep` checkpoints of a state, in one directory."""

    def __init__(self, directory: Path, state: State, *, keep: int, writer: Writer | None = None) -> None:
        """The `writer` is shared where one checkpoint names another."""
        self.directory, self.state, self.keep = directory, state, keep
        self.writer = writer or Writer()
        self._newest: Path | None = None  # The last one that was saved. It may still be pending.
        self._infinite: set[str] = set()

    def accept_infinite(self) -> None:
        """Lets variables that are infinite now stay so, as a mask may be; others that become so have diverged."""
        names = (*self.state.mirrored, *self.state.per_replica)
        self._infinite = {name for name in names if not all(map(is_finite, map(read_variable, self.state.parts(name))))}

    def paths(self) -> list[Path]:
        """Returns the checkpoints, oldest first."""
        return checkpoint_paths(self.directory)

    def path(self, step: int) -> Path:
        """Returns the newest checkpoint of `step`, or where it would be."""
        return max(self._same_step(step), key=place, default=self.directory / f"step-{step:08d}")

    def _same_step(self, step: int) -> list[Path]:
        saved = [*self.paths(), *([self._newest] if self._newest else [])]
        return [path for path in saved if step_of(path) == step]

    def save(self, step: int, record: dict[str, Any]) -> Path:
        """Writes the state and `record` (JSON values) as a checkpoint of `step`; returns its path. Removes the oldest.

        Every worker must call it; the chief writes. It also removes checkpoints of later steps, which are left from
        before the run resumed from an earlier one.

        Raises BadInput if workers have other values, Diverged if a variable is no longer finite, and writes nothing
        then. Raises CannotWrite if an earlier write failed.
        """
        from_chief = self.state.workers.from_chief
        from_chief(lambda: self.writer.wait(at_most=1))  # Memory is needed for each pending one.
        values, record = self.state.values(), {**record, "step": step}
        self.state.check_workers(values, "something in the hooks or train.py")
        diverged = (name for name, value in values.items() if self._has_diverged(name, value))
        if name := from_chief(lambda: next(diverged, None)):
            raise Diverged(f"after step {step} the variable {name} is not finite")
        self._newest = path = from_chief(lambda: self._free_path(step))
        from_chief(lambda: self.writer.submit(lambda: self._write(path, values, record)))
        return path

    def read(self, path: Path) -> tuple[StoredValues, dict[str, Any]]:
        """Returns the values and the record of the checkpoint at `path`; changes nothing. Only the chief calls it.

        Raises Damaged if a file is missing or changed; BadInput if its variables differ from the model's.
        """
        self.writer.wait()
        record, values = read_record(path), StoredValues(path)
        if differences := self.state.differences(values.kinds):
            raise BadInput(
                f"{path} belongs to another model or optimizer ({len(differences)} variables differ: "
                f"{', '.join(differences[:3])}): restore its hooks, or start a new run"
            )
        return values, record

    def restore(self, path: Path) -> dict[str, Any]:
        """Sets the state, on all workers, from the checkpoint at `path`; returns its record. Raises as `read` does.

        After Damaged some variables have changed: values are compared with their checksums while they are read.
        """
        values, record = self.state.workers.from_chief(lambda: self.read(path))
        self.state.assign(values)
        return record

    def _has_diverged(self, name: str, value: np.ndarray | tf.Tensor) -> bool:
        if is_of_metrics(name):
            return False
        if name in self.state.mirrored and "GPU" in self.state.parts(name)[0].device:
            value = read_variable(*self.state.parts(name))  # On a GPU this takes 2 ms for 2 GiB, on the host 400 ms.
        if is_finite(value):
            return False
        return name not in self._infinite or bool(np.isnan(value).any())

    def _free_path(self, step: int) -> Path:
        newest = self.path(step)
        if newest not in self._same_step(step):
            return newest
        return self.directory / f"step-{step:08d}.{place(newest)[1] + 1}"

    def _write(self, path: Path, values: Values, record: dict[str, Any]) -> None:
        def attempt() -> None:
            if path.exists():  # A rename had succeeded, and its answer was lost.
                return
            # Its parents are not made: if the run directory is gone, somebody deleted it.
            self.directory.mkdir(exist_ok=True)
            self.clear()
            temporary = _hidden(path, "part")
            temporary.mkdir()
            try:
                tf.raw_ops.SaveV2(
                    prefix=str(temporary / "state"),
                    tensor_names=list(values),
                    shape_and_slices=[""] * len(values),
                    tensors=list(values.values()),
                )
                write_record(temporary, record)
                sync(*temporary.iterdir(), temporary)
                temporary.rename(path)
                sync(self.directory)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # A full disk needs the space.
                raise

        with writing(path):
            until_written(attempt, path)
        with contextlib.suppress(OSError):  # The checkpoint is complete. The next save tries again.
            paths = self.paths()  # This one is missing if somebody moved the directory; the next write fails.
            later = [other for other in paths if place(other) > place(path)]
            earlier = paths[: len(paths) - len(later)]
            for old in [*later, *earlier[: max(0, len(earlier) - self.keep)]]:
                _remove(old)

    def clear(self) -> None:
        """Removes checkpoints that are half-written or half-removed, or tries it again after the next save."""
        with contextlib.suppress(OSError):
            for leftover in self.directory.glob(".step-[0-9]*"):
                _delete(leftover)

    def forget(self, first_step: int, *, but: int | None = None) -> None:
        """Removes the checkpoints from `first_step` on, except those of step `but`."""
        for path in self.paths():
            if step_of(path) >= first_step and step_of(path) != but:
                _remove(path)


def read_progress(path: Path) -> Progress:
    """Returns the progress in a checkpoint. Raises as `read_record` and `Progress.read` do."""
    return Progress.read(read_record(path), path)


def restore_newest(checkpoints: Checkpoints, best: Checkpoints) -> tuple[Path, Progress] | None:
    """Restores the newest checkpoint that is intact, with intact best weights; returns its path and progress.

    Prints which checkpoints are damaged; returns None if there is none. Raises BadInput if none is intact, or if the
    newest has other variables than the model or is of another version of the engine. Deletes nothing. Every worker must
    call it.
    """
    from_chief = checkpoints.state.workers.from_chief

    def check_best(step: int) -> None:
        best.read(best.path(step))[0].check()

    problems: list[Exception] = []
    intact = None
    for path in reversed(from_chief(checkpoints.paths)):
        try:
            # Another version may have other variables, too.
            progress = from_chief(functools.partial(read_progress, path))
            checkpoints.restore(path)
            intact = intact or path
            if (step := progress.best_step) is not None:
                from_chief(functools.partial(check_best, step))
        except Damaged as problem:
            problems.append(problem)
            console.print(f"{path.name} is skipped: {problem}")
            continue
        return path, progress
    if problems:
        raise BadInput(
            f"{checkpoints.directory} has no usable checkpoint ({problems[0]}): restore the files from a backup, "
            f"{f'start a new --run-dir with --init-from {intact}, ' if intact else ''}or use --fresh"
        )
    return None


def restore_best(checkpoints: Checkpoints, best: Checkpoints) -> tuple[Path, Progress]:
    """Restores the weights that the newest checkpoint names as the best; returns their path, and its progress.

    Raises BadInput if there are none yet, or a file is damaged. Every worker must call it.
    """

    def find() -> tuple[Path, Progress]:
        paths = checkpoints.paths()
        if not paths:
            raise BadInput(f"{checkpoints.directory} is empty: train first")
        progress = read_progress(paths[-1])
        if progress.best_step is None:
            raise BadInput(
                f"{paths[-1]} names no best weights, because nothing was validated yet, or --monitor was not a number: "
                "train further, or pass --init-from"
            )
        return best.path(progress.best_step), progress

    try:
        path, progress = checkpoints.state.workers.from_chief(find)
        best.restore(path)
    except Damaged as problem:
        raise BadInput(f"{problem}: restore it from a backup, or try again if the run is still training") from problem
    return path, progress


def _remove(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that half of it is never taken for a checkpoint."""
    try:
        _delete(path.rename(_hidden(path, "removed")))
    except OSError as problem:
        console.print(f"{path} is no longer needed, but cannot be removed ({problem.strerror})")


def _hidden(path: Path, kind: str) -> Path:
    """Returns a hidden name for a checkpoint, never the same: what had the last one may still be there (`_delete`)."""
    return path.with_name(f".{path.name}.{kind}.{uuid.uuid4().hex[:8]}")


def _delete(path: Path) -> None:
    """Deletes a directory, or else a file or a link; not the checkpoint that a link leads to.

    On NFS, files that another program still reads stay (NFS renames them). `clear` tries them again.
    """
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
