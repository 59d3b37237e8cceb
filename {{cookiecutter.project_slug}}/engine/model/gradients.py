"""From the tape to the changed weights: micro-batches, the sum over replicas, clipping, the update."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.global_batch import layers_that_count_padding, reject_padding, sum_over_replicas
from engine.model.optimizers import apply_sums, optimizer_of
from engine.model.rows import slices_or_dense, sum_by_row
from engine.model.step import Gradient, Step, current_step, step_on
from engine.settings import Settings
from engine.tracing import returning_loss

# --- Micro-batches ----------------------------------------------------------------------------------------------------


@tf.autograph.experimental.do_not_convert
def replica_step(
    step: Callable[..., tf.Tensor], settings: Settings | None = None, model: Any = None
) -> Callable[..., tf.Tensor]:
    """Returns a step of task.py as each replica takes it, on the complete per-replica batch, its last argument.

    With the `settings` of a training it runs on equal micro-batches, one after the other, and updates once. Only one
    micro-batch's activations are in memory at a time. Of n micro-batches the m-th contains every n-th example from the
    m-th on, so that all replicas' m-th micro-batches contain the same examples for any number of replicas that can
    share the batch equally. The losses are summed. Then `step` takes one replica's (features, labels, sample_weights),
    divides the loss by the global batch size, and updates by `apply_gradients`.

    Such a step raises BadInput if replicas cannot share the batch equally, and a layer of the model, or of the dict of
    models, would count the padding.
    """
    call = returning_loss(step)

    @tf.autograph.experimental.do_not_convert
    def complete_step(*arguments: Any) -> tf.Tensor:
        with step_on(arguments[-1], settings) as current:
            if settings is None:
                return call(*arguments)
            loss = _take_micro_batches(call, current)
            reject_padding(settings, layers_that_count_padding({} if model is None else model))
            _check_updated(current, settings)
            return loss

    return complete_step


def _take_micro_batches(call: Callable[[Any], tf.Tensor], step: Step) -> tf.Tensor:
    """Takes all micro-batches; returns the sum of their losses."""
    count = step.micro_batches

    def take(number: int | tf.Tensor, loss: tf.Tensor | None) -> tf.Tensor:
        """Takes a micro-batch; returns the sum of the losses so far."""
        step.is_last, step.updates, step.counts = not tf.is_tensor(number) and number == count - 1, 0, 0
        micro_batch = step.batch if count == 1 else _micro_batch(step, number, after=loss)
        with _xla(step, compiles=True):
            return call(micro_batch) if loss is None else loss + call(micro_batch)

    loss = take(0, None)
    return loss if count == 1 else take(count - 1, _take_until(count - 1, take, loss, step))


def _check_updated(step: Step, settings: Settings) -> None:
    """Raises BadInput if a setting acts in apply_gradients, which the step has not called."""
    options = {
        "--micro-batches": settings.micro_batches > 1,
        "--global-clipnorm": settings.global_clipnorm is not None,
        "--precision mixed_float16": settings.precision == "mixed_float16",
    }
    needed_by = [option for option, is_used in options.items() if is_used]
    if needed_by and not step.updates:
        raise BadInput(f"{needed_by[0]} needs task.train_step to update by engine.model.apply_gradients")


def _take_until(end: int, take: Callable[..., tf.Tensor], loss: tf.Tensor, step: Step) -> tf.Tensor:
    """Takes the micro-batches from the second one to before `end`, which neither start the sums nor update."""
    gradients = step.gradients
    if end > 2 and not tf.executing_eagerly():
        try:
            return _take_in_loop(end, take, loss, step)
        except RuntimeError as problem:
            # From inside a loop a synchronized layer cannot reach the other replicas of a process.
            if "merge_call" not in str(problem):
                raise
            step.gradients = gradients
    for number in range(1, end):
        loss = take(number, loss)
    return loss


def _take_in_loop(end: int, take: Callable[..., tf.Tensor], loss: tf.Tensor, step: Step) -> tf.Tensor:
    """Does the same in a loop in the graph, so that the step is traced once for all of them."""

    def body(number: tf.Tensor, loss: tf.Tensor, gradients: list[Any]) -> tuple[Any, ...]:
        step.gradients = gradients
        return number + 1, take(number, loss), step.gradients

    start = tf.constant(1), loss, step.gradients
    shapes = tf.nest.map_structure(_shape_in_loop, start)
    _, loss, step.gradients = tf.while_loop(lambda number, *_: number < end, body, start, shapes, parallel_iterations=1)
    return loss


def _shape_in_loop(value: Gradient) -> Any:
    """Returns what stays the same of a value: slices become more with each micro-batch."""
    if isinstance(value, tf.IndexedSlices):
        shape = [None, *value.values.shape[1:]]
        dtypes = value.values.dtype, value.indices.dtype, value.dense_shape.dtype
        return tf.IndexedSlicesSpec(shape, *dtypes, indices_shape=[None])
    return value.shape


def _micro_batch(step: Step, number: int | tf.Tensor, after: tf.Tensor | None) -> Any:
    """Returns the micro-batch of this number, once the loss `after` is computed and its memory is free."""
    count = step.micro_batches

    def take(tensor: tf.Tensor) -> tf.Tensor:
        taken = tf.identity(tensor[number::count])
        taken.set_shape([tensor.shape[0] // count, *tensor.shape[1:]])  # Unknown for a number that is a tensor.
        return taken

    sums = tf.nest.flatten(step.gradients, expand_composites=True)
    with tf.control_dependencies([*sums, *([] if after is None else [after])]):
        return tf.nest.map_structure(take, step.batch)


def _xla(step: Step, *, compiles: bool) -> contextlib.AbstractContextManager[None]:
    """Marks operations for XLA, or not, with --jit. Operations that XLA cannot compile run as they do without it."""
    if step.settings and step.settings.jit and not tf.executing_eagerly():
        return tf.xla.experimental.jit_scope(compile_ops=compiles)
    return contextlib.nullcontext()


# --- Gradients --------------------------------------------------------------------------------------------------------


@tf.autograph.experimental.do_not_convert
def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    tape: tf.GradientTape,
    loss: tf.Tensor,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Gradient | None] | None = None,
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
    step, scale = current_step(), None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # The update changes the variable, and the norm is computed with the scale of the gradients.
        scale = tf.identity(optimizer.dynamic_scale.value)
    if gradients is None:
        gradients = tape.gradient(loss, variables, None if scale is None else tf.cast(scale, loss.dtype))
    elif scale is not None:
        gradients = [
            None if gradient is None else tf.math.scalar_mul(tf.cast(scale, gradient.dtype), gradient)
            for gradient in gradients
        ]
    pairs = list(zip(variables, gradients, strict=True))
    used = [(variable, value) for variable, value in pairs if value is not None]
    _check_used(variables, are_used=bool(used))
    with _xla(step, compiles=False):
        parts = step.micro_batches * tf.distribute.get_strategy().num_replicas_in_sync
        local = [slices_or_dense(optimizer_of(variable, optimizer), variable, value, parts) for variable, value in used]
        local = _summed_over_micro_batches(step, local, loss)
        if not step.is_last:
            return tf.constant(0.0)
        sums, norm = _clipped_sums(step, local, scale)
        apply_sums(optimizer, pairs, sums)
        return norm


def _check_used(variables: Sequence[Any], *, are_used: bool) -> None:
    """Raises BadInput for variables that are not Keras's, or if the loss uses none of them."""
    if strangers := [variable.name for variable in variables if not isinstance(variable, keras.Variable)]:
        raise BadInput(
            f"task.train_step gave apply_gradients {strangers[0]}, a tf.Variable: pass Keras's variables of the "
            "models, which add_weight of a layer makes"
        )
    if not are_used:
        raise BadInput(
            "task.train_step gave apply_gradients a loss that uses none of its variables, or no variables: pass "
            "trainable variables, and compute the loss from them under the tape"
        )


