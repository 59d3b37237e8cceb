"""Lets a program record the gradients of its steps, and move no weight until it is asked to.

So one program shows its gradients, of which all updates of a step have the same weights, and then its real updates.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from engine.model import optimizers
from engine.model.variables import Variables, by_name, inner_variable, trainable_variables

NAMES = "hidden/optimizer/"  # The state has the variables under names that begin so.


@contextlib.contextmanager
def recording_gradients(task: Any) -> Iterator[None]:
    """Lets programs that are built and traced inside record the gradients that their optimizers get.

    No weight moves before `move_weights`.
    """
    create_optimizer, apply = task.create_optimizer, optimizers.apply_in_keras
    made: list[tf.Variable] = []  # Nothing else keeps them before the end of the build.

    def create_with_records(total_steps: int) -> Any:
        trained = trainable_variables(task.model).values()
        made[:] = [
            tf.Variable(tf.zeros_like(variable), name=f"gradient_{index}") for index, variable in enumerate(trained)
        ]
        made.append(tf.Variable(initial_value=False, name="moves"))
        return create_optimizer(total_steps=total_steps)

    def record_and_apply(optimizer: keras.optimizers.Optimizer, sums: Sequence[Any], variables: Any) -> None:
        names = [name for name, outer in by_name(task.optimizer, "model").items() if outer is optimizer]
        if not names:  # It is inside a MultiOptimizer.
            apply(optimizer, sums, variables)
            return
        model = task.model[names[0]] if isinstance(task.optimizer, Mapping) else task.model
        trained = [inner_variable(variable) for variable in variables or trainable_variables(model).values()]
        dense = [_dense(gradient, variable) for gradient, variable in zip(sums, trained, strict=True)]
        before = [tf.identity(variable) for variable in trained]
        apply(optimizer, sums, variables)
        records = dict(zip(map(id, trainable_variables(task.model).values()), made, strict=False))

        def keep(strategy: tf.distribute.Strategy, moves: Any, dense: list[Any], before: list[Any]) -> None:
            for variable, gradient, value in zip(trained, dense, before, strict=True):
                if id(variable) in records:
                    strategy.extended.update(records[id(variable)], _add, (gradient,), group=False)
                strategy.extended.update(variable, _move_if, (moves, value), group=False)

        context = tf.distribute.get_replica_context()
        context.merge_call(keep, args=(tf.identity(made[-1]), dense, before))

    with (
        mock.patch.object(task, "create_optimizer", create_with_records),
        mock.patch.object(optimizers, "apply_in_keras", record_and_apply),
    ):
        yield


def _dense(gradient: tf.Tensor | None, variable: tf.Variable) -> tf.Tensor:
    """Returns the gradient of the complete variable; the one that Keras gets may be of some rows."""
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    if (rows := optimizers.rows_of(variable)) is not None:
        gradient = tf.convert_to_tensor(tf.IndexedSlices(gradient, rows, variable.shape))
    return tf.cast(gradient, variable.dtype)


def _add(record: tf.Variable, gradient: tf.Tensor) -> None:
    record.assign_add(gradient)


def _move_if(variable: tf.Variable, moves: tf.Tensor, value: tf.Tensor) -> None:
    variable.assign(tf.where(moves, variable, value))


def recorded_gradients(program: Any, task: Any) -> Variables:
    """Returns the variables that hold the recorded gradients, under the names of the trainable variables."""
    state = program.run.checkpoints.state.per_replica
    return {name: state[f"{NAMES}gradient_{index}"] for index, name in enumerate(trainable_variables(task.model))}


def move_weights(program: Any) -> None:
    """Lets the steps update the weights from now on, which `recording_gradients` prevents."""
    moves = program.run.checkpoints.state.per_replica[f"{NAMES}moves"]
    for part in program.strategy.experimental_local_results(moves):
        part.assign(True)
