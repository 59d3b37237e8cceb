"""Trains task.py on one device, many devices or many machines.

    python train.py                           this machine, whatever it has
    python train.py --simulated-devices 4     four replicas on any CPU
    python launch.py --workers 2              two processes of this machine
    srun ... python train.py                  a cluster: each process finds the others by Slurm, Kubernetes or TF_CONFIG
    python train.py --check                   checks the hooks of task.py, and trains nothing
    python train.py --help                    every setting

The same command again resumes a run that was stopped.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from config import Config  # Reads the command line, before TensorFlow is imported.

import tensorflow as tf

import task
from engine.check import check_task
from engine.cluster.parameter_servers import worker_pool
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers, peers_named
from engine.command_line import read_settings
from engine.data import Batches, CompiledSteps, load_splits
from engine.errors import exit_codes
from engine.model import build_models, finish_objects, in_micro_batches, recorded_variables, set_up
from engine.report import compare
from engine.run import Run, RunDirectory, begin_run, evaluate, evaluate_continuously, lock_and_find_result, signals
from engine.trained import export
from engine.user_errors import user_errors_named

SPLITS = ("train", "validation", "test")

# --- Global objects: build() makes them, everything below uses them ---------------------------------------------------

config: Config
strategy: tf.distribute.Strategy
batches: dict[str, Batches]  # "train", "validation" or "validation/<set>", "test" or "test/<set>" -> its batches
run_steps: dict[str, CompiledSteps]  # split -> takes steps on a stack of batches, in the graph
run: Run  # how far the run has come, and what it keeps on disk


def build(settings: Config) -> None:
    """Makes every global object from the settings; may be called again with others. Writes nothing.

    Raises:
        BadInput: the settings, the hooks of task.py and this machine do not go together.
    """
    global config, strategy, batches, run_steps, run
    config = task.config = settings
    strategy = create_strategy(config)
    set_up(task, config)
    workers = Workers(strategy)
    context = tf.distribute.InputContext(workers.count, workers.index)
    # With --strategy parameter_server, each worker trains on batches of its own.
    batches = load_splits(SPLITS, task, config, strategy, context, worker_pool(strategy))

    # KEEP: All variables are made inside the scope, and before anything is compiled.
    with strategy.scope(), recorded_variables() as made:
        task.model = build_models(task.create_model(), batches["train"].element_spec[0])
        task.optimizer = task.create_optimizer(total_steps=config.epochs * batches["train"].steps_per_epoch)
        task.loss_objects = task.create_loss_objects()
        task.metrics = {split: task.create_metrics(split) for split in SPLITS}
        element_specs = {name: each.element_spec for name, each in batches.items()}
        objects = finish_objects(task, config, element_specs, made, graph)
    run = Run(config, strategy, objects)
    # Compiled anew with every build: a compiled function keeps using the objects it was first called with.
    steps = {"train": distributed_train_step, "validation": distributed_validation_step, "test": distributed_test_step}
    run_steps = {split: compile_steps(split, step) for split, step in steps.items() if sets(split)}


def sets(split: str) -> list[str]:
    """Returns the names in `batches` of a split's sets: of one, of several, or of none."""
    return [name for name, each in batches.items() if each.split == split]


# --- One batch on all replicas ----------------------------------------------------------------------------------------


def distributed_train_step(batch) -> tf.Tensor:
    """Runs task.train_step on every replica; returns the batch's loss (scalar)."""
    per_replica_losses = strategy.run(in_micro_batches(task.train_step, config), args=(batch,))
    run.objects.update_average()  # Of the weights, with --ema-decay.
    # KEEP: SUM, because every replica's loss is already divided by the global batch.
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


