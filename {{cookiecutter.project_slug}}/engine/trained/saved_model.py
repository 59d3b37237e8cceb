"""A SavedModel of functions of features, for programs that have TensorFlow and neither Keras nor this project."""

import dataclasses
import gc
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.data.element_spec import leaf_text, leaves
from engine.files import writing
from engine.tracing import Traced

Outputs = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A function of features [n, ...] in the structure of an element spec; a SavedModel takes them by name."""

    function: Any  # Returns outputs by name, all [n, ...].
    spec: Any

    @property
    def inputs(self) -> dict[str, tf.TensorSpec]:
        """The element specs of the features, under names of letters, digits and underscores, as servers need."""
        by_name = {re.sub(r"\W", "_", name): leaf for name, leaf in leaves(self.spec).items()}
        return {name if name[0].isalpha() else f"arg_{name}": leaf for name, leaf in by_name.items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {leaf_text(leaf)}" for name, leaf in self.inputs.items())

    def signature(self) -> Any:
        """Returns the function, compiled for features by name."""

        def named(**tensors: tf.Tensor) -> Outputs:
            return self.function(tf.nest.pack_sequence_as(self.spec, [tensors[name] for name in self.inputs]))

        given = {name: tf.TensorSpec(leaf.shape, leaf.dtype, name) for name, leaf in self.inputs.items()}
        return tf.function(named, autograph=False).get_concrete_function(**given)

    def loaded(self, signature: Callable[..., Outputs]) -> "Endpoint":
        """Returns an endpoint that calls a loaded signature."""
        return Endpoint(
            lambda features: signature(**dict(zip(self.inputs, tf.nest.flatten(features), strict=True))), self.spec
        )


def write_saved_model(folder: Path, endpoints: dict[str, Endpoint]) -> tuple[dict[str, Endpoint], dict[str, str]]:
    """Writes the endpoints that a file can contain; the first one is also the default for requests.

    Returns those that were written, loaded again, and why the others were skipped. Raises CannotWrite.
    """
    signatures, skipped = {}, {}
    for name, endpoint in endpoints.items():
        signature = endpoint.signature()
        if calls := Traced(signature.graph).python_calls:
            skipped[name] = f"no file can contain the Python function of {', '.join(calls)}"
        else:
            signatures[name] = signature
    if not signatures:
        return {}, skipped
    default = {"serving_default": next(iter(signatures.values()))}
    with writing(folder):
        tf.saved_model.save(_resources(signatures.values()), str(folder), {**signatures, **default})
    loaded = tf.saved_model.load(str(folder)).signatures
    return {name: endpoints[name].loaded(loaded[name]) for name in signatures}, skipped


def _resources(signatures: Iterable[Any]) -> tf.Module:
    """Returns a module of the variables and lookup tables that the signatures use, so that the file contains them."""
    graphs = [signature.graph for signature in signatures]
    handles = {id(handle) for graph in graphs for handle, _ in graph.captures}
    module = tf.Module()
    module.weights = [variable for graph in graphs for variable in graph.variables]
    module.tables = [
        resource
        for resource in gc.get_objects()
        if issubclass(type(resource), tf.saved_model.experimental.TrackableResource)
        and id(vars(resource).get("_resource_handle_value")) in handles
    ]
    return module
