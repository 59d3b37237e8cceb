"""What a step is made of: the compiled step alone, and what each part of train.py's step adds to it, in one process.

    python benchmarks/step_cost.py [--replicas 2] [--rounds 5]

Each line has one thing more than the one before; the rounds go through them in turns. The model is the MLP of the
benchmarks, so small that everything else shows.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))

import keras
import tensorflow as tf
from workloads import WORKLOADS

import task
import train
from config import Config
from engine.command_line import read_settings

STEPS = 1200
CALLS = 4
WORKLOAD = WORKLOADS["mlp"]


def build(replicas: int, folder: str) -> None:
    """Makes train.py's global objects for the workload."""
    task.load_examples = lambda split: tf.data.Dataset.from_tensor_slices(WORKLOAD.data(STEPS))
    task.prepare_example = lambda features, labels: (features, labels)
    task.create_model = lambda: WORKLOAD.model(keras)
    task.create_optimizer = lambda total_steps: keras.optimizers.Adam(1e-3)
    devices = f"--simulated-devices={replicas if replicas > 1 else 0}"
    train.build(read_settings(Config, [f"--run-dir={folder}", f"--global-batch-size={WORKLOAD.batch_size}", devices]))


def step_alone(batch: Any) -> tf.Tensor:
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        loss, _ = task.compute_loss(labels, task.model(features, training=True), weights)
    gradients = tape.gradient(loss, task.model.trainable_variables)
    task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
    return loss


def variants() -> dict[str, Any]:
    """Returns functions that take a stack and how many steps to do, by what the step has more than the one before."""
    run, pick = train.strategy.run, train.batches["train"].stacks.pick

    def loop(body: Any) -> Any:
        @tf.function(reduce_retracing=True)
        def steps(stack: Any, count: tf.Tensor) -> tf.Tensor:
            resident = pick(stack, 0)
            total = 0.0
            for index in tf.range(count):
                total += body(stack, resident, index)
            return total

        return steps

    def alone(stack: Any, resident: Any, index: tf.Tensor) -> tf.Tensor:
        run(step_alone, args=(resident,))
        return 0.0

    def with_metrics(stack: Any, resident: Any, index: tf.Tensor) -> tf.Tensor:
        run(task.train_step, args=(resident,))
        return 0.0

    def with_slices(stack: Any, resident: Any, index: tf.Tensor) -> tf.Tensor:
        run(task.train_step, args=(pick(stack, index),))
        return 0.0

    return {
        "compiled step alone": loop(alone),
        "+ metrics": loop(with_metrics),
        "+ a batch of the stack": loop(with_slices),
        "+ losses, as compiled": lambda stack, count: train.run_steps["train"](stack, 0, count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(options.replicas, folder)
    # The largest stack of those that grow.
    stack, _, count = max(train.batches["train"].iterator().take(STEPS), key=lambda taken: taken[2])
    steps = variants()
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for function in steps.values():
        function(stack, tf.constant(count))  # Compiles.
    for _ in range(options.rounds):
        for name, function in steps.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                function(stack, tf.constant(count)).numpy()
            milliseconds[name].append(1000 * (time.perf_counter() - started) / (CALLS * count))
    alone = statistics.median(milliseconds["compiled step alone"])
    for name, rounds in milliseconds.items():
        median = statistics.median(rounds)
        print(f"{options.replicas} replica(s), {name}: {median:.3f} ms, {alone / median:.2f} of the rate alone")


if __name__ == "__main__":
    main()
