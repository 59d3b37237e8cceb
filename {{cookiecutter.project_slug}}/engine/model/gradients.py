"""From the tape to the changed weights: micro-batches, the sum over replicas, clipping, the update."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.global_batch import start_micro_batch, step_on, sum_over_replicas, why_padded
from engine.model.optimizers import BYTES_PER_PACK, inner_optimizers, optimizer_of, summed_gradients
from engine.model.rows import by_values, slices_or_dense, sum_by_row
from engine.settings import Settings
from engine.tracing import returning_loss

Gradients = list[tf.Tensor | tf.IndexedSlices | None]


@dataclasses.dataclass
class _Step(threading.local):
    """The step that is being traced in this thread, which is one replica's."""

    global_clipnorm: float | None = None
    jit: bool = False
    micro_batches: int = 1
    is_last: bool = True  # Whether this micro-batch is the last one of the step.
    calls: int = 0  # How often this micro-batch has called apply_gradients.
    # The sums of the gradients, without None, of the micro-batches so far, for each of these calls.
    sums: list[list[tf.Tensor | tf.IndexedSlices]] = dataclasses.field(default_factory=list)
    operations: int = 0  # The number of operations in the graph at the first call.


_step = _Step()


@tf.autograph.experimental.do_not_convert
def in_micro_batches(train_step: Callable[[Any], tf.Tensor], settings: Settings) -> Callable[[Any], tf.Tensor]:
    """Returns a step that runs `train_step` on equal micro-batches, one after the other, and updates once.

    Only one micro-batch's activations are in memory at a time. Of n micro-batches the m-th contains every n-th example
    from the m-th on, so that all replicas' m-th micro-batches contain the same examples for any number of replicas that
    can share the batch equally. The losses are summed. `train_step` takes one replica's (features, labels,
    sample_weights), divides the loss by the global batch size, and updates by `apply_gradients`.
    """
    step, count = returning_loss(train_step), settings.micro_batches
    options = {
        "--micro-batches": count > 1,
        "--global-clipnorm": settings.global_clipnorm is not None,
        "--precision mixed_float16": settings.precision == "mixed_float16",
    }
    needed_by = [option for option, is_used in options.items() if is_used]

    @tf.autograph.experimental.do_not_convert
    def complete_step(batch: Any) -> tf.Tensor:
        def take(number: int | tf.Tensor, loss: tf.Tensor | None) -> tf.Tensor:
            """Takes a micro-batch; returns the sum of the losses so far."""
            _step.is_last, _step.calls = not tf.is_tensor(number) and number == count - 1, 0
            start_micro_batch()
            micro_batch = batch if count == 1 else _micro_batch(batch, number, count, after=loss)
            with _xla(True):
                return step(micro_batch) if loss is None else loss + step(micro_batch)

        _step.global_clipnorm, _step.jit, _step.micro_batches = settings.global_clipnorm, settings.jit, count
        try:
            with step_on(batch, count, why_padded(settings)):
                loss = take(0, None)
                if count > 1:
                    loss = take(count - 1, _take_until(count - 1, take, loss))
            if needed_by and not _step.calls:
                raise BadInput(f"{needed_by[0]} needs task.train_step to update by engine.model.apply_gradients")
            return loss
        finally:
            # The next step that is traced in this thread starts over.
            _step.global_clipnorm, _step.jit, _step.micro_batches, _step.is_last, _step.sums = None, False, 1, True, []

    return complete_step


def is_last_micro_batch() -> bool:
    """Returns whether the step that is being traced updates now; also outside a step."""
    return _step.is_last


