"""What the programs of benchmarks/tables.py share: data, model, optimizers, and how steps are timed and printed.

The functions take the keras module, because Keras 3 and tf-keras are measured.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WIDTH = 32
IDS = 8
BATCH_SIZE = 256
LEARNING_RATE = 0.01
# Adagrad's sums start as small as the squared gradients are here, so that the loss shows a wrong sum.
INITIAL_SUM = 1e-6
# The steps of the first call, which compiles. The loss of the last of them shows whether programs train alike.
FIRST_STEPS = 4
CALLS_OF_A_MEASUREMENT = 10
NETWORK, WHOM_TO_END = "/proc/net/dev", "/proc/self/oom_score_adj"


def read_arguments() -> argparse.Namespace:
    """Returns the options. From here on, this process is the first that Linux ends if memory is used up."""
    # A dense gradient of the largest table is one of many copies of it, and other programs may run on the machine.
    with open(WHOM_TO_END, "w", encoding="ascii") as score:
        score.write("1000")
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--optimizer", choices=("adagrad", "sgd"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batches", type=int, required=True, help="different batches, used again and again")
    parser.add_argument("--replicas", type=int, default=1)
    return parser.parse_args()


def examples(rows: int, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids (int64, [batches * BATCH_SIZE, IDS]) and labels (float32, [batches * BATCH_SIZE, 1])."""
    random = np.random.default_rng(0)
    count = batches * BATCH_SIZE
    return random.integers(0, rows, (count, IDS)), random.standard_normal((count, 1), np.float32)


def initial_table(shape: Any, dtype: Any = None) -> Any:
    """Returns the same values in every program (float32, [rows, width]), without a second tensor of that size."""
    import tensorflow as tf

    rows, columns = (tf.range(size, dtype=tf.float32) for size in shape)
    return tf.sin(rows)[:, None] * tf.cos(columns)


def create_model(keras: Any, rows: int) -> Any:
    """Returns a model from ids ([batch, IDS]) to a number ([batch, 1])."""
    layers = keras.layers
    ids = keras.Input((IDS,), dtype="int64")
    embedded = layers.Embedding(rows, WIDTH, embeddings_initializer=initial_table)(ids)
    head = layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.1))
    return keras.Model(ids, head(layers.GlobalAveragePooling1D()(embedded)))


def create_optimizer(keras: Any, name: str) -> Any:
    """Returns Adagrad, with the same numbers in both versions of Keras, or SGD."""
    if name == "adagrad":
        return keras.optimizers.Adagrad(LEARNING_RATE, initial_accumulator_value=INITIAL_SUM, epsilon=1e-7)
    if not hasattr(keras, "ops"):  # Only Keras 3 has them.
        # The newer SGD of tf-keras keeps a momentum of every row, even of 0, and so updates all of them.
        return keras.optimizers.legacy.SGD(LEARNING_RATE)
    return keras.optimizers.SGD(LEARNING_RATE)


def measure(
    run_steps: Callable[[int], float],
    seconds: float,
    agree: Callable[[float], float] = lambda value: value,
    counts_bytes: bool = False,
) -> None:
    """Times steps for some seconds, after a warm-up, and prints the figures as the last line of the output.

    `run_steps(count)` takes that number of steps in the graph and returns the loss of the last one. Of several
    processes, `agree` gives all of them the value of one, so that all take the same number of steps.
    """
    figures: dict[str, float] = {"loss": run_steps(FIRST_STEPS), "steps": 0, "seconds": 0.0}
    count = 1
    while figures["seconds"] < seconds:
        started = time.perf_counter()
        run_steps(count)
        took = agree(time.perf_counter() - started)
        if took < seconds / CALLS_OF_A_MEASUREMENT:
            count *= 2  # What was timed before was a call that something else delayed.
            figures["steps"], figures["seconds"] = 0, 0.0
            continue
        figures["steps"] += count
        figures["seconds"] += took
    figures["steps/s"] = figures["steps"] / figures["seconds"]
    if counts_bytes:
        figures["bytes/step"] = _bytes_per_step(run_steps, count)
    # Linux counts it in KiB.
    figures["peak memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(figures), flush=True)


def _bytes_per_step(run_steps: Callable[[int], float], count: int) -> float:
    """Returns the bytes that a step sends over the loopback interface, in both directions together.

    It is the difference of two calls, so that what every call sends does not count. Other programs of the machine that
    use the interface do count.
    """
    sent = []
    for steps in (count, 3 * count):
        before = _bytes_sent()
        run_steps(steps)
        sent.append(_bytes_sent() - before)
    return (sent[1] - sent[0]) / (2 * count)


def _bytes_sent() -> int:
    with open(NETWORK, encoding="ascii") as lines:
        (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])
