"""Trains task.py on one device or on many.

    python train.py                          this machine, whatever it has
    python train.py --simulated-devices 4    four replicas on any CPU
    python train.py --check                  examines the task without training
    python train.py --help                   every setting

The same command again resumes a run that was stopped.
"""

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import task
from config import MAY_CHANGE_ON_RESUME, Config, read_settings
from engine import objects
from engine.check import check_task
from engine.checkpoint import Checkpoints, weights_sha256
from engine.console import print_facts
from engine.data import Batches, load_splits
from engine.errors import Diverged, exit_codes
from engine.gradients import MovingAverage
from engine.monitor import is_better, resolve_direction
from engine.replicas import average_statistics, spread_seeds
from engine.report import Report
from engine.run_directory import (
    CONFIG,
    RESULT,
    check_run_directory,
    file_sha256,
    open_run_directory,
    read_json,
    write_json,
)
from engine.strategy import create_strategy, describe_strategy, make_deterministic

SPLITS = ("train", "validation", "test")

# --- Global objects: build() makes them, everything below uses them ---------------------------------------------------

config: Config
strategy: tf.distribute.Strategy
batches: dict[str, Batches]  # split -> its batches
run_steps: dict[str, Callable[..., tf.Tensor]]  # split -> the compiled function that runs its steps
steps_at_once: dict[str, int]  # split -> how many steps its next call runs
checkpoints: Checkpoints  # the whole state, at the end of each epoch
best: Checkpoints  # the weights that --monitor says are the best
direction: str  # "min" or "max": which --monitor is better
moving_average: MovingAverage | None  # of the weights, with --ema-decay


def build(settings: Config) -> None:
    """Makes every global object from the settings; may be called again with others. Writes nothing.

    Raises:
        BadInput: the settings, the hooks of task.py and this machine do not go together.
    """
    global config, strategy, batches, run_steps, steps_at_once, checkpoints, best, direction, moving_average
    objects.check_hooks(task)
    config = task.config = settings
    strategy = create_strategy(config.strategy, config.simulated_devices)
    if config.deterministic:
        make_deterministic()
    # Names and random numbers start anew, so that one process can build the same objects twice.
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    batches = load_splits(SPLITS, task, config, strategy.num_replicas_in_sync)

    # KEEP: All variables are made inside the scope, and before anything is compiled.
    with strategy.scope():
        task.model = task.create_model()
        objects.build_models(task.model, batches["train"].element_spec[0])
        objects.check_scope(strategy, task.model, "task.create_model")
        optimizer = task.create_optimizer(total_steps=config.epochs * batches["train"].steps)
        objects.check_scope(strategy, optimizer, "task.create_optimizer")
        task.optimizer = objects.build_optimizers(optimizer, task.model, config.precision)
        task.loss_objects = task.create_loss_objects()
        task.metrics = {split: task.create_metrics(split) for split in SPLITS}
        for of_split in task.metrics.values():
            objects.check_scope(strategy, of_split, "task.create_metrics")
        trained = objects.trainable_variables(task.model)
        moving_average = MovingAverage(trained, config.ema_decay) if config.ema_decay else None
    objects.check_objects(task, config, strategy, batches["train"].element_spec)
    direction = resolve_direction(config.monitor, config.monitor_direction)
    spread_seeds(strategy, objects.by_name(task.model, "model"))

    # Compiled anew with every build: a compiled function keeps using the objects it was first called with.
    run_steps = {
        "train": compile_steps(distributed_train_step),
        "validation": compile_steps(distributed_validation_step),
        "test": compile_steps(distributed_test_step),
    }
    steps_at_once = dict.fromkeys(SPLITS, 1 if config.steps_per_execution == "auto" else config.steps_per_execution)

    weights = objects.model_variables(task.model)
    state = {**weights, **objects.optimizer_variables(task.optimizer)}
    if moving_average:
        state |= {f"average/{name}": average for name, average in moving_average.averages.items()}
    checkpoints = Checkpoints(config.run_dir / "checkpoints", state, keep=config.keep_checkpoints)
    # Two, because the newest checkpoint names the one before, until the next checkpoint is whole.
    best = Checkpoints(config.run_dir / "best", weights, keep=2)


# --- One batch on all replicas ----------------------------------------------------------------------------------------


def distributed_train_step(batch) -> tf.Tensor:
    """Runs task.train_step on every replica; returns the batch's loss (scalar)."""
    per_replica_losses = strategy.run(task.train_step, args=(batch,))
    if moving_average:
        moving_average.update()
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


