"""Asynchronous training: parameter servers hold the weights, each worker changes them without waiting for the others.

A gradient may be of weights that others have changed since, so no two runs give the same numbers. Keras's authors call
it unsupported with Keras 3 (keras#18624). Its advantage is that a lost worker costs nothing but time.

The program runs on the chief, which hands chunks of training steps to the workers and evaluates by itself. Workers and
parameter servers do what the chief sends.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster
from engine.cluster.rendezvous import ended_after, is_listening
from engine.console import console
from engine.errors import BadInput, PeerLost

# A chunk is cut into so many pieces per worker, so that a fast one can take more of them.
PIECES_PER_WORKER = 4
# A chief that is not heard of for so long has ended; and how long a chief waits for workers that may be started again.
SECONDS_WITHOUT_CHIEF = 5.0
SECONDS_WITHOUT_WORKERS = 30.0
SECONDS_BETWEEN_LOOKS = 1.0


def serve(cluster: Cluster, *, timeout: float) -> NoReturn:
    """Does what the chief sends until the chief has ended, then ends the process.

    Raises:
        BadInput: the chief did not join within `timeout` seconds.
    """
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster.addresses),
        job_name=cluster.job,
        task_index=cluster.index,
        protocol="grpc",
        # A server does not read tf.config.
        config=tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True)),
    )
    chief = cluster.tasks()["chief"]
    console.print(f"{cluster.name} serves the chief ({chief})")
    _wait_until_listening({"chief": chief}, timeout)
    heard = time.monotonic()
    while time.monotonic() < heard + SECONDS_WITHOUT_CHIEF:
        time.sleep(0.5)
        if is_listening(chief):
            heard = time.monotonic()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server cannot be stopped.


def coordinate(cluster: Cluster, *, timeout: float) -> tf.distribute.Strategy:
    """Returns the strategy, for the chief, when all the others have joined.

    Raises:
        BadInput: some did not join within `timeout` seconds.
    """
    others = {task: address for task, address in cluster.tasks().items() if task != cluster.name}
    _wait_until_listening(others, timeout)
    os.environ["TF_CONFIG"] = cluster.tf_config()
    late = f"--cluster-timeout {timeout:g}: TensorFlow did not start on all of {', '.join(cluster.tasks())}"
    with ended_after(timeout, late):
        strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    strategy.extended._allow_run_without_coordinator = True  # The chief evaluates by itself.
    keras.Variable.assign_add = _add_atomically
    # Kept on the strategy, where the rest of this file finds it.
    strategy.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    strategy.worker_addresses = cluster.addresses["worker"]
    strategy.size = f", {len(strategy.worker_addresses)} worker(s), asynchronous: each takes steps of its own"
    return strategy


def _wait_until_listening(tasks: dict[str, str], timeout: float) -> None:
    """Returns when all tasks can be reached at their addresses. Raises BadInput after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while missing := {task: address for task, address in tasks.items() if not is_listening(address)}:
        if time.monotonic() > deadline:
            named = ", ".join(f"{task} ({address})" for task, address in missing.items())
            raise BadInput(f"{named} did not join within {timeout:g} s (--cluster-timeout): check its log")
        time.sleep(0.2)


def check_settings(settings: Any) -> None:
    """Raises BadInput for settings that need the replicas to wait for each other."""
    for name, why in (
        ("ema_decay", "an average over steps that have no order is none"),
        ("deterministic", "workers change the weights in the order in which they happen to come"),
        ("steps_per_epoch", "each worker goes over the examples of an epoch by itself, again and again"),
    ):
        if getattr(settings, name):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag} with --strategy parameter_server: {why}; leave it out")
    if settings.precision == "mixed_float16":
        raise BadInput(
            "--precision mixed_float16 with --strategy parameter_server: its loss scale belongs to one order of steps; "
            "use mixed_bfloat16"
        )


def _add_atomically(variable: keras.Variable, value: Any) -> tf.Tensor:
    """Replaces keras.Variable.assign_add, which reads, adds and writes: what a worker writes in between would be lost.

    Optimizers count their steps with it, and metrics their examples.
    """
    return variable.value.assign_add(tf.cast(value, variable.dtype))


def worker_pool(strategy: tf.distribute.Strategy) -> "WorkerPool | None":
    """Returns the workers that take training steps by themselves; None without parameter servers."""
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return None
    return WorkerPool(strategy.coordinator, strategy.worker_addresses)


@dataclasses.dataclass(frozen=True)
class WorkerPool:
    """The workers, as the chief reaches them; see engine.data.worker_batches."""

    coordinator: tf.distribute.coordinator.ClusterCoordinator
    addresses: list[str]

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self.addresses)

    def iterate(self, dataset: Callable[[], tf.data.Dataset]) -> Any:
        """Returns the workers' iterators, as one value; each worker calls `dataset` for its own."""
        return iter(self.coordinator.create_per_worker_dataset(dataset))

    def take_steps(self, steps: Callable[..., tf.Tensor], iterators: Any, count: int) -> np.ndarray:
        """Has the workers take `count` steps together; returns their losses ([count]), in any order."""
        pieces = np.array_split(np.arange(count), min(count, PIECES_PER_WORKER * self.count))
        losses = [
            self.coordinator.schedule(steps, args=(iterators, tf.constant(0), tf.constant(len(piece))))
            for piece in pieces
        ]
        _wait(self.coordinator, self.addresses)
        return np.concatenate([each.fetch() for each in losses])


def _wait(coordinator: Any, addresses: list[str]) -> None:
    """Returns when all that was scheduled is done. Raises PeerLost if no worker is left to do it."""
    alive = time.monotonic()
    while not coordinator.done():
        time.sleep(0.01)
        if time.monotonic() > alive + SECONDS_BETWEEN_LOOKS:
            if any(is_listening(address) for address in addresses):
                alive = time.monotonic()
            elif time.monotonic() > alive + SECONDS_WITHOUT_WORKERS:
                raise PeerLost("all workers are gone: check their logs, then start the whole cluster again")
    coordinator.join()  # Raises what a worker has raised.
