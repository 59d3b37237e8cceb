"""How the pipelines of tf.data run: their options, their parallel calls, and a shuffle whose seed is a tensor."""

import os

import tensorflow as tf

PARALLEL_CALLS = 64  # More calls at once than there are cores, so that a core finds the next one waiting.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
BYTES_AHEAD = 2**30  # What a pipeline may prepare ahead; but always two calls, and the stacks.


def parallel_calls(at_most: int, bytes_of_call: float, bytes_besides: float = 0) -> int:
    """Returns how many calls may run, or wait with their results, at once; besides them, a pipeline has some bytes."""
    return max(2, min(at_most, PARALLEL_CALLS, int((BYTES_AHEAD - bytes_besides) / max(1, bytes_of_call))))


def input_options() -> tf.data.Options:
    """Returns the options of every pipeline: elements keep their order, and nothing is tuned while it runs."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The thread that tunes a pipeline may miss that it should end, and is then waited for, up to a minute.
    options.autotune.enabled = False
    options.autotune.initial_parallelism = PARALLEL_CALLS  # tf.data.AUTOTUNE then means this, or a call per core.
    return options


def shuffled(dataset: tf.data.Dataset, buffer_size: int | tf.Tensor, seed: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset shuffled through a buffer by a seed (int64, scalar) that may be a tensor."""
    # TensorFlow mixes it with the seed of the graph, which it first compares with 0, so the graph's must be a number.
    tf.compat.v1.set_random_seed(1)
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)
