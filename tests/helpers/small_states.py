"""Checkpoints of a few variables."""

from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.cluster.workers import Workers
from engine.run.checkpoints import Checkpoints
from engine.run.state import State


def variables(**shapes: tuple[int, ...]) -> dict[str, tf.Variable]:
    return {name.replace("_", "/"): tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}


def state_of(named: dict[str, tf.Variable]) -> State:
    strategy = tf.distribute.get_strategy()
    return State(strategy, Workers(strategy), named)


def make_checkpoints(directory: Path, named: dict[str, tf.Variable], **options: Any) -> Checkpoints:
    return Checkpoints(directory, state_of(named), **{"keep": 1, **options})
