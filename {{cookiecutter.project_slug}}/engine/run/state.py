"""The variables of a run by name, and their values.

Most variables are mirrored: they have one value on all replicas. Some are per-replica: what a metric has counted so
far, the seeds of dropout, the statistics of an unsynchronized BatchNormalization. Every replica's value of them is
saved, because otherwise a resumed run would differ slightly.
"""

import functools
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.console import console
from engine.errors import BadInput
from engine.model.variables import Variables, is_seed, spread_seeds

Values = dict[str, np.ndarray | tf.Tensor]
PORTION = 2**26  # Bytes of variables that are restored together.
LARGE = 2**18  # Numbers in a variable from which on it is looked at on its device.
ROUNDING = 1e-3  # Machines of several kinds may differ by this fraction of a variable's largest value.


class State:
    """Some variables by name.

    Attributes:
        mirrored: those that have one value on all replicas.
        per_replica: those of which each replica has its own value.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        workers: Workers,
        mirrored: Variables,
        per_replica: Variables | None = None,
        after_assign: Callable[[], object] = lambda: None,
    ) -> None:
        """No name may be both in `mirrored` and in `per_replica`. `after_assign` is called when all were assigned."""
        self.strategy, self.workers = strategy, workers
        self.mirrored, self.per_replica, self._after_assign = mirrored, per_replica or {}, after_assign

    def variables(self) -> list[tf.Variable]:
        return [*self.mirrored.values(), *self.per_replica.values()]

    @property
    def bytes(self) -> int:
        """The size of the values, without texts."""
        own = sum(map(_bytes_of, self.per_replica.values()))
        return sum(map(_bytes_of, self.mirrored.values())) + self.strategy.num_replicas_in_sync * own

    def parts(self, name: str) -> list[tf.Variable]:
        """Returns the variable of each replica of this process; of a mirrored one the first replica's alone."""
        if name in self.mirrored:
            return list(self.strategy.experimental_local_results(self.mirrored[name])[:1])
        return list(self.strategy.experimental_local_results(self.per_replica[name]))

    def values(self) -> Values:
        """Returns, on the chief, the values as they are now; on other workers {}. All of them must call it.

        They are [...] of a mirrored variable, [replicas, ...] of a per-replica one, and in host memory. A mirrored
        value may share the memory of its variable until that is changed, so that large models need no memory for a
        second copy while they are saved.
        """
        per_replica = {
            name: np.stack([as_array(read_variable(part).numpy()) for part in self.parts(name)])
            for name in self.per_replica
        }
        gathered = self.workers.gather(per_replica, to_chief=True)  # [workers, replicas of each, ...]
        if not self.workers.is_chief:
            return {}
        return self.mirrored_values() | {name: np.concatenate(list(value)) for name, value in gathered.items()}

    def mirrored_values(self, *names: str) -> Values:
        """Returns the values of all mirrored variables, or the first replica's of other variables."""
        # The first replica's variable is read, because reading the mirrored one takes five times as long.
        values = {name: read_variable(self.parts(name)[0]) for name in names or self.mirrored}
        with tf.device("CPU:0"):
            # Copies values of GPUs and parameter servers to the host; the others are there already.
            host = tf.constant(0).device
            return {name: value if value.device == host else tf.identity(value) for name, value in values.items()}

    def check_workers(self, read: Values, cause: str, *, is_start: bool = False) -> None:
        """Raises BadInput, on every worker, if the mirrored values of one differ from the chief's.

        When a run starts without a checkpoint, the other values must be equal, too, except the seeds. Values that
        differ by rounding only, on machines of several kinds, become the chief's. Those that are not in `read` are read
        one by one.
        """
        if self.workers.count == 1:
            return

        def value(name: str) -> Any:
            return read[name] if name in read else self.mirrored_values(name)[name]

        compared = [*self.mirrored, *(self.per_replica if is_start else ())]
        compared = [name for name in compared if not is_seed(name)]  # In the best weights, seeds are the chief's.
        digests = np.array([_digest(value(name)) for name in compared], np.uint32)
        rows = self.workers.gather({"digests": digests}, "the check of the weights")["digests"]  # [workers, variables]
        differing = [name for name, column in zip(compared, rows.T, strict=True) if (column != column[0]).any()]
        if not differing:
            return
        chiefs = self.workers.from_chief(lambda: {name: value(name) for name in differing})
        far = np.array([not _differ_by_rounding(value(name), chiefs[name]) for name in differing])
        are_far = self.workers.gather({"far": far})["far"]  # [workers, differing]
        if are_far.any():
            names = [name for name, column in zip(differing, are_far.T, strict=True) if column.any()]
            workers = [name for name, row in zip(self.workers.names, are_far, strict=True) if row.any()]
            raise BadInput(
                f"{', '.join(workers)}: {len(names)} of {len(compared)} variables ({', '.join(names[:3])}"
                f"{', ...' if names[3:] else ''}) differ from those of {self.workers.names[0]}: {cause} depends on the "
                "process (an unseeded generator, another file, the environment, the order of a set); make it equal"
            )
        console.print(f"{len(differing)} variables differed by rounding between the workers; all have the chief's now")
        for name in differing:
            for variable in [self.mirrored[name]] if name in self.mirrored else self.parts(name):
                variable.assign(chiefs[name])

    def assign(self, values: Mapping[str, np.ndarray | tf.Tensor]) -> None:
        """Sets every variable to the chief's value; the `values` of other workers are not used. All of them call it.

        Per-replica values of another number of replicas are combined first. Few values are in memory at a time.
        """
        seeds = []
        for names in portions({**self.mirrored, **self.per_replica}):
            portion = self.workers.from_chief(functools.partial(self._some_of, values, names))
            for name in names:
                if name in self.mirrored:
                    self.mirrored[name].assign(portion.pop(name))
                elif self._assign_rows(self.per_replica[name], as_array(portion.pop(name))) and is_seed(name):
                    seeds.append(self.per_replica[name])
        spread_seeds(self.strategy, seeds)
        self._after_assign()

    def _some_of(self, values: Mapping[str, np.ndarray | tf.Tensor], names: list[str]) -> Values:
        read = getattr(values, "read", None)  # Stored values are read together.
        some = read(names) if read else {name: values[name] for name in names}
        return some if self.workers.count == 1 else {name: as_array(value) for name, value in some.items()}

    def _assign_rows(self, variable: tf.Variable, rows: np.ndarray) -> bool:
        """Sets a per-replica variable; returns whether the rows are of another number of replicas."""
        parts = self.strategy.experimental_local_results(variable)
        replicas = len(parts) * self.workers.count
        if is_other := len(rows) != replicas:
            rows = _for_replicas(rows, variable, replicas)
        first = len(parts) * self.workers.index
        for part, row in zip(parts, rows[first : first + len(parts)], strict=True):
            part.assign(row)
        return is_other

    def differences(self, kinds: Mapping[str, tuple[Any, tuple[int, ...]]]) -> list[str]:
        """Returns a text for each variable whose name, dtype or shape differs from those of stored values.

        Values of a network that only the training needs, such as a teacher that no hook returns, may be left over,
        unless another variable may have their names: these are counted.
        """
        expected = {
            name: _kind(variable.dtype, variable.shape)
            for name, variable in {**self.mirrored, **self.per_replica}.items()
        }
        counted = {name.split("#")[0] for name in expected}
        stored = {
            name: _kind(dtype, shape[1:] if name in self.per_replica else shape)
            for name, (dtype, shape) in kinds.items()
            if name in expected or not name.startswith("hidden/") or name.split("#")[0] in counted
        }
        return [
            f"{name} {stored.get(name, 'absent')} there and {expected.get(name, 'absent')} now"
            for name in sorted({**expected, **stored})
            if expected.get(name) != stored.get(name)
        ]


