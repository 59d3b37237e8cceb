"""--export: the best weights of a run as files for Keras, and as a SavedModel that needs only TensorFlow.

    export/model.keras         the model; <name>.keras for each of several models
    export/model.weights.h5    its weights
    export/saved_model/        two endpoints, which return the outputs of task.predict_step: serve takes prepared
                               features, serve_examples the features of examples as task.load_examples returns them

Every file is loaded again and compared with the model before the export replaces an earlier one.
"""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.console import print_facts
from engine.data.records import Records
from engine.data.splits import named
from engine.errors import BadInput, ProgramExit, first_line, user_errors_named
from engine.files import writing
from engine.model.build import set_up
from engine.model.variables import by_name, is_seed, model_variables
from engine.settings import Settings
from engine.trained.export_folder import SAVED_MODEL, replaced
from engine.trained.loading import (
    NO_TENSORS,
    Trained,
    check_outputs,
    compiled_predict_step,
    load_trained,
    new_model,
    without_init_only,
)
from engine.trained.saved_model import Endpoint, write_saved_model

TOLERANCE, TOLERANCE_OF_MIXED_PRECISION = 1e-5, 1e-2  # Allowed distance of outputs, relative to the largest one.
TIES = 1e-3  # Allowed fraction of differing integers, such as the classes of pixels: rounding decides a tie.
EXAMPLES, UNKNOWN_SIZE = 3, 8  # The number of made-up examples, and the sizes that their element spec leaves open.

Facts = dict[str, Any]  # File or endpoint -> the text to print.


@user_errors_named()  # Placed here, because `from_chief` passes on no exception of the user's code.
def export(task: Any, settings: Settings) -> None:
    """Writes the run's best weights to export/ in its directory, completely or not at all; replaces an earlier export.

    Call it in the chief, outside any strategy. task.model is then the model with those weights. Raises CannotWrite, or
    BadInput if something cannot be exported, or differs from the model once it is loaded again.
    """
    trained, path = load_trained(task, without_init_only(settings)), settings.run_dir / "export"
    facts: Facts = {"weights": trained.weights}
    with replaced(path, trained.models) as folder:
        if unlisted := ", ".join(trained.unlisted):
            facts["Keras's files"] = f"skipped: they cannot contain {unlisted}, made without add_weight"
        else:
            for write in (_write_models, _write_weights):
                facts |= write(folder, task, trained)
                gc.collect()  # Frees the copies that were compared.
        facts |= _write_saved_model(folder / SAVED_MODEL, task, trained)
    print_facts(f"Exported to {path}", facts)


@contextlib.contextmanager
def _failing_as(text: str) -> Iterator[None]:
    """Turns any exception but a ProgramExit into BadInput with `text` and the reason: a user's layer may raise any."""
    try:
        yield
    except ProgramExit:
        raise
    except Exception as problem:
        raise BadInput(f"{text} ({first_line(problem)})") from problem


# --- Files for Keras --------------------------------------------------------------------------------------------------


def _write_models(folder: Path, task: Any, trained: Trained) -> Facts:
    facts: Facts = {}
    loaded = dict(trained.models)
    for name, model in trained.models.items():
        file = folder / f"{name}.keras"
        try:
            with writing(file):
                model.save(file)
            loaded[name], options = _load(file)
            facts[file.name] = f"for keras.models.load_model{options}"
        except ProgramExit:
            raise
        except Exception as problem:  # noqa: BLE001 - A user's layer may raise any.
            file.unlink(missing_ok=True)
            facts[file.name] = (
                f"skipped: Keras cannot save and load this model ({first_line(problem)}): layers of your own need "
                "@keras.saving.register_keras_serializable() and get_config"
            )
    note = _compare_models(".keras", loaded, task, trained)
    return {name: text + note for name, text in facts.items()}


def _load(file: Path) -> tuple[keras.Model, str]:
    """Returns the model in a file, and the options that load_model needs."""
    with contextlib.suppress(Exception):
        return keras.models.load_model(file, compile=False), ""
    return keras.models.load_model(file, compile=False, safe_mode=False), "(..., safe_mode=False)"


def _write_weights(folder: Path, task: Any, trained: Trained) -> Facts:
    set_up(task, trained.settings)  # Starts the names of layers over, so that the new models have the same.
    loaded = by_name(new_model(task, trained.settings, trained.serve.spec), "model")
    for name, model in trained.models.items():
        file = folder / f"{name}.weights.h5"
        with _failing_as(f"--export: {file.name} cannot be written and loaded"):
            with writing(file):
                model.save_weights(file)
            loaded[name].load_weights(file)
    note = _compare_models(".weights.h5", loaded, task, trained)
    return {f"{name}.weights.h5": f"for load_weights and --init-from{note}" for name in loaded}


# --- Files for TensorFlow ---------------------------------------------------------------------------------------------


