"""Predictions of a trained model: from examples to arrays, and to a file."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput
from engine.files import write_whole
from engine.trained.inputs import Batch, batches_in_memory, read_batches
from engine.trained.loading import NO_TENSORS, Trained
from engine.user_errors import first_line, where_raised

Predictions = dict[str, np.ndarray]


class Predictor:
    """Gives predictions for examples as task.load_examples gives them; task.prepare_example runs as in an evaluation.

    Attributes:
        model: the Keras model with the run's best weights, or a dict of models by name.
        settings: the run's.
    """

    def __init__(self, trained: Trained) -> None:
        """Raises BadInput if the task's examples are no tensors."""
        if trained.predict_examples is None:
            raise BadInput(f"predict.py: {NO_TENSORS}: give predict_step its features")
        self._trained = trained
        self._spec = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), trained.examples_spec
        )
        self.model, self.settings = trained.model, trained.settings

    def __call__(self, examples: Any, batch_size: int = 128) -> Predictions:
        """Returns what task.predict_step returns, [n, ...] each.

        Args:
            examples: the features of n examples, an array [n, ...] or a dict of arrays.
            batch_size: how many to take at a time.

        Raises:
            BadInput: they are no such examples, or one of them cannot be prepared.
        """
        return self._predict_batches(batches_in_memory(examples, self._spec, batch_size))[1]

    def predict_file(self, path: Path, batch_size: int) -> tuple[list[str], Predictions]:
        """Returns the names and the predictions of the examples in a file or folder. Raises BadInput."""
        return self._predict_batches(read_batches(path, self._spec, batch_size))

    def check_output(self, path: Path) -> None:
        """Raises BadInput if a file of this kind cannot hold what task.predict_step returns."""
        for name, output in self._trained.predict.get_concrete_function().structured_outputs.items():
            if name in TITLES:
                raise BadInput(f"--output {path}: task.predict_step returns {name!r}, which names the rows: rename it")
            if path.suffix == ".csv" and output.shape.rank not in (1, 2):
                raise BadInput(f"--output {path}: {name!r} is of shape {output.shape}: give an .npz file")

    def _predict_batches(self, batches: Iterable[Batch]) -> tuple[list[str], Predictions]:
        names: list[str] = []
        parts: list[Predictions] = []
        shown = rich.progress.Progress(*COLUMNS, console=console, transient=True, disable=not console.is_terminal)
        with shown:
            bar = shown.add_task("predictions", total=None)
            for batch_names, features in batches:
                parts.append(self._predict_batch(batch_names, features, first=len(names)))
                names += batch_names
                shown.update(bar, completed=len(names))
        if not parts:
            raise BadInput("there are no examples to predict")
        for name in parts[0]:
            if len(shapes := {part[name].shape[1:] for part in parts}) > 1:
                raise BadInput(
                    f"task.predict_step returned {name!r} of different sizes ({sorted(shapes)}): return one size, or "
                    "predict the examples of each size apart"
                )
        return names, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _predict_batch(self, names: list[str], features: Any, first: int) -> Predictions:
        predict = self._trained.predict_examples
        try:
            outputs = predict(features, tf.constant(first, tf.int64))
        except FAILURES:
            for number, name in enumerate(names):
                one = tf.nest.map_structure(lambda part, number=number: part[number : number + 1], features)
                try:
                    predict(one, tf.constant(first + number, tf.int64))
                except FAILURES as problem:
                    reason = f"{where_raised(problem)}: {first_line(problem)}"
                    raise BadInput(f"{name}: {reason} (labels are made up when predicting)") from problem
            raise
        return {name: _as_array(output) for name, output in outputs.items()}


# The second one where TensorFlow's message quotes bytes that are no text.
FAILURES = (tf.errors.OpError, UnicodeDecodeError)
# Of the first column of a .csv file.
TITLES = ROW, FILE = "row", "file"
COLUMNS = (rich.progress.TextColumn("{task.completed:,} {task.description}"), rich.progress.TimeElapsedColumn())


def write_predictions(path: Path, title: str, names: list[str], predictions: Predictions) -> None:
    """Writes predictions completely or not at all: an .npz file by the outputs' names, or a .csv file, a row for each.

    The first column of a .csv file is the row's number in the input, counted from 0, or the file's name: `title` says
    which, ROW or FILE. An output [n, k] has the columns "name/0", "name/1" and so on.

    Raises:
        CannotWrite: the disk is full, or the folder is read-only.
    """
    if path.suffix == ".npz":
        write_whole(path, lambda temporary: _write_npz(temporary, predictions))
    else:
        write_whole(path, lambda temporary: _write_csv(temporary, title, names, predictions))


def report_infinite(names: list[str], predictions: Predictions) -> None:
    """Prints which outputs are not finite, as those of an example that holds NaN."""
    for name, values in predictions.items():
        if values.dtype.kind == "f":
            places = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
            if len(places):
                console.print(f"{name!r} is not finite for {len(places):,} of the examples, {names[places[0]]} first")


def _write_npz(path: Path, predictions: Predictions) -> None:
    with path.open("wb") as file:  # A name of another ending would be changed.
        np.savez(file, **predictions)


def _write_csv(path: Path, title: str, names: list[str], predictions: Predictions) -> None:
    columns = {title: [name.removeprefix("row ") for name in names] if title == ROW else names}
    for name, values in predictions.items():
        if values.ndim == 1:
            columns[name] = _texts(values)
        else:
            columns |= {f"{name}/{number}": _texts(values[:, number]) for number in range(values.shape[1])}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _texts(values: np.ndarray) -> list[str]:
    return [str(each) for each in values]  # Of a number, the fewest digits that stand for it alone.


def _as_array(output: tf.Tensor) -> np.ndarray:
    """Returns an output as an array that NumPy's files can hold: texts and float32 where it knows no such type."""
    if output.dtype == tf.string:
        return np.vectorize(lambda each: each.decode(errors="replace"), otypes=[str])(output.numpy())
    return tf.cast(output, tf.float32).numpy() if output.dtype == tf.bfloat16 else output.numpy()
