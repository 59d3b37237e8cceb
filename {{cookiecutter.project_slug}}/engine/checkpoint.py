"""The state of a run on disk: save, verify, restore, keep the newest.

One checkpoint is one directory, `step-00000135/`: the variables as a tf.train.Checkpoint (`state.index`,
`state.data-*`), and beside it `record.json`, the run's counters and every variable's name, dtype and shape. It is
written under a temporary name and renamed, so a directory with a checkpoint's name is a whole checkpoint.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
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
        return sorted(self.directory.glob("step-*"))

    def newest(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        return next(reversed(self.paths()), None)

    def save(self, step: int, record: dict[str, Any]) -> Path:
        """Writes the variables and `record` (JSON values) as the checkpoint of `step`; then removes the oldest."""
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f".{final.name}.{os.getpid()}"
        temporary.mkdir(parents=True)
        self._state.write(str(temporary / "state"))
        write_json(temporary / "record.json", {**record, "step": step, "variables": _description(self.variables)})
        if final.exists():  # The same step again, after a kill between the save and what followed it.
            shutil.rmtree(final)
        temporary.rename(final)
        leftovers = [path for path in self.directory.glob(".step-*") if path.is_dir()]
        for path in [*leftovers, *self.paths()[: -self.keep]]:
            shutil.rmtree(path)
        return final

    def verify(self, path: Path) -> dict[str, Any]:
        """Returns the record of the checkpoint at `path`. Raises BadInput if its variables are not exactly ours."""
        record = read_json(path / "record.json")
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
        self._state.read(str(path / "state")).assert_consumed()
        return record


def weights_sha256(variables: Variables) -> str:
    """Returns the SHA-256, in hex, over each variable's name, dtype, shape and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, variable in variables.items():
        value = variable.numpy()
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _description(variables: Variables) -> dict[str, list[Any]]:
    return {name: [variable.dtype.name, variable.shape.as_list()] for name, variable in variables.items()}


def _kind(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]}{described[1]}"
