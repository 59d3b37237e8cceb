"""Checks of the steps: one replica and two have the same results; they use sample weights, regularizers and metrics.

A step is repeated on the same batches with other sample weights. Examples of weight 0 are replaced by others, which
must change nothing, because padding consists of them. What a step updates, its graph shows.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.check import comparison, measure
from engine.check.comparison import LOSS, PROMISE, TOLERANCE, Arrays, BatchStacks, Check, Measured, close, hook_of_step
from engine.data.batches import Batches
from engine.errors import BadInput
from engine.model.global_batch import adds_losses
from engine.model.metrics import PythonMetric, split_of
from engine.model.step import step_on
from engine.model.variables import by_name, is_random_state, layers_of, trainable_variables
from engine.tracing import operations_of, place

FEATURES, LABELS, _, LENGTHS = range(4)  # The parts of a stack; only padded examples have lengths.
PER_EXAMPLE = "update it with values and weights per example; for a maximum, which is not a sum, see docs/recipes.md"
PER_REPLICA = "the steps change {}, which is per-replica: to keep it equal on all replicas, assign what "
PER_REPLICA += "tf.distribute.get_replica_context().all_reduce returns"
DRAWN = "random numbers depend on the replica{}: draw them from a seed of each example, see docs/reproducibility.md"


def check_layers(program: Any, task: Any, one: Measured) -> Iterator[Check]:
    """Names the layers whose results depend on the replica, and variables without a gradient."""
    layers = one.layers
    if layers.unsynchronized:
        names = ", ".join(map(repr, layers.unsynchronized))
        text = f"the statistics of {names} are of one replica's batch: use BatchNormalization(synchronized=True)"
        yield Check(False, "task.py create_model", text)
    if layers.random:
        text = f"random in training, so not the same on one replica and two: {', '.join(layers.random)}"
        yield Check(True, "task.py create_model", text + _places(program, "train"))
    if unused := one.without_gradient:
        text = f"no gradient for {', '.join(unused[:3])}: pass it to apply_gradients and use it in the loss, or freeze "
        yield Check(False, "task.py train_step", text + "its layer")
    again = [arrays[LOSS] for arrays in measure.losses_and_gradients(program, task, one.stacks)]
    traced = program.run.traced["train"]
    yield from comparison.check_repeats("train_step", "losses", traced, repeats=close(one.losses, again))


def check_same_results(program: Any, task: Any, one: Measured, two: Measured, micro_batches: int) -> Iterator[Check]:
    """Checks that losses, gradients and metrics agree, though only two replicas have `micro_batches`."""
    if random := ", ".join(one.layers.still_random):
        text = f"{random} cannot be switched off: augment in task.prepare_example instead"
        yield Check(True, "task.py train_step", text, compared=False)
        return
    # If the loss differs, gradients and metrics differ for the same reason.
    if loss_of := comparison.differing_loss(one, two):
        batch, loss, of_two = loss_of
        hook, why = _why_losses_differ(program, task, *loss_of, two.per_replica)
        if micro_batches > 1:
            why = f"if it agrees without --micro-batches {micro_batches}, divide by config.global_batch_size or a sum "
            why += "of engine.model.sum_over_batch, and a regularization by config.micro_batches"
        text = f"the loss{batch} is {loss:.7g} on one replica and {of_two:.7g} on two: {why}"
        yield Check(False, f"task.py {hook}", text)
        return
    yield Check(True, "task.py compute_loss", f"loss {one.losses[0]:.6g} on one replica and on two")
    differing, gradients = comparison.differing_gradients(one, two), trainable_variables(task.model)
    if assigned := [name for name in differing if name not in gradients]:
        text = f"the step assigns a value of one replica to {assigned[0].split('/', 1)[1]}: assign what "
        yield Check(False, "task.py train_step", text + "tf.distribute.get_replica_context().all_reduce returns")
        return  # Such as a learning rate, which changes the gradients and metrics that are compared.
    if differing:
        text = f"the loss agrees, and the gradient of {differing[0]} differs: update with apply_gradients, without "
        text += "a sum of your own, and look for values that depend on the replica or on the size of its batch"
    else:
        text = f"the same gradients of {len(gradients)} variables"
    yield Check(not differing, "task.py train_step", text)
    yield from _check_same_metrics(program, task, one, two, micro_batches)


def _check_same_metrics(
    program: Any, task: Any, at_one: Measured, at_two: Measured, micro_batches: int
) -> Iterator[Check]:
    """Checks that metrics have the same results, and the same variables where the results may say nothing."""
    names, one, two = program.run.objects.names, at_one.metrics, at_two.metrics
    differing = comparison.differing_metrics(names, one, two)
    # A mean of values of a step, such as a rate, counts one for every replica and micro-batch.
    times = {"train": 2.0 * micro_batches}
    differing = [
        name
        for name in differing
        if name in names.metrics or not close(times.get(split_of(name), 2.0) * one[name], two[name])
    ]
    for name in differing:
        split = split_of(name)
        if measure.drawing(program, task, split):
            continue  # The check of the evaluation names it.
        hook, why = hook_of_step(task, "update_metrics", split), PER_EXAMPLE
        if split != "train" and (places := _places(program, split)):
            hook, why = "task.py evaluation_step", DRAWN.format(places)
        elif split != "train" and at_two.per_replica:
            hook, why = "task.py create_model", PER_REPLICA.format(", ".join(at_two.per_replica))
        most = np.abs(np.nan_to_num(one[name]) - np.nan_to_num(two[name])).argmax()
        values = [f"{np.ravel(metrics[name])[most]:.7g}" for metrics in (one, two)]
        yield Check(False, hook, f"{name} is {values[0]} on one replica and {values[1]} on two: {why}")
    if not differing:
        of_python = {name: metric for name, (metric, _) in names.metrics.items() if isinstance(metric, PythonMetric)}
        same = dict.fromkeys([*names.lines(names.metrics), *names.arrays.values()])
        text = f"the same {', '.join(name for name in same if name not in of_python)}"
        yield Check(True, "task.py create_metrics", text)
        for name, metric in of_python.items():
            text = f"{name}, which Python computes, is {metric.result():.6g} on one replica"
            yield Check(True, "task.py create_metrics", text, compared=False)


def _why_losses_differ(program: Any, task: Any, padded: str, one: float, two: float, own: list[str]) -> tuple[str, str]:
    """Returns the hook to look at, and likely causes, from the losses of one replica and of two.

    `padded` names a padded batch; weights called `own` differed. Raises BadInput if a loss is not one of each example.
    """
    batch = features, labels, sample_weights = next(program.batches["train"].one_by_one())
    shape = sample_weights.shape
    with contextlib.suppress(Exception), step_on(batch):  # The steps of this task may pass it other arguments.
        shape = task.compute_loss(labels, task.model(features), sample_weights)[1].shape
    # A loss of each token has the shape in which labels begin.
    of_tokens = shape.rank and any(shape == leaf.shape[: shape.rank] for leaf in tf.nest.flatten(labels))
    if shape.rank != 1 and not of_tokens:
        text = f"task.compute_loss returned a per-example loss of shape {shape}: return one value per example, or that "
        raise BadInput(text + "of each token, and divide the sum of these by a sum of engine.model.sum_over_batch")
    if padded or math.isnan(two) or close(two, 2 * one):
        return "compute_loss", (
            "it is divided by what one replica's batch contains: divide by config.global_batch_size, or with "
            "tf.math.divide_no_nan by a sum of engine.model.sum_over_batch"
        )
    if close(two, one / 2):
        return "compute_loss", "it is divided by the number of replicas a second time; remove that division"
    if own:
        return "create_model", PER_REPLICA.format(", ".join(own))
    if places := _places(program, "train"):
        return "train_step", DRAWN.format(places)
    return "compute_loss", (
        "look for a mean over one replica's batch, not by a sum of engine.model.sum_over_batch; for examples compared "
        "with those of their replica, not with the result of engine.model.gather_batch; for model.losses without "
        "tf.nn.scale_regularization_loss; for a layer whose add_loss adds a sum over one replica's batch, not a mean"
    )


def _places(program: Any, split: str, maker: str = "StatelessRandom") -> str:
    """Returns the places in hooks of a split's operations of a kind, or of those that a function makes; "" if none."""
    operations = operations_of(program.run_steps[split].graph())
    made = [
        operation
        for operation in operations
        if operation.type.startswith(maker) or maker in [frame.name for frame in operation.traceback or ()]
    ]
    return "".join(dict.fromkeys(map(place, made)))


