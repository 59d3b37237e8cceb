"""Trains task.py on one device, many devices or many machines.

    python train.py                           this machine, whatever it has
    python train.py --simulated-devices 4     four replicas on any CPU
    python launch.py --workers 2              two processes of this machine
    srun ... python train.py                  a cluster: each process finds the others by Slurm, Kubernetes or TF_CONFIG
    python train.py --check                   checks the hooks of task.py, and trains nothing
    python train.py --help                    every setting

The same command again resumes a run that was stopped.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from config import Config  # Reads the command line, before TensorFlow is imported.

import tensorflow as tf

import task
from engine.check import check_task
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers
from engine.command_line import read_settings
from engine.data import Splits, load_splits
from engine.model import TaskObjects, replica_step
from engine.report import compare
from engine.run import Run, RunDirectory, documented_exits, evaluate, initialize
from engine.trained import export

SPLITS = ("train", "validation", "test")

# --- Global objects: build() makes them, everything below uses them ---------------------------------------------------

config: Config
strategy: tf.distribute.Strategy
workers: Workers  # the processes that train together, usually only this one
batches: Splits  # "train", "validation" or "validation/<name>", "test" or "test/<name>" -> its batches
objects: TaskObjects  # what the steps use and change: the objects of task.py, built and checked
run_steps: dict[str, Any]  # split -> takes steps on a stack of batches, in the graph
run: Run  # how far the run has come, and what it keeps on disk


def build(settings: Config) -> None:
    """Makes every global object from the settings; may be called again with others. Writes nothing.

    Raises BadInput if the settings, the hooks of task.py and this machine do not go together.
    """
    global config, strategy, workers, batches, objects, run_steps, run
    config = task.config = settings
    strategy = create_strategy(config)
    workers = Workers(strategy)
    objects = TaskObjects(task, config)
    batches = load_splits(SPLITS, task, config, strategy, workers)

    # KEEP: All variables are made inside the scope, and before anything is compiled.
    with strategy.scope(), objects.recording():
        task.model = objects.build_models(task.create_model(), batches["train"].element_spec[0])
        initialize(config, strategy, workers, objects)  # By --init-from, before an optimizer copies the weights.
        total_steps = config.epochs * batches["train"].steps_per_epoch
        task.optimizer = objects.build_optimizers(task.create_optimizer(total_steps=total_steps))
        task.loss_objects = task.create_loss_objects()
        with objects.counting_in_float64():
            task.metrics = {split: task.create_metrics(split) for split in SPLITS}
        objects.finish({name: dataset.element_spec for name, dataset in batches.items()})
    # Compiled again by every build: a compiled function keeps using the objects of its first call.
    steps = {"train": distributed_train_step, "validation": distributed_validation_step, "test": distributed_test_step}
    run_steps = {split: compile_steps(split, step) for split, step in steps.items() if batches.of(split)}
    run = Run(strategy, workers, objects, batches)


# --- One batch on all replicas ----------------------------------------------------------------------------------------


def distributed_train_step(batch) -> tf.Tensor:
    """Runs task.train_step on every replica; returns the sum (scalar) of the losses of this process's replicas."""
    per_replica_losses = strategy.run(replica_step(task.train_step, config, task.model), args=(batch,))
    objects.average.update()  # It is empty without --ema-decay.
    return reduce_losses(per_replica_losses)


def distributed_validation_step(batch) -> tf.Tensor:
    """Runs task.evaluation_step on every replica; returns the sum (scalar) of the losses of this process's replicas."""
    per_replica_losses = strategy.run(replica_step(task.evaluation_step), args=("validation", batch))
    return reduce_losses(per_replica_losses)


def distributed_test_step(batch) -> tf.Tensor:
    """Runs task.evaluation_step on every replica; returns the sum (scalar) of the losses of this process's replicas."""
    per_replica_losses = strategy.run(replica_step(task.evaluation_step), args=("test", batch))
    return reduce_losses(per_replica_losses)


def reduce_losses(per_replica_losses) -> tf.Tensor:
    """Returns the sum (scalar) of the losses of this process's replicas."""
    if workers.count > 1:  # Here `reduce` would sum over all of them in every step, which takes long.
        return functools.reduce(tf.add, strategy.experimental_local_results(per_replica_losses))
    # KEEP: The sum, because every replica's loss is already divided by the global batch size.
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


