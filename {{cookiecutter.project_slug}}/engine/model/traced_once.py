"""What the steps take from Python when they are traced. TensorFlow does not say that a later change has no effect."""

import dis
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
from engine.model.variables import layers_of

STEPS = ("train_step", "evaluation_step")


def code_of_steps(task: Any) -> list[types.CodeType]:
    """Returns the code of the steps and of the functions of task.py that they call, with functions in functions.

    Raises BadInput if a function among them is a tf.function: it would keep the models of its first call.
    """
    names, codes = [*STEPS], []
    for name in names:
        function = vars(task).get(name)
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            raise BadInput(
                f"task.{name} is a tf.function, which would keep the models and settings of its first call: remove "
                "@tf.function, because train.py compiles the steps with all that they call"
            )
        for code in _with_inner(getattr(function, "__code__", None)):
            codes.append(code)
            names += [used for used in _globals_in(code) if used not in names]
    return codes


def _with_inner(code: types.CodeType | None) -> Iterator[types.CodeType]:
    if code is not None:
        yield code
        for part in code.co_consts:
            yield from _with_inner(part if isinstance(part, types.CodeType) else None)


def _globals_in(code: types.CodeType) -> list[str]:
    """Returns the global names that the code uses; `co_names` has those of attributes, too."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


class TakenFromPython:
    """The numbers and texts of task.py that its steps use, and which layers are trainable, when steps are traced."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._names = dict.fromkeys(name for code in code_of_steps(task) for name in _globals_in(code))
        self._values = self._present_values()

    def changes(self) -> list[str]:
        """Returns a text for each value that is another one than at the last call, which has no effect on the steps."""
        before, self._values = self._values, self._present_values()
        return [
            f"{name} has become {value}, but the steps were traced with {before[name]} and go on with it: see "
            "docs/recipes.md, A number that changes while the run trains"
            for name, value in self._values.items()
            if repr(before.get(name, value)) != repr(value)
        ]

    def _present_values(self) -> dict[str, Any]:
        used = {f"task.{name}": vars(self._task)[name] for name in self._names if name in vars(self._task)}
        values = {name: value for name, value in used.items() if isinstance(value, bool | int | float | str)}
        layers = layers_of(self._task.model)
        return values | {f"{layer.name}.trainable": layer.trainable for layer in layers}
