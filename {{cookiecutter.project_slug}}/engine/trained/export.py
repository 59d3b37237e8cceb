"""--export: the best weights of a run as files for Keras, and as a SavedModel that needs TensorFlow only.

    export/model.keras         the model; of several models <name>.keras each
    export/model.weights.h5    its weights
    export/saved_model/        two endpoints that give what task.predict_step returns: serve takes prepared features,
                               serve_examples takes the features of examples as task.load_examples gives them

All of it is loaded again, and compared with the model, before it gets its name.
"""

import contextlib
import gc
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.console import print_facts
from engine.data.records import Records
from engine.data.splits import named
from engine.errors import BadInput, ProgramExit
from engine.files import sync, writing
from engine.model.finish import set_up
from engine.model.objects import build_models, by_name, model_variables
from engine.model.replicas import is_seed
from engine.tracing import converted
from engine.trained.loading import NO_TENSORS, load_trained, with_lengths
from engine.trained.saved_model import Endpoint, write_saved_model
from engine.user_errors import first_line, user_errors_named

EXPORT = "export"  # In a run's directory.
# How far an output may be from the model's, relative to the largest one.
TOLERANCE, TOLERANCE_OF_MIXED_PRECISION = 1e-5, 1e-2
# Of whole numbers, such as the classes of pixels, how many may differ: rounding decides a tie.
SHARE_OF_TIES = 1e-3
# The batch that is compared is made up: so many examples, and sizes where the types say none.
EXAMPLES, UNKNOWN_SIZE = 3, 8
# What Keras's model.export writes.
SUFFIXES = {"litert": ".tflite", "onnx": ".onnx"}


def export(task: ModuleType, settings: Any, workers: Workers) -> None:
    """Writes the run's best weights to export/ in its directory: all of it or nothing. An earlier export is replaced.

    The chief does it, outside any strategy, and the others wait. task.model is then the model with those weights.

    Raises:
        BadInput: something cannot be exported, or does not give what the model gives once it is loaded again.
        CannotWrite: the disk is full, or the directory is read-only.
    """

    def write() -> None:
        with user_errors_named():  # Here, so that the other workers hear of them.
            _Export(task, settings).write()

    workers.from_chief(write)


