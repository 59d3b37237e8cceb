"""Real local clusters: processes of train.py that find each other by TF_CONFIG, as different machines would."""

import contextlib
import csv
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from processes import until
from programs import Program, run_program

from rendering import PROJECT

TIME_COLUMNS = ("seconds", "examples_per_second", "goodput")
LOST, COUNTED = 43, 44  # The exit codes of processes that have lost another one; one whose end is counted ends with 44.
# No batch divides the examples, of training or of evaluation; clipping, parts of a batch and an average of the weights.
# Frequent saves and short executions, so that kills come in many kinds of moments.
NUMBERS = (
    *("--epochs=2", "--global-batch-size=24", "--global-clipnorm=0.5", "--micro-batches=2", "--ema-decay=0.9"),
    *("--keep-last-batch", "--validate-every-steps=8", "--checkpoint-every-steps=10", "--steps-per-execution=5"),
)

# What is added to the default task.py where the numbers are compared: a normalization that needs all replicas, and L2.
NORMALIZED = """


def create_model() -> keras.Model:
    hidden = keras.layers.Dense(24, activation="gelu", kernel_regularizer=keras.regularizers.L2(1e-3))
    layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Flatten(), hidden]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
"""

# A task of few examples, whose processes write how many collective operations the loops of each graph contain. The
# executions of several processes take a while, so that a kill comes between them.
SLOW = """

import json
import os
import time

from engine.data.stacks import CompiledSteps

_load_examples, _call, _seen = load_examples, CompiledSteps.__call__, set()
_index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]


def load_examples(split: str) -> tf.data.Dataset:
    return _load_examples(split).take(500 if split == "train" else 90)


def _called(self, *arguments):
    if self not in _seen:
        _seen.add(self)
        functions = self.graph().as_graph_def().library.function
        number = sum(node.op.startswith("Collective") for each in functions for node in each.node_def)
        with open(config.run_dir / f".collectives-{_index}", "a") as file:
            print(number, file=file)
    time.sleep(0.1 * ("TF_CONFIG" in os.environ))
    return _call(self, *arguments)


CompiledSteps.__call__ = _called
"""

# Gives each worker two CPU devices, where users have two GPUs. TensorFlow itself takes all GPUs or one CPU, and there
# is no public way to change that. So a private method is replaced. Its result differs in the kind of device only.
TWO_DEVICES = """

from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
CollectiveAllReduceExtended._initialize_local_devices = lambda self, resolver, worker_device: (
    tuple(f"{worker_device}/device:CPU:{index}" for index in range(2)),
    "CPU",
)
"""


def project_with(folder: Path, addition: str) -> Path:
    """Returns a copy of the project whose task.py has something added at its end."""
    ignored = shutil.ignore_patterns("__pycache__", "runs", ".*_cache")
    project = shutil.copytree(PROJECT, folder / "project", ignore=ignored)
    with (project / "task.py").open("a", encoding="utf-8") as task:
        task.write(addition)
    return project


class Worker:
    """One process of a cluster, whose output goes to a file."""

    def __init__(self, address: str, log: Path, process: Program) -> None:
        self.address, self.log, self.process = address, log, process

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def last_line(self) -> str:
        """Returns the line with which the program ended."""
        endings = [line for line in self.text.splitlines() if line.startswith(("ERROR: ", "stopped by"))]
        return endings[-1] if endings else ""

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


Started = contextlib.AbstractContextManager[list[Worker]]


@contextlib.contextmanager
def cluster(project: Path, folder: Path, jobs: dict[str, int], *arguments: str) -> Iterator[list[Worker]]:
    """Starts the processes of each job; ends those that are left."""
    with contextlib.ExitStack() as taken:
        sockets = iter([taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(sum(jobs.values()))])
        addresses = {
            job: [f"127.0.0.1:{next(sockets).getsockname()[1]}" for _ in range(number)] for job, number in jobs.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    started: list[Worker] = []
    try:
        for job, number in jobs.items():
            for index in range(number):
                config = {"cluster": addresses, "task": {"type": job, "index": index}}
                environment, log = {**os.environ, "TF_CONFIG": json.dumps(config)}, folder / f"{job}-{index}.log"
                process = Program(["train.py", *arguments], project, log, log, environment)
                started.append(Worker(addresses[job][index], log, process))
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


def workers(project: Path, folder: Path, number: int, *arguments: str) -> Started:
    """Starts workers; ends those that are left."""
    return cluster(project, folder, {"worker": number}, *arguments)


def wait_for(text: str, worker: Worker) -> None:
    """Returns when a worker has written a text. Fails if it ends before."""
    until(lambda: text in worker.text or worker.process.poll() is not None)
    assert text in worker.text, worker.text


def train(project: Path, run_dir: Path, number: int, *arguments: str) -> None:
    """Trains to the end, in one process or in several."""
    given = (f"--run-dir={run_dir}", *arguments)
    if number == 1:
        done = run_program(["train.py", *given], project, timeout=600)
        assert done.returncode == 0, done.stderr
        return
    with workers(project, run_dir.with_name(f"{run_dir.name}-logs"), number, *given) as started:
        for each in started:
            assert each.wait(600) == 0, each.text


def outcome(run_dir: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Returns the rows of metrics.csv and result.json, without times."""
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = [{name: text for name, text in row.items() if name not in TIME_COLUMNS} for row in csv.DictReader(lines)]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return rows, {name: value for name, value in result.items() if name not in TIME_COLUMNS}


def assert_same_numbers(one: Path, other: Path) -> None:
    """Metrics, validations and test result agree to 1e-5; variables to 1e-5 of each one's largest value."""
    (rows, result), (other_rows, other_result) = outcome(one), outcome(other)
    for row, other_row in zip(rows, other_rows, strict=True):
        np.testing.assert_allclose([*map(float, row.values())], [*map(float, other_row.values())], rtol=1e-5)
    between, other_between = (np.loadtxt(run / "validations.csv", delimiter=",", skiprows=1) for run in (one, other))
    assert between.size
    np.testing.assert_allclose(other_between, between, rtol=1e-5)
    for name in (name for name in result if name.startswith("test/")):
        np.testing.assert_allclose(other_result[name], result[name], rtol=1e-5, err_msg=name)
    for name, value in weights(one).items():
        largest = np.abs(value).max()
        np.testing.assert_allclose(weights(other)[name], value, rtol=0, atol=1e-5 * largest, err_msg=name)


def weights(run_dir: Path, names: str = "(model|average)/.*") -> dict[str, np.ndarray]:
    """Returns the variables of the newest checkpoint whose names match a pattern; of statistics the replicas' mean."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    reader = tf.train.load_checkpoint(str(newest / "state"))
    found = [name for name in reader.get_variable_to_shape_map() if re.fullmatch(names, name)]
    assert found
    values = {name: reader.get_tensor(name) for name in found}
    return {name: value.mean(axis=0) if "/moving_" in name else value for name, value in values.items()}
