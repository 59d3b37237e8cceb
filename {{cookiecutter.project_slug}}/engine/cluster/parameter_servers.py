"""Asynchronous training: parameter servers have the weights; each worker changes them without waiting for the others.

A gradient may be of weights that others have changed since, so no two runs give the same results. Keras's authors call
it unsupported with Keras 3 (keras#18624). Its advantage is that a lost worker costs nothing but time. The program runs
on the chief, which sends training steps to the workers and evaluates by itself.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster, find_cluster
from engine.cluster.rendezvous import (
    FROZEN,
    SECONDS_UNTIL_FREE,
    did_not_join,
    is_free,
    is_listening,
    kind_of_loss,
    lost,
    wait_for,
)
from engine.cluster.tensorflow_start import start_tensorflow
from engine.console import console
from engine.errors import BadInput, CountedLoss, PeerLost
from engine.settings import Settings

PIECES_PER_WORKER = 4  # The pieces of an execution for each worker, so that a fast worker can take more of them.
SECONDS_WITHOUT_CHIEF = 5.0  # A chief that does not answer for this long has ended.
SECONDS_WITHOUT_WORKERS = 30.0  # A chief waits this long for workers that may be restarted, or are frozen.
SECONDS_BETWEEN_LOOKS = 1.0


def serve(cluster: Cluster, *, timeout: float) -> NoReturn:
    """Does what the chief sends, then ends the process; raises PeerLost if no chief joins within `timeout` seconds."""
    _wait_until_free(cluster, timeout)
    # A server does not read tf.config.
    config = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
    spec = tf.train.ClusterSpec(cluster.addresses)
    tf.distribute.Server(spec, cluster.job, cluster.index, protocol="grpc", config=config)
    chief = cluster.processes()["chief"]
    console.print(f"{cluster.name} serves the chief ({chief})")
    _wait_until_listening(cluster, ["chief"], timeout)
    while wait_for(lambda: is_listening(chief), SECONDS_WITHOUT_CHIEF):
        time.sleep(0.5)
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server cannot be stopped.


def coordinate(cluster: Cluster, *, timeout: float) -> tf.distribute.Strategy:
    """Returns the chief's strategy when all others have joined. Raises PeerLost if some do not within `timeout` s."""
    _wait_until_free(cluster, timeout)
    _wait_until_listening(cluster, cluster.others(), timeout)

    def start() -> tf.distribute.Strategy:
        return tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    strategy = start_tensorflow(cluster, timeout, start)
    strategy.extended._allow_run_without_coordinator = True  # The chief evaluates by itself.
    keras.Variable.assign_add = _add_atomically
    threading.Thread(target=_end_if_frozen, args=(cluster,), daemon=True).start()
    return strategy


def _end_if_frozen(cluster: Cluster) -> None:
    """Ends this process when another one is frozen; TensorFlow would wait for it for ever, where nothing can raise."""
    answered = time.monotonic()
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        frozen = ", ".join(text for text in lost(cluster) if text.endswith(FROZEN))
        if not frozen:
            answered = time.monotonic()
        elif time.monotonic() > answered + SECONDS_WITHOUT_WORKERS:
            print(f"ERROR: {frozen}: end it, then restart the cluster", file=sys.stderr, flush=True)
            os._exit(CountedLoss.exit_code)  # Counted, because the others end with 0, and the frozen one does not end.


def _wait_until_free(cluster: Cluster, timeout: float) -> None:
    """Waits until no other process uses this one's port; TensorFlow would end with a traceback."""
    address, seconds = cluster.processes()[cluster.name], min(timeout, SECONDS_UNTIL_FREE)
    # It does not listen, because the others would take that for the start of TensorFlow.
    fact = f"{cluster.source} puts {cluster.name} at {address}, which another program uses"
    if not is_free(address):
        print(f"{fact}: waits up to {seconds:g} s for the port", file=sys.stderr, flush=True)
        if not wait_for(lambda: is_free(address), seconds):
            raise CountedLoss(f"{fact}: end the program that uses the port, or choose another port")


def _wait_until_listening(cluster: Cluster, names: Iterable[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while missing := [name for name in names if not is_listening(cluster.processes()[name])]:
        if time.monotonic() > deadline:
            text = did_not_join(cluster, missing, timeout)
            raise kind_of_loss(cluster, text)(text)
        time.sleep(0.2)


def check_settings(settings: Settings) -> None:
    """Raises BadInput for settings that need the replicas to wait for each other."""
    for given, flag, why in (
        (settings.ema_decay, "--ema-decay", "the steps have no order in which to average"),
        (settings.deterministic, "--deterministic", "the order in which workers change the weights varies"),
        (settings.steps_per_epoch, "--steps-per-epoch", "each worker repeats its own examples"),
        (settings.precision == "mixed_float16", "--precision mixed_float16", "its loss scale needs steps in order"),
    ):
        if given:
            raise BadInput(f"{flag} cannot be combined with --strategy parameter_server ({why}): remove it")


def _add_atomically(variable: keras.Variable, value: Any) -> tf.Tensor:
    """Replaces keras.Variable.assign_add, which reads, adds and writes, and so loses counts of other workers."""
    return variable.value.assign_add(tf.cast(value, variable.dtype))


class WorkerPool:
    """The workers, as the chief reaches them; see engine.data.worker_batches."""

    def __init__(self, strategy: tf.distribute.ParameterServerStrategy) -> None:
        # A strategy has one coordinator: the constructor returns it again.
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        cluster = find_cluster(os.environ)
        assert cluster  # Otherwise there would be no such strategy.
        self._addresses = cluster.addresses["worker"]
        self.count = len(self._addresses)

    def iterate(self, dataset: Callable[[], tf.data.Dataset]) -> Any:
        """Returns the workers' iterators, as one value; each worker calls `dataset` for its own."""
        return iter(self._coordinator.create_per_worker_dataset(dataset))

    def take_steps(self, steps: Callable[..., tf.Tensor], iterators: Any, count: int) -> np.ndarray:
        """Has the workers take `count` steps together; returns their losses ([count]), in any order."""
        pieces = np.array_split(np.arange(count), min(count, PIECES_PER_WORKER * self.count))
        arguments = [(iterators, tf.constant(0), tf.constant(len(piece))) for piece in pieces]
        losses = [self._coordinator.schedule(steps, args=each) for each in arguments]
        self._wait()
        return np.concatenate([each.fetch() for each in losses])

    def _wait(self) -> None:
        """Returns when all that was scheduled is done. Raises PeerLost if no worker is left to do it."""
        alive = time.monotonic()
        while not self._coordinator.done():
            time.sleep(0.01)
            if time.monotonic() > alive + SECONDS_BETWEEN_LOOKS:
                if any(map(is_listening, self._addresses)):
                    alive = time.monotonic()
                elif time.monotonic() > alive + SECONDS_WITHOUT_WORKERS:
                    raise PeerLost("all workers are gone: check their logs, then restart the cluster")
        self._coordinator.join()  # Raises what a worker has raised.


def worker_pool(strategy: tf.distribute.Strategy) -> WorkerPool | None:
    """Returns the workers that take training steps by themselves; None without parameter servers."""
    return WorkerPool(strategy) if isinstance(strategy, tf.distribute.ParameterServerStrategy) else None
