"""The generated project on a large table: train.py's compiled steps, with its input and a metric, without saves."""

import train  # First, as when it is started by itself: it imports TensorFlow in its own way.

# isort: split
import contextlib
import os
import sys
import tempfile

import keras
import tensorflow as tf
from table_common import BATCH_SIZE, create_model, create_optimizer, examples, measure, read_arguments

import task
from config import Config
from engine.command_line import read_settings

options = read_arguments()


def load_examples(split):
    return tf.data.Dataset.from_tensor_slices(examples(options.rows, options.batches if split == "train" else 1))


def update_metrics(split, labels, predictions, per_example_loss, sample_weights):
    task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=sample_weights)


task.load_examples, task.update_metrics = load_examples, update_metrics
task.prepare_example = lambda ids, labels: (ids, labels)
task.create_model = lambda: create_model(keras, options.rows)
task.create_optimizer = lambda total_steps: create_optimizer(keras, options.optimizer)
task.create_loss_objects = lambda: {"label": keras.losses.MeanSquaredError(reduction="none")}
task.create_metrics = lambda split: {"loss": keras.metrics.Mean()}

with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
    devices = f"--simulated-devices={options.replicas if options.replicas > 1 else 0}"
    train.build(read_settings(Config, [f"--run-dir={folder}", f"--global-batch-size={BATCH_SIZE}", devices]))
iterator = train.batches["train"].iterator()


def run_steps(count):
    losses = [train.run_steps["train"](stack, first, taken) for stack, first, taken in iterator.take(count)]
    return float(losses[-1][-1])


workers = train.run.workers
measure(
    run_steps,
    options.seconds,
    agree=lambda value: workers.from_chief(lambda: value),
    counts_bytes="TF_CONFIG" in os.environ,
)
