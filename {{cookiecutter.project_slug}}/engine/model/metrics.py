"""The metrics of a task: built, read, and the names of their results.

A result is one number, an array, or a dictionary of these. Each number has a name of its own: "validation/loss", an
array's "validation/confusion/1/2", a dictionary's "validation/scores/recall"; of several sets
"validation/<set>/loss".
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from engine.model.objects import Metrics, inner_variable, zeros

# Each number is a column of metrics.csv.
LARGEST_RESULT = 10_000
# An array of more numbers is not shown in TensorBoard.
LARGEST_SHOWN = 32


def build_metrics(
    task: ModuleType, strategy: tf.distribute.Strategy, batch_specs: Mapping[str, Any], made: Iterable[weakref.ref]
) -> None:
    """Makes the variables of metrics that would make them with their first update, such as F1Score.

    In a compiled step that fails on several replicas. So such a split's step runs once before, on zeros, and what it
    did to the variables that the hooks have `made` is undone. `batch_specs`: see `finish_objects`.
    """
    steps = {"train": task.train_step, "validation": task.validation_step, "test": task.test_step}
    for split, batch_spec in {split_of(name): spec for name, spec in batch_specs.items()}.items():
        # Keras notes it as `_built`, because some, such as R2Score, have one of their variables from the start.
        if all(metric.variables and getattr(metric, "_built", True) for metric in task.metrics[split].values()):
            continue
        changed = [variable for each in list(made) if (variable := each()) is not None]
        local = [each for variable in changed for each in strategy.experimental_local_results(variable)]
        before = [tf.identity(each) for each in local]
        strategy.run(steps[split], args=(zeros(batch_spec),))
        for each, value in zip(local, before, strict=True):
            each.assign(value)
        for metric in task.metrics[split].values():
            metric.reset_state()


def split_of(name: str) -> str:
    """Returns the split of a set: "validation/easy" -> "validation"."""
    return name.split("/")[0]


def metric_results(metrics: Metrics, name: str) -> dict[str, float]:
    """Returns the results of the metrics of a set's split, each number as "<name>/<metric>".

    Raises:
        BadInput: a result is no number, array or dictionary of these, or has too many of them.
    """
    return {f"{name}/{path}": number for _, path, _, number in _numbers(metrics, split_of(name))}


def _numbers(metrics: Metrics, split: str) -> Iterator[tuple[str, str, str, float]]:
    """Yields each number of the results of a split's metrics: the metric, its name, that of its array, and itself.

    The last two names are the same if it is in no array.
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
            f"task.create_metrics({split!r}) returned {metric_name!r}, whose result cannot be read ({problem}): it has "
            "to be a number, an array of numbers, or a dict of these"
        ) from problem


def _over_replicas(variable: tf.Variable, split: str, metric: str) -> tf.Tensor:
    """Returns what the replicas' values of a metric's variable come to together."""
    if isinstance(variable, tf.distribute.DistributedValues) and variable.aggregation == tf.VariableAggregation.NONE:
        raise BadInput(
            f"task.create_metrics({split!r}) returned {metric!r}, whose variable {variable.name} does not say what the "
            "replicas' values come to together: make it with self.add_variable(shape=..., initializer=...), which sums"
        )
    return tf.convert_to_tensor(variable)


class ResultNames:
    """The names of the numbers that the metrics of some sets come to.

    Attributes:
        sets: those of the sets: "train", "validation" or "validation/<set>", ...
        metrics: number -> the metric in task.metrics, and what it is of: "f1", or "scores/recall" of a dictionary.
        arrays: number in an array -> the array: "validation/f1/3" -> "validation/f1".
    """

    def __init__(self, metrics: Metrics, sets: Iterable[str]) -> None:
        """Raises BadInput for what `metric_results` refuses, or if two numbers have one name."""
        self.sets = tuple(sets)
        self.metrics: dict[str, tuple[keras.metrics.Metric, str]] = {}
        self.arrays: dict[str, str] = {}
        for name in self.sets:
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
        """Returns what of a report fits on lines and curves: all but the elements of arrays."""
        return {name: value for name, value in values.items() if name not in self.arrays}

    def scalars(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what TensorBoard shows: all but the elements of large arrays."""
        sizes: dict[str, int] = {}
        for array in self.arrays.values():
            sizes[array] = sizes.get(array, 0) + 1
        return {name: value for name, value in values.items() if sizes.get(self.arrays.get(name), 0) <= LARGEST_SHOWN}

    def metric(self, name: str) -> str:
        """Returns a number's name without that of the set: "validation/easy/loss" -> "loss"."""
        for each in self.sets:
            if name.startswith(f"{each}/"):
                return name.removeprefix(f"{each}/")
        return name.rsplit("/", 1)[-1]
