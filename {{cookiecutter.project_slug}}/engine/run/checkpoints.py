"""The state of a run on disk: save, restore, keep the newest.

One checkpoint is one directory, `step-00000135/`: every variable under its name, in TensorFlow's own format
(`state.index`, `state.data-*`, for tf.train.load_checkpoint), the counts and scores (`record.json`), and `SHA256SUMS`.
It is written under a temporary name, brought to the disk and renamed, so a directory with a checkpoint's name was whole
once; what was damaged since is found by checksums, before any variable is changed.
"""

import concurrent.futures
import contextlib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, Damaged, Diverged
from engine.mistakes import first_line
from engine.run.files import as_text, file_sha256, sync, writing
from engine.run.progress import Progress
from engine.run.state import State, Values
from engine.settings import read_json

RECORD = "record.json"
INDEX = "state.index"
CHECKSUMS = "SHA256SUMS"


class Writer:
    """Has files written, in order: at once, or in a thread while training goes on."""

    def __init__(self, *, in_thread: bool = False) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1) if in_thread else None
        self._under_way: list[concurrent.futures.Future] = []

    def submit(self, write: Callable[[], None]) -> None:
        """Has `write` called, unless one before it failed: a checkpoint may name weights that were not written."""
        if self._thread is None:
            write()
            return

        def write_after(before: list[concurrent.futures.Future]) -> None:
            for each in before:
                each.result()
            write()

        self._under_way.append(self._thread.submit(write_after, list(self._under_way)))

    def wait_for_room(self) -> None:
        """Returns when so little is under way that memory holds one more. Raises CannotWrite as `wait` does."""
        if len(self._under_way) > 1:
            self.wait()

    def wait(self) -> None:
        """Returns when all is written. Raises CannotWrite, once, if something could not be."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.result()


class Checkpoints:
    """The newest `keep` checkpoints of a state, in one directory."""

    def __init__(self, directory: Path, state: State, *, keep: int, writer: Writer | None = None) -> None:
        """A `writer` may be shared, where one checkpoint names another."""
        self.directory = directory
        self.state = state
        self.keep = keep
        self.writer = writer or Writer()
        # A mask may be infinite from the start; a weight that becomes so has diverged.
        self._infinite = {name for name, variable in state.alike.items() if not _all_finite(variable.numpy())}

    def paths(self) -> list[Path]:
        """Returns the checkpoints there are, oldest first."""
        return checkpoint_paths(self.directory)

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is, or would be."""
        return self.directory / f"step-{step:08d}"

    def save(self, step: int, record: dict[str, Any]) -> Path:
        """Writes the state and `record` (JSON values) as the checkpoint of `step`; then removes the oldest.

        Every worker has to call it; the chief writes. Checkpoints of later steps are removed too: they are of a run
        that was taken up again from before them.

        Raises:
            Diverged: a variable is not finite any more; nothing is written.
            CannotWrite: the disk refused; what was there is as it was. From a thread it comes with a later call.
        """
        from_chief = self.state.workers.from_chief
        from_chief(self.writer.wait_for_room)
        values, record = self.state.values(), {**record, "step": step}
        for name, value in values.items():
            if name.startswith("metrics/") or _all_finite(value):
                continue
            if name not in self._infinite or np.isnan(value).any():
                raise Diverged(f"after step {step} the variable {name} is not finite")
        from_chief(lambda: self.writer.submit(lambda: self._write(step, values, record)))
        return self.path(step)

    def read(self, path: Path) -> tuple[Values, dict[str, Any]]:
        """Returns the values and the record of the checkpoint at `path`; changes nothing. For the chief.

        Raises:
            Damaged: a file is missing, cut short or changed.
            BadInput: it is whole, and of other variables.
        """
        values, record = read_checkpoint(path)
        if differences := self.state.differences(values):
            raise BadInput(
                f"{path} is of another model or optimizer ({len(differences)} variables differ: "
                f"{', '.join(differences[:3])}): restore the hooks it was made with, or use another --run-dir, "
                "or --fresh"
            )
        return values, record

    def restore(self, path: Path) -> dict[str, Any]:
        """Sets the state, on all workers, to that of the checkpoint at `path`, which only the chief has to see.

        Returns its record, and raises what `read` raises.
        """

        def read() -> tuple[Values, dict[str, Any]]:
            self.writer.wait()
            return self.read(path)

        values, record = self.state.workers.from_chief(read)
        self.state.assign(values)
        return record

    def _write(self, step: int, values: Values, record: dict[str, Any]) -> None:
        final = self.path(step)
        temporary, replaced = (self.directory / f".{final.name}.{kind}" for kind in ("part", "replaced"))
        with writing(final):
            # Not its parents: that the run's directory is gone means that somebody deleted it.
            self.directory.mkdir(exist_ok=True)
            self.clear()
            temporary.mkdir()
            try:
                tf.raw_ops.SaveV2(
                    prefix=str(temporary / "state"),
                    tensor_names=list(values),
                    shape_and_slices=[""] * len(values),
                    tensors=list(values.values()),
                )
                (temporary / RECORD).write_text(as_text(record), encoding="utf-8")
                (temporary / CHECKSUMS).write_text(_checksums(temporary), encoding="utf-8")
                sync(*temporary.iterdir(), temporary)
                if final.exists():  # A signal may come between a save and the next step.
                    final.rename(replaced)
                temporary.rename(final)
                sync(self.directory)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # A full disk needs the room.
                self.bring_back()
                raise
        paths = self.paths()
        earlier, later = paths[: paths.index(final) + 1], paths[paths.index(final) + 1 :]
        for path in [*([replaced] if replaced.exists() else []), *later, *earlier[: -self.keep]]:
            _remove(path)

    def clear(self) -> None:
        """Removes what a killed process left half-written, or half-removed."""
        with writing(self.directory):
            for leftover in self.directory.glob(".step-*"):
                shutil.rmtree(leftover)

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps: they are of a run that is taken up again from before them."""
        for path in self.paths():
            if path > self.path(step):
                _remove(path)

    def bring_back(self) -> None:
        """Gives back its name to a checkpoint that was to be replaced, if the one in its place did not come to be."""
        for replaced in self.directory.glob(".step-*.replaced"):
            final = replaced.with_name(replaced.stem.removeprefix("."))
            if not final.exists():
                replaced.rename(final)


def read_newest(checkpoints: Checkpoints, best: Checkpoints) -> tuple[Path, Values, Progress] | None:
    """Reads the newest checkpoint that is whole, and whose best weights are; says which ones are damaged.

    Returns:
        The checkpoint, its values and what it records, or None if there is none.

    Raises:
        BadInput: there are checkpoints, and none is whole or it is of other variables. Nothing is deleted.
    """
    problems, whole = [], None
    for each in (checkpoints, best):
        each.bring_back()
    for path in reversed(checkpoints.paths()):
        try:
            values, record = checkpoints.read(path)
            progress, whole = _progress(path, record), whole or path
            if progress.best_step is not None:
                best.read(best.path(progress.best_step))
        except Damaged as problem:
            problems.append(problem)
            console.print(f"{path.name} is left out: {problem}")
            continue
        return path, values, progress
    if problems:
        raise BadInput(
            f"{checkpoints.directory} holds no checkpoint to go on from ({problems[0]}): bring its files back from a "
            f"copy, {f'begin a new --run-dir with --init-from {whole}, ' if whole else ''}or use --fresh, which moves "
            "the run aside"
        )
    return None


def _progress(path: Path, record: dict[str, Any]) -> Progress:
    try:
        return Progress(**record)
    except TypeError as problem:
        raise Damaged(f"{path} is damaged ({RECORD} is not of a run: {problem})") from None


def checkpoint_paths(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory, oldest first."""
    found = (path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name.removeprefix("step-")))


