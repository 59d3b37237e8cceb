"""What the steps take from Python when they are traced. TensorFlow does not say that a later change has no effect."""

import types
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
from engine.model.variables import layers_of

STEPS = ("train_step", "evaluation_step")


def names_in_steps(task: Any) -> set[str]:
    """Returns the names that the code of the steps contains, and of the functions of task.py that they call.

    Raises BadInput if a function among them is a tf.function: it would keep the models of its first call.
    """
    names: set[str] = set()
    left = [*STEPS]
    while left:
        value = vars(task).get(name := left.pop())
        if isinstance(value, tf.types.experimental.PolymorphicFunction):
            raise BadInput(
                f"task.{name} is a tf.function, which would keep the models and settings of its first call: remove "
                "@tf.function, because train.py compiles the steps with all that they call"
            )
        left += {*_names_in(getattr(value, "__code__", None))} - names
        names |= {name, *left}
    return names


def _names_in(code: types.CodeType | None) -> list[str]:
    if code is None:
        return []
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]  # Functions in functions.
    return [*code.co_names, *(name for part in inner for name in _names_in(part))]


class TakenFromPython:
    """The numbers and texts of task.py that its steps use, and which layers are trainable, when steps are traced."""

    def __init__(self, task: Any) -> None:
        self._task, self._values = task, _values(task)

    def changes(self) -> list[str]:
        """Returns a text for each value that is another one than at the last call, which has no effect on the steps."""
        before, self._values = self._values, _values(self._task)
        return [
            f"{name} has become {value}, but the steps were traced with {before[name]} and go on with it: see "
            "docs/recipes.md, A number that changes while the run trains"
            for name, value in self._values.items()
            if before.get(name, value) != value
        ]


def _values(task: Any) -> dict[str, Any]:
    used = {name: vars(task)[name] for name in sorted(names_in_steps(task) & vars(task).keys())}
    values = {f"task.{name}": value for name, value in used.items() if isinstance(value, bool | int | float | str)}
    return values | {f"the trainable of {layer.name}": layer.trainable for layer in layers_of(task.model)}
