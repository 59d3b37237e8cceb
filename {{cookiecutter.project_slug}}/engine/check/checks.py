"""The checks of a task's hooks.

One replica and two simulated ones must get the same results for the same batches. Randomness inside the model is
switched off for that. An unsynchronized BatchNormalization is reported and then synchronized, so that it hides no other
cause.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from engine.check import measure
from engine.check.causes import differing_losses, draws_of_replicas, losses_of_model, why_losses_differ
from engine.check.examples import check_batches, check_examples, check_predictions, check_unchanged, read_examples
from engine.check.measure import LOSS, SAMPLE_WEIGHTS, Arrays, Measured
from engine.check.recorder import recording_optimizers
from engine.check.results import (
    Check,
    as_texts,
    check_repeats,
    close,
    differing_arrays,
    differing_gradients,
    differing_metrics,
    hook_of_step,
)
from engine.check.steps import check_loss, check_metrics, check_updated_metrics, draws, jumps
from engine.cluster.strategy import create_strategy
from engine.model.rows import slow_reads
from engine.model.variables import by_name, model_variables
from engine.settings import Settings
from engine.tracing import unrepeatable

PARTS = ("examples", "results", "evaluation", "updates")
REPEATED_STEPS = 40
SMALL_EPSILON = 1e-6


def run_checks(
    program: Any, task: Any, settings: Settings, global_batch_size: int, only: Collection[str] = PARTS
) -> Iterator[Check]:
    """Yields the results of the checks; BadInput, and any exception of a hook, ends them.

    `global_batch_size` is the user's; the one in `settings` can be shared by two replicas. `only` names the PARTS to
    run: a test of one hook needs one of them. Each part traces the steps that it uses, which takes most of the time, so
    the evaluation is checked with the program whose results are compared.
    """
    create_strategy(settings)
    task.config = settings  # task.load_examples is called before anything is built.
    load_examples = task.load_examples  # Of all examples, also under `few_examples`.
    hashes = read_examples(program, load_examples)
    if "examples" in only:
        yield from check_examples(program, settings, global_batch_size)
        yield from check_batches(program, task)
        if hook := getattr(task, "predict_step", None):
            yield from check_predictions(program, hook)
    agree = True  # Whether one replica and two have the same results, so that their updates can be compared.
    with measure.few_examples(task, settings.global_batch_size):
        with recording_optimizers(task):
            two = measure.measure(program, task, settings, 2) if "results" in only else None
            alone = settings if not two or two.layers.synchronized else dataclasses.replace(settings, micro_batches=1)
            program.build(dataclasses.replace(alone, simulated_devices=1))
            evaluation = list(_check_evaluation(program, task)) if "evaluation" in only else []
            if two:
                one, two, why = _measure_one(program, task, settings, alone, two)
        check_unchanged(hashes, load_examples)
        if two:
            yield from _check_layers(program, task, one)
            compared = [] if one.layers.still_random else list(_check_same_results(program, task, one, two, why))
            # Steps that differ make the updates differ, too. That is one cause, so it is reported once.
            agree = not one.layers.still_random and all(each.ok for each in compared)
            yield from compared
            yield from check_updated_metrics(program, task)
            yield from check_metrics(program, task, program.batches["train"], one.stacks)
            yield from check_loss(program, task, one)
            yield from _check_traces(program)
        yield from evaluation
        if "updates" in only:
            yield from _check_training(program, task, settings, compare=agree)


# --- The steps, on one replica and on two -----------------------------------------------------------------------------


def _measure_one(
    program: Any, task: Any, settings: Settings, alone: Settings, two: Measured
) -> tuple[Measured, Measured, str]:
    """Returns the results of one replica and of two, and why their losses differ if only micro-batches cause it.

    The program is that of one replica, before and after; `alone` are its settings. A synchronized layer has the
    statistics of a micro-batch; without one, all results must equal those of the complete batch.
    """
    one = measure.results(program, task)
    differing = differing_losses(one, two)
    if alone.micro_batches == settings.micro_batches or not differing:
        return one, two, ""
    complete = measure.measure(program, task, alone, 2)
    one = measure.measure(program, task, alone, 1)
    if differing_losses(one, complete):
        return one, complete, ""
    _, loss, other = differing
    count = settings.micro_batches
    weights, _ = losses_of_model(task.model, next(program.batches["train"].one_by_one())[0])
    why = f"--micro-batches {count} alone changes it: "
    if weights and close(other - loss, (count - 1) * weights):
        why += "the regularization is added in each micro-batch: divide it by config.micro_batches"
    elif loss and abs(other / loss - count) < count / 2:
        why += f"it is {other / loss:.4g} times as large, because it is divided by what a micro-batch contains: divide "
        why += "by config.global_batch_size, or by a sum of engine.model.sum_over_batch"
    else:
        why += "look for a value of one micro-batch that should be one of the complete batch"
    return one, two, why


def _check_layers(program: Any, task: Any, one: Measured) -> Iterator[Check]:
    layers, step, graph = one.layers, program.run.traced["train"], program.run_steps["train"].graph()
    assert graph is not None  # It is None only beside other processes.
    if layers.unsynchronized:
        names = ", ".join(map(repr, layers.unsynchronized))
        text = f"the statistics of {names} are of one replica's batch: use BatchNormalization(synchronized=True)"
        yield Check(False, "task.py create_model", text)
    if layers.random:
        text = f"random in training, so not the same on one replica and two: {', '.join(layers.random)}{draws(graph)}"
        yield Check(True, "task.py create_model", text)
    if unused := one.without_gradient:
        more = f" and {len(unused) - 1} more get" if len(unused) > 1 else " gets"
        text = f"{unused[0]}{more} no gradient: pass it to apply_gradients and use it in the loss, or freeze its layer"
        yield Check(False, "task.py train_step", text)
    drawn, python = unrepeatable(step, "train_step")
    again = measure.losses_and_gradients(program, task, one.stacks)
    yield from check_repeats(
        "train_step", "losses", drawn, python, repeats=close(one.losses, [each[LOSS] for each in again])
    )
    if places := jumps(graph):
        text = f"its gradient jumps{places}, so results on one replica and on two drift apart: see "
        yield Check(True, hook_of_step(task, "compute_loss"), text + "docs/reproducibility.md")
    if layers.still_random:
        names = ", ".join(layers.still_random)
        text = f"not compared, because {names} cannot be switched off: augment in task.prepare_example instead"
        yield Check(True, "task.py train_step", text)


def _check_same_results(program: Any, task: Any, one: Measured, two: Measured, why: str) -> Iterator[Check]:
    """`why` says why losses differ, if that is known."""
    # If the loss differs, gradients and metrics differ for the same reason.
    if differing := differing_losses(one, two):
        batch, loss, other = differing
        # A replica's batch size doubles this loss, too; a count of examples or tokens is 0 in the padded half.
        doubled = close(two.half_padded, 2 * one.half_padded)
        hook, cause = why_losses_differ(program, task, batch, loss, other, doubled=doubled)
        texts = f"the loss{batch} is {{}} on one replica and {{}} on two".format(*as_texts(loss, other))
        yield Check(False, f"task.py {hook}", f"{texts}: {why or cause}")
        return
    yield Check(True, "task.py compute_loss", f"loss {one.losses[0]:.6g} on one replica and on two")
    for name, value in one.assigned.items():
        if not close(value, two.assigned[name]):
            text = f"the step assigns a value of one replica to {name.split('/', 1)[1]}: assign what "
            text += "tf.distribute.get_replica_context().all_reduce returns"
            yield Check(False, "task.py train_step", text)
            return  # Such as a learning rate, which changes the gradients and metrics that are compared.
    if gradients := differing_gradients(one, two):
        text = f"the loss agrees, and the gradient of {gradients[0]} differs: update with apply_gradients, without "
        text += "a sum of your own, and look for values that depend on the replica or on the size of its batch"
        yield Check(False, "task.py train_step", text)
    else:
        yield Check(True, "task.py train_step", f"the same gradients of {len(one.rounding) - 1} variables")
    names = program.run.objects.names
    metrics = differing_metrics(names, one.metrics, two.metrics)
    for name in metrics:
        text = "{} is {} on one replica and {} on two: ".format(name, *as_texts(one.metrics[name], two.metrics[name]))
        split = name.split("/")[0]
        if measure.draws_from_generators(program, split):
            continue  # _check_evaluation names it.
        graph = program.run_steps[split].graph()
        if split != "train" and graph is not None and (places := draws(graph)):
            yield Check(False, "task.py evaluation_step", text + draws_of_replicas(places))
            continue
        text += "update it with unscaled values per example, and sample_weight=sample_weights"
        yield Check(False, hook_of_step(task, "update_metrics", split), text)
    if not metrics:
        arrays = dict.fromkeys(names.arrays.values())
        yield Check(True, "task.py create_metrics", f"the same {', '.join([*names.lines(one.metrics), *arrays])}")


def _check_traces(program: Any) -> Iterator[Check]:
    retraced = ", ".join(split for split, each in program.run_steps.items() if each.trace_count() != 1)
    fault = f"the {retraced} steps were traced more than once: use stacks.compile"
    yield Check(not retraced, "train.py compile_steps", fault if retraced else "every split's steps were traced once")


def _check_evaluation(program: Any, task: Any) -> Iterator[Check]:
    """Checks that validation and test leave the model unchanged, and count no examples of weight 0.

    The program is a new one on one replica, whose random layers are as the hooks made them. Its variables are restored.
    """
    variables, objects = model_variables(task.model), program.run.objects
    kept = objects.mirrored_weights | objects.per_replica_weights
    initial = [(variable, tf.identity(variable)) for variable in kept.values()]
    try:
        for split, evaluate in (("validation", program.validate), ("test", program.test)):
            yield from _check_split(program, task, split, evaluate, variables)
    finally:
        for variable, value in initial:
            variable.assign(value)
        for split in program.SPLITS:  # The steps may have updated another split's metrics by mistake.
            program.run.objects.reset(split)


def _check_split(
    program: Any,
    task: Any,
    split: str,
    evaluate: Callable[[], dict[str, float]],
    variables: Mapping[str, tf.Variable],
) -> Iterator[Check]:
    before = {name: variable.numpy() for name, variable in variables.items()}
    results = evaluate()
    if not results:  # The split has no dataset.
        return
    if changed := [name for name, each in variables.items() if not np.array_equal(before[name], each.numpy())]:
        # The metrics of changed weights cannot be compared.
        fault = f"{split} changes {changed[0]}: call the model with training=False"
        yield Check(False, "task.py evaluation_step", fault)
        return
    yield Check(True, "task.py evaluation_step", f"{split} changes nothing")
    layers = measure.drawing_layers(program, task, split)
    if measure.depends_on_seeds(program, evaluate, results):
        # A layer of Keras draws in training only, unlike one that is written to sample.
        if trained := [each.name for each in layers if type(each).__module__.startswith("keras.")]:
            fault = f"{split} draws random numbers in {trained[0]}: call the model with training=False"
            yield Check(False, "task.py evaluation_step", fault)
        else:
            names = ", ".join(each.name for each in layers) or "a generator"
            text = f"random in {split}, so not the same on one replica and two: {names}: draw from a seed of each "
            yield Check(True, "task.py evaluation_step", text + "example, see docs/steps.md")
    for batches in program.batches.values():
        if batches.split == split:
            stacks = list(batches.iterator().take(batches.steps_per_pass))
            yield from check_metrics(program, task, batches, stacks)


def _check_training(program: Any, task: Any, settings: Settings, *, compare: bool) -> Iterator[Check]:
    """Checks that one replica and two make the same updates, that a checkpoint restores, and that the loss falls."""
    epochs = math.ceil(REPEATED_STEPS / measure.BATCHES)  # A schedule ends within these steps.

    def updates(replicas: int) -> tuple[Arrays, list[tuple[Any, int, int]]]:
        program.build(dataclasses.replace(settings, simulated_devices=replicas, epochs=epochs))
        measure.make_comparable(program, task, "train")
        stacks = measure.first_stacks(program)
        return measure.measure_updates(program, task, stacks), stacks

    two, _ = updates(2)
    yield _check_checkpoint(program)
    one, stacks = updates(1)
    rounding = measure.rounding_of([one], program, task, lambda: [measure.measure_updates(program, task, stacks)])
    differing = differing_arrays(one, two, rounding)
    if compare and differing:
        text = f"the gradients agree, and two replicas change {differing[0]} by another amount than one: look for "
        text += "an optimizer that changes a replica's gradients, or counts in Python"
        epsilons = (getattr(each, "epsilon", None) or 1.0 for each in program.run.objects.optimizers.values())
        if (smallest := min(epsilons)) < SMALL_EPSILON:
            text += f". Its epsilon is {smallest:g}, so rounding may decide the update where a gradient is almost 0: "
            text += "pass epsilon=1e-5"
        yield Check(False, "task.py create_optimizer", text)
    for text in slow_reads(program.run.objects.model, program.run.traced["train"]):
        yield Check(True, "task.py train_step", text)
    stack, first, _ = stacks[0]
    losses = [float(program.run_steps["train"](stack, first, 1)[0]) for _ in range(REPEATED_STEPS)]
    # Opposing losses, as in a GAN, need not decrease; that of a batch whose weights are all 0 cannot.
    cannot_fall = len(by_name(task.optimizer, "optimizer")) > 1 or not np.any(stack[SAMPLE_WEIGHTS][first])
    falls = cannot_fall or bool(np.mean(losses[-5:]) < losses[0])
    text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {REPEATED_STEPS} steps on one batch"
    rule = ": it must fall; check --learning-rate, and how task.create_optimizer uses it"
    yield Check(falls, "task.py create_optimizer", text if falls else text + rule)


def _check_checkpoint(program: Any) -> Check:
    checkpoints, state = program.run.checkpoints, program.run.checkpoints.state
    saved = state.values()
    path = checkpoints.save(1, {})
    state.assign({name: np.zeros_like(value) for name, value in saved.items()})
    checkpoints.restore(path)
    lost = [name for name, value in state.values().items() if not np.array_equal(value, saved[name])]
    fault = f"{', '.join(lost)} differ from the saved values"
    return Check(not lost, "checkpoint", fault if lost else f"{len(saved)} variables saved and restored")
