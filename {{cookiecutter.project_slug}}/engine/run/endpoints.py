"""Endpoints: task.predict_step, and its preparation of examples, as functions that a SavedModel can contain."""

import contextlib
import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from engine.data.element_spec import as_text, batched, decode, leaf_text, leaves
from engine.data.preparation import Preparation, evaluation_seed, of_largest_length
from engine.errors import BadInput
from engine.model.rejections import check_hooks
from engine.settings import Settings
from engine.tracing import converted

NO_TENSORS = "task.load_examples returns ragged or sparse features: let it return tensors, and prepare them as before"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A function of features [n, ...] in the structure of an element spec; a SavedModel takes them by name."""

    function: Any  # Returns outputs by name, all [n, ...].
    spec: Any

    @property
    def inputs(self) -> dict[str, tf.TensorSpec]:
        """The element specs of the features, under names of letters, digits and underscores, as servers need."""
        specs = {}
        for path, leaf in leaves(self.spec).items():
            name = re.sub(r"^(?![A-Za-z])", "arg_", re.sub(r"\W", "_", path))
            while name in specs:
                name += "_"
            specs[name] = tf.TensorSpec(leaf.shape, leaf.dtype, name)
        return specs

    def by_name(self, **tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the outputs for the tensors of `inputs`."""
        return self.function(tf.nest.pack_sequence_as(self.spec, [tensors[name] for name in self.inputs]))

    def __str__(self) -> str:
        return ", ".join(f"{name} {leaf_text(leaf)}" for name, leaf in self.inputs.items())


def predict_endpoint(task: Any, features_spec: Any) -> Endpoint:
    """Returns task.predict_step compiled for the model that is in task.model at the first call."""
    check_hooks(task, export=True)
    function = tf.function(converted(task.predict_step), input_signature=[features_spec], autograph=False)
    return Endpoint(function, features_spec)


def tensor_spec(encoded: Any) -> Any | None:
    """Returns the element spec of examples from its JSON; None if their features are ragged, sparse, or no tensors."""
    with contextlib.suppress(ValueError):
        spec = decode(encoded)
        features = spec[0] if isinstance(spec, tuple) else spec
        if all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(features)):
            return spec
    return None


def examples_endpoint(task: Any, settings: Settings, serve: Endpoint, example_spec: Any) -> Endpoint:
    """Returns the endpoint of examples of an element spec, which prepares them as in an evaluation.

    `serve` is that of their prepared features. Raises BadInput if task.prepare_example returns others.
    """
    lengths = settings.pad_to or ()
    preparation = Preparation(task.prepare_example, training=False, pad_to=lengths)
    prepared, seed = preparation.trace(example_spec), tf.stack([evaluation_seed(settings.seed, "test"), 0])
    if batched(prepared.spec[0]) != of_largest_length(serve.spec, lengths):
        raise BadInput(
            f"task.prepare_example returns features of {as_text(batched(prepared.spec[0]))}, and the run in "
            f"{settings.run_dir} has {as_text(serve.spec)}: restore the hook it was trained with"
        )
    features_spec, *label_specs = example_spec if isinstance(example_spec, tuple) else (example_spec,)

    def predict_examples(features: Any, first: tf.Tensor) -> dict[str, tf.Tensor]:
        flat = tf.nest.flatten(features)
        labels = tf.nest.map_structure(lambda leaf: _placeholder(leaf, flat), tuple(label_specs))
        numbers = first + tf.range(tf.shape(flat[0], tf.int64)[0])
        examples = (features, *labels) if isinstance(example_spec, tuple) else features
        return serve.function(prepared.features(numbers, examples, seed))

    spec = batched(features_spec)
    function = tf.function(predict_examples, input_signature=[spec, tf.TensorSpec([], tf.int64)], autograph=False)
    function.get_concrete_function()  # Traced now, because loading another run replaces task.config.
    return Endpoint(lambda features, first=0: function(features, tf.constant(np.int64(first))), spec)


def _placeholder(leaf: Any, features: list[tf.Tensor]) -> Any:
    """Returns labels for examples that have none: zeros or "", [n, ...], of the leaf's kind of tensor.

    Unknown sizes are taken from the features, as a mask has the sizes of its image; 1 if these have fewer axes.
    """
    sizes = leaf.shape.as_list() if leaf.shape.rank else []
    known = next(
        (tf.shape(feature)[1:] for feature in features if (feature.shape.rank or 0) > len(sizes)), [1] * len(sizes)
    )
    sizes = [known[axis] if size is None else size for axis, size in enumerate(sizes)]
    zeros = tf.zeros([tf.shape(features[0])[0], *sizes], leaf.dtype)
    if isinstance(leaf, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(zeros, ragged_rank=1 + leaf.ragged_rank)
    if isinstance(leaf, tf.SparseTensorSpec):
        return tf.sparse.from_dense(zeros)
    return tf.ensure_shape(zeros, tf.TensorShape([None]).concatenate(leaf.shape))
