"""A trained model: the best weights of a run in the task's model, without the run's data and devices."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.data.element_spec import batched, decode, encode
from engine.data.preparation import of_largest_length
from engine.data.records import Records
from engine.data.splits import named
from engine.errors import BadInput
from engine.model.objects import TaskObjects
from engine.model.rejections import check_outputs
from engine.model.variables import by_name, name_in_hook
from engine.run.agreement import check_files
from engine.run.checkpoints import Checkpoints, restore_best
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.endpoints import Endpoint, examples_endpoint, predict_endpoint, tensor_spec
from engine.run.state import State
from engine.settings import CONFIG, Settings, read_config
from engine.tracing import Traced


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


def _examples_endpoint(task: Any, settings: Settings, serve: Endpoint, recorded: Any) -> Endpoint | None:
    """Returns the endpoint of a run's examples, or of the present ones if the hooks have changed with the examples.

    None if their features are ragged or sparse. Raises BadInput if the hooks do not fit the run.
    """
    problem = None
    for described in (lambda: recorded, lambda: encode(some_examples(task).element_spec)):
        spec = None
        with contextlib.suppress(Exception):  # The data is not on this machine.
            spec = tensor_spec(described())
        if spec:
            try:
                return examples_endpoint(task, settings, serve, spec)
            except BadInput as error:
                problem = error
    if problem:
        raise problem
    return None
