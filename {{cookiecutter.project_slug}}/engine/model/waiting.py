"""How long this process waits for the others in its steps. The process that waits least is the slowest one.

It is measured in the graph. An execution takes the same time in all processes, because each step sums over all of them.
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


def measured(
    reduce: Callable[[], Sequence[Any]], per_replica: Sequence[Any], strategy: tf.distribute.Strategy
) -> Sequence[Any]:
    """Returns what `reduce` does for values of all replicas of this process, and counts how long that takes."""
    if not _seconds or not per_replica:
        return reduce()
    start = _time_after(per_replica, strategy)
    sums = reduce()
    end = _time_after(sums, strategy)
    with tf.device("CPU:0"):
        _seconds[0].assign_add(tf.maximum(end - start, 0.0))  # The clock of a machine may be set back.
    return sums


def _time_after(values: Sequence[Any], strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Returns the time, in seconds, at which this process has computed all the values."""
    tensors = [each for value in values for each in strategy.experimental_local_results(value)]
    tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
    replicas, last = strategy.experimental_local_results(values[-1]), []
    # A GPU computes a result after its operation has ended. So the time depends on a number read from each GPU.
    for tensor in tensors[-len(replicas) :]:
        with tf.device(tensor.device), tf.control_dependencies(tensors):
            last.append(tf.reshape(tensor, [-1])[:1])
    with tf.device("CPU:0"):
        numbers = [tf.math.count_nonzero(each, dtype=tf.float64) for each in last]
        with tf.control_dependencies(numbers):
            return tf.timestamp(OWN_CLOCK) + 1e-9 * tf.add_n(numbers)