def _summed_over_micro_batches(step: Step, gradients: list[Gradient], loss: tf.Tensor) -> list[Gradient]:
    """Returns the gradients of one call plus the gradients of the same call in earlier micro-batches."""
    call, step.updates = step.updates, step.updates + 1
    if step.micro_batches == 1:
        return gradients
    _check_order(step, loss, call)
    if call == len(step.gradients):  # In the first micro-batch.
        step.gradients.append(gradients)
    else:
        step.gradients[call] = list(map(_added, step.gradients[call], gradients))
    return step.gradients[call]


def _added(sum_so_far: Gradient, gradient: Gradient) -> Gradient:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.add(sum_so_far, gradient)
    values = tf.concat([sum_so_far.values, gradient.values], 0)
    return tf.IndexedSlices(values, tf.concat([sum_so_far.indices, gradient.indices], 0), gradient.dense_shape)


def _check_order(step: Step, loss: tf.Tensor, call: int) -> None:
    """Raises BadInput if the loss may depend on an update that waits for the last micro-batch."""
    if tf.executing_eagerly():
        return
    operations = loss.graph.get_operations()
    if call == 0:
        step.operations = len(operations)
    elif loss.op not in operations[: step.operations]:
        raise BadInput(
            "--micro-batches: task.train_step computes a loss after an update, which waits for the last micro-batch: "
            "compute all losses before the first apply_gradients, or remove --micro-batches"
        )


def _clipped_sums(step: Step, gradients: list[Gradient], scale: tf.Tensor | None) -> tuple[list[Gradient], tf.Tensor]:
    """Returns the sums over the replicas, clipped by --global-clipnorm, and their norm before; `scale` is theirs."""
    # TensorFlow packs gradients to sum them, and their norms too. Keras casts each to its variable's dtype.
    dtype = keras.backend.result_type("float32", *(gradient.dtype.name for gradient in gradients))
    # Summed here, so that every replica clips, or finds an overflow in, the same gradients.
    sums = sum_over_replicas([tf.cast(gradient, dtype) for gradient in gradients])
    # The slices of a row are summed too: Adam would square them one by one, and the norm would be theirs.
    sums = [sum_by_row(total) if isinstance(total, tf.IndexedSlices) else total for total in sums]
    limit = step.settings.global_clipnorm if step.settings else None
    if scale is None and limit is None:
        return sums, tf.constant(math.nan)
    scale = tf.constant(1.0, dtype) if scale is None else tf.cast(scale, dtype)
    norm = tf.linalg.global_norm(sums)
    if limit is not None:
        sums, _ = tf.clip_by_global_norm(sums, limit * scale, use_norm=norm)
    return sums, tf.cast(norm / scale, tf.float32)
