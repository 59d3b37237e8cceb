"""Builds and reads the metrics of a task, and names their results.

A result is a number, an array, or a dictionary of these. Each number has its own name: "validation/loss",
"validation/confusion/1/2" in an array, "validation/scores/recall" in a dictionary.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from engine.model.step import step_on
from engine.model.variables import given_back, inner_variable

Metrics = dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric
LARGEST_RESULT = 10_000  # Each number is a column of metrics.csv.
LARGEST_SHOWN = 32  # TensorBoard does not show larger arrays.


class PythonMetric(keras.metrics.Metric):
    """A number that a function of Python computes after the steps of a pass, such as the score of a game.

    The weights are then those that are evaluated. On several workers all of them compute it, and the chief's counts.
    """

    def __init__(self, compute: Callable[[], float], **options: Any) -> None:
        super().__init__(**options)
        self.compute = compute

    def result(self) -> float:
        """Returns the number. Raises BadInput if the function returns anything else."""
        value = self.compute()
        try:
            return float(value)
        except (TypeError, ValueError):
            raise BadInput(
                f"the function of PythonMetric {self.name!r} returned {value!r:.100}: return one number"
            ) from None

    def reset_state(self) -> None: ...


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Lets metrics that are made inside, or make variables, count in float64.

    Keras counts in float32, in which a sum of millions of examples drifts by percents.
    """
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def build_metrics(
    task: Any, strategy: tf.distribute.Strategy, batch_specs: Mapping[str, Any], made: Iterable[tf.Variable]
) -> None:
    """Makes the variables of metrics that make them with their first update, such as F1Score.

    In a compiled step this fails on several replicas. So the step of such a split runs once before, on zeros, and its
    changes to the variables that the hooks have `made` are undone. `batch_specs` are as in `TaskObjects.finish`.
    """
    for split, batch_spec in {split_of(name): spec for name, spec in batch_specs.items()}.items():
        # `_built`, because some metrics, such as R2Score, have one of their variables from the start.
        unbuilt = [
            metric
            for metric in task.metrics[split].values()
            if not (metric.variables and getattr(metric, "_built", True)) and not isinstance(metric, PythonMetric)
        ]
        if not unbuilt:
            continue
        step = task.train_step if split == "train" else functools.partial(task.evaluation_step, split)

        def run(batch: Any, step: Callable[[Any], Any] = step) -> None:
            with step_on(batch):
                step(batch)

        with given_back(strategy, made), contextlib.ExitStack() as patches:
            for metric in unbuilt:
                update = in_float64()(metric.update_state)
                patches.enter_context(mock.patch.object(metric, "update_state", update))
            strategy.run(run, args=(zeros(batch_spec),))
        for metric in task.metrics[split].values():
            metric.reset_state()


def zeros(spec: Any) -> Any:
    """Returns tensors of zeros of the shapes and dtypes of an element spec."""
    return tf.nest.map_structure(lambda leaf: tf.zeros(leaf.shape, leaf.dtype), spec)


def split_of(name: str) -> str:
    """Returns the split of a dataset: "validation/easy" -> "validation"."""
    return name.split("/")[0]


def metric_results(metrics: Metrics, name: str, *, of_steps: bool = False) -> dict[str, float]:
    """Returns the results of the metrics of a dataset's split, each number as "<name>/<metric>".

    With `of_steps` it skips the results that Python computes. Raises BadInput if a result is not a number, an array or
    a dictionary of these, or has too many numbers.
    """
    of_split = metrics[split_of(name)]
    return {
        f"{name}/{path}": number
        for metric_name, path, _, number in _numbers(metrics, split_of(name), of_steps)
        if not of_steps or not isinstance(of_split[metric_name], PythonMetric)
    }


