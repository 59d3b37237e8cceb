"""Prepares Keras's optimizers for several replicas.

On several replicas Keras clips each replica's gradients before the sum (tensorflow#33929), counts an accumulated
gradient once per replica, and looks for an overflow on the first replica only, all without an error. Therefore the
sum comes first, once, and an optimizer that would do the rest by itself is rejected.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.global_batch import sum_over_replicas
from engine.model.rows import update_by_row

# Arguments of a Keras optimizer that are wrong on several replicas, and the setting that is right.
REJECTED_ARGUMENTS = {
    "gradient_accumulation_steps": "--micro-batches",
    "use_ema": "--ema-decay",
    "loss_scale_factor": "--precision mixed_float16",
}

# Packed into one tensor, the gradients of a model would be in memory twice, and sums would wait for the last of them.
BYTES_PER_PACK = 50 * 2**20

# Set while Keras gets gradients that are summed already, in any thread: a loss scale calls the optimizer in new ones.
_is_summed = threading.Event()


def prepare_optimizer(optimizer: keras.optimizers.Optimizer, precision: str) -> keras.optimizers.Optimizer:
    """Returns the optimizer, with a loss scale around it for "mixed_float16"; it clips the sum over the replicas.

    Raises BadInput if it would accumulate, average or scale by itself.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise BadInput("task.create_optimizer returned a LossScaleOptimizer: use --precision mixed_float16 instead")
    for argument, setting in REJECTED_ARGUMENTS.items():
        if value := getattr(optimizer, argument, None):
            raise BadInput(
                f"task.create_optimizer returned an optimizer with {argument}={value}, which is wrong on several "
                f"replicas: remove it and use {setting}"
            )
    _sum_first(optimizer)
    update_by_row(optimizer)
    return keras.optimizers.LossScaleOptimizer(optimizer) if precision == "mixed_float16" else optimizer


def _sum_first(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes Keras sum gradients over the replicas before it clips them, unless they are summed already; and not after.

    So the gradients are right, too, that a task passes to `optimizer.apply_gradients` by itself.
    """
    apply = type(optimizer).apply

    def apply_sums(grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        if _is_summed.is_set():
            apply(optimizer, grads, trainable_variables)
            return
        # A row may occur in several slices, and the update of rows wants each once.
        used = [tf.convert_to_tensor(gradient) for gradient in grads if gradient is not None]
        sums = iter(sum_over_replicas(used, BYTES_PER_PACK))
        with summed_gradients():
            apply(optimizer, [None if gradient is None else next(sums) for gradient in grads], trainable_variables)

    optimizer.apply = apply_sums
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers inside a keras.optimizers.MultiOptimizer or one like it; none for other optimizers."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Inside a LossScaleOptimizer.
    return list(getattr(optimizer, "optimizers", []))


def optimizer_of(variable: keras.Variable, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that updates the variable: this one, or one inside it."""
    for inner in inner_optimizers(optimizer):
        with contextlib.suppress(KeyError):
            inner._get_variable_index(variable)
            return inner
    return getattr(optimizer, "inner_optimizer", optimizer)


@contextlib.contextmanager
def summed_gradients() -> Iterator[None]:
    """Says that the gradients that optimizers get inside are sums over the replicas."""
    _is_summed.set()
    try:
        yield
    finally:
        _is_summed.clear()
