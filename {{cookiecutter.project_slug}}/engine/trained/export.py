"""--export: the best weights of a run as files for Keras, and as a SavedModel that needs only TensorFlow.

    export/model.keras         the model; <name>.keras for each of several models
    export/saved_model/        two endpoints, which return the outputs of task.predict_step: serve takes prepared
                               features, serve_examples the features of examples as task.load_examples returns them

Every file is loaded again and compared with the model before the export replaces an earlier one.
"""

import contextlib
import dataclasses
import gc
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.console import print_facts
from engine.errors import BadInput, CannotWrite, first_line, user_errors_named
from engine.files import sync, writing
from engine.model.rejections import check_outputs
from engine.model.variables import layers_of
from engine.run.endpoints import NO_TENSORS, Endpoint, predict_endpoint
from engine.settings import INIT_ONLY, Settings, marked
from engine.tracing import Traced
from engine.trained.loading import Trained, load_trained, some_examples

TOLERANCE, TOLERANCE_OF_MIXED_PRECISION = 1e-5, 1e-2  # Allowed distance of outputs, relative to the largest one.
TIES = 1e-3  # Allowed fraction of differing integers, such as the classes of pixels: rounding decides a tie.
EXAMPLES, UNKNOWN_SIZE = 3, 8  # The number of made-up examples, and the sizes that their element spec leaves open.
# What an export of models contains, with the files that TensorFlow writes.
OWN_FILES = r"({})\.keras|saved_model(/(\w+\.pb|variables(/variables\.[^/]+)?|assets(/[^/]+)?))?"

Facts = dict[str, Any]  # File or endpoint -> the text to print.


@user_errors_named()  # Placed here, because `from_chief` passes on no exception of the user's code.
def export(task: Any, settings: Settings) -> None:
    """Writes the run's best weights to export/ in its directory, completely or not at all; replaces an earlier export.

    Call it in the chief, outside any strategy. task.model is then the model with those weights. Raises CannotWrite, or
    BadInput if the SavedModel cannot be written, or differs from the model once it is loaded again.
    """
    kind, path = type(settings), settings.run_dir / "export"
    # Settings that say how the run started may name files that are gone.
    defaults = {name: getattr(kind, name) for name in marked(kind, INIT_ONLY) if hasattr(kind, name)}
    trained = load_trained(task, dataclasses.replace(settings, **defaults))
    facts: Facts = {"weights": trained.weights}
    with replaced(path, trained.models) as folder:
        if unlisted := ", ".join(trained.unlisted):
            facts["Keras's files"] = f"skipped: they cannot contain {unlisted}, made without add_weight"
        else:
            facts |= _write_models(folder, task, trained)
            gc.collect()  # Frees the copies that were compared.
        facts |= _write_saved_model(folder / "saved_model", task, trained)
    print_facts(f"Exported to {path}", facts)