class _Export:
    def __init__(self, task: ModuleType, settings: Any) -> None:
        self._task, self._settings = task, settings
        self._trained = load_trained(task, settings, "--export")
        self._models: dict[str, keras.Model] = by_name(self._trained.model, "model")
        self._serve = Endpoint(self._trained.predict, self._trained.features_spec)
        self._facts: dict[str, Any] = {"weights": self._trained.weights}

    def write(self) -> None:
        path, problem = self._settings.run_dir / EXPORT, None
        part, earlier = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "earlier"))
        try:
            with writing(path):
                if earlier.exists() and not path.exists():  # A process was killed between the last two lines below.
                    earlier.rename(path)
                _remove(part)
                part.mkdir()
            if hidden := ", ".join(self._trained.hidden):
                self._facts["Keras's files"] = f"left out: they cannot hold {hidden}, made without add_weight"
            else:
                for write in (self._write_models, self._write_weights):
                    write(part)
                    gc.collect()  # Frees the copies that were compared.
            self._write_saved_model(part / "saved_model")
            if self._settings.export_format:
                problem = self._write_format(part, self._settings.export_format)
            with writing(path):
                sync(*part.rglob("*"), part)
                _remove(earlier)
                if path.exists():
                    path.rename(earlier)
                part.rename(path)
        finally:
            _remove(part)
        _remove(earlier)
        print_facts(f"Exported to {path}", self._facts)
        if problem:
            raise problem

    # --- For Keras ----------------------------------------------------------------------------------------------------

    def _write_models(self, folder: Path) -> None:
        loaded = dict(self._models)
        for name, model in self._models.items():
            file = folder / f"{name}.keras"
            try:
                with writing(file):
                    model.save(file)
                loaded[name], options = _load(file)
                self._facts[file.name] = f"for keras.models.load_model{options}"
            except ProgramExit:
                raise
            except Exception as problem:  # noqa: BLE001 - A layer of the user's own may raise anything.
                file.unlink(missing_ok=True)
                self._facts[file.name] = (
                    f"left out: Keras cannot save and load this model ({first_line(problem)}): layers of your own need "
                    "@keras.saving.register_keras_serializable() and get_config"
                )
        self._compare_models(".keras", loaded)

    def _write_weights(self, folder: Path) -> None:
        set_up(self._task, self._settings)  # So that its layers have the same names.
        like_features = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([EXAMPLES, *leaf.shape[1:]], leaf.dtype), self._trained.features_spec
        )
        loaded = by_name(build_models(self._task.create_model(), with_lengths(like_features, self._settings)), "model")
        for name, model in self._models.items():
            file = folder / f"{name}.weights.h5"
            with _failing_as(f"{file.name} cannot be written and loaded"):
                with writing(file):
                    model.save_weights(file)
                loaded[name].load_weights(file)
            self._facts[file.name] = "for load_weights, and --init-from"
        self._compare_models(".weights.h5", loaded)

    def _compare_models(self, kind: str, loaded: dict[str, keras.Model]) -> None:
        """Raises BadInput unless models that were loaded have the weights, and give the outputs, of those in place."""
        for name, model in self._models.items():
            values, found = (
                [value.numpy() for path, value in model_variables(each).items() if not is_seed(path)]
                for each in (model, loaded[name])
            )
            if len(values) != len(found) or not all(map(np.array_equal, values, found)):
                raise BadInput(
                    f"--export: {name}{kind} has other weights than the model once it is loaded: let the layers of "
                    "your own keep weights with add_weight, and every argument in get_config"
                )
        predict = tf.function(converted(self._task.predict_step), autograph=False)
        self._task.model = loaded if isinstance(self._trained.model, dict) else loaded["model"]
        try:
            files = ", ".join(f"{name}{kind}" for name in self._models)
            self._compare(files, self._serve, Endpoint(predict, self._trained.features_spec))
        finally:
            self._task.model = self._trained.model

    def _write_format(self, folder: Path, kind: str) -> BadInput | None:
        """Returns why it cannot be written, as the other files are good all the same."""
        for name, model in self._models.items():
            file = folder / f"{name}{SUFFIXES[kind]}"
            # Of several models, only Keras may know what each one takes.
            signature = [self._trained.features_spec] if len(self._models) == 1 else None
            try:
                model.export(file, format=kind, input_signature=signature, verbose=False)
                if kind == "onnx":  # tf2onnx writes operations that ONNX does not have, and only logs them.
                    importlib.import_module("onnx").checker.check_model(str(file))
            except Exception as problem:  # noqa: BLE001 - Converters raise anything.
                file.unlink(missing_ok=True)
                self._facts[file.name] = "left out"
                return BadInput(f"--export-format {kind} failed ({first_line(problem)}); the other files are written")
            self._facts[file.name] = "written by Keras, of the model alone; not compared"
        return None

    # --- For TensorFlow -----------------------------------------------------------------------------------------------

    def _write_saved_model(self, folder: Path) -> None:
        trained, first = self._trained, tf.constant(0, tf.int64)
        endpoints = {"serve": self._serve}
        if trained.examples_spec is None:
            self._facts["serve_examples"] = f"left out: {NO_TENSORS}"
        else:
            endpoints["serve_examples"] = Endpoint(
                lambda features: trained.predict_examples(features, first), trained.examples_spec
            )
        with _failing_as("the SavedModel cannot be written and loaded"):
            loaded, left_out = write_saved_model(folder, endpoints)
        self._facts |= {name: f"left out: {reason}" for name, reason in left_out.items()}
        for name, endpoint in loaded.items():
            self._facts[name] = f"endpoint of {folder.name}: {endpoint}"
            self._compare(name, endpoints[name], endpoint)

    # --- Comparison ---------------------------------------------------------------------------------------------------

    def _compare(self, what: str, endpoint: Endpoint, loaded: Endpoint) -> None:
        """Raises BadInput unless both give the same outputs for a few examples."""
        for features in self._example_features(endpoint.spec):
            try:
                expected = endpoint.function(features)
                break
            except tf.errors.OpError as problem:
                reason = first_line(problem)
        else:
            compared = f"not compared, because examples of the data, if there are any, and made-up ones fail ({reason})"
            self._facts[what] = f"{self._facts[what]}; {compared}" if what in self._facts else compared
            return
        found = loaded.function(features)
        tolerance = TOLERANCE if self._settings.precision == "float32" else TOLERANCE_OF_MIXED_PRECISION
        for name, output in expected.items():
            if not _are_close(output, found[name], tolerance):
                distance = f"by more than {tolerance:g} of its largest value"
                if not output.dtype.is_floating:
                    distance = f"in more than {SHARE_OF_TIES:g} of its values"
                raise BadInput(
                    f"--export: {what}, once loaded, gives another {name!r} than the model, {distance}: let the layers "
                    "of your own keep what they use with add_weight and get_config"
                )

    def _example_features(self, spec: Any) -> Iterator[Any]:
        """Yields the features of a few examples: made up, and of the data; these first if they have texts."""
        leaves = tf.nest.flatten(spec)
        have_texts = any(leaf.dtype == tf.string for leaf in leaves)  # Which may be records.
        if not have_texts:
            yield tf.nest.map_structure(_made_up, spec)
        if spec is self._trained.examples_spec:
            count = EXAMPLES if all(leaf.shape[1:].is_fully_defined() for leaf in leaves) else 1
            with contextlib.suppress(Exception):  # The data need not be on this machine.
                found = (named(split, self._task.load_examples(split)) for split in ("test", "validation", "train"))
                examples = next(each for sets in found for each in sets.values())
                examples = examples.dataset() if isinstance(examples, Records) else examples
                features = examples.map(lambda *example: example[0])  # Of no tuple, the whole example.
                yield next(iter(features.batch(count)))
        if have_texts:
            yield tf.nest.map_structure(_made_up, spec)


