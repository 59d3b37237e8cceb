"""What the processes decide together while they train.

A process that leaves a loop earlier than the others, or saves where they do not, makes them wait for ever. So what only
one of them knows (a signal, a file, how long a step took) is shared before anything depends on it.
"""

import contextlib
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster, find_cluster
from engine.cluster.rendezvous import lost
from engine.errors import BadInput, CannotWrite, Damaged, PeerLost
from engine.user_errors import CONNECTION_ERRORS

# Integers in one collective operation: 64 MiB. gRPC refuses messages of 2 GiB.
CHUNK = 2**24
# Integers of the first operation of `from_chief`: most of what it sends is smaller.
HEAD = 256
# A process that is ending may keep its port for a moment.
SECONDS_UNTIL_GONE = 5.0


class Workers:
    """The processes that train together; one alone by default. Every one of them has to make the same calls."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and resolver is not None
        spec = resolver.cluster_spec().as_dict() if several else {}
        # TensorFlow counts a chief before the workers.
        self.names = [f"{job} {index}" for job in ("chief", "worker") for index, _ in enumerate(spec.get(job, []))]
        hosts = [address.rpartition(":")[0] for job in ("chief", "worker") for address in spec.get(job, [])]
        # Processes on the machine that has most of them, as far as their addresses say it.
        self.on_one_machine = max(map(hosts.count, hosts), default=1)
        self.index = self.names.index(f"{resolver.task_type} {resolver.task_id}") if several else 0

    @property
    def count(self) -> int:
        return max(1, len(self.names))

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes."""
        return self.index == 0

    def _sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' `values` (same shape and dtype: int32, int64, float32 or float64)."""
        if self.count == 1:
            return values
        # One of a worker's replicas carries its values.
        parts = iter([values])
        own = self._strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(next(parts, np.zeros_like(values)))
        )
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, own, axis=None).numpy()

    def gather(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns each of the `values` [...] as [workers, ...], of all workers in their order, bit for bit."""
        if self.count == 1 or not values:
            return {name: value[None] for name, value in values.items()}
        # As whole numbers, because a sum with zeros leaves those as they are; that of floats loses the sign of zero.
        own = _as_integers(b"".join(value.tobytes() for value in values.values()))
        rows = np.zeros((self.count, own.size), np.int32)
        rows[self.index] = own
        rows = self._sum_in_chunks(rows.ravel()).reshape(rows.shape)
        gathered, first = {}, 0
        for name, value in values.items():
            parts = [row.tobytes()[first : first + value.nbytes] for row in rows]
            gathered[name] = np.stack([np.frombuffer(part, value.dtype).reshape(value.shape) for part in parts])
            first += value.nbytes
        return gathered

    def any(self, flag: bool) -> list[str]:
        """Returns the names of the workers whose flag is set; of a process alone, one text."""
        flags = self.gather({"flag": np.array(flag)})["flag"]
        return [name for name, each in zip(self.names or ["this process"], flags, strict=True) if each]

    def from_chief(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on the chief only; returns what it returned, or raises what it raised, on every worker.

        What it returns is pickled where there are several workers.

        Raises:
            BadInput, CannotWrite, Damaged: `function` did. Any other exception of it is raised on the chief only.
        """
        if self.count == 1:
            return function()
        outcome: Any = None
        if self.is_chief:
            try:
                outcome = (function(), None)
            except (BadInput, CannotWrite, Damaged) as problem:
                outcome = (None, problem)
        packed = _as_integers(pickle.dumps(outcome) if self.is_chief else b"")
        head = np.zeros(HEAD, np.int32)
        head[0], head[1 : 1 + packed.size] = packed.size, packed[: HEAD - 1]
        head = self._sum(head)
        rest = packed[HEAD - 1 :] if self.is_chief else np.zeros(max(0, head[0] - (HEAD - 1)), np.int32)
        packed = np.concatenate([head[1:], self._sum_in_chunks(rest)])
        value, problem = pickle.loads(packed.tobytes())
        if problem is not None:
            raise problem
        return value

    def agree(self, value: Any) -> Any:
        """Returns the chief's `value` on every worker."""
        return self.from_chief(lambda: value)

    def _sum_in_chunks(self, numbers: np.ndarray) -> np.ndarray:
        parts = [self._sum(numbers[first : first + CHUNK]) for first in range(0, numbers.size, CHUNK)]
        return np.concatenate(parts) if parts else numbers


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
        deadline = time.monotonic() + SECONDS_UNTIL_GONE
        while not (who := ", ".join(lost(cluster))) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not who and (accused := _accused(str(problem), cluster)):
            who = f"{accused} does not answer, or failed"
        if not who:
            raise
        raise PeerLost(
            f"{who}: check its log, then start the same command, without --fresh, on all; what was saved is whole"
        ) from problem


def _accused(message: str, cluster: Cluster) -> str:
    """Returns the other tasks that failed by TensorFlow's own words, or "" if the error is about something else."""
    tasks = cluster.tasks()
    found = [f"{job} {index}" for job, index in re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message)]
    if "CoordinationService" in message:  # Which the first worker runs.
        found.append(next(iter(tasks)))
    others = [task for task in dict.fromkeys(found) if task in tasks and task != cluster.name]
    if not others and "Collective ops is aborted" not in message:
        return ""
    return ", ".join(f"{task} ({tasks[task]})" for task in others) or "another worker"