def _numbers(metrics: Metrics, split: str, of_steps: bool) -> Iterator[tuple[str, str, str, float]]:
    """Yields the metric, the number's name, its array's name (the same outside arrays), and the number itself.

    With `of_steps`, NaN stands for a number that Python computes.
    """
    for metric_name, metric in metrics[split].items():
        subject = f"task.create_metrics({split!r}) returned {metric_name!r}, whose"
        is_left_out = of_steps and isinstance(metric, PythonMetric)
        arrays = list(_arrays(metric_name, math.nan if is_left_out else metric.result(), subject))
        if (size := sum(array.size for _, array in arrays)) > LARGEST_RESULT:
            raise BadInput(
                f"{subject} result has {size:,} numbers: at most {LARGEST_RESULT:,} can be columns of metrics.csv; "
                "average it, or draw it in task.on_report"
            )
        for name, array in arrays:
            for index in np.ndindex(array.shape):
                yield metric_name, "/".join([name, *map(str, index)]), name, float(array[index])


def _arrays(name: str, result: Any, subject: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a result, which may be of shape [], under their names."""
    if isinstance(result, Mapping):
        for key, part in result.items():
            yield from _arrays(f"{name}/{key}", part, subject)
        return
    try:
        result = inner_variable(result)
        array = np.asarray(tf.convert_to_tensor(result) if isinstance(result, tf.Variable) else result)
        if array.dtype.kind in "OSU":
            raise ValueError(f"of type {type(result).__name__}")
        yield name, array.astype(np.float64)
    except (TypeError, ValueError) as problem:
        raise BadInput(
            f"{subject} result cannot be read ({problem}): it must be a number, an array of numbers, or a dict of these"
        ) from problem


def drifting(metrics: Metrics) -> list[str]:
    """Returns the names of the metrics that add up in less than 64 bits: "iou (int32)"."""
    found = {
        f"{name} ({dtype.name})": None
        for of_split in metrics.values()
        for name, metric in of_split.items()
        for variable in metric.variables
        if (dtype := inner_variable(variable).dtype).size < 8 and (dtype.is_floating or dtype.is_integer)
    }
    return list(found)


class ResultNames:
    """Names of all scalar metric results, per dataset.

    Attributes:
        datasets: "train", "validation" or "validation/<name>", ...
        metrics: number -> the metric in task.metrics, and the name there: "f1", or "scores/recall" in a dictionary.
        arrays: number in an array -> the array: "validation/f1/3" -> "validation/f1".
    """

    def __init__(self, metrics: Metrics, datasets: Iterable[str]) -> None:
        """Raises BadInput for results that `metric_results` rejects, or if two numbers have one name."""
        self.datasets = tuple(datasets)
        self.metrics: dict[str, tuple[keras.metrics.Metric, str]] = {}
        self.arrays: dict[str, str] = {}
        for name in self.datasets:
            split = split_of(name)
            for metric_name, path, array, _ in _numbers(metrics, split, of_steps=True):
                number = f"{name}/{path}"
                if number in self.metrics:
                    results = f"task.create_metrics({split!r}) returned two results called {path}"
                    raise BadInput(f"{results}: rename the metric {metric_name!r}")
                self.metrics[number] = metrics[split][metric_name], array
                if path != array:
                    self.arrays[number] = f"{name}/{array}"

    def to_monitor(self) -> list[str]:
        """Returns the results that --monitor may name: a number, or the first and the last element of an array."""
        elements: dict[str, list[str]] = {}
        for number in self.metrics:
            if split_of(number) in ("train", "validation"):
                elements.setdefault(self.arrays.get(number, number), []).append(number)
        return [" … ".join(dict.fromkeys([numbers[0], numbers[-1]])) for numbers in elements.values()]

    def lines(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values for the console's lines and for curves: all but the elements of arrays."""
        return {name: value for name, value in values.items() if name not in self.arrays}

    def scalars(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values for TensorBoard: all but the elements of large arrays."""
        sizes = collections.Counter(self.arrays.values())
        return {name: value for name, value in values.items() if sizes[self.arrays.get(name, "")] <= LARGEST_SHOWN}

    def dataset(self, name: str) -> str:
        """Returns the dataset of a number: "validation/easy/loss" -> "validation/easy"; "" if it has none."""
        return next((dataset for dataset in self.datasets if name.startswith(f"{dataset}/")), "")

    def metric(self, name: str) -> str:
        """Returns a number's name without the dataset: "validation/easy/loss" -> "loss"."""
        dataset = self.dataset(name)
        return name.removeprefix(f"{dataset}/") if dataset else name.rsplit("/", 1)[-1]
