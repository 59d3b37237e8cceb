"""The metrics of a task: built, read, and the names of their results.

A result is a number, an array, or a dictionary of these. Each number has a name of its own: "validation/loss",
"validation/confusion/1/2" in an array, "validation/scores/recall" in a dictionary; with several datasets
"validation/<dataset>/loss".
"""

import collections
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from engine.model.variables import inner_variable
from engine.protocols import Metrics, Task

# Each number is a column of metrics.csv.
LARGEST_RESULT = 10_000
# TensorBoard does not show larger arrays.
LARGEST_SHOWN = 32


def build_metrics(
    task: Task, strategy: tf.distribute.Strategy, batch_specs: Mapping[str, Any], recorded: Iterable[weakref.ref]
) -> None:
    """Makes the variables of metrics that make them with their first update, such as F1Score.

    In a compiled step that fails on several replicas. So the step of such a split runs once before, on zeros, and its
    changes to the `recorded` variables of the hooks are undone. `batch_specs`: see `finish_objects`.
    """
    for split, batch_spec in {split_of(name): spec for name, spec in batch_specs.items()}.items():
        # Keras sets `_built`, because some metrics, such as R2Score, have one of their variables from the start.
        if all(metric.variables and getattr(metric, "_built", True) for metric in task.metrics[split].values()):
            continue
        variables = [variable for each in list(recorded) if (variable := each()) is not None]
        local = [each for variable in variables for each in strategy.experimental_local_results(variable)]
        before = [tf.identity(each) for each in local]
        step = task.train_step if split == "train" else functools.partial(task.evaluation_step, split)
        zeros = tf.nest.map_structure(lambda leaf: tf.zeros(leaf.shape, leaf.dtype), batch_spec)
        strategy.run(step, args=(zeros,))
        for each, value in zip(local, before, strict=True):
            each.assign(value)
        for metric in task.metrics[split].values():
            metric.reset_state()


def split_of(name: str) -> str:
    """Returns the split of a dataset: "validation/easy" -> "validation"."""
    return name.split("/")[0]


def metric_results(metrics: Metrics, name: str) -> dict[str, float]:
    """Returns the results of the metrics of a dataset's split, each number as "<name>/<metric>".

    Raises:
        BadInput: a result is not a number, an array or a dictionary of these, or has too many numbers.
    """
    return {f"{name}/{path}": number for _, path, _, number in _numbers(metrics, split_of(name))}


def _numbers(metrics: Metrics, split: str) -> Iterator[tuple[str, str, str, float]]:
    """Yields each number of the results of a split's metrics: the metric, its name, its array's name, and itself.

    The two names are the same for a number outside an array.
    """
    for metric_name, metric in metrics[split].items():
        arrays = list(_arrays(metric_name, metric.result(), split, metric_name))
        if (size := sum(array.size for _, array in arrays)) > LARGEST_RESULT:
            raise BadInput(
                f"task.create_metrics({split!r}) returned {metric_name!r}, whose result has {size:,} numbers: each is "
                f"a column of metrics.csv, and {LARGEST_RESULT:,} are the most; average it, or draw it in "
                "task.on_report"
            )
        for name, array in arrays:
            for index in np.ndindex(array.shape):
                yield metric_name, "/".join([name, *map(str, index)]), name, float(array[index])


def _arrays(name: str, result: Any, split: str, metric_name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a result, which may be of shape [], under their names."""
    if isinstance(result, Mapping):
        for key, each in result.items():
            yield from _arrays(f"{name}/{key}", each, split, metric_name)
        return
    if isinstance(result, keras.Variable | tf.Variable):
        result = _over_replicas(inner_variable(result), split, metric_name)
    try:
        array = np.asarray(result)
        if array.dtype.kind in "OSU":
            raise ValueError(f"of type {type(result).__name__}")
        yield name, array.astype(np.float64)
    except (TypeError, ValueError) as problem:
        raise BadInput(
            f"task.create_metrics({split!r}) returned {metric_name!r}, whose result cannot be read ({problem}): it "
            "must be a number, an array of numbers, or a dict of these"
        ) from problem


def _over_replicas(variable: tf.Variable, split: str, metric: str) -> tf.Tensor:
    """Returns a metric's variable as one value for all replicas."""
    if isinstance(variable, tf.distribute.DistributedValues) and variable.aggregation == tf.VariableAggregation.NONE:
        raise BadInput(
            f"task.create_metrics({split!r}) returned {metric!r}, whose variable {variable.name} does not say how the "
            "replicas' values are combined: make it with self.add_variable(shape=..., initializer=...), which sums"
        )
    return tf.convert_to_tensor(variable)


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
            for metric_name, path, array, _ in _numbers(metrics, split):
                number = f"{name}/{path}"
                if number in self.metrics:
                    raise BadInput(
                        f"task.create_metrics({split!r}) returned two results called {path}: rename the metric "
                        f"{metric_name!r}"
                    )
                self.metrics[number] = metrics[split][metric_name], array
                if path != array:
                    self.arrays[number] = f"{name}/{array}"

    def to_monitor(self) -> list[str]:
        """Returns the results that --monitor may name: a number, or the first and the last element of an array."""
        elements: dict[str, list[str]] = {}
        for number in self.metrics:
            if split_of(number) in ("train", "validation"):
                elements.setdefault(self.arrays.get(number, number), []).append(number)
        return [" … ".join(dict.fromkeys([each[0], each[-1]])) for each in elements.values()]

    def lines(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values for the console's lines and for curves: all but the elements of arrays."""
        return {name: value for name, value in values.items() if name not in self.arrays}

    def scalars(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values for TensorBoard: all but the elements of large arrays."""
        sizes = collections.Counter(self.arrays.values())
        return {name: value for name, value in values.items() if sizes[self.arrays.get(name, "")] <= LARGEST_SHOWN}

    def dataset(self, name: str) -> str:
        """Returns the dataset of a number: "validation/easy/loss" -> "validation/easy"; "" if it has none."""
        return next((each for each in self.datasets if name.startswith(f"{each}/")), "")

    def metric(self, name: str) -> str:
        """Returns a number's name without the dataset: "validation/easy/loss" -> "loss"."""
        dataset = self.dataset(name)
        return name.removeprefix(f"{dataset}/") if dataset else name.rsplit("/", 1)[-1]
