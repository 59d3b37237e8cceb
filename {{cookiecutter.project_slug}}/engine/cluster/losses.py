"""Sums the losses of steps: over the replicas of a process at each step, and over the processes once per call.

A collective operation over processes takes longer than a small step does.
"""

from typing import Any

import tensorflow as tf


def reduce_on_worker(strategy: tf.distribute.Strategy, per_replica_losses: Any) -> tf.Tensor:
    """Returns the sum (scalar) of the losses of this process's replicas (scalars)."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):  # Its `reduce` would sum over the processes.
        return tf.add_n(strategy.experimental_local_results(per_replica_losses))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.autograph.experimental.do_not_convert
def reduce_over_workers(strategy: tf.distribute.Strategy, losses: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the `losses` (any shape) of all workers, on each of them. Call it in a graph, on all."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return losses
    first = iter([losses])  # One of a worker's replicas carries its losses.
    per_replica = strategy.run(lambda: next(first, tf.zeros_like(losses)))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)