def _load(file: Path) -> tuple[keras.Model, str]:
    """Returns the model in a file, and what load_model needs besides the file."""
    with contextlib.suppress(Exception):
        return keras.models.load_model(file, compile=False), ""
    return keras.models.load_model(file, compile=False, safe_mode=False), "(..., safe_mode=False)"


def _made_up(leaf: tf.TensorSpec) -> tf.Tensor:
    """Returns a few rows for a type: numbers from 0 to 1, and empty texts."""
    sizes = [UNKNOWN_SIZE if size is None else size for size in leaf.shape[1:]] if leaf.shape.rank else []
    if leaf.dtype == tf.string:
        return tf.fill([EXAMPLES, *sizes], "")
    values = np.random.default_rng(0).uniform(0.0, 1.0, [EXAMPLES, *sizes])
    return tf.cast(tf.constant(values if leaf.dtype.is_floating else values.round()), leaf.dtype)


def _are_close(expected: tf.Tensor, found: tf.Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.dtype.is_floating:
        return np.count_nonzero(expected.numpy() != found.numpy()) <= SHARE_OF_TIES * expected.numpy().size
    expected, found = (tf.cast(each, tf.float64).numpy() for each in (expected, found))
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return np.allclose(found, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turns any error that is no ending of its own into BadInput, which says `what` and why."""
    try:
        yield
    except ProgramExit:
        raise
    except Exception as problem:
        raise BadInput(f"--export: {what} ({first_line(problem)})") from problem


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
