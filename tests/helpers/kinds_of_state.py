"""Trains a task whose hooks keep state, or draw, in one of many ways: whole, and stopped and resumed.

    python kinds_of_state.py KIND ...

For each kind there is one JSON line: how training ended, which lines it printed about the task, and whether a resumed
run has the bits of one that was left alone. Each run is a process of its own, forked from one that has imported
TensorFlow.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

import keras
import numpy as np
import tensorflow as tf

import task
import train
from engine.errors import Stopped
from engine.run.signals import Signals

KINDS: dict[str, Callable[[], None]] = {}
EXAMPLES = {"train": 64, "validation": 16, "test": 16}


def kind(install: Callable[[], None]) -> Callable[[], None]:
    KINDS[install.__name__] = install
    return install


def with_layer(*layers: keras.layers.Layer | Callable[[], keras.layers.Layer]) -> None:
    """Makes task.create_model return a small model with some layers in its middle."""

    def create_model() -> keras.Model:
        made = [layer() for layer in layers]
        dense = [keras.layers.Dense(12, activation="gelu"), *made, keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *dense])

    task.create_model = create_model


def preparing(prepare: Callable[[tf.Tensor], tf.Tensor], *, seeded: bool = False) -> None:
    """Makes task.prepare_example apply something to the image in training."""

    def prepare_example(features, labels, *, training):
        features = features / 16.0
        return (prepare(features) if training else features), labels

    def prepare_with_seed(features, labels, *, training, seed):
        features = features / 16.0
        return (prepare(features, seed) if training else features), labels

    task.prepare_example = prepare_with_seed if seeded else prepare_example


# --- State ------------------------------------------------------------------------------------------------------------


@kind
def variable_made_in_create_model():
    with_layer()
    create_model, compute_loss = task.create_model, task.compute_loss

    def create_with_variable():
        task.running = tf.Variable(1.0, trainable=False)
        return create_model()

    def compute_with_variable(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        return loss * task.running, per_example_loss

    train_step = task.train_step

    def count_and_train(batch):
        task.running.assign(task.running * 0.95)
        return train_step(batch)

    task.create_model, task.compute_loss, task.train_step = create_with_variable, compute_with_variable, count_and_train


@kind
def random_generator_of_a_layer():
    class Noise(keras.layers.Layer):
        def build(self, shape):
            self.generator = tf.random.Generator.from_seed(7)

        def call(self, inputs, training=False):
            return inputs + 0.3 * self.generator.normal(tf.shape(inputs)) if training else inputs

    with_layer(Noise)


@kind
def optimizer_with_variables_of_its_own():
    class Heavy(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.slow = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

        def update_step(self, gradient, variable, learning_rate):
            slow = self.slow[self._get_variable_index(variable)]
            slow.assign(0.9 * slow + gradient)
            variable.assign_sub(0.05 * slow)

    with_layer()
    task.create_optimizer = lambda total_steps: Heavy(0.05)


@kind
def text_variable_of_a_layer():
    class Remembering(keras.layers.Layer):
        def build(self, shape):
            self.text = tf.Variable("a", trainable=False)

        def call(self, inputs, training=False):
            if training:
                self.text.assign(self.text + "b")
            return inputs / tf.cast(tf.strings.length(self.text), inputs.dtype)

    with_layer(Remembering)


@kind
def metric_with_an_empty_variable():
    create_metrics = task.create_metrics

    class Mean(keras.metrics.Mean):
        def __init__(self):
            super().__init__()
            self.nothing = self.add_variable((0,), "zeros", name="nothing")

    with_layer()
    task.create_metrics = lambda split: {**create_metrics(split), "loss": Mean()}


# --- Random numbers in the steps --------------------------------------------------------------------------------------


@kind
def tf_nn_dropout_in_a_layer():
    class Drop(keras.layers.Layer):
        def call(self, inputs, training=False):
            return tf.nn.dropout(inputs, 0.3) if training else inputs

    with_layer(Drop)


# --- Random numbers in prepare_example --------------------------------------------------------------------------------


@kind
def tf_random_with_a_seed_in_prepare_example():
    with_layer()
    preparing(lambda image: image + 0.1 * tf.random.normal(image.shape, seed=3))


@kind
def numpy_in_prepare_example():
    with_layer()

    def noisy(image):
        return image + np.random.normal(size=image.shape).astype("float32")

    preparing(lambda image: tf.ensure_shape(tf.numpy_function(noisy, [image], tf.float32), (8, 8, 1)))


@kind
def numpy_with_the_seed_in_prepare_example():
    with_layer()

    def noisy(image, seed):
        return image + np.random.default_rng(np.abs(seed)).normal(size=image.shape).astype("float32")

    preparing(
        lambda image, seed: tf.ensure_shape(tf.numpy_function(noisy, [image, seed], tf.float32), (8, 8, 1)), seeded=True
    )


# --- Runs -------------------------------------------------------------------------------------------------------------


def in_a_process(function: Callable[[], Any]) -> tuple[int, str]:
    """Returns the exit code of a fork that calls a function, and what it has printed."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            # As another process would, it begins with other random numbers.
            random.seed(os.getpid())
            np.random.seed(os.getpid())
            code = 0
            try:
                function()
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException as problem:  # noqa: BLE001 - It is what the run came to.
                print(f"TRACEBACK {type(problem).__name__}: {problem}")
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def train_whole_and_stopped(name: str) -> dict[str, Any]:
    """Returns what becomes of one kind."""

    def main(*arguments: str, chunks: int | None = None) -> None:
        load_examples = task.load_examples
        task.load_examples = lambda split: load_examples(split).take(EXAMPLES[split])
        KINDS[name]()
        if chunks is not None:
            left = iter(range(chunks))

            def stop(*_: Any) -> None:
                if next(left, None) is None:
                    raise Stopped("stopped by a test")

            Signals.check = stop
        train.main(["--simulated-devices=2", "--global-batch-size=16", *arguments])

    with tempfile.TemporaryDirectory() as folder:
        runs = ["--epochs=2", "--steps-per-execution=1", "--learning-rate=0.01", "--run-dir"]
        code, text = in_a_process(lambda: main(*runs, f"{folder}/whole"))
        found = {"kind": name, "training": code, "lines": interesting(text)}
        if code == 0:
            in_a_process(lambda: main(*runs, f"{folder}/stopped", chunks=6))
            in_a_process(lambda: main(*runs, f"{folder}/stopped"))
            found["same bits"] = len({outcome(Path(folder, run)) for run in ("whole", "stopped")}) == 1
    return found


def interesting(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("ERROR", "TRACEBACK", "task."))]


def outcome(run_dir: Path) -> str:
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    del result["seconds"], result["goodput"]
    return json.dumps(result)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(train_whole_and_stopped(name)), flush=True)
