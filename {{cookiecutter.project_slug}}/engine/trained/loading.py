"""A trained model: the best weights of a run in the task's model, without the run's data and devices."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.data.element_spec import as_text, batched, decode
from engine.data.preparation import Preparation, evaluation_seed, of_largest_length
from engine.errors import BadInput, Damaged
from engine.files import read_json
from engine.model.build import build_models
from engine.model.objects import TaskObjects
from engine.model.variables import by_name
from engine.run.checkpoints import Checkpoints, restore_best
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.state import State
from engine.settings import CONFIG, INIT_ONLY, Settings, marked
from engine.tracing import Traced, converted
from engine.trained.saved_model import Endpoint, Outputs

NO_TENSORS = "task.load_examples returns something other than plain tensors (ragged or sparse)"


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
    # prepared as in an evaluation. None if they are not tensors.
    serve_examples: Endpoint | None

    @property
    def models(self) -> dict[str, keras.Model]:
        return by_name(self.model, "model")


def without_init_only(settings: Settings) -> Settings:
    """Returns the settings with the defaults of those that describe how the run started: their files may be gone."""
    kind = type(settings)
    names = marked(kind, INIT_ONLY)
    return dataclasses.replace(settings, **{name: getattr(kind, name) for name in names if hasattr(kind, name)})


def load_trained(task: Any, settings: Settings) -> Trained:
    """Builds the task's model with the best weights of the run in --run-dir; sets task.config and task.model.

    Raises BadInput if no such run has best weights yet, its files are damaged, or task.py does not fit it.
    """
    example_spec, features_spec = _recorded_specs(settings.run_dir)
    task.config = settings
    objects = TaskObjects(task, settings)
    with objects.recording():
        task.model = objects.build_models(task.create_model(), _two_of(features_spec, settings))
        task.loss_objects = task.create_loss_objects()
    objects.name_weights()
    weights = _restore_best(settings.run_dir, objects)
    serve = Endpoint(compiled_predict_step(task, features_spec), features_spec)
    traced = serve.function.get_concrete_function()
    check_outputs(outputs := traced.structured_outputs)
    used, made = Traced(traced.graph).used, objects.per_replica_weights.items()
    unlisted = [name.removeprefix("hidden/") for name, each in made if id(each.handle) in used and "hidden/" in name]
    serve_examples = None if example_spec is None else _with_preparation(task, settings, serve, example_spec)
    return Trained(settings, task.model, weights, unlisted, outputs, serve, serve_examples)


def new_model(task: Any, settings: Settings, features_spec: Any) -> Any:
    """Returns the model, or the dict of models, that task.create_model makes for prepared features, built."""
    return build_models(task.create_model(), _two_of(features_spec, settings))


def _two_of(features_spec: Any, settings: Settings) -> Any:
    """Returns the element spec of two examples, of the largest length."""
    two = tf.nest.map_structure(lambda leaf: tf.TensorSpec([2, *leaf.shape[1:]], leaf.dtype), features_spec)
    return of_largest_length(two, settings.pad_to or ())


def compiled_predict_step(task: Any, features_spec: Any) -> tf.types.experimental.PolymorphicFunction:
    """Returns task.predict_step compiled for the model that is in task.model at the first call."""
    predict_step = getattr(task, "predict_step", None)
    if not callable(predict_step):
        raise BadInput("task.py has no function predict_step(features): add one that returns a dict of outputs")
    return tf.function(converted(predict_step), input_signature=[features_spec], autograph=False)


def _with_preparation(task: Any, settings: Settings, serve: Endpoint, example_spec: Any) -> Endpoint:
    lengths = settings.pad_to or ()
    preparation = Preparation(task.prepare_example, training=False, pad_to=lengths)
    prepared, seed = preparation.trace(example_spec), tf.stack([evaluation_seed(settings.seed, "test"), 0])
    if batched(prepared.spec[0]) != of_largest_length(serve.spec, lengths):
        fact = f"{as_text(batched(prepared.spec[0]))}, and the run in {settings.run_dir} has {as_text(serve.spec)}"
        raise BadInput(f"task.prepare_example returns features of {fact}: restore the hook it was trained with")

    def predict_examples(features: Any, first: tf.Tensor) -> Outputs:
        count = tf.shape(tf.nest.flatten(features)[0], tf.int64)[0]
        examples = features
        if isinstance(example_spec, tuple):
            placeholder = functools.partial(_placeholder, features=tf.nest.flatten(features))
            examples = (features, *tf.nest.map_structure(placeholder, example_spec[1:]))
        return serve.function(preparation.features(prepared, first + tf.range(count), examples, seed))

    spec = batched(example_spec[0] if isinstance(example_spec, tuple) else example_spec)
    signature = [spec, tf.TensorSpec([], tf.int64)]
    function = tf.function(predict_examples, input_signature=signature, autograph=False)
    function.get_concrete_function()  # Traced now, because loading another run replaces task.config.
    return Endpoint(lambda features, first=0: function(features, tf.constant(np.int64(first))), spec)


def _recorded_specs(run_dir: Path) -> tuple[Any, Any]:
    """Returns the element specs of an example (None if it is not of tensors), and of prepared features, [None, ...]."""
    recorded = read_json(run_dir / CONFIG) or {}
    if not {"example", "features"} <= recorded.keys():
        raise BadInput(f"{run_dir / CONFIG} does not describe an example: restore it, or train for one more epoch")
    with contextlib.suppress(ValueError):
        return decode(recorded["example"]), batched(decode(recorded["features"]))
    return None, batched(decode(recorded["features"]))


def check_outputs(outputs: Any, count: int | None = None) -> None:
    """Raises BadInput unless task.predict_step returned tensors by name with `count` rows; None while it is traced."""
    if not isinstance(outputs, dict) or not outputs or not all(isinstance(name, str) for name in outputs):
        raise BadInput(f"task.predict_step returned {outputs!r}: return a dict of tensors by name, [n, ...] each")
    for name, output in outputs.items():
        problem = ""
        if not isinstance(output, tf.Tensor):
            problem = f"as {type(output).__name__}: return a tensor"
        elif output.shape.rank is not None and output.shape[:1].as_list() != [count]:
            problem = f"of shape {output.shape}{f' for {count} examples' if count else ''}: return"
        if problem:
            raise BadInput(f"task.predict_step returned {name!r} {problem} [n, ...], a row per example")


def _restore_best(run_dir: Path, objects: TaskObjects) -> Path:
    """Sets the weights to the best ones of a run; returns their path."""
    strategy = tf.distribute.get_strategy()
    workers = Workers(strategy)
    weights = State(strategy, workers, objects.mirrored_weights, objects.per_replica_weights, objects.finalize_layers)
    checkpoints, best = (
        Checkpoints(run_dir / folder, state, keep=1)
        for folder, state in ((CHECKPOINTS, State(strategy, workers, {})), (BEST, weights))
    )
    try:
        return restore_best(checkpoints, best)
    except Damaged as problem:
        raise BadInput(f"{problem}: restore it from a backup, or try again if the run is still training") from problem


def _placeholder(leaf: tf.TensorSpec, features: list[tf.Tensor]) -> tf.Tensor:
    """Returns labels for examples that have none: zeros or "", [n, ...].

    Unknown sizes are taken from the features, as a mask has the sizes of its image; 1 if these have fewer axes.
    """
    rank = leaf.shape.rank or 0
    shapes = (tf.shape(each)[1:] for each in features if (each.shape.rank or 0) > rank)
    known = next(shapes, tf.ones([rank], tf.int32))
    sizes = [known[axis] if size is None else size for axis, size in enumerate(leaf.shape)] if rank else []
    zeros = tf.zeros([tf.shape(features[0])[0], *sizes], leaf.dtype)
    return tf.ensure_shape(zeros, tf.TensorShape([None]).concatenate(leaf.shape))
