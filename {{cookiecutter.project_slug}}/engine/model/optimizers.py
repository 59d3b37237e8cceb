"""Prepares Keras's optimizers for several replicas.

On several replicas Keras clips each replica's gradients before the sum (tensorflow#33929), counts an accumulated
gradient once per replica, and looks for an overflow on the first replica only, all without an error. Therefore the
sum comes first, once, and an optimizer that would do the rest by itself is rejected.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.global_batch import sum_over_replicas
from engine.model.rows import update_rows
from engine.model.step import Gradient

# Arguments of a Keras optimizer that are wrong on several replicas, and the setting that is right.
REJECTED_ARGUMENTS = {
    "gradient_accumulation_steps": "--micro-batches",
    "use_ema": "--ema-decay",
    "loss_scale_factor": "--precision mixed_float16",
}

# These are for all threads, because a loss scale calls the optimizer in new ones.
_is_summed = threading.Event()  # Set while Keras gets gradients that are summed already.
_rows: dict[int, tf.Tensor] = {}  # The rows whose gradients it gets then, by the id of the table's handle.


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
    _take_sums(optimizer)
    return keras.optimizers.LossScaleOptimizer(optimizer) if precision == "mixed_float16" else optimizer


def _take_sums(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes Keras take gradients that are summed over the replicas, and update tables by row.

    It sums gradients itself, before it clips them, that a task passes to `optimizer.apply_gradients`.
    """
    apply, update_step = type(optimizer).apply, type(optimizer).update_step

    def sum_and_apply(grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        if _is_summed.is_set():
            apply(optimizer, grads, trainable_variables)
            return
        # A row may occur in several slices, and the update of rows wants each once.
        sums = iter(sum_over_replicas([tf.convert_to_tensor(gradient) for gradient in grads if gradient is not None]))
        grads = [None if gradient is None else next(sums) for gradient in grads]
        pairs = list(zip(grads, trainable_variables or optimizer._trainable_variables, strict=True))
        with _giving_sums({}):
            update(pairs, lambda: apply(optimizer, grads, trainable_variables))

    def update_rows_or_all(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if (rows := rows_of(variable)) is not None:
            update_rows(optimizer, gradient, rows, variable, learning_rate)
        else:
            update_step(optimizer, gradient, variable, learning_rate)

    optimizer.apply, optimizer.update_step = sum_and_apply, update_rows_or_all
    optimizer._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables


def update(pairs: Sequence[tuple[Any, keras.Variable]], by_optimizer: Callable[[], None]) -> None:
    """Updates the variables in `pairs` with the gradients beside them; --check records here what an optimizer gets."""
    by_optimizer()


def rows_of(variable: keras.Variable | tf.Variable) -> tf.Tensor | None:
    """Returns the rows that the gradient given to Keras is of; None if it is of the complete variable."""
    return _rows.get(id(variable.handle)) if _rows else None


def apply_sums(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[keras.Variable, Gradient | None]],
    sums: Sequence[Gradient],
) -> None:
    """Updates with the sums over the replicas of the gradients in `pairs` that are not None.

    In slices each row may occur once. The optimizer gets their values, so that it clips these, and updates their rows
    only.
    """
    rows, given, in_turn = {}, [], iter(sums)
    for variable, gradient in pairs:
        total = None if gradient is None else next(in_turn)
        if isinstance(total, tf.IndexedSlices):
            rows[id(variable.handle)], total = total.indices, total.values
        # A MultiOptimizer needs all its variables, also those without a gradient, which its optimizers leave out.
        if total is not None or inner_optimizers(optimizer):
            given.append((total, variable))
    with _giving_sums(rows):
        update(given, lambda: optimizer.apply_gradients(given))


@contextlib.contextmanager
def _giving_sums(rows: dict[int, tf.Tensor]) -> Iterator[None]:
    _is_summed.set()
    _rows.update(rows)
    try:
        yield
    finally:
        _is_summed.clear()
        for handle in rows:
            del _rows[handle]


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