def portions(variables: Variables) -> Iterator[list[str]]:
    """Yields all names in lists, of which each has one large variable, or several that take PORTION together."""
    names, size = [], 0
    for name, variable in variables.items():
        names.append(name)
        size += _bytes_of(variable)
        if size >= PORTION:
            yield names
            names, size = [], 0
    if names:
        yield names


def _bytes_of(variable: tf.Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.size


def as_array(value: Any) -> np.ndarray:
    """Returns a value that TensorFlow has given as an array, which shares its memory; texts are objects in it."""
    if tf.is_tensor(value) and value.dtype == tf.string:
        value = value.numpy()
    return np.array(value, object) if isinstance(value, bytes) else np.asarray(value)


def weights_sha256(variables: dict[str, tf.Variable]) -> str:
    """Returns the SHA-256, in hex, over each variable's name, dtype, shape and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, variable in variables.items():
        value = as_array(variable.read_value())
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        # An array of texts contains their addresses.
        digest.update(repr(value.tolist()).encode() if value.dtype == object else _bytes(value))
    return digest.hexdigest()


def _digest(value: np.ndarray | tf.Tensor) -> int:
    """Returns a checksum of a value's bits and their places."""
    array = as_array(value)
    if array.dtype == object:  # An array of texts contains their addresses.
        return zlib.crc32(repr(array.tolist()).encode())
    return zlib.crc32(_bytes(array))


def _bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array without a copy of them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _differ_by_rounding(value: np.ndarray | tf.Tensor, chiefs: np.ndarray | tf.Tensor) -> bool:
    one, other = as_array(value), as_array(chiefs)
    if not tf.as_dtype(one.dtype).is_floating:
        return bool((one == other).all())
    largest = np.abs(other).max(initial=0)
    return bool(np.isclose(one, other, rtol=0, atol=ROUNDING * largest, equal_nan=True).all())


def one_of_replicas(rows: np.ndarray) -> np.ndarray:
    """Returns one value [...] for the values of all replicas [replicas, ...]: their mean, or the first of integers."""
    # The mean of equal numbers may be rounded to another number. Seeds, other integers and texts have no mean.
    if not tf.as_dtype(rows.dtype).is_floating or (rows == rows[0]).all():
        return rows[0]
    return rows.mean(axis=0, dtype=np.float64).astype(rows.dtype)  # In 16 bits the sum would be infinite.


def _for_replicas(rows: np.ndarray, variable: tf.Variable, replicas: int) -> np.ndarray:
    """Returns per-replica values for another number of replicas; values that are summed keep their sum."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    if on_read and variable.aggregation == tf.VariableAggregation.SUM:
        summed = np.zeros((replicas, *rows.shape[1:]), rows.dtype)
        summed[0] = rows.sum(axis=0, dtype=np.float64 if tf.as_dtype(rows.dtype).is_floating else rows.dtype)
        return summed
    return np.stack([one_of_replicas(rows)] * replicas)


def read_variable(variable: tf.Variable) -> tf.Tensor:
    """Returns the value of a variable of one replica, on its device."""
    # Does the same as variable.read_value() in less time, of which a save of many small variables mostly consists.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def is_finite(value: np.ndarray | tf.Tensor) -> bool:
    """Returns whether no number is infinite or NaN; integers and texts are neither."""
    dtype = tf.as_dtype(value.dtype)
    if not dtype.is_floating:
        return True
    # TensorFlow cannot do this for numbers of one byte. For small values its calls take longer than a copy.
    if isinstance(value, np.ndarray) or math.prod(value.shape) < LARGE or dtype.size == 1:
        return bool(np.isfinite(value).all())
    with tf.device(value.device):
        return bool(tf.reduce_all(tf.math.is_finite(value)))


def _kind(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{tf.as_dtype(dtype).name}{list(shape)}"
