"""Trains task.py on one device, many devices or many machines.

    python train.py                           this machine, whatever it has
    python train.py --simulated-devices 4     four replicas on any CPU
    python launch.py --workers 2              two processes of this machine
    srun ... python train.py                  a cluster: each process finds the others by Slurm, Kubernetes or TF_CONFIG
    python train.py --check                   examines the task without training
    python train.py --help                    every setting

The same command again resumes a run that was stopped.
"""

from config import Config
from engine.settings import begin

if __name__ == "__main__":  # Before TensorFlow is imported, which takes seconds.
    begin(Config)

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import task
from engine.check.check import check_task
from engine.cluster.asynchronous import asynchronous_steps, check_settings, is_asynchronous, synchronous
from engine.cluster.devices import long_sums_reported
from engine.cluster.strategy import create_strategy
from engine.cluster.versions import shared_facts
from engine.cluster.workers import Workers, peers_named
from engine.console import console, print_facts
from engine.data.batches import Batches, batch_of, load_splits
from engine.errors import BadInput, Diverged, InterruptedStep, exit_codes
from engine.mistakes import mistakes_named
from engine.model import objects
from engine.model.averages import MovingAverage
from engine.model.gradients import check_loss_scale
from engine.model.hidden_state import HiddenState, noted
from engine.model.replicas import compile_averaging, is_seed, spread_seeds
from engine.run.checkpoints import Checkpoints, Writer
from engine.run.chunks import Chunks
from engine.run.directory import BEST, CHECKPOINTS, RESULT, RunDirectory
from engine.run.evaluation import evaluate, evaluate_continuously
from engine.run.files import write_json
from engine.run.monitor import resolve_direction
from engine.run.plan import print_plan
from engine.run.profile import Profile
from engine.run.progress import Progress
from engine.run.report import TENSORBOARD, Report
from engine.run.run import (
    begin_writing,
    begins_anew,
    check_steps,
    initialize,
    is_finished,
    look_into,
    resume,
    test_the_best,
)
from engine.run.signals import Preemption, saved_at_the_end
from engine.run.state import State, run_state
from engine.settings import flag, read_settings

SPLITS = ("train", "validation", "test")

# --- Global objects: build() makes them, everything below uses them ---------------------------------------------------

config: Config
strategy: tf.distribute.Strategy
workers: Workers  # the processes that train together: usually one, this one
batches: dict[str, Batches]  # split -> its batches
run_steps: dict[str, Callable[..., tf.Tensor]]  # split -> the compiled function that runs its steps
chunks: Chunks  # how many steps the next call of one of them runs
progress: Progress  # how far the run has come
preemption = Preemption()  # whether a signal has asked the run to stop
checkpoints: Checkpoints  # the whole state, at the end of each epoch and every --checkpoint-every-steps
best: Checkpoints  # the weights that --monitor says are the best
direction: str  # "min" or "max": which --monitor is better
average_statistics: Callable[[], None]  # gives all replicas the mean of what each has measured for itself
moving_average: MovingAverage | None  # of the weights, with --ema-decay
hidden: HiddenState  # what the steps use besides the variables that Keras lists
profile: Profile  # of some steps, with --profile
this_program = sys.modules[__name__]  # all of the above, for those parts of the engine that need it


def choose_strategy(settings: Config) -> tf.distribute.Strategy:
    """Returns the strategy, the same one for the same settings; waits for the other processes of a cluster."""
    facts = {flag(name): value for name, value in settings.as_json().items() if name != "run_dir"}
    facts |= shared_facts()
    return create_strategy(
        settings.strategy,
        settings.simulated_devices,
        cluster_timeout=settings.cluster_timeout,
        facts=facts,
        all_reduce=settings.all_reduce,
    )


