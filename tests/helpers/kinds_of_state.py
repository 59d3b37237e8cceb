"""Trains a task whose hooks keep state, or draw, in one of many ways: whole, and stopped and resumed; checks it too.

    python kinds_of_state.py [--replicas 2] [--check] [KIND ...]

For each kind there is one JSON line: how training ended, whether a resumed run has the bits of one that was left alone,
and with --check what --check says. Each run is a process of its own, forked from one that has imported TensorFlow.
"""

import argparse
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
from engine.run.signals import Preemption

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


class RunningMean(keras.layers.Layer):
    def build(self, shape):
        self.mean = tf.Variable(tf.zeros(shape[1:]), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
        return inputs - self.mean


@kind
def variable_of_a_layer():
    with_layer(RunningMean)


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
def stateful_recurrent_layer():
    def create_model():
        share = task.config.global_batch_size // max(1, task.config.simulated_devices)
        layers = [keras.layers.Reshape((8, 8)), keras.layers.LSTM(8, stateful=True), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input(batch_shape=(share, 8, 8, 1)), *layers])

    task.create_model = create_model


@kind
def random_generator_of_a_layer():
    class Noise(keras.layers.Layer):
        def build(self, shape):
            self.generator = tf.random.Generator.from_seed(7)

        def call(self, inputs, training=False):
            return inputs + 0.3 * self.generator.normal(tf.shape(inputs)) if training else inputs

    with_layer(Noise)


@kind
def seed_generator_of_a_layer():
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(7)

        def call(self, inputs, training=False):
            return inputs + 0.3 * keras.random.normal(tf.shape(inputs), seed=self.seed_generator)

    with_layer(Noise)


@kind
def dropout_layer():
    with_layer(lambda: keras.layers.Dropout(0.3))


@kind
def batch_normalization():
    with_layer(keras.layers.BatchNormalization)


@kind
def variable_of_a_metric():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.largest = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

        def update_state(self, values, sample_weight=None):
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(values)))

        def result(self):
            return tf.identity(self.largest)

        def reset_state(self):
            self.largest.assign(0.0)

    with_layer()
    create_metrics, update_metrics = task.create_metrics, task.update_metrics
    task.create_metrics = lambda split: {**create_metrics(split), "largest": Largest()}

    def update(split, labels, predictions, per_example_loss, weights):
        update_metrics(split, labels, predictions, per_example_loss, weights)
        task.metrics[split]["largest"].update_state(per_example_loss)

    task.update_metrics = update


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
def variable_at_module_level():
    with_layer()
    count, train_step = tf.Variable(0.0), task.train_step

    def count_and_train(batch):
        count.assign_add(1.0)
        return train_step(batch) + 0.0 * count

    task.train_step = count_and_train


@kind
def lookup_table_that_grows():
    with_layer()
    create_model, train_step = task.create_model, task.train_step

    def create_with_table():
        task.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        return create_model()

    def train_and_insert(batch):
        loss = train_step(batch)
        task.table.insert(tf.constant(1, tf.int64), loss)
        return loss

    task.create_model, task.train_step = create_with_table, train_and_insert


# --- Random numbers in the steps --------------------------------------------------------------------------------------


@kind
def tf_nn_dropout_in_a_layer():
    class Drop(keras.layers.Layer):
        def call(self, inputs, training=False):
            return tf.nn.dropout(inputs, 0.3) if training else inputs

    with_layer(Drop)


@kind
def tf_random_in_the_step():
    with_layer()
    compute_loss = task.compute_loss

    def noisy(labels, predictions, weights):
        return compute_loss(labels, predictions + 0.3 * tf.random.normal(tf.shape(predictions)), weights)

    task.compute_loss = noisy


@kind
def tf_random_with_a_seed_in_the_step():
    with_layer()
    compute_loss = task.compute_loss

    def noisy(labels, predictions, weights):
        return compute_loss(labels, predictions + 0.3 * tf.random.normal(tf.shape(predictions), seed=3), weights)

    task.compute_loss = noisy


@kind
def keras_random_without_a_seed():
    class Noise(keras.layers.Layer):
        def call(self, inputs, training=False):
            return inputs + 0.3 * keras.random.normal(tf.shape(inputs))

    with_layer(Noise)


@kind
def numpy_in_the_step():
    with_layer()
    compute_loss = task.compute_loss

    def noisy(labels, predictions, weights):
        noise = tf.numpy_function(lambda: np.random.normal(size=(1, 10)).astype("float32"), [], tf.float32)
        return compute_loss(labels, predictions + 0.3 * tf.ensure_shape(noise, (1, 10)), weights)

    task.compute_loss = noisy


# --- Random numbers in prepare_example --------------------------------------------------------------------------------


@kind
def tf_image_random_in_prepare_example():
    with_layer()
    preparing(tf.image.random_flip_left_right)


@kind
def tf_random_in_prepare_example():
    with_layer()
    preparing(lambda image: image + 0.1 * tf.random.normal(image.shape))


@kind
def tf_random_with_a_seed_in_prepare_example():
    with_layer()
    preparing(lambda image: image + 0.1 * tf.random.normal(image.shape, seed=3))


@kind
def random_generator_in_prepare_example():
    with_layer()
    generator = tf.random.Generator.from_seed(3)
    preparing(lambda image: image + 0.1 * generator.normal(image.shape))


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


@kind
def stateless_in_prepare_example():
    with_layer()
    preparing(lambda image, seed: image + 0.1 * tf.random.stateless_normal(image.shape, seed), seeded=True)


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


def look_into(name: str, replicas: int, *, check: bool) -> dict[str, Any]:
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

            Preemption.check = stop
        train.main([f"--simulated-devices={replicas}", "--global-batch-size=16", *arguments])

    with tempfile.TemporaryDirectory() as folder:
        runs = ["--epochs=2", "--steps-per-execution=1", "--learning-rate=0.01", "--run-dir"]
        code, text = in_a_process(lambda: main(*runs, f"{folder}/whole"))
        found = {"kind": name, "training": code, "lines": interesting(text)}
        if code == 0:
            in_a_process(lambda: main(*runs, f"{folder}/stopped", chunks=6))
            in_a_process(lambda: main(*runs, f"{folder}/stopped"))
            found["same bits"] = len({outcome(Path(folder, run)) for run in ("whole", "stopped")}) == 1
    if check:
        _, text = in_a_process(lambda: main("--check"))
        found["check"] = [line for line in text.splitlines() if line.startswith(("FIX", "TRACEBACK", "ERROR"))]
    return found


def interesting(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("ERROR", "TRACEBACK", "task."))]


def outcome(run_dir: Path) -> str:
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    del result["seconds"]
    return json.dumps(result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("kinds", nargs="*")
    options = parser.parse_args()
    for name in options.kinds or KINDS:
        print(json.dumps(look_into(name, options.replicas, check=options.check)), flush=True)


if __name__ == "__main__":
    main()
