"""The variables of the objects that the hooks of task.py returned, under unique names, in a fixed order.

A task has one model and one optimizer, or dictionaries of them under the same names, such as a GAN's generator and
discriminator. `by_name` makes both the same to the rest of the engine.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.model.sums import Sum

# An odd number near 2**32 / 1.618: multiples of it fall far apart in 32 bits (Knuth, volume 3, section 6.4).
SEED_STEP = 2654435769


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
    """Returns the `model_variables` that may differ between replicas: seeds, statistics of unsynchronized layers."""
    models = by_name(model, "model").values()
    seeds = [each for one in models for each in one.variables if is_seed(each.path)]
    return _chosen(model, [*seeds, *(each for one in models for each in _statistics(one))])


def statistics(model: Any) -> dict[str, keras.layers.Layer]:
    """Returns the layers of the floating `model_variables` that layers change themselves, such as moving means."""
    layers = [layer for one in by_name(model, "model").values() for layer in layers_of(one)]
    owner = {
        id(each.value): layer
        for layer in layers
        for each in layer._non_trainable_variables
        if tf.as_dtype(each.dtype).is_floating
    }
    return {name: owner[id(each)] for name, each in model_variables(model).items() if id(each) in owner}


def inner_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns TensorFlow's variable; a task's own optimizer or metric may list such variables itself."""
    if isinstance(variable, Sum):
        return variable.inner
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


# --- Variables that differ between replicas: dropout's seeds, an unsynchronized BatchNormalization's statistics -------


def is_seed(path: str) -> bool:
    """Returns whether the variable of this path is the state of a keras.random.SeedGenerator."""
    return path.rsplit("/", 1)[-1].startswith("seed_generator_state")


def spread_seeds(strategy: tf.distribute.Strategy, seeds: Sequence[tf.Variable]) -> None:
    """Gives every replica but the first other seeds, so that dropout does not drop the same units on all."""
    if strategy.num_replicas_in_sync == 1 or not seeds:
        return

    def spread() -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint32)
        for seed in seeds:
            offset = replica * tf.constant(SEED_STEP, tf.uint32)
            seed.assign(seed + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), seed.dtype))

    tf.function(strategy.run)(spread)


def compile_averaging(strategy: tf.distribute.Strategy, per_replica: Iterable[tf.Variable]) -> Callable[[], None]:
    """Returns a function that gives all replicas the mean of their floating values. Call it before every evaluation."""
    statistics = [variable for variable in per_replica if variable.dtype.is_floating]
    if strategy.num_replicas_in_sync == 1 or not statistics:
        return lambda: None

    def average() -> None:
        replica = tf.distribute.get_replica_context()
        for variable in statistics:
            variable.assign(replica.all_reduce(tf.distribute.ReduceOp.MEAN, tf.identity(variable)))

    return functools.partial(tf.function(strategy.run), average)


def _statistics(model: keras.Model) -> Iterator[keras.Variable]:
    for layer in layers_of(model):
        if not getattr(layer, "synchronized", False):
            yield from layer._non_trainable_variables


def layers_of(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields every layer of a model, however deeply nested; `model.layers` has the outermost ones only."""
    yield from model._flatten_layers(include_self=True, recursive=True)