def build(settings: Config) -> None:
    """Makes every global object from the settings; may be called again with others. Writes nothing.

    Raises:
        BadInput: the settings, the hooks of task.py and this machine do not go together.
    """
    global config, strategy, workers, batches, run_steps, chunks, direction, moving_average
    global average_statistics, progress, profile, checkpoints, best, hidden
    objects.check_hooks(task)
    config = task.config = settings
    strategy = choose_strategy(settings)
    workers = Workers(strategy)
    if is_asynchronous(strategy):
        check_settings(config)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
    # Names and random numbers start anew, so that one process can build the same objects twice.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    batches = load_splits(SPLITS, task, config, strategy.num_replicas_in_sync, pipelines=workers.count)

    # KEEP: All variables are made inside the scope, and before anything is compiled.
    made: list = []
    with strategy.scope(), noted(made):
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
    with strategy.scope():  # Without `noted`: the average's variables are not the hooks'.
        trained = objects.trainable_variables(task.model)
        moving_average = MovingAverage(trained, config.ema_decay) if config.ema_decay else None
    if config.jit:
        objects.check_jit(task.model, strategy)
    objects.build_metrics(task, synchronous(strategy), batches["train"].element_spec)
    validation = objects.check_objects(task, config, synchronous(strategy), batches["train"].element_spec)
    direction = resolve_direction(config.monitor, config.monitor_direction)
    weights = objects.model_variables(task.model)
    spread_seeds(strategy, [variable for name, variable in weights.items() if is_seed(name)])

    # Compiled anew with every build: a compiled function keeps using the objects it was first called with.
    run_steps = {
        "train": compile_steps(distributed_train_step),
        "validation": compile_steps(distributed_validation_step),
        "test": compile_steps(distributed_test_step),
    }
    if is_asynchronous(strategy):
        run_steps = asynchronous_steps(this_program, task)
    average_statistics = compile_averaging(strategy, objects.by_name(task.model, "model"))

    trace_training = None if is_asynchronous(strategy) else functools.partial(trace, run_steps["train"])
    hidden = HiddenState(strategy, task, made, trace_training=trace_training, validation=validation)

    progress, chunks = Progress(), Chunks(config, SPLITS, workers)
    profile = Profile(config.run_dir / TENSORBOARD if config.profile else None, records=workers.is_chief)
    state = run_state(strategy, task, moving_average, hidden.of_training)
    writer = Writer(in_thread=config.async_checkpoints)
    checkpoints = Checkpoints(config.run_dir / CHECKPOINTS, state, keep=config.keep_checkpoints, writer=writer)
    # One more than there are checkpoints, because each of them may name another one as the best.
    keep = config.keep_checkpoints + 1
    best = Checkpoints(
        config.run_dir / BEST, State(strategy, weights, hidden=hidden.of_validation), keep=keep, writer=writer
    )


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
    """Returns a compiled function that takes steps on some of a stack of batches; it returns their losses ([count]).

    A stack is several batches in one, [batches, share, ...] on each replica.
    """
    replicas = synchronous(strategy)

    # With a signature, because a graph would be traced for each size of a stack otherwise.
    @tf.function(input_signature=steps_signature())
    def steps(stack, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, count, element_shape=())
        # `count` is a tensor, so this loop runs in the graph, and any number of steps shares one graph.
        for index in tf.range(count):
            batch = replicas.run(batch_of, args=(stack, first + index))
            losses = losses.write(index, distributed_step(batch))
        return losses.stack()

    return steps


def steps_signature() -> tuple:
    """Returns the types of what compiled steps take. Batches of all splits are of one type."""
    scalar = tf.TensorSpec((), tf.int32)
    return batches["train"].stack_spec(strategy), scalar, scalar


def trace(steps: Callable[..., tf.Tensor]) -> tf.Graph:
    """Returns the graph of compiled steps."""
    return steps.get_concrete_function(*steps_signature()).graph