@contextlib.contextmanager
def replaced(path: Path, models: Collection[str]) -> Iterator[Path]:
    """Yields a new folder, which replaces the one at `path` at the end; after an exception `path` is unchanged.

    `models` are the names of the run's models. Raises BadInput if `path` contains anything that no export of them has
    written.
    """
    path = Path(os.path.realpath(path))  # A link is followed, as to a larger disk.
    own = re.compile(OWN_FILES.format("|".join(map(re.escape, models))))
    for file in [path] if path.is_file() else path.rglob("*"):
        if not own.fullmatch(file.relative_to(path).as_posix()):
            raise BadInput(f"--export: {file} is not of an export, which would replace it: move it elsewhere")
    new, old = (path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}") for kind in ("new", "old"))
    try:
        with writing(path):
            new.mkdir()
        yield new
        with writing(path):
            sync(*new.rglob("*"), new)
            if path.exists():
                path.rename(old)
            new.rename(path)
        # On NFS, files that a server still reads stay, and so do those of a process that was killed. They go now.
        for leftover in path.parent.glob(f".{path.name}.*.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_models(folder: Path, task: Any, trained: Trained) -> Facts:
    """Writes a file for each model; none for a model that Keras does not load as it was, with the reason."""
    facts: Facts = {}
    for name, model in trained.models.items():
        file = folder / f"{name}.keras"
        try:
            with writing(file):
                model.save(file)
            loaded = keras.models.load_model(file, compile=False, safe_mode=False)
            expected, found = [*_written_values(model)], [*_written_values(loaded)]
            if len(expected) != len(found) or not all(map(np.array_equal, expected, found)):
                raise BadInput("the file, once loaded, has other weights than the model")
            task.model = {**trained.model, name: loaded} if isinstance(trained.model, dict) else loaded
            loaded_step = predict_endpoint(task, trained.serve.spec).by_name
            note = _compare("the file", trained.serve, loaded_step, task, trained)
            facts[file.name] = f"for keras.models.load_model, load_weights and --init-from{note}"
        except CannotWrite:
            raise
        except Exception as problem:  # noqa: BLE001 - A user's layer may raise any.
            file.unlink(missing_ok=True)
            reason = str(problem) if isinstance(problem, BadInput) else first_line(problem)
            facts[file.name] = (
                f"skipped: Keras cannot save and load this model ({reason}): layers of your own need "
                "@keras.saving.register_keras_serializable(), add_weight, and get_config with every argument"
            )
        finally:
            task.model = trained.model
    return facts


def _written_values(model: keras.Model) -> Iterator[np.ndarray]:
    """Yields the values that layers write to a file: with LoRA not their weights, but kernels with the adapters in."""
    for layer in layers_of(model):
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        yield from map(keras.ops.convert_to_numpy, store.values())


def _write_saved_model(folder: Path, task: Any, trained: Trained) -> Facts:
    """Writes the endpoints that a file can contain; the first one is also the default for requests.

    Raises BadInput unless they return the same once loaded.
    """
    endpoints, facts = {"serve": trained.serve}, Facts()
    if trained.serve_examples:
        endpoints["serve_examples"] = trained.serve_examples
    else:
        facts["serve_examples"] = f"skipped: {NO_TENSORS}"
    signatures: dict[str, Any] = {}
    for name, endpoint in endpoints.items():
        signature = tf.function(endpoint.by_name, autograph=False).get_concrete_function(**endpoint.inputs)
        if calls := Traced(signature.graph).python_calls:
            facts[name] = f"skipped: no file can contain the Python function of {', '.join(calls)}"
        else:
            signatures[name] = signature
    if signatures:
        default = {"serving_default": next(iter(signatures.values()))}
        with writing(folder):
            tf.saved_model.save(_resources(signatures.values()), str(folder), {**signatures, **default})
        loaded = tf.saved_model.load(str(folder)).signatures
    for name in signatures:
        note = _compare(f"--export: {name}", endpoints[name], loaded[name], task, trained)
        facts[name] = f"endpoint of {folder.name}: {endpoints[name]}{note}"
    return facts


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


# --- Comparison -------------------------------------------------------------------------------------------------------


def _compare(name: str, expected: Endpoint, loaded: Callable[..., Any], task: Any, trained: Trained) -> str:
    """Returns "", or why the outputs cannot be compared. Raises BadInput if those of `loaded` differ.

    `loaded` takes the features by name.
    """
    reason = ""
    tolerance = TOLERANCE if trained.settings.precision == "float32" else TOLERANCE_OF_MIXED_PRECISION
    for features in _few_features(expected, task, trained):
        try:
            outputs = expected.function(features)
        except (tf.errors.OpError, TypeError) as problem:  # The second one: the data is of another element spec now.
            reason = first_line(problem)
            continue
        check_outputs(outputs, len(tf.nest.flatten(features)[0]))
        loaded_outputs = loaded(**dict(zip(expected.inputs, tf.nest.flatten(features), strict=True)))
        for output, values in outputs.items():
            if not _are_close(values, loaded_outputs[output], tolerance):
                raise BadInput(f"{name}, once loaded, returns another {output!r} than the model")
        return ""
    return f"; not compared, because examples of the data, if there are any, and made-up ones fail ({reason})"


def _few_features(endpoint: Endpoint, task: Any, trained: Trained) -> Iterator[Any]:
    """Yields the features of an example of the data, which may be records, and of a few made-up ones."""
    if endpoint is trained.serve_examples:
        with contextlib.suppress(Exception):  # The data need not be on this machine.
            # Labels, if there are any, follow the features in a tuple.
            yield next(iter(some_examples(task).map(lambda *example: example[0]).batch(1)))
    yield tf.nest.map_structure(_made_up, endpoint.spec)


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
