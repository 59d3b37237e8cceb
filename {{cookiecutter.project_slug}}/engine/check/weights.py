"""Whether losses and metrics use the sample weights, and the loss the regularizers.

A step is repeated on the same batches with other sample weights. Examples of weight 0 are replaced by others, which
must change nothing, because padding consists of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.check import measure
from engine.check.measure import Arrays, Measured
from engine.check.results import PROMISE, Check, close, differing_metrics, hook_of_step
from engine.data.batches import Batches
from engine.model.variables import by_name, layers_of, trainable_variables
from engine.protocols import Task
from engine.run.evaluation import Program

Change = Callable[[Any], Any]  # Of a stack.


def check_loss(program: Program, task: Task, one: Measured) -> Iterator[Check]:
    """Checks that the loss of training uses sample weights and regularizers. `one` was measured on this program."""
    stacks = measure.first_stacks(program)
    for optimizer in by_name(task.optimizer, "optimizer").values():
        optimizer.learning_rate.assign(measure.LEARNING_RATE)

    def results(*changes: Change) -> tuple[np.ndarray, list[Arrays]]:
        losses, gradients = measure.losses_and_gradients(program, task, _changed(stacks, *changes))
        return np.array(losses), gradients

    halves, replaced = results(_half), results(_half, _replaced(features=False))
    losses, (nothing, of_regularizers) = (
        np.array(one.losses),
        results(lambda stack: _weighted(stack, lambda i: 0.0 * i)),
    )
    uneven, _ = results(lambda stack: _weighted(stack, lambda i: 0.5 ** (i % 4)))
    even, _ = results(lambda stack: _weighted(stack, lambda i: 0.5 + 0.0 * i))
    # In several models the labels of one may be the features of another, of whose batch a layer takes statistics.
    may_use_all = bool(one.layers.synchronized) and len(by_name(task.model, "model")) > 1
    where = hook_of_step(task, "compute_loss")
    same_gradients = all(
        close(pair[0][name], pair[1][name]) for pair in zip(halves[1], replaced[1], strict=True) for name in pair[0]
    )
    if close(losses, halves[0], tolerance=PROMISE) or not (
        may_use_all or (close(halves[0], replaced[0], tolerance=PROMISE) and same_gradients)
    ):
        text = "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights"
        yield Check(False, where, text)
    elif close(losses, uneven, tolerance=PROMISE):
        text = "the loss is the same with sample weights of 1 and of 0.5: multiply each example's loss by its own"
        yield Check(False, where, text)
    elif close(even - nothing, (losses - nothing) / 4):
        text = "a quarter of the loss is left with half the sample weights: multiply by them once, not twice"
        yield Check(False, where, text)
    else:
        yield Check(True, where, "examples of weight 0 do not count in the loss, others by their weights")
    if names := _not_added(task, nothing, of_regularizers):
        text = f"the loss does not contain the regularization of {', '.join(names)}: add "
        yield Check(False, where, text + "tf.nn.scale_regularization_loss(model.losses)")


def check_metrics(program: Program, task: Task, batches: Batches) -> Iterator[Check]:
    """Checks that no metric of a dataset depends on examples of weight 0. The steps must leave the model as it is."""
    stacks, is_training = list(batches.iterator().take(batches.steps_per_pass)), batches.split == "train"

    def results(*stacks: Any) -> dict[str, float]:
        for stack, first, count in stacks:
            program.run_steps[batches.split](stack, first, count)
        return program.run.objects.results(batches.name)

    without = results(*_changed(stacks, _half))
    nothing = _changed(stacks, lambda stack: _weighted(stack, lambda i: 0.0 * i))
    other = results(*_changed(stacks, _half, _replaced(features=not is_training)), *nothing)
    for name in differing_metrics(program.run.objects.names, without, other):
        text = f"{name} depends on examples of weight 0, such as padding: pass sample_weight=sample_weights to it"
        yield Check(False, hook_of_step(task, "update_metrics", batches.split), text)


def _changed(stacks: Any, *changes: Change) -> list[tuple[Any, int, int]]:
    changed = []
    for stack, first, count in stacks:
        for change in changes:
            stack = change(stack)
        changed.append((stack, first, count))
    return changed


def _weighted(stack: Any, factors: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Multiplies the sample weights by factors of the examples' places in their batch."""
    features, labels, sample_weights, *lengths = stack
    return (features, labels, sample_weights * factors(np.arange(sample_weights.shape[1])).astype("float32"), *lengths)


def _half(stack: Any) -> Any:
    return _weighted(stack, lambda i: i < len(i) // 2)


def _replaced(*, features: bool) -> Change:
    """Replaces the second half of each batch by its first half, without the sample weights.

    Without `features` only the labels are replaced, as long as there are any: in training a BatchNormalization takes
    its statistics of all features.
    """

    def change(stack: Any) -> Any:
        of_examples, labels, sample_weights, *lengths = stack
        places = np.arange(sample_weights.shape[1])
        places = np.where(places < len(places) // 2, places, places - len(places) // 2)
        pick = lambda parts: tf.nest.map_structure(lambda part: tf.gather(part, places, axis=1), parts)  # noqa: E731
        if features:
            return (pick(of_examples), pick(labels), sample_weights, *pick(lengths))
        return (of_examples, pick(labels), sample_weights, *lengths)

    return change


def _not_added(task: Task, losses: np.ndarray, gradients: list[Arrays]) -> list[str]:
    """Returns the weights and layers whose regularization is not in the `losses` of examples that all have weight 0."""
    names = {id(variable): name for name, variable in trainable_variables(task.model).items()}
    models = by_name(task.model, "model").values()
    regularized = [each for model in models for each in model.trainable_variables if each.regularizer]
    missing = [
        each.path
        for each in regularized
        if float(each.regularizer(each)) and not any(one[names[id(each.value)]].any() for one in gradients)
    ]
    if missing or losses.any():
        return missing
    return [layer.name for model in models for layer in layers_of(model) if layer._losses]
