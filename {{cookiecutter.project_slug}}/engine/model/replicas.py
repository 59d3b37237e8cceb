"""The variables that differ between replicas: dropout's seeds, an unsynchronized BatchNormalization's statistics."""

import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

# An odd number near 2**32 / 1.618: multiples of it fall far apart in 32 bits (Knuth, volume 3, section 6.4).
SEED_STEP = 2654435769


def is_seed(path: str) -> bool:
    """Returns whether the variable of this path is the state of a keras.random.SeedGenerator."""
    return path.rsplit("/", 1)[-1].startswith("seed_generator_state")


def per_replica_variables(models: dict[str, keras.Model]) -> Iterator[keras.Variable]:
    """Yields the variables that may differ between replicas: seeds, and the statistics of unsynchronized layers."""
    for model in models.values():
        yield from (variable for variable in model.variables if is_seed(variable.path))
        yield from _statistics(model)


def spread_seeds(strategy: tf.distribute.Strategy, seeds: Sequence[tf.Variable]) -> None:
    """Gives every replica but the first other seeds, so that dropout does not drop the same units on all."""
    if strategy.num_replicas_in_sync == 1 or not seeds:
        return

    def spread() -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint32)
        for seed in seeds:
            offset = replica * tf.constant(SEED_STEP, tf.uint32)
            seed.assign(seed + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), seed.dtype))

    tf.function(strategy.run)(spread)


def compile_averaging(strategy: tf.distribute.Strategy, models: dict[str, keras.Model]) -> Callable[[], None]:
    """Returns a function that gives all replicas the mean of their statistics. Call it before every evaluation."""
    measured = [variable for model in models.values() for variable in _statistics(model)]
    statistics = [variable for variable in measured if variable.dtype.startswith(("float", "bfloat"))]
    if strategy.num_replicas_in_sync == 1 or not statistics:
        return lambda: None

    def average() -> None:
        replica = tf.distribute.get_replica_context()
        for variable in statistics:
            variable.assign(replica.all_reduce(tf.distribute.ReduceOp.MEAN, tf.identity(variable.value)))

    return functools.partial(tf.function(strategy.run), average)


def _statistics(model: keras.Model) -> Iterator[keras.Variable]:
    for layer in layers_of(model):
        if not getattr(layer, "synchronized", False):
            yield from layer._non_trainable_variables


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields every layer of a model, however deeply nested; `model.layers` has the outermost ones only."""
    yield from model._flatten_layers(include_self=True, recursive=True)