def compile_steps(distributed_step: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a compiled function that takes `count` steps (scalar tensor) and returns their losses ([count])."""

    @tf.function
    def steps(iterator, count: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, count, element_shape=())
        # `count` is a tensor, so this loop runs in the graph, and any number of steps shares one graph.
        for index in tf.range(count):
            losses = losses.write(index, distributed_step(next(iterator)))
        return losses.stack()

    return steps


def one_pass(split: str, epoch: int = 0) -> dict[str, float]:
    """Runs all batches of a split; returns its metrics as "<split>/<name>", and resets them.

    Raises:
        Diverged: a loss is not finite.
    """
    iterator = batches[split].distribute(strategy, epoch=epoch)
    done, steps = 0, batches[split].steps
    while done < steps:
        count = min(steps_at_once[split], steps - done)
        started = time.monotonic()
        losses = run_steps[split](iterator, tf.constant(count)).numpy()
        seconds = time.monotonic() - started
        if not np.isfinite(losses).all():
            first = np.flatnonzero(~np.isfinite(losses))[0]
            raise Diverged(
                f"the loss of {split} step {done + first + 1} in epoch {epoch + 1} is {losses[first]}: try a smaller "
                f"--learning-rate with --fresh, or look for what is not finite with --check"
            )
        done += count
        if config.steps_per_execution == "auto" and count == steps_at_once[split]:
            # A second's worth, reached by doubling: the first call compiles, and so looks slow.
            steps_at_once[split] = max(1, min(2 * count, int(count / seconds)))
    results = objects.metric_results(task.metrics, split)
    for metric in task.metrics[split].values():
        metric.reset_state()
    return results


# --- Epochs -----------------------------------------------------------------------------------------------------------


def train_epoch(epoch: int) -> dict[str, float]:
    """Trains on every batch of one epoch, counted from 0; returns the training metrics."""
    return one_pass("train", epoch)


def validate(epoch: int = 0) -> dict[str, float]:
    """Returns the validation metrics of the weights as they are, after an epoch counted from 0."""
    return one_pass("validation", epoch)


def test() -> dict[str, float]:
    """Returns the test metrics of the weights as they are."""
    return one_pass("test")


@contextlib.contextmanager
def weights_to_keep() -> Iterator[None]:
    """Puts in place, for a while, the weights that are validated, tested and kept as the best."""
    average_statistics(strategy, objects.by_name(task.model, "model"))
    with moving_average.in_place() if moving_average else contextlib.nullcontext():
        yield


def run_epochs(progress: dict[str, Any]) -> None:
    """Trains, validates, reports and saves until `progress` (what a checkpoint records) has all epochs."""
    report = Report(config.run_dir, epochs=config.epochs, epochs_done=progress["epoch"])
    while progress["epoch"] < config.epochs:
        # TODO(you): Change what happens in an epoch, and between epochs.
        started = time.monotonic()
        train_metrics = train_epoch(progress["epoch"])
        train_seconds = time.monotonic() - started
        progress["epoch"] += 1
        progress["step"] += batches["train"].steps

        with weights_to_keep():
            validation_metrics = validate(progress["epoch"] - 1)
            score = {**train_metrics, **validation_metrics}[config.monitor]
            improved = is_better(score, progress["best_score"], direction)
            if improved:
                progress |= {"best_epoch": progress["epoch"], "best_step": progress["step"], "best_score": score}
                best.save(progress["step"], progress)

        seconds = time.monotonic() - started
        progress["seconds"] += seconds
        row = {
            "epoch": progress["epoch"],
            "step": progress["step"],
            "seconds": seconds,
            "examples_per_second": (batches["train"].number_of_examples - batches["train"].left_out) / train_seconds,
            "learning_rate": objects.learning_rate(task.optimizer),
            **train_metrics,
            **validation_metrics,
        }
        report.epoch(row, is_best=improved)
        checkpoints.save(progress["step"], progress)
    report.draw_curves()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program; `arguments` replaces the command line. Exit codes: see engine/errors.py."""
    with exit_codes():
        settings = read_settings(arguments)
        if settings.check:
            sys.exit(0 if check_task(sys.modules[__name__], task, settings) else 2)
        task_file = Path(task.__file__)
        check_run_directory(settings.run_dir, settings.as_json(), MAY_CHANGE_ON_RESUME, task_file, fresh=settings.fresh)
        result = None if settings.fresh else read_json(settings.run_dir / RESULT)
        if result and result.get("epochs", 0) >= settings.epochs:
            title = f"Finished already after {result['epochs']} epochs (more --epochs continue it, --fresh starts anew)"
            print_facts(title, result)
            return

        build(settings)
        progress = {"epoch": 0, "step": 0, "seconds": 0.0, "best_epoch": None, "best_step": None, "best_score": None}
        resumed_from = None if settings.fresh else checkpoints.newest()
        if resumed_from:
            progress = checkpoints.restore(resumed_from)
            spread_seeds(strategy, objects.by_name(task.model, "model"))
        open_run_directory(settings.run_dir, fresh=settings.fresh)
        write_json(settings.run_dir / CONFIG, describe_run())
        (settings.run_dir / RESULT).unlink(missing_ok=True)
        print_plan(resumed_from)

        run_epochs(progress)

        fingerprint = weights_sha256(objects.model_variables(task.model))
        best.restore(best.path(progress["best_step"]))
        result = {
            **test(),
            "epochs": progress["epoch"],
            "step": progress["step"],
            "best_epoch": progress["best_epoch"],
            f"best_{settings.monitor}": progress["best_score"],
            "seconds": progress["seconds"],
            "weights_sha256": fingerprint,
        }
        write_json(settings.run_dir / RESULT, result)
        print_facts("Result, of the best weights", result)


def describe_run() -> dict[str, Any]:
    """Returns what config.json holds: the settings, and what else the numbers depend on."""
    return {
        "settings": config.as_json(),
        "strategy": describe_strategy(strategy),
        "replicas": strategy.num_replicas_in_sync,
        "task_sha256": file_sha256(Path(task.__file__)),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__, "python": platform.python_version()},
    }


def print_plan(resumed_from: Path | None) -> None:
    """Prints once, before training, what is about to happen."""
    train = batches["train"]
    left_out = f", {train.left_out} examples left out of each (--keep-last-batch keeps them)" if train.left_out else ""
    facts = {
        "strategy": f"{describe_strategy(strategy)}, {strategy.num_replicas_in_sync} replica(s)",
        "batch": f"{config.global_batch_size} examples, {train.share} on each replica",
        "examples": ", ".join(f"{split} {each.number_of_examples}" for split, each in batches.items()),
        "epochs": f"{config.epochs} of {train.steps} steps{left_out}",
        "parameters": f"{sum(model.count_params() for model in objects.by_name(task.model, 'model').values()):,}",
        "run directory": str(config.run_dir) + (f", resumed from {resumed_from.name}" if resumed_from else ""),
    }
    print_facts("Training", facts)


if __name__ == "__main__":
    main()