# --- Sample weights, regularizers and metrics -------------------------------------------------------------------------


def check_loss(program: Any, task: Any, one: Measured) -> Iterator[Check]:
    """Checks that the loss of training uses sample weights and regularizers. `one` was measured on this program."""

    def results(factors: Any, *replaced: int) -> Arrays:
        stacks = measure.changed_stacks(program, one.stacks, factors, *replaced)
        return _of_all_batches(measure.losses_and_gradients(program, task, stacks))

    size, loss_layers = program.batches["train"].global_batch_size, _loss_layers(task)
    # What a layer normalizes, measures, or adds to the loss, it takes of all features, so only the labels are replaced.
    # In several models the labels of one may be the features of another.
    replaced: tuple[int, ...] = (FEATURES, LABELS, LENGTHS)
    changed = measure.changed_by(program, "train").keys() & program.run.objects.per_replica_weights.keys()
    if one.layers.synchronized:
        replaced = () if len(by_name(task.model, "model")) > 1 else (LABELS,)
    elif loss_layers or not all(map(is_random_state, changed)):
        replaced = (LABELS,)
    first_half = np.arange(size) < size // 2
    exact, halves, nothing = _of_all_batches(one.batches), results(first_half), results(0.0)
    rest = np.nan_to_num(nothing[LOSS])  # Not finite if the loss is divided by the sum of the weights.
    has_weights = any(tf.reduce_any(stack[measure.SAMPLE_WEIGHTS][:, size // 2 :] > 0.0) for stack, _, _ in one.stacks)
    where, text = hook_of_step(task, "compute_loss"), ""
    if (
        not _are_same(halves, results(first_half, *replaced), TOLERANCE)
        or not (loss_layers or _are_same(nothing, results(0.0, FEATURES, LABELS), TOLERANCE))
        or (has_weights and _are_same(exact, halves, PROMISE))
    ):
        text = "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights, and "
        text += "mask them in a loss that uses engine.model.gather_batch"
        if counts := _places(program, "train", "sum_over_batch"):
            text += f", and multiply by the sample weights in what sum_over_batch counts{counts}"
    elif _are_same(exact, results(0.5 ** (np.arange(size) % 4)), PROMISE):
        text = "the loss is the same with sample weights of 1 and of 0.5: multiply each example's loss by its own"
    elif close(results(0.5)[LOSS] - rest, (exact[LOSS] - rest) / 4):
        text = "a quarter of the loss is left with half the sample weights: multiply by them once, not twice"
    yield Check(not text, where, text or "examples of weight 0 do not count in the loss, others by their weights")
    # Without weights it may be divided by 0, and then does not show what else it contains.
    if np.isfinite(nothing[LOSS]).all() and (names := _not_added(task, nothing)):
        text = f"the loss does not contain the regularization of {', '.join(names)}: add "
        yield Check(False, where, text + "tf.nn.scale_regularization_loss(model.losses)")


def _of_all_batches(batches: list[Arrays]) -> Arrays:
    return {name: np.stack([arrays[name] for arrays in batches]) for name in batches[0]}


def _are_same(results: Arrays, others: Arrays, tolerance: float) -> bool:
    # The losses alone may be equal: of a new model that predicts the same for all examples.
    return all(close(results[name], others[name], tolerance=tolerance) for name in results)


def _not_added(task: Any, results: Arrays) -> list[str]:
    """Returns weights and layers whose regularization is not in the results of examples that all have weight 0."""
    names = {id(variable): name for name, variable in trainable_variables(task.model).items()}
    regularized = [
        names[id(variable.value)]
        for model in by_name(task.model, "model").values()
        for variable in model.trainable_variables
        if variable.regularizer and float(variable.regularizer(variable))
    ]
    missing = [name for name in regularized if name in results and not results[name].any()]
    return missing if missing or results[LOSS].any() else _loss_layers(task)


def _loss_layers(task: Any) -> list[str]:
    """Returns the layers that add losses of their own, such as regularizers of activities."""
    return [layer.name for layer in layers_of(task.model) if adds_losses(layer)]


def check_metrics(program: Any, task: Any, batches: Batches, stacks: BatchStacks) -> Iterator[Check]:
    """Checks that no metric of a dataset depends on examples of weight 0; `stacks` has a pass over its batches."""
    size, is_training = batches.global_batch_size, batches.split == "train"
    first_half = np.arange(size) < size // 2

    def results(stacks: BatchStacks) -> dict[str, Any]:
        with measure.state_restored(program):
            for stack, first, count in stacks:
                program.run_steps[batches.split](stack, first, count)
            return measure.counted(program, batches.name)

    parts = (LABELS,) if is_training else (FEATURES, LABELS, LENGTHS)
    halves = results(measure.changed_stacks(program, stacks, first_half))
    replaced = measure.changed_stacks(program, stacks, first_half, *parts)
    ((padding, first, _),) = measure.changed_stacks(program, stacks[:1], 0.0)
    before, after = results(replaced), results([*replaced, (padding, first, 1)])
    differing = comparison.differing_metrics(program.run.objects.names, halves, before)
    for name in comparison.differing_metrics(program.run.objects.names, before, after):
        # A variable must not count the examples of padding, but may count 1 in each step, as the mean of a rate does.
        added = np.nan_to_num(after[name] - before[name])
        differing += [name] * bool(np.ndim(added) == 0 or added[added % size == 0].any())
    for name in dict.fromkeys(differing):
        text = f"{name} depends on examples of weight 0, such as padding: pass sample_weight=sample_weights to it"
        yield Check(False, hook_of_step(task, "update_metrics", batches.split), text)


def check_updated_metrics(program: Any, task: Any, one: dict[str, Any]) -> Iterator[Check]:
    """Checks that the steps of each split update all metrics of the split, and no others, with what is a number."""
    metrics = {f"{split}/{name}": metric for split in task.metrics for name, metric in task.metrics[split].items()}
    for split in program.run_steps:
        changed, where = measure.changed_by(program, split), hook_of_step(task, "update_metrics", split)
        updated = [name for name in metrics if any(key.startswith(f"metrics/{name}/") for key in changed)]
        if of_others := [name for name in updated if split_of(name) != split]:
            other, name = of_others[0].split("/", 1)
            text = f"the {split} steps update metrics[{other!r}][{name!r}]: update metrics[{split!r}] there"
            yield Check(False, where, text)
            continue
        for name, metric in metrics.items():
            if split_of(name) == split and metric.variables and name not in updated:
                yield Check(False, where, f"{name} is never updated: update it, or remove it in create_metrics")
    numbers, arrays = program.run.objects.names.metrics, program.run.objects.names.arrays
    of_steps = [name for name, (metric, _) in numbers.items() if not isinstance(metric, PythonMetric)]
    for name in dict.fromkeys(arrays.get(name, name) for name in of_steps if math.isnan(one[name])):
        # The few examples of the check may lack a class, of which an array has an element.
        text = f"{name} is NaN: look for 0/0, for which tf.math.divide_no_nan returns 0, and for sqrt or log"
        is_array = name in arrays.values()
        yield Check(is_array, hook_of_step(task, "update_metrics", split_of(name)), text, compared=not is_array)
    for name in (name for name, value in one.items() if name not in numbers and not value.any()):
        text = f"{name} stays 0 for this model: --init-from a trained one compares more"
        yield Check(True, hook_of_step(task, "update_metrics", split_of(name)), text, compared=False)
