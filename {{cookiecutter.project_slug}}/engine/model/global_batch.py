"""What a loss across the batch needs inside a step: sums over the global batch, and the values of all its examples.

A step sees one replica's part of one micro-batch. What it divides by, or compares with, may be in the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.step import current_step
from engine.model.variables import layers_of
from engine.settings import Settings
from engine.tracing import Traced, converted

# Packed into one tensor, the gradients of a model would be in memory twice, and sums would wait for the last of them.
BYTES_PER_PACK = 50 * 2**20


@tf.autograph.experimental.do_not_convert
def sum_over_batch(count: Callable[[Any, Any, tf.Tensor], Any]) -> tf.Tensor:
    """Returns `count(...)` summed over the global batch of a step: all replicas, workers and micro-batches.

    Use it as the denominator of a mean over tokens, pixels, existing labels or weights. It can be 0, so divide with
    tf.math.divide_no_nan:

        def count_tokens(features, labels, sample_weights):
            return tf.reduce_sum(tf.cast(labels > 0, "float32") * sample_weights[:, None])

        loss = tf.math.divide_no_nan(tf.reduce_sum(token_losses), sum_over_batch(count_tokens))

    Call it in a hook that a step calls, equally often on every replica and in every micro-batch, and not inside a
    tf.cond or a loop.

    Args:
        count: takes the features, labels and sample weights of the complete per-replica batch, before it is cut into
            micro-batches, because the gradient of the first one needs the sum; returns a number or an array of them.
            Padded examples have the weight 0.

    Returns the sum (the shape of what `count` returns; float64 if that is, otherwise float32). It is equal on all
    replicas, and has no gradient. Raises BadInput outside a step.
    """
    step = current_step()
    if step.batch is None:
        raise BadInput("engine.model.sum_over_batch was called outside a step: call it in a hook that a step calls")
    call, step.counts = step.counts, step.counts + 1
    if call == len(step.counted):  # In the first micro-batch.
        total = tf.convert_to_tensor(converted(count)(*step.batch))
        total = tf.stop_gradient(total if total.dtype == tf.float64 else tf.cast(total, tf.float32))
        step.counted.append(*sum_over_replicas([total]))
    return step.counted[call]


@tf.autograph.experimental.do_not_convert
def gather_batch(values: tf.Tensor) -> tf.Tensor:
    """Returns the values of all examples of the global batch, in its order: [batch, ...] to [replicas * batch, ...].

    They are numbers or truth values, and have gradients: a value gets the sum of what all replicas' losses make of it.
    Padded examples are among them: gather their sample weights too, and exclude examples of weight 0. Raises BadInput
    with --micro-batches, which are computed one after the other, so that no micro-batch has the values of the next; and
    in a training whose batches the replicas cannot share equally, where padding would be between the examples.
    """
    _check_gathered("gather_batch")
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return values
    # Several workers gather no other dtypes than these.
    dtype = values.dtype
    if not (dtype.is_floating or dtype in (tf.int32, tf.int64)):
        values = tf.cast(values, tf.int32)
    elif dtype == tf.bfloat16:
        values = tf.cast(values, tf.float32)
    gathered = context.all_gather(values, axis=0)
    # The gradient of a reshape is dense. That of a gather would be slices, in which all_gather's own gradient fails.
    return tf.cast(tf.reshape(gathered, tf.shape(gathered)), dtype)


@tf.autograph.experimental.do_not_convert
def places_in_batch(values: tf.Tensor) -> tf.Tensor:
    """Returns the place (int32, [batch]) of each example in what gather_batch returns for such values [batch, ...].

    Raises BadInput as gather_batch does.
    """
    _check_gathered("places_in_batch")
    size, replica = tf.shape(values)[0], tf.distribute.get_replica_context().replica_id_in_sync_group
    return size * tf.cast(replica, "int32") + tf.range(size)


def _check_gathered(function: str) -> None:
    step = current_step()
    if step.settings:
        reject_padding(step.settings, [f"task.train_step calls engine.model.{function}"])
    if step.micro_batches > 1:
        raise BadInput(
            f"--micro-batches is {step.micro_batches}, and task.train_step calls engine.model.{function}: "
            "micro-batches are computed one after the other, so that none has the values of the next: "
            "remove --micro-batches"
        )


# --- Padding, where replicas or micro-batches cannot share the batch equally ------------------------------------------


def reject_padding(settings: Settings, counted_by: Iterable[str]) -> None:
    """Raises BadInput if per-replica batches of the training are padded, and `counted_by` has what counts the padding.

    `counted_by` is not read unless they are padded.
    """
    size, count = settings.global_batch_size, settings.micro_batches
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    unit = replicas * count
    if not (rest := size % unit):
        return
    sizes = " or ".join(str(shared) for shared in (size - rest, size - rest + unit) if shared)
    for text in counted_by:
        raise BadInput(
            f"--global-batch-size {size} cannot be shared equally by {replicas} replica(s)"
            f"{f' in {count} micro-batches each' if count > 1 else ''}, and {text}, which would count the padding: "
            f"use {sizes}"
        )


def layers_that_count_padding(model: Any) -> Iterator[str]:
    """Yields a text for each layer of the models to which all examples count that the training step gives it.

    Read it at the end of the step, while that is still being traced.
    """
    changed = None if tf.executing_eagerly() else Traced(tf.compat.v1.get_default_graph()).changed
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            # With --eager there is no graph to tell whether the step calls the layer with training=False.
            if changed is None or id(layer.moving_mean.handle) in changed:
                yield f"the layer {layer.name} normalizes the batch"
        elif adds_losses(layer):
            yield f"the layer {layer.name} adds a loss of its own"


def adds_losses(layer: keras.layers.Layer) -> bool:
    """Returns whether the layer has added losses in its last call, as regularizers of activities do."""
    return bool(layer._losses)


# --- Over replicas ----------------------------------------------------------------------------------------------------


def sum_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """Returns the sums of tensors over all replicas, without gradients. Every replica must call it.

    The sum of tf.IndexedSlices has the slices of all replicas, in their order; a row may occur several times.

    With --micro-batches these are the sums of one micro-batch. Raises BadInput inside a tf.cond or a loop, where the
    replicas of a process cannot wait for each other.

    ReplicaContext.all_reduce would give the same numbers, but bundles all tensors in one IdentityN. Of a step that
    updates several times, Grappler then loses that an update comes after the reads of the weights before it, and now
    and then a loss is of the weights after the update.
    """
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=BYTES_PER_PACK)

    def reduce(strategy: tf.distribute.Strategy, *per_replica: Any) -> Any:
        pairs = [(value, value.device if isinstance(value, tf.Tensor) else value) for value in per_replica]
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs, options)

    try:
        return list(tf.distribute.get_replica_context().merge_call(reduce, args=tuple(tensors)))
    except RuntimeError as problem:
        if "merge_call" not in str(problem) or current_step().micro_batches > 1:
            raise
        raise BadInput(
            "task.train_step updates or sums over the replicas inside a tf.cond or a loop, where replicas cannot wait "
            "for each other: do it in every step, outside"
        ) from problem
