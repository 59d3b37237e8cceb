"""Asynchronous training: parameter servers hold the weights, each worker changes them without waiting for the others.

A gradient may be of weights that others have changed since, so no two runs give the same numbers, and Keras's authors
call it unsupported with Keras 3 (keras#18624). What it gives is a run that loses nothing but time with a worker.

The program runs on the chief, which hands chunks of training steps to the workers and evaluates by itself. Workers and
parameter servers run none of it: they do what the chief sends.
"""

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from engine.cluster.environment import Cluster
from engine.cluster.meeting import ended_after, is_listening
from engine.console import console
from engine.errors import BadInput, PeerLost
from engine.model.objects import by_name

# A chunk is cut into that many pieces per worker, so that a fast one can take more of them.
PIECES_PER_WORKER = 4
# A chief that is not heard of for so long has ended; and how long a chief waits for workers that may be started again.
SECONDS_WITHOUT_CHIEF = 5.0
SECONDS_WITHOUT_WORKERS = 30.0
SECONDS_BETWEEN_LOOKS = 1.0


def serve(cluster: Cluster, *, timeout: float) -> NoReturn:
    """Does what the chief sends, until the chief has ended; then ends the process.

    Raises:
        BadInput: the chief did not come within `timeout` seconds.
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
    deadline = time.monotonic() + timeout
    while not is_listening(chief):
        if time.monotonic() > deadline:
            raise BadInput(f"--cluster-timeout {timeout:g}: the chief ({chief}) did not come: look at its log")
        time.sleep(0.2)
    heard = time.monotonic()
    while time.monotonic() < heard + SECONDS_WITHOUT_CHIEF:
        time.sleep(0.5)
        if is_listening(chief):
            heard = time.monotonic()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server cannot be stopped.


def coordinate(cluster: Cluster, *, timeout: float) -> tf.distribute.Strategy:
    """Returns the strategy, for the chief, when all the others are there.

    Raises:
        BadInput: some did not come within `timeout` seconds.
    """
    others = {task: address for task, address in cluster.tasks().items() if task != cluster.name}
    deadline = time.monotonic() + timeout
    while missing := {task: address for task, address in others.items() if not is_listening(address)}:
        if time.monotonic() > deadline:
            named = ", ".join(f"{task} ({address})" for task, address in missing.items())
            raise BadInput(f"--cluster-timeout {timeout:g}: {named} did not come: look at the log there")
        time.sleep(0.2)
    os.environ["TF_CONFIG"] = cluster.tf_config()
    late = f"--cluster-timeout {timeout:g}: TensorFlow did not start on all of {', '.join(cluster.tasks())}"
    with ended_after(timeout, late):
        strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    # Found again by whoever has the strategy.
    strategy.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    strategy.worker_addresses = cluster.addresses["worker"]
    return strategy


def is_asynchronous(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether `strategy` is one of parameter servers."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def synchronous(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns `strategy`; with parameter servers that of the chief alone, for what it does not hand to the workers."""
    return tf.distribute.get_strategy() if is_asynchronous(strategy) else strategy


def check_settings(settings: Any) -> None:
    """Raises BadInput for settings that need the replicas to wait for each other."""
    for name, why in (
        ("ema_decay", "an average over steps that have no order is none"),
        ("deterministic", "workers change the weights in the order in which they happen to come"),
        ("simulated_devices", "a worker has one replica"),
    ):
        if getattr(settings, name):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag} with --strategy parameter_server: {why}; leave it out")
    if settings.precision == "mixed_float16":
        raise BadInput(
            "--precision mixed_float16 with --strategy parameter_server: its loss scale belongs to one order of steps; "
            "use mixed_bfloat16"
        )


def asynchronous_steps(program: ModuleType, task: ModuleType) -> dict[str, Callable[..., tf.Tensor]]:
    """Returns split -> the compiled function that runs its steps: workers train, and the chief evaluates alone.

    Args:
        program: the module train.py.
        task: the module task.py.
    """
    _count_atomically([*by_name(task.optimizer, "optimizer").values(), *task.metrics["train"].values()])
    return {
        "train": _compile_steps_on_workers(program.distributed_train_step),
        "validation": program.compile_steps(task.validation_step),
        "test": program.compile_steps(task.test_step),
    }


def _count_atomically(objects: Any) -> None:
    """Lets the variables of optimizers and metrics that only add count what all workers add.

    Keras adds by reading, adding and writing; what another worker has written in between is lost.
    """
    for each in objects:
        for variable in each.variables:
            if isinstance(each, keras.metrics.Metric) or variable is each.iterations:
                variable.assign_add = _atomic(variable)


def _atomic(variable: keras.Variable) -> Callable[[Any], Any]:
    return lambda value: variable.value.assign_add(tf.cast(value, variable.dtype))


def _compile_steps_on_workers(distributed_step: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a compiled function that takes `count` steps on an iterator's batches; it returns their losses."""

    @tf.function
    def steps(iterator: Any, count: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, count, element_shape=())
        for index in tf.range(count):
            losses = losses.write(index, distributed_step(next(iterator)))
        return losses.stack()

    return steps


class WorkersFeed:
    """Each worker's own batches, without end; what engine/feed.py's Feed is to replicas."""

    seconds_waited = 0.0  # Each worker waits for its own, beside the others.

    def __init__(self, strategy: tf.distribute.Strategy, pipeline: Callable[[int, Any], tf.data.Dataset]) -> None:
        """`pipeline` returns a worker's batches for (number of workers, index of the worker)."""
        self._strategy = strategy

        @tf.autograph.experimental.do_not_convert
        def of_worker() -> tf.data.Dataset:
            return pipeline(
                len(strategy.worker_addresses), tf.distribute.coordinator.experimental_get_current_worker_index()
            )

        self._iterator = iter(strategy.coordinator.create_per_worker_dataset(of_worker))

    def run(self, steps: Callable[..., tf.Tensor], count: int) -> np.ndarray:
        """Has the workers take `count` steps; returns their losses (float32, [count]) in any order."""
        coordinator, addresses = self._strategy.coordinator, self._strategy.worker_addresses
        pieces = np.array_split(np.arange(count), min(count, PIECES_PER_WORKER * len(addresses)))
        losses = [coordinator.schedule(steps, args=(self._iterator, tf.constant(len(piece)))) for piece in pieces]
        alive = time.monotonic()
        while not coordinator.done():
            time.sleep(0.01)
            if time.monotonic() > alive + SECONDS_BETWEEN_LOOKS:
                if any(is_listening(address) for address in addresses):
                    alive = time.monotonic()
                elif time.monotonic() > alive + SECONDS_WITHOUT_WORKERS:
                    raise PeerLost("all workers are gone: look at their logs, then start the whole cluster again")
        coordinator.join()  # Raises what a worker has raised.
        return np.concatenate([each.fetch() for each in losses])
