"""A trained model: the best weights of a run, without its data, and on whatever devices there are.

--export and predict.py use it.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, batched, decode
from engine.data.padding import of_largest_length
from engine.data.pipeline import evaluation_seed
from engine.data.preparation import Preparation
from engine.errors import BadInput, Damaged
from engine.files import read_json
from engine.model.finish import set_up
from engine.model.hidden_state import HiddenState, recorded_variables
from engine.model.objects import build_models, model_variables
from engine.run.checkpoints import Checkpoints, find_best, read_checkpoint
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.state import State
from engine.settings import CONFIG
from engine.tracing import converted

Outputs = dict[str, tf.Tensor]
NO_TENSORS = "task.load_examples gives something other than plain tensors (ragged or sparse)"


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best weights of a run, and what they say of features and of examples."""

    settings: Any
    """The run's own."""
    model: Any
    """The Keras model, or a dict of models by name."""
    weights: Path
    """The checkpoint that the weights are from."""
    hidden: list[str]
    """The variables that task.predict_step uses and Keras does not list."""
    features_spec: Any
    """The type of prepared features, [None, ...]."""
    predict: Callable[[Any], Outputs]
    """task.predict_step: from prepared features to its outputs, [n, ...] each."""
    examples_spec: Any = None
    """The type of the features of examples as task.load_examples gives them, [None, ...]; None if it is no tensors."""
    predict_examples: Callable[[Any, tf.Tensor], Outputs] | None = None
    """The same from those, prepared as in an evaluation. It also takes the first one's number (int64)."""


def load_trained(task: ModuleType, settings: Any, purpose: str) -> Trained:
    """Builds the task's model with the best weights of the run in --run-dir; sets task.config and task.model.

    Args:
        task: the module task.py.
        settings: the run's own, with run_dir; those about devices do not matter.
        purpose: what the messages begin with: "--export".

    Raises:
        BadInput: there is no such run, it has no best weights yet, its files are damaged, or task.py does not fit it.
    """
    example_spec, features_spec = _recorded_specs(settings.run_dir, purpose)
    task.config = settings
    set_up(task, settings)
    if not callable(getattr(task, "predict_step", None)):
        raise BadInput(f"{purpose}: task.py has no function predict_step(features): return a dict of outputs in it")
    with recorded_variables() as made:
        try:
            task.model = build_models(task.create_model(), with_lengths(batched(features_spec, size=2), settings))
        except BadInput as problem:
            raise BadInput(
                f"{purpose}: task.py does not make the model of the run in {settings.run_dir} any more ({problem}): "
                "restore the hooks that it was trained with"
            ) from problem
    features_spec = batched(features_spec)
    predict = tf.function(converted(task.predict_step), input_signature=[features_spec], autograph=False)
    graph = predict.get_concrete_function().graph
    _check_outputs(graph.structured_outputs)
    hidden = HiddenState(tf.distribute.get_strategy(), made, model_variables(task.model).values(), lambda _: graph)
    trained = Trained(
        settings=settings,
        model=task.model,
        weights=_restore_best(settings.run_dir, task.model, hidden, purpose),
        hidden=[name.removeprefix("hidden/") for name in hidden.used_in_validation()],
        features_spec=features_spec,
        predict=predict,
    )
    return trained if example_spec is None else _with_examples(trained, task, example_spec)


def with_lengths(spec: Any, settings: Any) -> Any:
    """Returns a type of batches of features in which sequences are as long as the largest --pad-to."""
    return of_largest_length(spec, settings.pad_to) if settings.pad_to else spec


def _with_examples(trained: Trained, task: ModuleType, example_spec: Any) -> Trained:
    preparation = Preparation(task.prepare_example, training=False, pad_to=trained.settings.pad_to)
    prepared = preparation.trace(example_spec)
    found = prepared.batch_spec[0]
    if found != with_lengths(trained.features_spec, trained.settings):
        raise BadInput(
            f"task.prepare_example gives features of {as_text(found)}, and the run in {trained.settings.run_dir} has "
            f"{as_text(trained.features_spec)}: restore the hook that it was trained with"
        )
    seed = evaluation_seed(trained.settings.seed)

    def predict_examples(features: Any, first: tf.Tensor) -> Outputs:
        number = tf.shape(tf.nest.flatten(features)[0], tf.int64)[0]
        example = features
        if isinstance(example_spec, tuple):
            blank = functools.partial(_blank, features=tf.nest.flatten(features))
            example = (features, *tf.nest.map_structure(blank, example_spec[1:]))
        return trained.predict(preparation.features(prepared, first + tf.range(number), example, seed))

    spec = batched(example_spec[0] if isinstance(example_spec, tuple) else example_spec)
    signature = [spec, tf.TensorSpec([], tf.int64)]
    function = tf.function(predict_examples, input_signature=signature, autograph=False)
    function.get_concrete_function()  # Traced now, because task.config is replaced with the next run.
    return dataclasses.replace(trained, examples_spec=spec, predict_examples=function)