# --- Many batches in one call -----------------------------------------------------------------------------------------


def compile_steps(split: str, distributed_step: Callable[..., tf.Tensor]) -> Any:
    """Returns a compiled function that takes steps on some batches of a stack; it returns their losses ([count]).

    A stack is several batches in one tensor, [batches, per_replica_batch_size, ...] on each replica. All datasets of a
    split share the function.
    """
    stacks = batches.of(split)[0].stacks

    def steps(stack, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, count, element_shape=())
        # `count` is a tensor, so this loop runs in the graph, and any number of steps shares one graph.
        for index in tf.range(count):
            losses = losses.write(index, distributed_step(stacks.pick(stack, first + index)))
        return workers.sum(losses.stack())

    return stacks.compile(steps)


# --- Epochs -----------------------------------------------------------------------------------------------------------


def train_epoch(epoch: int = 0) -> dict[str, float]:
    """Trains on the remaining batches of an epoch, counted from 0; returns the metrics of the complete epoch."""
    training = run.start_pass(batches["train"], epoch)
    while training.steps_left:
        losses = []
        # Some seconds of steps, at most up to the next checkpoint or validation; none if a resumed run owes one.
        for stack, first, count in training.next_execution():
            losses.append(run_steps["train"](stack, first, count))
        run.record_losses(training, losses)
        if run.save_is_due(training):  # With --checkpoint-every-steps.
            run.save()
        if run.validation_is_due(training):  # With --validate-every-steps.
            run.end_validation(validate_and_keep_best(epoch))
        run.stop_if_asked()  # By a signal.
    return run.end_pass(training)


def evaluate_split(split: str, epoch: int | None = None) -> dict[str, float]:
    """Returns the metrics of a split's datasets, within an epoch of training or not; {} without datasets."""
    for dataset in batches.of(split):
        evaluation = run.start_pass(dataset, epoch)
        while evaluation.steps_left:
            losses = []
            for stack, first, count in evaluation.next_execution():
                losses.append(run_steps[split](stack, first, count))
            run.record_losses(evaluation, losses)
            run.stop_if_asked()
        run.end_pass(evaluation)
    return run.results(split)


def validate_and_keep_best(epoch: int) -> dict[str, float]:
    """Returns the validation metrics; saves the weights if --monitor has never been better."""
    with run.evaluation_weights():  # With --ema-decay these are the averages.
        metrics = evaluate_split("validation", epoch)
        run.save_if_best(metrics)
    return metrics


def run_epochs() -> None:
    """Trains, validates, reports and saves until all epochs are done, or --patience is used up."""
    while run.should_continue():
        # TODO(you): Change what happens in an epoch, and between epochs.
        # A run that resumes within an epoch runs code before train_epoch again, but not below `if run.starts_epoch:`.
        train_metrics = train_epoch(run.epoch)
        validation_metrics = validate_and_keep_best(run.epoch)
        run.end_epoch(train_metrics | validation_metrics)
        run.save()


# --- The program ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any] | bool | None:
    """Runs the program; `arguments` replaces the command line. Exit codes: see engine/errors.py.

    Returns the contents of result.json; with --evaluate-only the metrics, with --check whether all checks passed.
    """
    with documented_exits():
        settings = read_settings(Config, arguments)
        program = sys.modules[__name__]
        if settings.compare:
            return compare(settings.compare)
        if settings.check:
            return check_task(program, task, settings)
        if settings.evaluates:
            return evaluate(program, settings, lambda: read_settings(Config, arguments))
        return train(settings)


def train(settings: Config) -> dict[str, Any]:
    """Starts a run, or resumes the one in the directory; returns its result, with the test of its best weights."""
    with RunDirectory(settings, create_strategy(settings)) as directory:
        result = directory.result()
        if not result:
            build(settings)
            directory.restore(run)  # The newest checkpoint, if there is one.
            run.trace(run_steps)  # Not before, because layers make constants of what they compute from their weights.
            with directory.recording(run):
                run_epochs()
            result = directory.finish(run, lambda: evaluate_split("test"))
    if settings.export:
        directory.workers.from_chief(lambda: export(task, settings))
    return result


if __name__ == "__main__":
    sys.exit(2 if main() is False else 0)
