"""A trained model: the best weights of a run in the task's model, without the run's data and devices."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.data.element_spec import as_text, batched, decode, encode, leaf_text, leaves
from engine.data.preparation import Preparation, evaluation_seed, of_largest_length
from engine.data.records import Records
from engine.data.splits import named
from engine.errors import BadInput
from engine.model.objects import TaskObjects
from engine.model.rejections import check_hooks, check_outputs
from engine.model.variables import by_name, name_in_hook
from engine.run.agreement import check_files
from engine.run.checkpoints import Checkpoints, restore_best
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.state import State
from engine.settings import CONFIG, Settings, read_config
from engine.tracing import Traced, converted

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
            specs[name] = tf.TensorSpec(leaf.shape, leaf.dtype, name)
        return specs

    def by_name(self, **tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the outputs for the tensors of `inputs`."""
        return self.function(tf.nest.pack_sequence_as(self.spec, [tensors[name] for name in self.inputs]))

    def __str__(self) -> str:
        return ", ".join(f"{name} {leaf_text(leaf)}" for name, leaf in self.inputs.items())


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best weights of a run in the task's model, and its predictions as functions."""

    settings: Settings
    model: Any  # A keras.Model, or a dict of them by name.
    weights: Path  # The checkpoint of the weights.
    unlisted: list[str]  # The names of the variables that task.predict_step uses and Keras does not list.
    outputs: dict[str, tf.TensorSpec]  # The element spec of each output of task.predict_step, [None, ...].
    serve: Endpoint  # Takes prepared features: task.predict_step.
    # Takes features as task.load_examples returns them, and optionally the number of the first example; they are
    # prepared as in an evaluation. None if they are ragged or sparse.
    serve_examples: Endpoint | None

    @property
    def models(self) -> dict[str, keras.Model]:
        return by_name(self.model, "model")


def load_trained(task: Any, settings: Settings) -> Trained:
    """Builds the task's model with the best weights of the run in --run-dir; sets task.config and task.model.

    Raises BadInput if no such run has best weights yet, its files are damaged, or task.py does not fit it.
    """
    recorded = read_config(settings.run_dir) or {}
    if not {"example", "features"} <= recorded.keys():
        raise BadInput(f"{settings.run_dir / CONFIG} does not describe an example: restore it")
    features = decode(recorded["features"])
    task.config = settings
    objects = TaskObjects(task, settings)
    check_files(objects.data_files, settings.run_dir)
    two = of_largest_length(batched(features, 2), settings.pad_to or ())
    with objects.recording():
        task.model = objects.build_models(task.create_model(), two)
    objects.name_weights()
    strategy = tf.distribute.get_strategy()
    workers = Workers(strategy)
    state = State(strategy, workers, objects.mirrored_weights, objects.per_replica_weights, objects.finalize_layers)
    checkpoints = Checkpoints(settings.run_dir / CHECKPOINTS, State(strategy, workers, {}), keep=1)
    weights, _ = restore_best(checkpoints, Checkpoints(settings.run_dir / BEST, state, keep=1))
    serve = predict_endpoint(task, batched(features))
    traced = serve.function.get_concrete_function()
    check_outputs(outputs := traced.structured_outputs)
    used, made = Traced(traced.graph).used, objects.per_replica_weights.items()
    unlisted = [name_in_hook(name) for name, part in made if id(part.handle) in used and name.startswith("hidden/")]
    serve_examples = _examples_endpoint(task, settings, serve, recorded["example"])
    return Trained(settings, task.model, weights, unlisted, outputs, serve, serve_examples)


def some_examples(task: Any) -> tf.data.Dataset:
    """Returns a dataset of examples, a test dataset if there is one. Raises any exception if the data is not here."""
    splits = (named(split, task.load_examples(split)) for split in ("test", "validation", "train"))
    examples = next(dataset for datasets in splits for dataset in datasets.values())
    return examples.dataset() if isinstance(examples, Records) else examples


def predict_endpoint(task: Any, features_spec: Any) -> Endpoint:
    """Returns task.predict_step compiled for the model that is in task.model at the first call."""
    check_hooks(task, export=True)
    function = tf.function(converted(task.predict_step), input_signature=[features_spec], autograph=False)
    return Endpoint(function, features_spec)


def _examples_endpoint(task: Any, settings: Settings, serve: Endpoint, recorded: Any) -> Endpoint | None:
    """Returns the endpoint of a run's examples, or of the present ones if the hooks have changed with the examples.

    None if their features are ragged or sparse. Raises BadInput if the hooks do not fit the run.
    """
    problem = None
    for described in (lambda: recorded, lambda: encode(some_examples(task).element_spec)):
        spec = None
        with contextlib.suppress(Exception):  # A leaf is not a tensor, or the data is not on this machine.
            spec = decode(described())
        features_spec = spec[0] if isinstance(spec, tuple) else spec
        if all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(features_spec)):
            try:
                return _with_preparation(task, settings, serve, spec)
            except BadInput as error:
                problem = error
    if problem:
        raise problem
    return None


def _with_preparation(task: Any, settings: Settings, serve: Endpoint, example_spec: Any) -> Endpoint:
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
