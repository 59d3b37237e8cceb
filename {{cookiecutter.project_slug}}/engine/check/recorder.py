"""Optimizers of --check, which record the gradients of a step instead of training with them."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from engine.model.variables import by_name, trainable_variables


class Recorder(keras.optimizers.SGD):
    """Adds up the gradients of each variable and moves none, so that all updates of a step have the same weights.

    Attributes:
        trained: the variables that it was built for.
        gradients: the sums of their gradients, in the same order.
        updated: the ids of the variables that get a gradient.
    """

    updates_by_element = True  # So it records the gradients of --lazy-rows too.

    def __init__(self) -> None:
        super().__init__(name="optimizer")
        self.trained: list[keras.Variable] = []
        self.gradients: list[keras.Variable] = []
        self.updated: set[int] = set()

    def build(self, variables: Sequence[keras.Variable]) -> None:
        super().build(variables)
        self.trained = list(variables)
        for each in variables:
            each.constraint = None  # Keras would apply it after each update, and move the weight.
        self.gradients = self.add_optimizer_variables(variables, "gradient")

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        pairs = zip(grads, trainable_variables, strict=True)
        self.updated |= {id(variable) for gradient, variable in pairs if gradient is not None}
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(self.gradients[self._get_variable_index(variable)], gradient)


def recorded_gradients(task: Any) -> dict[str, tf.Variable]:
    """Returns the variables that hold the recorded gradients, under the names of the trainable variables."""
    names = {id(variable): name for name, variable in trainable_variables(task.model).items()}
    return {
        names[id(variable.value)]: gradient.value
        for recorder in by_name(task.optimizer, "optimizer").values()
        for variable, gradient in zip(recorder.trained, recorder.gradients, strict=True)
    }


def recording_optimizers(task: Any) -> contextlib.AbstractContextManager[object]:
    """Replaces the task's optimizers with recorders."""
    create_optimizer = task.create_optimizer

    def create_recorders(total_steps: int) -> Any:
        created = create_optimizer(total_steps)
        return {name: Recorder() for name in created} if isinstance(created, Mapping) else Recorder()

    return mock.patch.object(task, "create_optimizer", create_recorders)
