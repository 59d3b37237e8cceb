"""The state of a run on disk: save, verify, restore, keep the newest.

One checkpoint is one directory, `step-00000135/`: the variables as a tf.train.Checkpoint (`state.index`,
`state.data-*`), and beside it `record.json`, the run's counters and every variable's name, dtype and shape. It is
written under a temporary name and renamed, so a directory with a checkpoint's name is a whole checkpoint.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.errors import BadInput, first_line
from engine.run_directory import read_json, write_json

Variables = dict[str, tf.Variable]


class Checkpoints:
    """The newest `keep` checkpoints of some variables, in one directory."""

    def __init__(self, directory: Path, variables: Variables, *, keep: int) -> None:
        """`variables` maps a unique name to a variable; a name is how a checkpoint's content is recognised."""
        self.directory = directory
        self.variables = variables
        self.keep = keep
        self._state = tf.train.Checkpoint(variables=variables)

    def paths(self) -> list[Path]:
        """Returns the checkpoints there are, oldest first."""
        found = (path for path in self.directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))
        return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name.removeprefix("step-")))

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of `step` is, or would be."""
        return self.directory / f"step-{step:08d}"

    def newest(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        return next(reversed(self.paths()), None)

    def save(self, step: int, record: dict[str, Any]) -> Path:
        """Writes the variables and `record` (JSON values) as the checkpoint of `step`; then removes the oldest.

        Checkpoints of later steps are removed too: they are of a run that was taken up again from before them.
        """
        final = self.path(step)
        # What a killed process left half-written; in a container the next one may have the same number.
        for leftover in self.directory.glob(".step-*"):
            shutil.rmtree(leftover)
        temporary = self.directory / f".{final.name}.{os.getpid()}"
        temporary.mkdir(parents=True)
        self._state.write(str(temporary / "state"))
        write_json(temporary / "record.json", {**record, "step": step, "variables": _description(self.variables)})
        if final.exists():  # The same step again, after a kill between the save and what followed it.
            _remove(final)
        temporary.rename(final)
        paths = self.paths()
        earlier, later = paths[: paths.index(final) + 1], paths[paths.index(final) + 1 :]
        for path in [*later, *earlier[: -self.keep]]:
            _remove(path)
        return final

    def verify(self, path: Path) -> dict[str, Any]:
        """Returns the record of the checkpoint at `path`. Raises BadInput if its variables are not exactly ours."""
        record = read_json(path / "record.json")
        if record is None or "variables" not in record:
            raise BadInput(f"{path} is no whole checkpoint (no record.json): {self._way_on(path)}")
        expected, found = _description(self.variables), record["variables"]
        differences = [
            f"{name} {_kind(found.get(name))} there and {_kind(expected.get(name))} now"
            for name in {**expected, **found}
            if expected.get(name) != found.get(name)
        ]
        if differences:
            raise BadInput(
                f"{path} is of another model or optimizer ({len(differences)} variables differ: "
                f"{', '.join(differences[:3])}): restore the hooks it was made with, or use another --run-dir, "
                "or --fresh"
            )
        return record

    def restore(self, path: Path) -> dict[str, Any]:
        """Sets the variables to those of the checkpoint at `path`, which `verify` accepts; returns its record."""
        record = self.verify(path)
        try:
            self._state.read(str(path / "state")).assert_consumed()
        except (tf.errors.OpError, IndexError, ValueError) as problem:
            raise BadInput(f"{path} is damaged ({first_line(problem)}): {self._way_on(path)}") from problem
        return record

    def _way_on(self, path: Path) -> str:
        return f"delete it to go on from {self.paths()[-2].name}" if len(self.paths()) > 1 else "use --fresh"


def weights_sha256(variables: Variables) -> str:
    """Returns the SHA-256, in hex, over each variable's name, dtype, shape and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, variable in variables.items():
        value = variable.numpy()
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Removes a checkpoint; it loses its name first, so that half of it is never taken for one."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.removed")))


def _description(variables: Variables) -> dict[str, list[Any]]:
    return {name: [variable.dtype.name, variable.shape.as_list()] for name, variable in variables.items()}


def _kind(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]}{described[1]}"
