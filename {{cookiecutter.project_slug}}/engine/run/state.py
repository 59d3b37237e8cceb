"""The variables of a run by name, and their values.

Most variables are alike on all replicas and have one value. Some are each replica's own: what a metric has counted so
far, the seeds of dropout, the statistics of a BatchNormalization that is not synchronized. Of those every replica's
value is saved, otherwise a resumed run would differ slightly.
"""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.model.replicas import is_seed, spread_seeds

Variables = dict[str, tf.Variable]
Values = dict[str, np.ndarray | tf.Tensor]


class State:
    """Some variables, each under a name of its own."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        alike: Variables,
        own: Variables | None = None,
        hidden: Callable[[], Variables] = dict,
    ) -> None:
        """`alike` have one value on all replicas, `own` each replica's own; no name may be in both.

        `hidden` returns more of each replica's own; it is called when they are needed for the first time.
        """
        self.strategy = strategy
        self.workers = Workers(strategy)
        self.alike = alike
        self._own = own or {}
        self._hidden = hidden

    @functools.cached_property
    def own(self) -> Variables:
        """The variables of which each replica has a value of its own."""
        return {**self._own, **self._hidden()}

    def variables(self) -> list[tf.Variable]:
        """Returns all variables."""
        return [*self.alike.values(), *self.own.values()]

    def values(self) -> Values:
        """Returns the values as they are now: [...] of a variable that is alike, [replicas, ...] of each replica's own.

        They are in host memory. A value that is alike may share the memory of its variable until that is changed, so
        that large models need no memory for a second copy while they are saved.
        """
        local_results = self.strategy.experimental_local_results
        # Of the first replica's variable, because that of all takes five times as long to read.
        values = {name: _read(local_results(variable)[0]) for name, variable in self.alike.items()}
        with tf.device("CPU:0"):
            # Copies values of GPUs and parameter servers to the host; the others are there already.
            host = tf.constant(0).device
            values = {name: value if value.device == host else tf.identity(value) for name, value in values.items()}
        own = {
            name: np.stack([_read(each).numpy() for each in local_results(variable)])
            for name, variable in self.own.items()
        }
        gathered = self.workers.gather(own)  # [workers, replicas of each, ...]
        return values | {name: value.reshape(-1, *value.shape[2:]) for name, value in gathered.items()}

    def assign(self, values: Values) -> None:
        """Sets every variable. What other numbers of replicas had of their own is combined first."""
        for name, variable in self.alike.items():
            variable.assign(values[name])
        seeds = []
        for name, variable in self.own.items():
            local, rows = self.strategy.experimental_local_results(variable), values[name]
            replicas = len(local) * self.workers.count
            if len(rows) != replicas:
                rows = _shared_out(rows, variable, replicas)
                seeds += [variable] if is_seed(name) else []
            first = len(local) * self.workers.index
            for each, row in zip(local, rows[first : first + len(local)], strict=True):
                each.assign(row)
        spread_seeds(self.strategy, seeds)

    def differences(self, values: Values) -> list[str]:
        """Returns a text for each variable whose name, dtype or shape differs from `values`."""
        expected = {
            name: _kind(variable.dtype.name, variable.shape) for name, variable in {**self.alike, **self.own}.items()
        }
        found = {
            name: _kind(value.dtype.name, value.shape[1:] if name in self.own else value.shape)
            for name, value in values.items()
        }
        return [
            f"{name} {found.get(name, 'absent')} there and {expected.get(name, 'absent')} now"
            for name in sorted({**expected, **found})
            if expected.get(name) != found.get(name)
        ]


def one_of_replicas(rows: np.ndarray) -> np.ndarray:
    """Returns the one value [...] that stands for the replicas' own ones [replicas, ...]: their mean."""
    # The mean of equal numbers may be rounded to another number, and whole numbers have none: of seeds it is the first.
    if rows.dtype.kind in "iu" or (rows == rows[0]).all():
        return rows[0]
    return rows.mean(axis=0, dtype=rows.dtype)


def _shared_out(rows: np.ndarray, variable: tf.Variable, replicas: int) -> np.ndarray:
    """Returns for `replicas` what was of another number of them; what is summed over them stays the same in sum."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    if on_read and variable.aggregation == tf.VariableAggregation.SUM:
        shares = np.zeros((replicas, *rows.shape[1:]), rows.dtype)
        shares[0] = rows.sum(axis=0, dtype=rows.dtype)
        return shares
    return np.stack([one_of_replicas(rows)] * replicas)


def _read(variable: tf.Variable) -> tf.Tensor:
    # What variable.read_value() does, in less time, which a save of many small variables mostly consists of.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
