"""What each measured program shares: its command line, its strategy, and the one line of JSON that it ends with."""

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

from workloads import WORKLOADS, Workload

# When the process was started, by the clock of all processes (seconds since 1970).
STARTED = float(os.environ.get("BENCHMARK_STARTED", time.time()))


class Measured:
    """The figures of one process."""

    def __init__(self) -> None:
        self.first_step_seconds: float | None = None
        self._seconds = {"train": 0.0, "evaluation": 0.0}
        self._count = {"train": 0, "evaluation": 0}

    def first_step_is_done(self) -> None:
        self.first_step_seconds = self.first_step_seconds or time.time() - STARTED

    @contextlib.contextmanager
    def timed(self, what: str, count: int) -> Iterator[None]:
        """Counts what is inside: `count` training steps ("train"), or examples ("evaluation")."""
        started = time.perf_counter()
        yield
        self.add(what, count, time.perf_counter() - started)

    def add(self, what: str, count: int, seconds: float) -> None:
        self._seconds[what] += seconds
        self._count[what] += count

    def tell(self) -> None:
        """Prints the figures as the last line of the output."""
        rates = {what: self._count[what] / seconds for what, seconds in self._seconds.items() if seconds}
        figures = {
            "training steps/s": rates.get("train"),
            "evaluation examples/s": rates.get("evaluation"),
            "start to first step, s": self.first_step_seconds,
            "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps({name: figure for name, figure in figures.items() if figure is not None}), flush=True)


def read_arguments() -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps-per-execution", type=int, help="of loops that take it")
    parser.add_argument(
        "--saves", action=argparse.BooleanOptionalAction, help="at the end of each epoch; only train.py does by default"
    )
    parser.add_argument("--precision", default="float32", help="or mixed_bfloat16")
    parser.add_argument("--jit", action="store_true", help="compile the steps by XLA")
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    options.steps_per_execution = options.steps_per_execution or workload.steps_per_execution
    return options, workload


def create_strategy(replicas: int) -> Any:
    """Returns what TensorFlow's guides use: MirroredStrategy over the devices there are, none for a single one."""
    import tensorflow as tf

    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if replicas == 1:
        return tf.distribute.get_strategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def create_datasets(workload: Workload) -> tuple[Any, Any]:
    """Returns the batches to train on and to evaluate, of arrays in memory.

    The numbers of the examples are shuffled, and a batch of them is gathered at once, as train.py does.
    """
    import tensorflow as tf

    def batches(steps: int, shuffled: bool) -> Any:
        features, labels = map(tf.constant, workload.data(steps))
        count = steps * workload.batch_size
        numbers = tf.data.Dataset.from_tensors(tf.range(count))
        numbers = numbers.map(tf.random.shuffle) if shuffled else numbers
        batched = numbers.rebatch(workload.batch_size, drop_remainder=True).map(
            lambda chosen: (tf.gather(features, chosen), tf.gather(labels, chosen))
        )
        return batched.prefetch(tf.data.AUTOTUNE)

    return batches(workload.steps, True), batches(workload.evaluation_steps, False)
