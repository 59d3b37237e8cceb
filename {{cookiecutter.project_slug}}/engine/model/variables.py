"""The variables of the objects that the hooks of task.py returned, under unique names, in a fixed order.

A task has one model and one optimizer, or dictionaries of them under the same names, such as a GAN's generator and
discriminator. `by_name` makes both the same to the rest of the engine.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from engine.model import replicas


def by_name(objects: Any, kind: str) -> dict[str, Any]:
    """Returns `objects` if it is a dictionary, otherwise a dictionary with it under `kind`."""
    return dict(objects) if isinstance(objects, Mapping) else {kind: objects}


def model_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns every variable of every model, trained or not, seed states included, in model order."""
    return named(by_name(model, "model"))


def trainable_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns the `model_variables` that training changes."""
    return _chosen(model, (each for one in by_name(model, "model").values() for each in one.trainable_variables))


def per_replica_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns the `model_variables` that may differ between replicas."""
    return _chosen(model, replicas.per_replica_variables(by_name(model, "model")))


def inner_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns TensorFlow's variable; a task's own optimizer or metric may list such variables itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_path(variable: keras.Variable | tf.Variable) -> str:
    """Returns a variable's name with the names of the layers around it."""
    return variable.path if isinstance(variable, keras.Variable) else variable.name.removesuffix(":0")


def _chosen(model: Any, variables: Iterable[keras.Variable]) -> dict[str, tf.Variable]:
    chosen = {id(variable.value) for variable in variables}
    return {name: variable for name, variable in model_variables(model).items() if id(variable) in chosen}


def named(objects: dict[str, Any]) -> dict[str, tf.Variable]:
    """Returns the variables of objects, as "<object>/<path>", and with "#2" for the second one of a path."""
    found: dict[str, tf.Variable] = {}
    for kind, each in objects.items():
        for variable in each.variables:
            name = unique = f"{kind}/{variable_path(variable)}"
            number = 2
            while unique in found:
                unique, number = f"{name}#{number}", number + 1
            found[unique] = inner_variable(variable)
    return found
