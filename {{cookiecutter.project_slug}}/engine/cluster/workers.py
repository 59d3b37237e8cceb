"""Decisions that the processes take together while they train.

A process that leaves a loop earlier than the others, or saves where they do not, makes them wait for ever. So a fact
that only one process knows (a signal, a file, how long a step took) is shared before anything depends on it.
"""

import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster, find_cluster
from engine.cluster.peers import NOT_TOGETHER
from engine.errors import BadInput, CannotWrite, Damaged, PeerLost, Unavailable

Arrays = dict[str, np.ndarray]
CHUNK = 2**24  # Integers in one collective operation: 64 MiB. gRPC refuses messages of 2 GiB.


class Workers:
    """The processes that train together, usually only this one. All of them must make the same calls."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        are_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        cluster = (are_several and find_cluster(os.environ)) or Cluster("", {"worker": [""]}, "worker", 0)
        self.names = list(cluster.processes())
        self.count = len(self.names)
        self.index = self.names.index(cluster.name)
        self.is_chief = cluster.is_chief  # Only the chief writes.
        hosts = [address.rpartition(":")[0] for address in cluster.processes().values()]
        self.most_on_one_machine = max(map(hosts.count, hosts))  # Judged by addresses.

    def _sum(self, integers: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' `integers` ([n], int32)."""
        return self.sum(tf.constant(integers)).numpy()

    @tf.autograph.experimental.do_not_convert
    def sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the `values` (any shape) of all workers, on each of them; also in a graph."""
        if self.count == 1:
            return values
        of_replicas = iter([values])  # One of a worker's replicas carries its values.
        per_replica = self._strategy.run(lambda: next(of_replicas, tf.zeros_like(values)))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    def gather(self, values: Arrays, doing: str = "", *, to_chief: bool = False) -> Arrays:
        """Returns the `values` [...] as [workers, ...], of all workers in their order, bit for bit.

        Every worker gets all values, so they should be small: 1,000 workers with 100 kB each need 100 MB in each. With
        `to_chief`, all but the chief get {} and need 64 MiB. Raises BadInput, on every worker, if not all of them call
        it with the same names, shapes and `doing`.
        """
        if self.count == 1:
            return {name: value[None] for name, value in values.items()}
        call = f"{doing} {[(name, str(value.dtype), value.shape) for name, value in values.items()]}"
        # Integers survive a sum with zeros unchanged; floats would lose the sign of zero.
        tag = zlib.crc32(call.encode()).to_bytes(4, "little")
        packed = _as_integers(b"".join([tag, *(value.tobytes() for value in values.values())]))
        parts, size = [], max(1, CHUNK // self.count)
        for first in range(0, packed.size, size):
            own = packed[first : first + size]
            rows = np.zeros((self.count, own.size), np.int32)
            rows[self.index] = own
            rows = self._sum(rows.ravel()).reshape(rows.shape)
            if not first and (others := [name for name, row in zip(self.names, rows, strict=True) if row[0] != own[0]]):
                raise BadInput(NOT_TOGETHER.format(f" (here {doing or 'another call'}, not in {', '.join(others)})"))
            if self.is_chief or not to_chief:
                parts.append(rows)
        if not parts:
            return {}
        received = np.concatenate(parts, axis=1).view(np.uint8)
        gathered, first = {}, len(tag)
        for name, value in values.items():
            columns = np.ascontiguousarray(received[:, first : first + value.nbytes])
            gathered[name] = columns.view(value.dtype).reshape(self.count, *value.shape)
            first += value.nbytes
        return gathered

    def names_where(self, flag: bool) -> list[str]:
        """Returns the names of the workers that call it with True."""
        flags = self.gather({"flag": np.array(flag)})["flag"]
        return [name for name, is_set in zip(self.names, flags, strict=True) if is_set]

    def check_all_do(self, doing: str) -> None:
        """Raises BadInput, on every worker, unless all do the same.

        It is called before compiled steps: workers that run different ones would wait for each other for ever.
        """
        # In the shape of `names_where`, whose tag is another.
        self.gather({"flag": np.array(True)}, doing)

    def from_chief(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on the chief only; returns its result, which is pickled, on all workers.

        The pickled result is in memory once more meanwhile, so large values are exchanged in portions. A BadInput,
        CannotWrite or Damaged that it raises is raised on all; a fault that may pass becomes PeerLost on all but the
        chief. Any other exception is raised on the chief only.
        """
        if self.count == 1:
            return function()
        value, error = None, None
        if self.is_chief:
            try:
                value = function()
            except (BadInput, CannotWrite, Damaged) as problem:
                error = problem
        message = pickle.dumps((value, error), protocol=5) if self.is_chief else b""
        name = getattr(getattr(function, "func", function), "__qualname__", "a decision of the chief")
        size = self.gather({"size": np.array(len(message))}, name)["size"][0]
        received = self._send(message, size)
        if not self.is_chief:
            value, error = pickle.loads(received)
            if isinstance(error, CannotWrite | Unavailable):
                raise PeerLost(str(error))  # The chief's end is counted, once.
        if error is not None:
            raise error
        return value

    def _send(self, message: bytes, size: int) -> memoryview:
        """Returns the chief's message of `size` bytes on all workers."""
        received = np.frombuffer(message, np.uint8) if self.is_chief else np.zeros(size, np.uint8)
        for first in range(0, size, 4 * CHUNK):
            piece = received[first : first + 4 * CHUNK]
            summed = self._sum(_as_integers(piece.tobytes()))
            if not self.is_chief:
                piece[:] = summed.view(np.uint8)[: piece.size]
        return received.data


def _as_integers(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed + bytes(-len(packed) % 4), np.int32)
