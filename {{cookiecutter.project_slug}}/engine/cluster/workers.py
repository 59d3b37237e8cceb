"""Decisions that the processes take together while they train.

A process that leaves a loop earlier than the others, or saves where they do not, makes them wait for ever. So a fact
that only one process knows (a signal, a file, how long a step took) is shared before anything depends on it.
"""

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster, find_cluster, process_name
from engine.cluster.rendezvous import lost, wait_for
from engine.errors import BadInput, CannotWrite, Damaged, PeerLost
from engine.user_errors import CONNECTION_ERRORS

CHUNK = 2**24  # Integers in one collective operation: 64 MiB. gRPC refuses messages of 2 GiB.
HEAD = 256  # Integers in the first operation of `from_chief`, which is usually the only one.
SECONDS_UNTIL_GONE = 5.0  # A process that is ending may keep its port for a moment.


class Workers:
    """The processes that train together, usually only this one. All of them must make the same calls."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        cluster = Cluster("", {"worker": [""]}, "worker", 0)
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            resolver = strategy.cluster_resolver
            cluster = Cluster("", resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id)
        self.names = list(cluster.processes())
        self.count = len(self.names)
        self.index = self.names.index(cluster.name)
        self.is_chief = cluster.is_chief  # Only the chief writes.
        hosts = [address.rpartition(":")[0] for address in cluster.processes().values()]
        self.most_on_one_machine = max(map(hosts.count, hosts))  # Judged by addresses.

    def _sum(self, integers: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' `integers` ([n], int32)."""
        # One of a worker's replicas carries its integers.
        first = iter([integers])
        per_replica = self._strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(next(first, np.zeros_like(integers)))
        )
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None).numpy()

    def _sum_in_chunks(self, integers: np.ndarray) -> np.ndarray:
        chunks = [self._sum(integers[first : first + CHUNK]) for first in range(0, integers.size, CHUNK)]
        return np.concatenate([integers[:0], *chunks])

    def gather(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns each of the `values` [...] as [workers, ...], of all workers in their order, bit for bit."""
        if self.count == 1 or not values:
            return {name: value[None] for name, value in values.items()}
        # Integers survive a sum with zeros unchanged; floats would lose the sign of zero.
        packed = _as_integers(b"".join(value.tobytes() for value in values.values()))
        rows = np.zeros((self.count, packed.size), np.int32)
        rows[self.index] = packed
        rows = self._sum_in_chunks(rows.ravel()).reshape(rows.shape)
        gathered, first = {}, 0
        for name, value in values.items():
            arrays = [np.frombuffer(row.tobytes()[first : first + value.nbytes], value.dtype) for row in rows]
            gathered[name] = np.stack([array.reshape(value.shape) for array in arrays])
            first += value.nbytes
        return gathered

    def names_where(self, flag: bool) -> list[str]:
        """Returns the names of the workers that call it with True."""
        flags = self.gather({"flag": np.array(flag)})["flag"]
        return [name for name, is_set in zip(self.names, flags, strict=True) if is_set]

    def from_chief(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on the chief only; returns its result, which is pickled, on all workers.

        A BadInput, CannotWrite or Damaged that it raises is raised on all; any other exception on the chief only.
        """
        if self.count == 1:
            return function()
        packed = _as_integers(b"")
        if self.is_chief:
            try:
                outcome: tuple[Any, Exception | None] = (function(), None)
            except (BadInput, CannotWrite, Damaged) as problem:
                outcome = (None, problem)
            packed = _as_integers(pickle.dumps(outcome))
        head = np.zeros(HEAD, np.int32)
        head[0], head[1 : 1 + packed.size] = packed.size, packed[: HEAD - 1]
        head = self._sum(head)
        rest = packed[HEAD - 1 :] if self.is_chief else np.zeros(max(0, head[0] - (HEAD - 1)), np.int32)
        value, error = pickle.loads(np.concatenate([head[1:], self._sum_in_chunks(rest)]).tobytes())
        if error is not None:
            raise error
        return value


def _as_integers(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed + bytes(-len(packed) % 4), np.int32)


@contextlib.contextmanager
def peers_named() -> Iterator[None]:
    """Turns TensorFlow's error about a broken connection into PeerLost, which names the process that is gone."""
    try:
        yield
    except tf.errors.OpError as problem:
        cluster = find_cluster(os.environ)
        if cluster is None or not isinstance(problem, CONNECTION_ERRORS):
            raise
        gone = ", ".join(wait_for(lambda: lost(cluster), SECONDS_UNTIL_GONE))
        if not gone and (accused := _accused(str(problem), cluster)):
            gone = f"{accused} does not answer, or failed"
        if not gone:
            raise
        remedy = "check its log, then start the same command, without --fresh, on all; everything saved is intact"
        frozen = "; or this process was frozen for 10 s or more" if "is gone" in gone else ""
        raise PeerLost(f"{gone}{frozen}: {remedy}") from problem


def _accused(message: str, cluster: Cluster) -> str:
    """Returns the other processes that TensorFlow's message says failed; "" if it is about something else."""
    others, found = cluster.others(), re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message)
    names = [process_name(job, int(index)) for job, index in found]
    if "CoordinationService" in message:  # The first worker runs it.
        names.append(next(iter(cluster.processes())))
    accused = ", ".join(f"{name} ({others[name]})" for name in dict.fromkeys(names) if name in others)
    return accused or ("another worker" if "Collective ops is aborted" in message else "")