def one_pass(split: str, epoch: int = 0, between_chunks: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Runs the batches of a split that are left to run; returns its metrics as "<split>/<name>", and resets them.

    Raises:
        Diverged: a loss is not finite.
        Stopped: a signal has come; what was done so far is in `progress` and in the metrics.
        BadInput: examples cannot be read, or a hook failed; it is the same, if it is not an InterruptedStep.
    """
    done = progress.steps_of_pass.setdefault(split, 0)
    feed = batches[split].feed(strategy, epoch=epoch, first_step=done)
    while done < batches[split].steps:
        preemption.check(workers)
        between_chunks()
        count = chunks.next(split, left=batches[split].steps - done, step=progress.step)
        count = profile.steps_at_most(split, count)
        started, waited_before = time.monotonic(), feed.seconds_waited
        numbers = f"step {done + 1}" if count == 1 else f"steps {done + 1} to {done + count}"
        try:
            with (
                profile.chunk(split),
                long_sums_reported(strategy),
                mistakes_named(f"in {split} {numbers} of epoch {epoch + 1}"),
            ):
                losses = feed.run(run_steps[split], count)
        except InterruptedStep as problem:
            if split == "train" or workers.count > 1:
                raise
            # Evaluation changes its metrics only. It begins anew, so that the training before it can be saved.
            progress.steps_of_pass[split] = 0
            for metric in task.metrics[split].values():
                metric.reset_state()
            raise BadInput(str(problem)) from problem
        count = len(losses)  # Fewer than asked for, if the examples after them cannot be read.
        seconds, waited = time.monotonic() - started, feed.seconds_waited - waited_before
        if not np.isfinite(losses).all():
            first = np.flatnonzero(~np.isfinite(losses))[0]
            raise Diverged(f"the loss of {split} step {done + first + 1} in epoch {epoch + 1} is {losses[first]}")
        done += count
        progress.add(split, count, seconds, waited)
        chunks.took(split, count, seconds)
        for optimizer in objects.by_name(task.optimizer, "optimizer").values():
            check_loss_scale(optimizer, progress.step)
        if split == "train" and done < batches[split].steps and is_multiple(config.checkpoint_every_steps):
            checkpoints.save(progress.step, progress.record())
    results = objects.metric_results(task.metrics, split)
    for metric in task.metrics[split].values():
        metric.reset_state()
    del progress.steps_of_pass[split]
    return results


def is_multiple(every: int | None) -> bool:
    """Returns whether this step is a multiple of a setting such as --checkpoint-every-steps."""
    return every is not None and progress.step % every == 0


# --- Epochs -----------------------------------------------------------------------------------------------------------


def train_epoch(epoch: int, report: Report | None = None) -> dict[str, float]:
    """Trains on the batches of one epoch, counted from 0, that are left; returns the training metrics of all."""
    metrics = one_pass("train", epoch, between_chunks=lambda: validate_in_between(epoch, report))
    average_statistics()
    return metrics


def validate(epoch: int = 0) -> dict[str, float]:
    """Returns the validation metrics of the weights as they are, after an epoch counted from 0."""
    return one_pass("validation", epoch)


def validate_in_between(epoch: int, report: Report | None) -> None:
    """Validates and reports, if --validate-every-steps says so, in the middle of a training epoch."""
    due = progress.steps_of_pass["train"] and is_multiple(config.validate_every_steps)
    if not due or progress.validated_step == progress.step:
        return
    if "validation" not in progress.steps_of_pass:  # Else it was stopped in the middle of it.
        average_statistics()
    with weights_to_keep():
        metrics = validate(epoch)
        improved = config.monitor in metrics and progress.consider(metrics[config.monitor], direction)
        progress.validated_step = progress.step
        if improved:
            best.save(progress.step, progress.record())
    if report:
        workers.from_chief(lambda: report.validation(progress.step, metrics, is_best=improved))
    if improved:  # Every checkpoint's best weights are kept, and there is room for one more.
        checkpoints.save(progress.step, progress.record())


def test() -> dict[str, float]:
    """Returns the test metrics of the weights as they are."""
    return one_pass("test")


def weights_to_keep() -> contextlib.AbstractContextManager[None]:
    """Puts in place, for a while, the weights that are validated, tested and kept as the best."""
    return moving_average.in_place() if moving_average else contextlib.nullcontext()


def run_epochs(report: Report) -> None:
    """Trains, validates, reports and saves until all epochs are done, or none was better for --patience of them."""
    while progress.epoch < config.epochs and not is_out_of_patience():
        # TODO(you): Change what happens in an epoch, and between epochs.
        if progress.train_metrics is None:  # Else it was stopped in the middle of the validation.
            progress.train_metrics = train_epoch(progress.epoch, report)
        with weights_to_keep():
            metrics = {**progress.train_metrics, **validate(progress.epoch)}
            seconds, train_seconds, waited = progress.end_epoch()
            improved = progress.consider(metrics[config.monitor], direction)
            if improved:
                best.save(progress.step, progress.record())
        row = {
            "epoch": progress.epoch,
            "step": progress.step,
            "seconds": seconds,
            "examples_per_second": (batches["train"].number_of_examples - batches["train"].left_out) / train_seconds,
            **objects.learning_rates(task.optimizer),
            **metrics,
        }
        workers.from_chief(functools.partial(report.epoch, row, is_best=improved, waited=waited / train_seconds))
        checkpoints.save(progress.step, progress.record())
    workers.from_chief(report.draw_curves)
    if is_out_of_patience():
        console.print(f"No better {config.monitor} for {progress.epochs_without_improvement()} epochs: stopped.")


def is_out_of_patience() -> bool:
    return config.patience is not None and progress.epochs_without_improvement() >= config.patience


# --- The program ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any] | bool | None:
    """Runs the program; `arguments` replaces the command line. Exit codes: see engine/errors.py.

    Returns:
        What result.json holds; with --evaluate-only the metrics, with --check whether all findings hold.
    """
    with exit_codes(), mistakes_named(), peers_named():
        settings = read_settings(Config, arguments)
        if settings.check:
            return check_task(this_program, task, settings)
        if settings.evaluate_only:
            return evaluate(this_program, settings)
        if settings.evaluate_continuously:
            return evaluate_continuously(this_program, lambda: read_settings(Config, arguments))
        return train(settings)


def train(settings: Config) -> dict[str, Any]:
    """Begins a run, or goes on with the one in the directory; returns its result, with the test of its best weights."""
    from_chief = Workers(choose_strategy(settings)).from_chief
    with RunDirectory(settings.run_dir) as run_directory, preemption.listening():
        fresh = from_chief(lambda: begins_anew(settings))
        result = from_chief(lambda: look_into(run_directory, settings, fresh=fresh))
        if result and is_finished(result, settings):
            more = "--epochs" if result["epochs"] >= settings.epochs else "--patience"
            told = f"more {more} would continue it; --fresh starts anew"
            print_facts(f"Finished already after {result['epochs']} epochs ({told})", result)
            return result
        build(settings)
        check_steps(this_program)
        begins = None if fresh else resume(this_program)
        if not begins:
            begins = initialize(this_program) if settings.init_from else "with new weights"
        for of_split in batches.values():
            of_split.read(strategy, workers.index)  # What cannot be read shows before anything is written.
        report = Report(settings.run_dir, epochs=settings.epochs)
        from_chief(lambda: begin_writing(this_program, run_directory, report, fresh=fresh))
        print_plan(settings, strategy, batches, task, begins)

        with contextlib.closing(profile), saved_at_the_end(checkpoints, progress):
            run_epochs(report)
        result = test_the_best(this_program)
        from_chief(lambda: write_json(settings.run_dir / RESULT, result))
    print_facts("Result, of the best weights", result)
    return result


if __name__ == "__main__":
    sys.exit(2 if main() is False else 0)
