"""How long this process waits in its steps for the others, measured in the graph: the one that waits least is slow.

From outside of an execution a slow process looks like all others, because each step sums over all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from engine.tracing import OWN_CLOCK

_seconds: list[tf.Variable] = []  # One, in a run of several workers.


def measure_waiting(strategy: tf.distribute.Strategy) -> tf.Variable | None:
    """Makes the steps that are traced from now on measure how long this process waits in sums over the replicas.

    Returns the seconds so far (float64, scalar); None, and nothing is measured, without several workers.
    """
    _seconds.clear()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    with tf.device("CPU:0"):
        _seconds.append(tf.Variable(0.0, trainable=False, dtype=tf.float64, name=OWN_CLOCK))
    return _seconds[0]


def counted(
    reduce: Callable[[], Sequence[Any]], per_replica: Sequence[Any], strategy: tf.distribute.Strategy
) -> Sequence[Any]:
    """Returns what `reduce` does for values of all replicas of this process, and adds how long it takes."""
    if not _seconds or not per_replica:
        return reduce()
    start = _time_after(per_replica, strategy)
    sums = reduce()
    _seconds[0].assign_add(_time_after(sums, strategy) - start)
    return sums


def _time_after(values: Sequence[Any], strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Returns the time, in seconds, at which this process has computed all the values."""
    tensors = [each for value in values for each in strategy.experimental_local_results(value)]
    tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
    replicas = strategy.experimental_local_results(values[-1])
    with tf.control_dependencies(tensors):
        last = [tf.reshape(each, [-1])[:1] for each in tensors[-len(replicas) :]]
    # A GPU computes later than its operations end, so a number of its memory is used.
    with tf.device("CPU:0"):
        numbers = [tf.math.count_nonzero(each, dtype=tf.float64) for each in last]
        with tf.control_dependencies(numbers):
            return tf.timestamp(OWN_CLOCK) + 1e-9 * tf.add_n(numbers)
