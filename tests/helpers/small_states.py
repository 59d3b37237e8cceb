"""Checkpoints of a few variables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.cluster.workers import Workers
from engine.run.checkpoint_files import StoredValues, read_record
from engine.run.checkpoints import Checkpoints, Writer
from engine.run.state import State


def variables(**shapes: tuple[int, ...]) -> dict[str, tf.Variable]:
    return {name.replace("_", "/"): tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}


def state_of(named: dict[str, tf.Variable]) -> State:
    strategy = tf.distribute.get_strategy()
    return State(strategy, Workers(strategy), named)


class WrittenAtOnce(Writer):
    """Returns when a file is written, so that tests need not wait."""

    def submit(self, write: Callable[[], None]) -> None:
        write()


def make_checkpoints(directory: Path, named: dict[str, tf.Variable], **options: Any) -> Checkpoints:
    return Checkpoints(directory, state_of(named), **{"keep": 1, "writer": WrittenAtOnce(), **options})


def read_checkpoint(path: Path) -> tuple[StoredValues, dict[str, Any]]:
    """Returns the values and the record of the checkpoint at `path`."""
    return StoredValues(path), read_record(path)
