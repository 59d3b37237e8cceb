"""The variables of a task: what its hooks made, listed by Keras or not, under unique names, in a fixed order.

A task has one model and one optimizer, or dictionaries of them under the same names, such as a GAN's generator and
discriminator. `by_name` makes both the same to the rest of the engine.
"""

import collections
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

# An odd number near 2**32 / 1.618: multiples of it fall far apart in 32 bits (Knuth, volume 3, section 6.4).
SEED_STEP = 2654435769

Variables = dict[str, tf.Variable]


# --- What the hooks made ----------------------------------------------------------------------------------------------


class Recorder:
    """Records the variables that hooks make, with the names that they get then, without keeping them alive."""

    def __init__(self) -> None:
        self._made: list[tuple[str, weakref.ref]] = []  # Name and variable.
        self.kind = "model"  # What the variables that are made now belong to, or "optimizer", "loss" or "metrics".
        self._times: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the variables that the code inside makes."""

        def record(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            variable = next_creator(**options)
            # Numbered here, so that a name does not depend on which earlier variables still exist.
            name = f"hidden/{self.kind}/{variable.name.removesuffix(':0')}"
            self._times[name] += 1
            numbered = f"{name}#{self._times[name]}" if self._times[name] > 1 else name
            self._made.append((numbered, weakref.ref(variable)))
            return variable

        with tf.variable_creator_scope(record):
            yield

    def variables(self) -> list[tf.Variable]:
        """Returns the variables that still exist, in the order in which they were made."""
        return [variable for _, reference in self._made if (variable := reference()) is not None]

    def unlisted(self, listed: Iterable[tf.Variable], *kinds: str) -> Variables:
        """Returns those of some kinds that are not `listed`, under names such as "hidden/model/Variable".

        They are a layer's own tf.Variable, a tf.random.Generator's, a stateful RNN's, or those of a network that no
        hook returned.
        """
        known = {id(variable) for variable in listed}
        made = [(name, reference) for name, reference in self._made if name.split("/")[1] in kinds]
        if any(reference() is not None and id(reference()) not in known for _, reference in made):
            gc.collect()  # Otherwise a network that a hook has deleted would still be among them.
        existing = ((name, reference()) for name, reference in made)
        return {name: made for name, made in existing if made is not None and id(made) not in known}


def name_in_hook(name: str) -> str:
    """Returns the name that a hook gave to a variable: "hidden/model/Variable" -> "Variable"; others as they are."""
    return name.split("/", 2)[2] if name.startswith("hidden/") else name


def is_of_metrics(name: str) -> bool:
    """Returns whether metrics count in the variable of this name, listed by Keras or not."""
    return name.startswith(("metrics/", "hidden/metrics/"))


@contextlib.contextmanager
def given_back(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Gives variables back, at the end, the values that they have now on each replica of this process."""
    existing = {id(variable): variable for variable in variables}.values()
    kept = [(part, tf.identity(part)) for made in existing for part in strategy.experimental_local_results(made)]
    try:
        yield
    finally:
        for part, value in kept:
            part.assign(value)


# --- What Keras lists -------------------------------------------------------------------------------------------------


def by_name(objects: Any, kind: str) -> dict[str, Any]:
    """Returns `objects` if it is a dictionary, otherwise a dictionary with it under `kind`."""
    return dict(objects) if isinstance(objects, Mapping) else {kind: objects}


def model_variables(model: Any) -> Variables:
    """Returns every variable of every model that Keras lists, trained or not, seed states included, in model order."""
    return named(by_name(model, "model"))


def trainable_variables(model: Any) -> Variables:
    """Returns the `model_variables` that training changes."""
    networks = by_name(model, "model").values()
    trainable = {id(variable.value) for network in networks for variable in network.trainable_variables}
    return {name: variable for name, variable in model_variables(model).items() if id(variable) in trainable}


def statistics(model: Any) -> Variables:
    """Returns the floating `model_variables` that trainable layers change themselves, such as moving means."""
    frozen = {id(variable.value) for layer in layers_of(model) if not layer.trainable for variable in layer.variables}
    return {
        name: variable
        for name, variable in model_variables(model).items()
        if variable.dtype.is_floating and not variable.trainable and id(variable) not in frozen
    }


def named(objects: dict[str, Any]) -> Variables:
    """Returns the variables of objects, as "<object>/<path>", and with "#2" for the second one of a path."""
    found: Variables = {}
    for kind, owner in objects.items():
        for variable in owner.variables:
            name = unique = f"{kind}/{variable_path(variable)}"
            number = 2
            while unique in found:
                unique, number = f"{name}#{number}", number + 1
            found[unique] = inner_variable(variable)
    return found


def inner_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns TensorFlow's variable; a task's own optimizer or metric may list such variables itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def add_in_one_operation(listed: Iterable[keras.Variable | tf.Variable]) -> None:
    """Lets variables that steps count with, of metrics and optimizers, add a value by one operation.

    Keras reads a variable and assigns the sum, which takes longer, and loses what another worker of parameter servers
    adds in between.
    """

    def assign_add(variable: keras.Variable, value: Any) -> tf.Tensor:
        if tf.distribute.in_cross_replica_context():  # There TensorFlow has no addition for variables of replicas.
            return keras.Variable.assign_add(variable, value)
        return variable.value.assign_add(tf.broadcast_to(tf.cast(value, variable.dtype), variable.shape))

    for variable in listed:
        if isinstance(variable, keras.Variable):
            variable.assign_add = functools.partial(assign_add, variable)


def variable_path(variable: keras.Variable | tf.Variable) -> str:
    """Returns a variable's name with the names of the layers around it."""
    return variable.path if isinstance(variable, keras.Variable) else variable.name.removesuffix(":0")


def layers_of(model: Any) -> Iterator[keras.layers.Layer]:
    """Yields every layer of the models, however deeply nested; `model.layers` has the outermost ones only."""
    for network in by_name(model, "model").values():
        yield from network._flatten_layers(include_self=True, recursive=True)


# --- Variables that differ between replicas ---------------------------------------------------------------------------


def is_seed(path: str) -> bool:
    """Returns whether the variable of this path is the state of a keras.random.SeedGenerator."""
    return "seed_generator_state" in path.rsplit("/", 1)[-1]


def is_random_state(path: str) -> bool:
    """Returns whether the variable of this path is the state of a SeedGenerator or of a tf.random.Generator."""
    return is_seed(path) or path.rsplit("/", 1)[-1].startswith("StateVar")


def spread_seeds(strategy: tf.distribute.Strategy, seeds: Sequence[tf.Variable]) -> None:
    """Gives every replica but the first other seeds, so that dropout does not drop the same units on all.

    TensorFlow does the same for a tf.random.Generator with each draw.
    """
    if strategy.num_replicas_in_sync == 1 or not seeds:
        return

    def spread() -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint32)
        for seed in seeds:
            offset = replica * tf.constant(SEED_STEP, tf.uint32)
            seed.assign(seed + tf.cast(tf.stack([offset, tf.zeros_like(offset)]), seed.dtype))

    tf.function(strategy.run)(spread)


def compile_averaging(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> Callable[[], None]:
    """Returns a function that gives all replicas the mean of their floating values ([...] each)."""
    if not variables:
        return lambda: None

    def average() -> None:
        replica = tf.distribute.get_replica_context()
        # In float64, in which the sum of equal numbers of 32 bits is exact, so that these stay as they are.
        values = [tf.cast(variable, tf.float64) for variable in variables]
        means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, values)
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))

    return functools.partial(tf.function(strategy.run), average)