def read_checkpoint(path: Path) -> tuple[Values, dict[str, Any]]:
    """Returns the values and the record of the checkpoint at `path`. Raises Damaged unless they are as written."""
    try:
        if (path / CHECKSUMS).read_text(encoding="utf-8") != _checksums(path):
            raise Damaged(f"{path} is damaged ({RECORD} or {INDEX} is not the one that was written)")
        record = read_json(path / RECORD)
        with plain_name(path / "state") as prefix:
            reader = tf.train.load_checkpoint(prefix)
            return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}, record
    except (BadInput, OSError, tf.errors.OpError, LookupError, ValueError, RuntimeError) as problem:
        raise Damaged(f"{path} is damaged ({first_line(problem)})") from problem


@contextlib.contextmanager
def plain_name(prefix: Path) -> Iterator[str]:
    """Yields a prefix of the same files by which TensorFlow can read them: to write, it can use any.

    To read it takes a name for a pattern, so that it finds nothing in "exp[1]" or "a\\b" (tensorflow#34290).
    """
    if not re.search(r"[][\\*?]", str(prefix)):
        yield str(prefix)
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in prefix.parent.iterdir():
            if file.name.startswith(f"{prefix.name}."):
                Path(folder, f"state{file.name.removeprefix(prefix.name)}").symlink_to(file.absolute())
        yield str(Path(folder, "state"))


def _checksums(path: Path) -> str:
    """Returns the checksums of the small files, as sha256sum writes them; those of the tensors are in the index."""
    return "".join(f"{file_sha256(path / name)}  {name}\n" for name in (RECORD, INDEX))


def weights_sha256(variables: dict[str, tf.Variable]) -> str:
    """Returns the SHA-256, in hex, over each variable's name, dtype, shape and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, variable in variables.items():
        value = variable.numpy()
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _all_finite(value: np.ndarray | tf.Tensor) -> bool:
    """Returns whether no number is infinite or NaN; whole numbers and texts are neither."""
    return not tf.as_dtype(value.dtype).is_floating or bool(np.isfinite(value).all())


def _remove(path: Path) -> None:
    """Removes a checkpoint; it loses its name first, so that half of it is never taken for one."""
    try:
        shutil.rmtree(path.rename(path.with_name(f".{path.name.removeprefix('.')}.removed")))
    except OSError as problem:
        console.print(f"{path} is not needed any more, and cannot be removed ({problem.strerror})")
