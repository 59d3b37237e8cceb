"""What replicas hold that differs: the seeds of dropout, and the statistics of BatchNormalization."""

from collections.abc import Iterator

import keras
import tensorflow as tf

# An odd number near 2**32 / 1.618: multiples of it fall far apart in 32 bits (Knuth, volume 3, section 6.4).
SEED_STEP = 2654435769


def spread_seeds(strategy: tf.distribute.Strategy, models: dict[str, keras.Model]) -> None:
    """Gives every replica seeds of its own, for dropout and other random layers; the first keeps what there is.

    All replicas begin with equal seeds, and so would drop the same units. A checkpoint holds the first replica's, so
    call this after the models are built, and again after every restore; in between all replicas count alike.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    states = [
        variable
        for model in models.values()
        for variable in model.variables
        if variable.path.endswith("seed_generator_state")
    ]

    def spread() -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint32)
        for state in states:
            offset = replica * tf.constant(SEED_STEP, tf.uint32)
            state.assign(state.value + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), state.dtype))

    tf.function(strategy.run)(spread)


def average_statistics(strategy: tf.distribute.Strategy, models: dict[str, keras.Model]) -> None:
    """Replaces what each replica measured for itself by the replicas' mean.

    This concerns moving statistics of layers that are not synchronized: each replica's are of its own share of the
    batches, and a checkpoint holds those of the first. Call it before every validation, save and export.
    """
    statistics = [
        variable
        for model in models.values()
        for layer in layers_of(model)
        if not getattr(layer, "synchronized", False)
        for variable in layer._non_trainable_variables
        if variable.dtype.startswith(("float", "bfloat"))
    ]
    if strategy.num_replicas_in_sync == 1 or not statistics:
        return

    def average() -> None:
        replica = tf.distribute.get_replica_context()
        for variable in statistics:
            variable.assign(replica.all_reduce(tf.distribute.ReduceOp.MEAN, tf.identity(variable.value)))

    tf.function(strategy.run)(average)


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields every layer of a model, however deeply nested."""
    # keras.Model.layers holds the outermost ones only.
    yield from model._flatten_layers(include_self=True, recursive=True)