def _take_until(end: int, take: Callable[..., tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
    """Takes the micro-batches from the second one to before `end`, which neither start the sums nor update."""
    sums = _step.sums
    if end > 2 and not tf.executing_eagerly():
        try:
            return _take_in_loop(end, take, loss)
        except RuntimeError as problem:
            # From inside a loop a synchronized layer cannot reach the other replicas of a process.
            if "merge_call" not in str(problem):
                raise
            _step.sums = sums
    for number in range(1, end):
        loss = take(number, loss)
    return loss


def _take_in_loop(end: int, take: Callable[..., tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
    """Does the same in a loop in the graph, so that the step is traced once for all of them."""

    def body(number: tf.Tensor, loss: tf.Tensor, sums: list[Any]) -> tuple[Any, ...]:
        _step.sums = sums
        return number + 1, take(number, loss), _step.sums

    start = tf.constant(1), loss, _step.sums
    shapes = tf.nest.map_structure(_shape_in_loop, start)
    _, loss, _step.sums = tf.while_loop(lambda number, *_: number < end, body, start, shapes, parallel_iterations=1)
    return loss


def _shape_in_loop(value: tf.Tensor | tf.IndexedSlices) -> Any:
    """Returns what stays the same of a value: slices become more with each micro-batch."""
    if isinstance(value, tf.IndexedSlices):
        shape = [None, *value.values.shape[1:]]
        dtypes = value.values.dtype, value.indices.dtype, value.dense_shape.dtype
        return tf.IndexedSlicesSpec(shape, *dtypes, indices_shape=[None])
    return value.shape


def _micro_batch(batch: Any, number: int | tf.Tensor, count: int, after: tf.Tensor | None) -> Any:
    """Returns every `count`-th example from `number` on, once the loss `after` is computed and its memory is free."""

    def part(tensor: tf.Tensor) -> tf.Tensor:
        taken = tf.identity(tensor[number::count])
        taken.set_shape([tensor.shape[0] // count, *tensor.shape[1:]])  # Unknown for a number that is a tensor.
        return taken

    sums = tf.nest.flatten(_step.sums, expand_composites=True)
    with tf.control_dependencies([*sums, *([] if after is None else [after])]):
        return tf.nest.map_structure(part, batch)


def _xla(compiles: bool) -> contextlib.AbstractContextManager[None]:
    """Marks operations for XLA, or not, with --jit. Operations that XLA cannot compile run as they do without it."""
    if _step.jit and not tf.executing_eagerly():
        return tf.xla.experimental.jit_scope(compile_ops=compiles)
    return contextlib.nullcontext()


@tf.autograph.experimental.do_not_convert
def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    tape: tf.GradientTape,
    loss: tf.Tensor,
    variables: Sequence[keras.Variable],
    gradients: Gradients | None = None,
) -> tf.Tensor:
    """Updates the variables with the gradient of the loss, summed over all replicas and micro-batches.

    Every replica must call it. With --global-clipnorm the sum is scaled down to that global norm if its own is larger
    (Pascanu et al. 2013, arXiv:1211.5063); the optimizer's own clipnorm, global_clipnorm or clipvalue follows. With
    mixed_float16 the loss is scaled for the gradient, and the update is skipped on every replica if any gradient is not
    finite. Variables of several dtypes are summed and clipped in the widest of them, or in float32 if that is wider.

    Args:
        optimizer: built for these variables.
        tape: recorded the loss.
        loss: this replica's part of the batch's loss (scalar).
        variables: the variables to update. One that the loss does not use stays as it is.
        gradients: this replica's gradients, one for each variable, to apply instead of the tape's.

    Returns the global norm of the sum before clipping (float32, scalar), equal on all replicas; 0 in every micro-batch
    but the last, not finite where mixed_float16 skips the update, and NaN without --global-clipnorm or mixed_float16.
    Raises BadInput if no variable has a gradient, or if, with micro-batches, the loss was computed after another update
    of the same step.
    """
    if loss is None:
        raise BadInput("task.train_step gave apply_gradients None as the loss: return the loss from task.compute_loss")
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # The update changes the variable, and the norm is computed with the scale of the gradients.
    scale = tf.identity(optimizer.dynamic_scale.value) if is_scaled else None
    if gradients is None:
        gradients = tape.gradient(loss, variables, output_gradients=tf.cast(scale, loss.dtype) if is_scaled else None)
    elif is_scaled:
        used = [each for each in gradients if each is not None]
        scaled = iter(by_values(lambda values: [each * tf.cast(scale, each.dtype) for each in values], used))
        gradients = [None if each is None else next(scaled) for each in gradients]
    if all(each is None for each in gradients):
        problem = "a loss that uses none of its variables" if variables else "no variables, so nothing is trainable"
        remedy = "pass trainable variables, and compute the loss from them under the tape"
        raise BadInput(f"task.train_step gave apply_gradients {problem}: {remedy}")
    with _xla(False):
        parts = _step.micro_batches * tf.distribute.get_strategy().num_replicas_in_sync
        gradients = [
            None if each is None else slices_or_dense(optimizer_of(variable, optimizer), variable, each, parts)
            for variable, each in zip(variables, gradients, strict=True)
        ]
        gradients = _summed_over_micro_batches(gradients, loss)
        return _update(optimizer, gradients, variables, scale) if _step.is_last else tf.constant(0.0)


def _summed_over_micro_batches(gradients: Gradients, loss: tf.Tensor) -> Gradients:
    """Returns the gradients of one call plus the gradients of the same call in earlier micro-batches."""
    call, _step.calls = _step.calls, _step.calls + 1
    if _step.is_last and not _step.sums:
        return gradients  # There is one micro-batch.
    _check_order(loss, call)
    used = [each for each in gradients if each is not None]
    if call == len(_step.sums):
        _step.sums.append(used)
    else:
        _step.sums[call] = list(map(_added, _step.sums[call], used))
    in_turn = iter(_step.sums[call])
    return [None if each is None else next(in_turn) for each in gradients]


def _added(one: tf.Tensor | tf.IndexedSlices, other: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    if not isinstance(one, tf.IndexedSlices):
        return tf.add(one, other)
    values, indices = (tf.concat(pair, 0) for pair in ((one.values, other.values), (one.indices, other.indices)))
    return tf.IndexedSlices(values, indices, one.dense_shape)


def _check_order(loss: tf.Tensor, call: int) -> None:
    """Raises BadInput if the loss may depend on an update that waits for the last micro-batch."""
    if tf.executing_eagerly():
        return
    operations = loss.graph.get_operations()
    if call == 0:
        _step.operations = len(operations)
    elif loss.op not in operations[: _step.operations]:
        problem = "task.train_step computes a loss after an update, which waits for the last micro-batch"
        remedy = "compute all losses before the first apply_gradients, or remove --micro-batches"
        raise BadInput(f"--micro-batches: {problem}: {remedy}")


def _update(
    optimizer: keras.optimizers.Optimizer,
    gradients: Gradients,
    variables: Sequence[keras.Variable],
    scale: tf.Tensor | None,
) -> tf.Tensor:
    """Updates with the sum over the replicas, and returns its norm; `scale` is the loss scale, if any."""
    used = [variable for variable, each in zip(variables, gradients, strict=True) if each is not None]
    given = [each for each in gradients if each is not None]
    # TensorFlow packs gradients to sum them, and their norms too. Keras casts each to its variable's dtype.
    dtype = keras.backend.result_type("float32", *(each.dtype.name for each in given))
    norm = tf.constant(math.nan, dtype)
    # Summed here, so that every replica clips, or finds an overflow in, the same gradients.
    gradients = sum_over_replicas([tf.cast(each, dtype) for each in given], BYTES_PER_PACK)
    # The slices of a row are summed too: Adam would square them one by one, and the norm would be theirs.
    gradients = [sum_by_row(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    if scale is not None or _step.global_clipnorm is not None:
        norm = tf.linalg.global_norm(gradients)
    if _step.global_clipnorm is not None:
        limit = _step.global_clipnorm if scale is None else _step.global_clipnorm * tf.cast(scale, dtype)
        gradients, _ = tf.clip_by_global_norm(gradients, limit, use_norm=norm)
    by_variable = dict(zip(map(id, used), gradients, strict=True))
    # A MultiOptimizer needs all its variables, also those without a gradient, which its optimizers leave out.
    variables = variables if inner_optimizers(optimizer) else used
    with summed_gradients():
        optimizer.apply_gradients([(by_variable.get(id(variable)), variable) for variable in variables])
    return tf.cast(norm if scale is None else norm / tf.cast(scale, dtype), tf.float32)
