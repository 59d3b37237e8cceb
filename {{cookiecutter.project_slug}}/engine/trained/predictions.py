"""Predictions of a trained model: from examples to arrays, and to a file."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
import tensorflow as tf

from engine.console import console
from engine.data.element_spec import leaf_text, leaves
from engine.errors import BadInput, first_line, where_raised
from engine.files import write_atomically
from engine.model.rejections import check_outputs
from engine.run.endpoints import NO_TENSORS
from engine.trained.loading import Trained

Arrays = dict[str, np.ndarray]  # Features or outputs, by name.
Name = int | str  # The name of an example: its number, for instance, or its file.
Examples = Iterable[tuple[Name, Any]]  # Pairs of a name and features.


class Predictor:
    """Predicts examples as task.load_examples returns them; task.prepare_example runs as in an evaluation.

    `model` is the Keras model with the run's best weights, or a dict of models by name; `settings` are the run's.
    """

    def __init__(self, trained: Trained) -> None:
        """Raises BadInput if the features of the task's examples are ragged or sparse."""
        if trained.serve_examples is None:
            raise BadInput(NO_TENSORS)
        self._serve, self._outputs = trained.serve_examples, trained.outputs
        self.model, self.settings = trained.model, trained.settings

    def __call__(self, examples: Any, batch_size: int = 128) -> Arrays:
        """Returns the outputs of task.predict_step, [n, ...] each, for features [n, ...]: an array or a dict of arrays.

        Raises BadInput if these are not examples of the run, or one cannot be prepared.
        """
        arrays = _as_arrays(examples)
        lengths = {array.shape[:1] for array in arrays.values()}
        if len(lengths) != 1 or lengths == {()}:
            raise BadInput(f"{', '.join(arrays)} must be arrays [n, ...] of the same number n of examples")
        ((length,),) = lengths
        rows = ({name: array[number] for name, array in arrays.items()} for number in range(length))
        return self.predict(enumerate(rows), batch_size)[1]

    def predict(self, examples: Examples, batch_size: int, source: str = "the features") -> tuple[list[Name], Arrays]:
        """Returns the names and the outputs of examples from a `source`.

        Raises BadInput, which names the first one that is not an example of the run, or cannot be prepared.
        """
        if not isinstance(examples, Iterable):
            raise BadInput(f"task.read_inputs returned {type(examples).__name__}: yield pairs of a name and features")
        names: list[Name] = []
        parts: list[Arrays] = []
        options: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        for batch_names, arrays in rich.progress.track(_batches(examples, batch_size), "predicting", **options):
            features = _as_tensors(batch_names, arrays, self._serve.spec)
            parts.append(self._predict_batch(batch_names, features, len(names)))
            names += batch_names
        if not parts:
            raise BadInput(f"there are no examples to predict in {source}")
        for name in parts[0]:
            if len(shapes := {part[name].shape[1:] for part in parts}) > 1:
                raise BadInput(f"task.predict_step returned {name!r} of several sizes ({sorted(shapes)}): return one")
        return names, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _predict_batch(self, names: Sequence[Name], features: Any, first: int) -> Arrays:
        try:
            outputs = self._serve.function(features, first)
        except (tf.errors.OpError, UnicodeDecodeError) as problem:  # The second one: TensorFlow quotes bytes, not text.
            if len(names) == 1:
                place, reason = where_raised(problem), first_line(problem)
                raise BadInput(f"example {names[0]}: {place}: {reason} (its labels are placeholders)") from problem
            for number, name in enumerate(names):  # One of them raises an exception with its name.
                example = tf.nest.map_structure(lambda part, number=number: part[number : number + 1], features)
                self._predict_batch([name], example, first + number)
            raise
        check_outputs(outputs, len(names))
        return {name: _from_tensor(output) for name, output in outputs.items()}

    def choose_output(self, *paths: Path) -> Path:
        """Returns the first path whose kind of file can contain the outputs of task.predict_step.

        Raises BadInput if none can.
        """
        problem = ""
        for name, output in self._outputs.items():
            if name in ("example", "file", "allow_pickle"):  # The names of the examples, and parameters of np.savez.
                raise BadInput(f"task.predict_step returns {name!r}, which is a reserved name: rename it")
            outer, _, number = name.rpartition("/")
            if output.shape.rank not in (1, 2):
                problem = f"{name!r} is of shape {output.shape}"
            elif outer in self._outputs and number.isdecimal():
                problem = f"{name!r} may be a column of {outer!r} too"
        for path in paths:
            if path.suffix == ".npz" or not problem:
                return path
        raise BadInput(f"--output {paths[0]}: {problem}: pass an .npz file")


