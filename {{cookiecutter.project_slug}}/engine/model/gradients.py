"""What lies between the tape and the changed weights: micro-batches, the sum over replicas, clipping, the update.

Each of these is easy to get wrong once there is a second replica, and wrong without an error: Keras clips each replica
before the sum (tensorflow#33929), counts an accumulated gradient per replica, and looks for an overflow on
the first replica only. So an optimizer that would do any of it is refused, and it is done here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput, Diverged
from engine.tracing import converted

# Arguments of a Keras optimizer that are wrong on several replicas, and the setting that is right.
REFUSED_ARGUMENTS = {
    "clipnorm": "--clip-norm",
    "global_clipnorm": "--clip-norm",
    "clipvalue": "--clip-norm",
    "gradient_accumulation_steps": "--micro-batches",
    "use_ema": "--ema-decay",
    "loss_scale_factor": "--precision mixed_float16",
}

# It begins at 2**15; a gradient that overflows float16 at this scale is beyond any that a step could use.
LOWEST_LOSS_SCALE = 2.0**-10

# --- In the step, on each replica -------------------------------------------------------------------------------------


@tf.autograph.experimental.do_not_convert
def in_micro_batches(loss_and_gradients: Callable[..., Any], batch: Any, *, count: int, jit: bool = False) -> Any:
    """Returns `loss_and_gradients(batch)`, computed on `count` equal parts of the batch, one after the other.

    Only one part's activations are in memory at a time. Micro-batch m holds every count-th example from the m-th on, so
    that the replicas' m-th parts together hold the same examples for any number of replicas.

    Args:
        loss_and_gradients: takes (features, labels, weights) and returns (loss, gradients, outputs). The losses and
            gradients of the parts are summed: each has to be divided by the size of the whole global batch already.
            The outputs, tensors [part, ...] in any structure, are put together in the order of the batch.
        batch: one replica's share; `count` divides it.
        jit: compile it with XLA. Nothing in it may need the other replicas.
    """
    compute = converted(loss_and_gradients)
    if jit:
        compute = tf.function(compute, autograph=False, jit_compile=True)
    if count == 1:
        return compute(batch)
    parts = []
    for first in range(count):
        # The next part begins when the one before has ended, so that its memory is free.
        before = [each for each in tf.nest.flatten(parts[-1][:2]) if each is not None] if parts else []
        with tf.control_dependencies(before):
            part = tf.nest.map_structure(lambda tensor, first=first: tf.identity(tensor[first::count]), batch)
        loss, gradients, outputs = compute(part)
        if parts:
            loss += parts[-1][0]
            gradients = tf.nest.map_structure(_add, parts[-1][1], gradients)
        parts.append((loss, gradients, outputs))
    loss, gradients, _ = parts[-1]
    return loss, gradients, tf.nest.map_structure(_interleave, *(outputs for _, _, outputs in parts))


@tf.autograph.experimental.do_not_convert
def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    *,
    clip_norm: float | None = None,
) -> None:
    """Updates the variables with the sum of all replicas' gradients; every replica has to call it.

    Args:
        optimizer: built for these variables. A LossScaleOptimizer skips the update, on every replica, if any replica's
            gradient is not finite, and halves its scale.
        gradients: this replica's, of the loss that `optimizer.scale_loss` returned; None or tf.IndexedSlices may be
            among them.
        variables: what the gradients are of, in the same order.
        clip_norm: scales the summed gradients down to this global norm, if theirs is larger (Pascanu et al. 2013,
            arXiv:1211.5063).
    """
    variables = [variable for variable, each in zip(variables, gradients, strict=True) if each is not None]
    # Whole tensors, also of an embedding: Adam squares the slices of a token that occurs twice one by one.
    gradients = [tf.convert_to_tensor(each) for each in gradients if each is not None]
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or clip_norm is not None:
        replica = tf.distribute.get_replica_context()
        # Summed here, so that every replica clips, or finds an overflow, in the same gradients.
        gradients = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        if clip_norm is not None:
            scale = tf.cast(optimizer.dynamic_scale, tf.float32) if scaled else 1.0
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm * scale)
        # Keras sums over the replicas once more, now of equal values.
        gradients = [each / replica.num_replicas_in_sync for each in gradients]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def _add(one: Any, other: Any) -> Any:
    return None if one is None else tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _interleave(*parts: tf.Tensor) -> tf.Tensor:
    """Puts [part, ...] tensors of every n-th example back into the order of the batch."""
    stacked = tf.stack(parts, axis=1)
    return tf.reshape(stacked, tf.concat([[-1], tf.shape(stacked)[2:]], axis=0))


# --- Around the step --------------------------------------------------------------------------------------------------


def prepare_optimizer(optimizer: keras.optimizers.Optimizer, precision: str) -> keras.optimizers.Optimizer:
    """Returns the optimizer, with a loss scale around it for "mixed_float16".

    Raises:
        BadInput: it would clip, accumulate, average or scale by itself.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise BadInput(
            "task.create_optimizer returned a LossScaleOptimizer: return the optimizer inside it and use "
            "--precision mixed_float16"
        )
    for argument, setting in REFUSED_ARGUMENTS.items():
        if value := getattr(optimizer, argument, None):
            raise BadInput(
                f"task.create_optimizer returned an optimizer with {argument}={value}, which is wrong on several "
                f"replicas: leave it out and use {setting}"
            )
    return keras.optimizers.LossScaleOptimizer(optimizer) if precision == "mixed_float16" else optimizer


def check_loss_scale(optimizer: keras.optimizers.Optimizer, step: int) -> None:
    """Raises Diverged if the loss scale of mixed_float16 has fallen so far that every step was skipped for long."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        if scale < LOWEST_LOSS_SCALE:
            raise Diverged(
                f"at step {step} the loss scale is down to {scale:g}, as no scale makes the gradients finite"
            )
