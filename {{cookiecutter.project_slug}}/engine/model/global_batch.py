"""What a loss across the batch needs inside a step: sums over the global batch, and the values of all its examples.

A step sees one replica's part of one micro-batch. What it divides by, or compares with, may be in the others.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.settings import Settings
from engine.tracing import converted, returning_loss

KERAS_ADD_LOSS = keras.layers.Layer.add_loss


@dataclasses.dataclass
class _Step(threading.local):
    """The step that is being traced in this thread, which is one replica's."""

    batch: Any = None  # The complete per-replica batch, before it is cut into micro-batches.
    micro_batches: int = 1
    padded: str = ""  # See `why_padded`.
    counts_padding: str = ""  # The first thing that counts the padding.
    calls: int = 0  # How often this micro-batch has called sum_over_batch.
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)  # What these calls returned in the first one.


_step = _Step()


@contextlib.contextmanager
def step_on(batch: Any, micro_batches: int = 1, padded: str = "") -> Iterator[None]:
    """Says which per-replica batch (features, labels, sample_weights) the hooks that are called inside belong to.

    `padded` is what `why_padded` returns. Raises BadInput at the end if something inside counts the padding.
    """
    before = dict(vars(_step))
    _step.batch, _step.micro_batches, _step.calls, _step.sums = batch, micro_batches, 0, []
    _step.padded, _step.counts_padding = padded, ""
    try:
        yield
        if _step.counts_padding:
            raise BadInput(padded.format(_step.counts_padding))
    finally:
        vars(_step).update(before)


def is_in_step() -> bool:
    """Returns whether a step is being traced in this thread."""
    return _step.batch is not None


def start_micro_batch() -> None:
    """Makes the next call of sum_over_batch the first one of a micro-batch."""
    _step.calls = 0


@tf.autograph.experimental.do_not_convert
def in_one_batch(step: Callable[..., Any]) -> Callable[..., tf.Tensor]:
    """Returns a step that takes the complete per-replica batch, its last argument, at once; it returns its loss."""
    call = returning_loss(step)

    @tf.autograph.experimental.do_not_convert
    def complete_step(*arguments: Any) -> tf.Tensor:
        with step_on(arguments[-1]):
            return call(*arguments)

    return complete_step


@tf.autograph.experimental.do_not_convert
def sum_over_batch(count: Callable[[Any, Any, tf.Tensor], Any]) -> tf.Tensor:
    """Returns what `count` gives for the global batch of a step, summed over replicas, workers and micro-batches.

    Divide by it what is a mean over tokens, pixels, labels that exist, or weights, with tf.math.divide_no_nan, because
    it may be 0:

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
    if _step.batch is None:
        raise BadInput("engine.model.sum_over_batch was called outside a step: call it in a hook that a step calls")
    call, _step.calls = _step.calls, _step.calls + 1
    if call == len(_step.sums):  # In the first micro-batch.
        total = tf.convert_to_tensor(converted(count)(*_step.batch))
        total = tf.stop_gradient(total if total.dtype == tf.float64 else tf.cast(total, tf.float32))
        _step.sums.append(*sum_over_replicas([total]))
    return _step.sums[call]


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


def why_padded(settings: Settings) -> str:
    """Returns why per-replica batches of the training are padded, as an error with a place for what counts the padding.

    It is "" if none is padded.
    """
    size, replicas = settings.global_batch_size, tf.distribute.get_strategy().num_replicas_in_sync
    unit = replicas * settings.micro_batches
    if not (rest := size % unit):
        return ""
    parts = f" in {settings.micro_batches} micro-batches each" if settings.micro_batches > 1 else ""
    sizes = " or ".join(str(each) for each in (size - rest, size - rest + unit) if each)
    problem = f"--global-batch-size {size} cannot be shared equally by {replicas} replica(s){parts}"
    return f"{problem}, and {{}}, which would count the padding: use {sizes}"


def note_padding(counts_padding: str) -> None:
    """Notes what would count the padding, if per-replica batches of the step that is being traced are padded.

    `step_on` raises the error, because Keras would wrap one from inside a layer in a text of its own.
    """
    if _step.padded:
        _step.counts_padding = _step.counts_padding or counts_padding


def watch_added_losses() -> None:
    """Makes a layer's add_loss, which activity regularizers call too, note that it counts padding."""
    keras.layers.Layer.add_loss = _add_loss


def _add_loss(layer: keras.layers.Layer, loss: Any) -> None:
    note_padding(f"the layer {layer.name} adds a loss of its own")
    KERAS_ADD_LOSS(layer, loss)


def _check_gathered(function: str) -> None:
    note_padding(f"task.train_step calls engine.model.{function}")
    if _step.micro_batches > 1:
        problem = f"{_step.micro_batches}, and task.train_step calls engine.model.{function}"
        reason = "micro-batches are computed one after the other, so that none has the values of the next"
        raise BadInput(f"--micro-batches is {problem}: {reason}: remove --micro-batches")


def sum_over_replicas(tensors: Sequence[Any], bytes_per_pack: int = 0) -> list[Any]:
    """Returns the sums of tensors over all replicas, without gradients. Every replica must call it.

    The sum of tf.IndexedSlices has the slices of all replicas, in their order; a row may occur several times.

    With --micro-batches these are the sums of one micro-batch. Raises BadInput inside a tf.cond or a loop, where the
    replicas of a process cannot wait for each other.

    ReplicaContext.all_reduce would give the same numbers, but bundles all tensors in one IdentityN. Of a step that
    updates several times, Grappler then loses that an update comes after the reads of the weights before it, and now
    and then a loss is of the weights after the update.
    """
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def reduce(strategy: tf.distribute.Strategy, *per_replica: Any) -> Any:
        pairs = [(each, each.device if isinstance(each, tf.Tensor) else each) for each in per_replica]
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs, options)

    try:
        return list(tf.distribute.get_replica_context().merge_call(reduce, args=tuple(tensors)))
    except RuntimeError as problem:
        if "merge_call" not in str(problem) or _step.micro_batches > 1:
            raise
        reason = "a tf.cond or a loop, where replicas cannot wait for each other: do it in every step, outside"
        raise BadInput(f"task.train_step updates or sums over the replicas inside {reason}") from problem
