"""Lets a program record the gradients of its steps, and move no weight until it is asked to.

So one program shows its gradients, of which all updates of a step have the same weights, and then its real updates.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from engine.model import optimizers
from engine.model.variables import Variables, inner_variable, trainable_variables

OF_OPTIMIZERS = "hidden/optimizer/"  # The state puts it before the names of variables made in create_optimizer.
GRADIENT, MOVES = "recorded_gradient/", "weights_move"


@contextlib.contextmanager
def recording_gradients(task: Any) -> Iterator[None]:
    """Lets programs that are built and traced inside record the gradients that their optimizers get.

    No weight moves before `move_weights`.
    """
    create_optimizer = task.create_optimizer
    records: dict[int, tuple[tf.Variable, tf.Variable]] = {}  # Id of a weight -> the weight, its record.
    moves: list[tf.Variable] = []

    def create_with_records(total_steps: int) -> Any:
        created = create_optimizer(total_steps=total_steps)  # It may freeze layers.
        records.clear()
        for name, weight in trainable_variables(task.model).items():
            records[id(weight)] = weight, tf.Variable(tf.zeros_like(weight), name=f"{GRADIENT}{name}")
        moves[:] = [tf.Variable(initial_value=False, name=MOVES)]
        return created

    def update_and_record(pairs: Sequence[tuple[Any, keras.Variable]], by_optimizer: Callable[[], None]) -> None:
        weights = [inner_variable(variable) for _, variable in pairs]
        recorded = [weight for weight, (gradient, _) in zip(weights, pairs, strict=True) if gradient is not None]
        gradients = [_dense(*pair) for pair in pairs if pair[0] is not None]
        before = [tf.identity(weight) for weight in weights]
        by_optimizer()

        def keep(strategy: tf.distribute.Strategy, moves: Any, gradients: list[Any], before: list[Any]) -> None:
            for weight, gradient in zip(recorded, gradients, strict=True):
                if id(weight) in records:
                    strategy.extended.update(records[id(weight)][1], _add, (gradient,), group=False)
            for weight, value in zip(weights, before, strict=True):
                strategy.extended.update(weight, _move_if, (moves, value), group=False)

        context = tf.distribute.get_replica_context()
        context.merge_call(keep, args=(tf.identity(moves[0]), gradients, before))

    with (
        mock.patch.object(task, "create_optimizer", create_with_records),
        mock.patch.object(optimizers, "update", update_and_record),
    ):
        yield


def _dense(gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
    """Returns the gradient of the complete variable; the one that Keras gets may be of some rows."""
    if (rows := optimizers.rows_of(variable)) is not None:
        gradient = tf.convert_to_tensor(tf.IndexedSlices(gradient, rows, variable.shape))
    return tf.cast(gradient, variable.dtype)


def _add(record: tf.Variable, gradient: tf.Tensor) -> None:
    record.assign_add(gradient)


def _move_if(variable: tf.Variable, moves: tf.Tensor, value: tf.Tensor) -> None:
    variable.assign(tf.where(moves, variable, value))


def recorded_gradients(program: Any) -> Variables:
    """Returns the variables that hold the recorded gradients, under the names of the trainable variables."""
    state = program.run.checkpoints.state.per_replica.items()
    start = f"{OF_OPTIMIZERS}{GRADIENT}"
    return {name.removeprefix(start): variable for name, variable in state if name.startswith(start)}


def move_weights(program: Any) -> None:
    """Lets the steps update the weights from now on, which `recording_gradients` prevents."""
    moves = program.run.checkpoints.state.per_replica[f"{OF_OPTIMIZERS}{MOVES}"]
    for part in program.strategy.experimental_local_results(moves):
        part.assign(True)
