"""The generated project's train.py as it ships: metrics, reports, checkpoints, the best weights, early stopping.

Only task.py's hooks are the workload's. Counted as training is everything from the end of the first epoch to the end
of the last one but the validations.
"""

import train  # First, as when it is started by itself: it imports TensorFlow in its own way.

# isort: split
import contextlib
import sys
import tempfile
import time

import keras
import tensorflow as tf
from common import Measured, read_arguments
from workloads import EPOCHS

import task
from engine.report.report import Report
from engine.run.training import Run

options, workload = read_arguments()
measured = Measured()


def load_examples(split):
    steps = workload.steps if split == "train" else workload.evaluation_steps
    return tf.data.Dataset.from_tensor_slices(workload.data(steps))


def prepare_example(features, labels):
    return features, labels


task.load_examples, task.prepare_example = load_examples, prepare_example
task.create_model = lambda: workload.model(keras)
task.create_optimizer = lambda total_steps: keras.optimizers.Adam(1e-3)

record_losses, evaluate, epoch = Run.record_losses, train.evaluate_split, Report.epoch
marks = []
validating = []


def measured_losses(self, one_pass, losses):
    if measured.first_step_seconds is None:
        losses = [each.numpy() for each in losses]  # Waits for the step.
        measured.first_step_is_done()
    record_losses(self, one_pass, losses)


def measured_evaluation(split, *arguments):
    started = time.perf_counter()
    metrics = evaluate(split, *arguments)
    if split == "validation":
        validating.append(time.perf_counter() - started)
    return metrics


def measured_epoch(self, row, **more):
    marks.append(time.perf_counter())
    epoch(self, row, **more)


Run.record_losses, train.evaluate_split, Report.epoch = measured_losses, measured_evaluation, measured_epoch
if options.saves is False:
    Run.save = lambda run: None
with tempfile.TemporaryDirectory() as folder:
    arguments = [
        f"--run-dir={folder}",
        f"--epochs={EPOCHS}",
        f"--global-batch-size={workload.batch_size}",
        f"--simulated-devices={options.replicas if options.replicas > 1 else 0}",
        "--patience=10",
        f"--precision={options.precision}",
        *(["--jit"] if options.jit else []),
    ]
    with contextlib.redirect_stdout(sys.stderr):
        train.main(arguments)
if train.run.workers.is_chief:  # Which is the one that reports, and the one that is measured.
    for began, ended, seconds in zip(marks[:-1], marks[1:], validating[1:], strict=True):
        measured.add("train", workload.steps, ended - began - seconds)
        measured.add("evaluation", workload.evaluation_steps * workload.batch_size, seconds)
measured.tell()