def _recorded_specs(run_dir: Path, purpose: str) -> tuple[Any, Any]:
    """Returns the types of an example (None if it is no tensors) and of its prepared features, from config.json."""
    recorded = read_json(run_dir / CONFIG) or {}
    if "example" not in recorded or "features" not in recorded:
        raise BadInput(
            f"{purpose}: {run_dir / CONFIG} does not say what an example is, because an earlier version began the run: "
            "train it for one more epoch, with --epochs, which records it"
        )
    try:
        example_spec = decode(recorded["example"])
    except ValueError:
        example_spec = None
    return example_spec, decode(recorded["features"])


def _check_outputs(outputs: Any) -> None:
    """Raises BadInput unless task.predict_step returned a dict of tensors [n, ...]."""
    if not isinstance(outputs, dict) or not outputs or not all(isinstance(name, str) for name in outputs):
        raise BadInput(f"task.predict_step returned {outputs!r}: return a dict of tensors by name, [n, ...] each")
    for name, output in outputs.items():
        shape = getattr(output, "shape", tf.TensorShape([]))
        if shape.rank == 0 or (shape.rank and shape[0] is not None):
            raise BadInput(
                f"task.predict_step returned {name!r} of shape {shape} for any number n of examples: it has to be "
                "[n, ...], one row for each"
            )


def _restore_best(run_dir: Path, model: Any, hidden: HiddenState, purpose: str) -> Path:
    """Gives the model, and what its predictions use besides, the best weights of a run; returns where these are."""
    strategy = tf.distribute.get_strategy()
    checkpoints, best = (Checkpoints(run_dir / each, State(strategy, {}), keep=1) for each in (CHECKPOINTS, BEST))
    try:
        path = find_best(checkpoints, best)
        values, _ = read_checkpoint(path)
    except (BadInput, Damaged) as problem:
        what_to_do = ": bring it back from a copy" if isinstance(problem, Damaged) else ""
        raise BadInput(f"{purpose}: {problem}{what_to_do}") from problem
    if missing := hidden.used_in_validation().keys() - values.keys():
        raise BadInput(
            f"{purpose}: {path} does not hold {min(missing)}, a variable of task.predict_step: use it in "
            "task.validation_step too, or make it with add_weight"
        )
    # Others in the checkpoint are of metrics and optimizers.
    unlisted = {name: each for name, each in hidden.unlisted.items() if name in values}
    values = {name: value for name, value in values.items() if name in unlisted or not name.startswith("hidden/")}
    state = State(strategy, model_variables(model), unlisted)
    if differences := state.differences(values):
        raise BadInput(
            f"{purpose}: {path} is of another model ({len(differences)} variables differ: "
            f"{', '.join(differences[:3])}): restore the hooks it was made with"
        )
    state.assign(values)
    return path


def _blank(leaf: tf.TensorSpec, features: list[tf.Tensor]) -> tf.Tensor:
    """Returns labels for examples that have none: zeros or "", [n, ...].

    Sizes that are not known are those of the features, as a mask has its image's; 1 if these have fewer.
    """
    rank = leaf.shape.rank or 0
    shapes = (tf.shape(each)[1:] for each in features if (each.shape.rank or 0) > rank)
    known = next(shapes, tf.ones([rank], tf.int32))
    sizes = [known[axis] if size is None else size for axis, size in enumerate(leaf.shape)] if rank else []
    blank = tf.zeros([tf.shape(features[0])[0], *sizes], leaf.dtype)
    return tf.ensure_shape(blank, tf.TensorShape([None]).concatenate(leaf.shape))