def _write_saved_model(folder: Path, task: Any, trained: Trained) -> Facts:
    """Writes the endpoints that a file can contain. Raises BadInput unless they return the same once loaded."""
    endpoints = {"serve": trained.serve}
    if trained.serve_examples:
        endpoints["serve_examples"] = trained.serve_examples
    with _failing_as("--export: the SavedModel cannot be written and loaded"):
        loaded, skipped = write_saved_model(folder, endpoints)
    if not trained.serve_examples:
        skipped["serve_examples"] = NO_TENSORS
    facts = {name: f"skipped: {reason}" for name, reason in skipped.items()}
    for name, endpoint in loaded.items():
        note = _compare(name, endpoints[name], endpoint, task, trained)
        facts[name] = f"endpoint of {folder.name}: {endpoint}{note}"
    return facts


# --- Comparison -------------------------------------------------------------------------------------------------------


def _compare_models(kind: str, loaded: dict[str, keras.Model], task: Any, trained: Trained) -> str:
    """Returns a note as `_compare` does. Raises BadInput unless the models have the same weights and outputs."""
    for name, model in trained.models.items():
        weights, loaded_weights = _weights(model), _weights(loaded[name])
        if len(weights) != len(loaded_weights) or not all(map(np.array_equal, weights, loaded_weights)):
            raise BadInput(
                f"--export: {name}{kind}, once loaded, has other weights than the model: create the weights of your "
                "own layers with add_weight, and return every argument in get_config"
            )
    task.model = loaded if isinstance(trained.model, dict) else loaded["model"]
    try:
        serve = Endpoint(compiled_predict_step(task, trained.serve.spec), trained.serve.spec)
        return _compare(", ".join(f"{name}{kind}" for name in loaded), trained.serve, serve, task, trained)
    finally:
        task.model = trained.model


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for path, variable in model_variables(model).items() if not is_seed(path)]


def _compare(name: str, expected: Endpoint, loaded: Endpoint, task: Any, trained: Trained) -> str:
    """Returns "", or why the endpoints cannot be compared. Raises BadInput if they return different outputs."""
    reason = ""
    tolerance = TOLERANCE if trained.settings.precision == "float32" else TOLERANCE_OF_MIXED_PRECISION
    for features in _few_features(expected, task, trained):
        try:
            outputs = expected.function(features)
        except tf.errors.OpError as problem:
            reason = first_line(problem)
            continue
        check_outputs(outputs, len(tf.nest.flatten(features)[0]))
        loaded_outputs = loaded.function(features)
        for output, values in outputs.items():
            if not _are_close(values, loaded_outputs[output], tolerance):
                raise BadInput(
                    f"--export: {name}, once loaded, returns another {output!r} than the model: keep the state of your "
                    "own layers with add_weight and get_config"
                )
        return ""
    return f"; not compared, because examples of the data, if there are any, and made-up ones fail ({reason})"


def _few_features(endpoint: Endpoint, task: Any, trained: Trained) -> Iterator[Any]:
    """Yields features of a few examples: made-up ones, and those of the data, which come first if they have text."""
    leaves, made_up = tf.nest.flatten(endpoint.spec), tf.nest.map_structure(_made_up, endpoint.spec)
    have_text = any(leaf.dtype == tf.string for leaf in leaves)  # It may be records, which cannot be made up.
    if not have_text:
        yield made_up
    if endpoint is trained.serve_examples:
        count = EXAMPLES if all(leaf.shape[1:].is_fully_defined() for leaf in leaves) else 1
        with contextlib.suppress(Exception):  # The data need not be on this machine.
            splits = (named(split, task.load_examples(split)) for split in ("test", "validation", "train"))
            examples = next(dataset for datasets in splits for dataset in datasets.values())
            examples = examples.dataset() if isinstance(examples, Records) else examples
            # Labels, if there are any, follow the features in a tuple.
            yield next(iter(examples.map(lambda *example: example[0]).batch(count)))
    if have_text:
        yield made_up


def _made_up(leaf: tf.TensorSpec) -> tf.Tensor:
    """Returns a few rows of an element spec: numbers from 0 to 1, or empty text."""
    sizes = [UNKNOWN_SIZE if size is None else size for size in leaf.shape[1:]] if leaf.shape.rank else []
    if leaf.dtype == tf.string:
        return tf.fill([EXAMPLES, *sizes], "")
    values = np.random.default_rng(0).uniform(0.0, 1.0, [EXAMPLES, *sizes])
    return tf.cast(tf.constant(values if leaf.dtype.is_floating else values.round()), leaf.dtype)


def _are_close(expected: tf.Tensor, loaded: tf.Tensor, tolerance: float) -> bool:
    if expected.shape != loaded.shape or expected.dtype != loaded.dtype:
        return False
    if not expected.dtype.is_floating:
        return np.count_nonzero(expected.numpy() != loaded.numpy()) <= TIES * expected.numpy().size
    expected, loaded = (tf.cast(values, tf.float64).numpy() for values in (expected, loaded))
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return np.allclose(loaded, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)