def distributed_validation_step(batch) -> tf.Tensor:
    """Runs task.validation_step on every replica; returns the batch's loss (scalar)."""
    per_replica_losses = strategy.run(task.validation_step, args=(batch,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


def distributed_test_step(batch) -> tf.Tensor:
    """Runs task.test_step on every replica; returns the batch's loss (scalar)."""
    per_replica_losses = strategy.run(task.test_step, args=(batch,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


# --- Many batches in one call -----------------------------------------------------------------------------------------


def compile_steps(split: str, distributed_step: Callable[..., tf.Tensor]) -> CompiledSteps:
    """Returns a compiled function that takes steps on some of a stack of batches; it returns their losses ([count]).

    A stack is several batches in one tensor, [batches, per-replica batch, ...] on each replica. All datasets of a split
    share the function.
    """
    stacks = batches[sets(split)[0]].stacks

    def steps(stack, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, count, element_shape=())
        # `count` is a tensor, so this loop runs in the graph, and any number of steps shares one graph.
        for index in tf.range(count):
            losses = losses.write(index, distributed_step(stacks.pick(stack, first + index)))
        return losses.stack()

    return stacks.compile(steps)


def graph(split: str) -> tf.Graph | None:
    """Returns the graph of a split's steps, to look at; None if there is none in this process."""
    return run_steps[split].graph() if split in run_steps else None


def take_steps(name: str, epoch: int = 0) -> None:
    """Takes the steps of a pass over a set that are left; in training, up to where a validation is due."""
    take = run_steps[batches[name].split]
    # Python has its turn about once a second: the run then saves what is due, or stops.
    for stack, first, count in run.chunks(batches[name], epoch):
        run.note(take(stack, first, count))


# --- Epochs -----------------------------------------------------------------------------------------------------------


def train_epoch(epoch: int = 0) -> dict[str, float]:
    """Trains on the batches of an epoch, counted from 0, that are left; returns the training metrics of all."""
    take_steps("train", epoch)
    while run.validation_is_due(batches["train"]):  # With --validate-every-steps.
        with run.weights_to_keep():
            metrics = validate(epoch)
            run.keep_if_best(metrics)
        run.end_validation(metrics)
        take_steps("train", epoch)
    return run.results("train")


def validate(epoch: int = 0) -> dict[str, float]:
    """Returns the validation metrics of the weights as they are, after an epoch counted from 0; none without sets."""
    for name in sets("validation"):
        take_steps(name, epoch)
    return run.results("validation")


def test() -> dict[str, float]:
    """Returns the test metrics of the weights as they are; none without sets."""
    for name in sets("test"):
        take_steps(name)
    return run.results("test")


def run_epochs() -> None:
    """Trains, validates, reports and saves until all epochs are done, or none was better for --patience of them."""
    while run.goes_on():
        # TODO(you): Change what happens in an epoch, and between epochs.
        metrics = train_epoch(run.epoch)
        with run.weights_to_keep():
            metrics |= validate(run.epoch)
            run.keep_if_best(metrics)
        run.end_epoch(metrics)


# --- The program ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any] | bool | None:
    """Runs the program; `arguments` replaces the command line. Exit codes: see engine/errors.py.

    Returns:
        What result.json holds; with --evaluate-only the metrics, with --check whether all findings hold.
    """
    with exit_codes(), user_errors_named(), peers_named():
        settings = read_settings(Config, arguments)
        program = sys.modules[__name__]
        if settings.compare:
            return compare(settings.compare)
        if settings.check:
            return check_task(program, task, settings)
        if settings.evaluate_only:
            return evaluate(program, settings)
        if settings.evaluate_continuously:
            return evaluate_continuously(program, lambda: read_settings(Config, arguments))
        return train(settings)


def train(settings: Config) -> dict[str, Any]:
    """Begins a run, or goes on with the one in the directory; returns its result, with the test of its best weights."""
    workers = Workers(create_strategy(settings))
    with RunDirectory(settings.run_dir) as directory:
        with signals.listening():
            result = lock_and_find_result(directory, settings, workers)
            if not result:
                build(settings)
                begin_run(run, directory, batches)  # From the newest checkpoint, or else --init-from, or else anew.
                with run.under_way():
                    run_epochs()
                result = run.finish(test)
        if settings.export:  # A signal ends it at once.
            export(task, settings, workers)
        return result


if __name__ == "__main__":
    sys.exit(2 if main() is False else 0)