def _batches(examples: Examples, size: int) -> Iterator[tuple[Sequence[Name], Arrays]]:
    """Yields batches of examples of the same shapes that follow each other."""

    def row(example: tuple[Name, Any]) -> tuple[Name, Arrays]:
        if not isinstance(example, tuple) or len(example) != 2:
            raise BadInput(f"task.read_inputs yields {type(example).__name__}: yield pairs of a name and features")
        return example[0], _as_arrays(example[1])

    rows = map(row, examples)
    for _, group in itertools.groupby(rows, lambda row: {name: array.shape for name, array in row[1].items()}):
        while batch := list(itertools.islice(group, size)):
            names, features = zip(*batch, strict=True)
            yield names, {name: np.stack([arrays[name] for arrays in features]) for name in features[0]}


def _as_arrays(features: Any) -> Arrays:
    """Returns features as arrays; bytes become objects, because NumPy's own type drops zeros at their end."""
    arrays = {}
    for name, values in leaves(features).items():
        has_bytes = any(isinstance(part, bytes) for part in (values if isinstance(values, list | tuple) else [values]))
        try:
            arrays[name] = np.asarray(values, dtype=object if has_bytes else None)
        except ValueError as problem:  # They are lists of several lengths.
            raise BadInput(f"features must be arrays: {first_line(problem)}") from problem
    return arrays


def _as_tensors(names: Sequence[Name], arrays: Arrays, spec: Any) -> Any:
    """Returns features as tensors of an element spec. Raises BadInput, naming an example, if they do not fit it."""
    specs, tensors = leaves(spec), []
    if arrays.keys() != specs.keys():
        raise BadInput(f"example {names[0]} has the features {', '.join(arrays)} and must have {', '.join(specs)}")
    for name, leaf in specs.items():
        array, dtype = arrays[name], leaf.dtype
        # A cast would drop a part of a date, or of a complex number. "V" is the kind of bfloat16.
        kinds = "OSU" if dtype == tf.string else "biufVc" if dtype.is_complex else "biufV"
        if array.dtype.kind not in kinds or not leaf.shape.is_compatible_with(array.shape):
            given, wanted = f"{array.dtype}{list(array.shape[1:])}", leaf_text(tf.TensorSpec(leaf.shape[1:], dtype))
            raise BadInput(f"example {names[0]}: {name} is {given} and must be {wanted}, as in task.load_examples")
        with np.errstate(all="ignore"):
            values = array if dtype == tf.string else array.astype(dtype.as_numpy_dtype)
        if not dtype.is_floating and (changed := values != array).any():
            row = np.flatnonzero(changed.reshape(len(array), -1).any(axis=1))[0]
            raise BadInput(f"example {names[row]}: {name} has a value that does not fit into {dtype.name}")
        tensors.append(tf.constant(values))
    return tf.nest.pack_sequence_as(spec, tensors)


def _from_tensor(output: tf.Tensor) -> np.ndarray:
    """Returns an output as an array that NumPy's files can contain: text instead of bytes, float32 for bfloat16."""
    if output.dtype == tf.string:
        return np.vectorize(lambda text: text.decode(errors="replace"), otypes=[str])(output.numpy())
    return tf.cast(output, tf.float32).numpy() if output.dtype == tf.bfloat16 else output.numpy()


def write_predictions(path: Path, names: Sequence[Name], predictions: Arrays) -> None:
    """Writes an .npz file with an array for each output, or a .csv file with a row for each example, and prints that.

    "example" contains the names. An output [n, k] has the columns "name/0", "name/1" and so on. Raises CannotWrite.
    """

    def write(temporary: Path) -> None:
        if path.suffix == ".npz":
            # NumPy would round larger numbers, and store others, such as paths, as Python objects.
            are_numbers = all(isinstance(name, int | np.integer) and abs(int(name)) < 2**63 for name in names)
            arrays: dict[str, Any] = {"example": [*map(int if are_numbers else str, names)], **predictions}
            with temporary.open("wb") as file:  # np.savez would append .npz to a path.
                np.savez(file, **arrays)
            return
        columns: dict[str, Iterable[Any]] = {"example": names}
        for name, values in predictions.items():
            numbered = {f"{name}/{number}": column for number, column in enumerate(values.T)}
            columns |= numbered if values.ndim == 2 else {name: values}
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))

    write_atomically(path, write, "run the same command again, or pass another --output")
    for name, values in predictions.items():
        is_finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(len(values), bool)
        places = np.flatnonzero(~is_finite.reshape(len(values), -1).all(axis=1))
        if len(places):
            console.print(f"{name!r} is not finite for {len(places):,} examples, example {names[places[0]]} first")
    console.print(f"{len(names):,} predictions ({', '.join(predictions)}) in {path}")
