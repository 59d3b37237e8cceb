"""Runs a step of one replica on simulated replicas, without train.py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from config import Config
from engine.cluster.strategy import create_strategy
from engine.model import apply_gradients


def on_replicas(
    replicas: int, step: Callable[[Any], Any], *, compiled: bool = True
) -> Callable[[Sequence[np.ndarray]], list]:
    """Returns a function that takes a batch, of which each replica gets an equal part, to what each replica returns."""
    strategy = create_strategy(Config(simulated_devices=replicas))

    def run(parts: Any) -> Any:
        with strategy.scope():
            return strategy.run(step, (parts,))

    call = tf.function(run, autograph=False) if compiled else run

    def take(batch: Sequence[np.ndarray]) -> list:
        size = len(batch[0]) // replicas

        def part(context: Any) -> tuple[tf.Tensor, ...]:
            first = size * context.replica_id_in_sync_group
            return tuple(tf.constant(each[first : first + size]) for each in batch)

        returned = call(strategy.experimental_distribute_values_from_function(part))
        return list(strategy.experimental_local_results(returned))

    return take


def updating(optimizer: Any, variables: Sequence[Any], loss_of: Callable[..., tf.Tensor]) -> Callable[[Any], tf.Tensor]:
    """Returns a step that updates with the loss of its batch, as a train_step does."""

    def train_step(batch: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        apply_gradients(optimizer, tape, loss, variables)
        return loss

    return train_step
