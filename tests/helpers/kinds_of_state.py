"""Trains a task whose hooks keep state in many ways, or draw random numbers that a resumed run does not repeat.

python kinds_of_state.py kept|drawn RUN_DIR [EXECUTIONS], in the folder of a project. It stops after some executions.
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import keras
import numpy as np
import tensorflow as tf

import task
import train
from engine.errors import Stopped
from engine.run.signals import Signals

EXAMPLES = {"train": 64, "validation": 16, "test": 16}


class Noise(keras.layers.Layer):
    """Draws from a random generator of its own."""

    def build(self, shape):
        self.generator = tf.random.Generator.from_seed(7)

    def call(self, inputs, training=False):
        return inputs + 0.3 * self.generator.normal(tf.shape(inputs)) if training else inputs


class Remembering(keras.layers.Layer):
    """Makes a text longer with each step."""

    def build(self, shape):
        self.text = tf.Variable("a", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.text.assign(self.text + "b")
        return inputs / tf.cast(tf.strings.length(self.text), inputs.dtype)


class Heavy(keras.optimizers.SGD):
    """Has variables that Keras does not list."""

    def build(self, variables):
        super().build(variables)
        self.slow = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign(0.9 * slow + gradient)
        variable.assign_sub(0.05 * slow)


class Mean(keras.metrics.Mean):
    """Has a variable without values."""

    def __init__(self):
        super().__init__()
        self.nothing = self.add_variable((0,), "zeros", name="nothing")


class Drop(keras.layers.Layer):
    def call(self, inputs, training=False):
        return tf.nn.dropout(inputs, 0.3) if training else inputs


def create_model():
    task.running = tf.Variable(1.0, trainable=False)
    middle = [Noise(), Remembering()] if kind == "kept" else [Drop()]
    dense = [keras.layers.Dense(12, activation="gelu"), *middle, keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *dense])


def compute_loss(labels, predictions, sample_weights, *, of_the_task=task.compute_loss):
    loss, per_example_loss = of_the_task(labels, predictions, sample_weights)
    return loss * task.running, per_example_loss


def train_step(batch, *, of_the_task=task.train_step):
    task.running.assign(task.running * 0.95)
    return of_the_task(batch)


def create_metrics(split, *, of_the_task=task.create_metrics):
    return {**of_the_task(split), "loss": Mean()}


def noisy(image, seed):
    random_numbers = np.random.default_rng(np.abs(seed)) if kind == "kept" else np.random
    return image + random_numbers.normal(size=image.shape).astype("float32")


def prepare_example(features, labels, *, training, seed):
    image = features / 16.0
    if training:
        if kind == "drawn":
            image += 0.1 * tf.random.normal(image.shape, seed=3)
        image = tf.ensure_shape(tf.numpy_function(noisy, [image, seed], tf.float32), (8, 8, 1))
    return image, labels


def load_examples(split, *, of_the_task=task.load_examples):
    return of_the_task(split).take(EXAMPLES[split])


kind, run_dir, *executions = sys.argv[1:]
# As another process would, it begins with other random numbers.
random.seed(os.getpid())
np.random.seed(os.getpid())
task.load_examples, task.prepare_example, task.create_model = load_examples, prepare_example, create_model
if kind == "kept":
    task.create_optimizer = lambda total_steps: Heavy(0.05)
    task.create_metrics, task.compute_loss, task.train_step = create_metrics, compute_loss, train_step
if executions:
    left = iter(range(int(executions[0])))

    def stop(*_):
        if next(left, None) is None:
            raise Stopped("stopped by a test")

    Signals.check = stop
flags = ["--simulated-devices=2", "--global-batch-size=16", "--steps-per-execution=1", "--learning-rate=0.01"]
train.main([*flags, "--epochs=2", f"--run-dir={run_dir}"])
