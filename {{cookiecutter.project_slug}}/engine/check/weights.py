"""Whether losses and metrics use the sample weights, and the loss the regularizers.

A step is repeated on the same batches with other sample weights. Examples of weight 0 are replaced by others, which
must change nothing, because padding consists of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.check import measure
from engine.check.measure import LOSS, Arrays, Measured
from engine.check.results import PROMISE, Check, close, differing_metrics, hook_of_step
from engine.data.batches import Batches
from engine.model.variables import by_name, layers_of, trainable_variables
from engine.protocols import Task
from engine.run.evaluation import Program

Change = Callable[[Any], Any]  # Of a stack.


def check_loss(program: Program, task: Task, one: Measured) -> Iterator[Check]:
    """Checks that the loss of training uses sample weights and regularizers. `one` was measured on this program."""
    stacks, where = measure.first_stacks(program), hook_of_step(task, "compute_loss")

    def results(*changes: Change) -> list[Arrays]:
        return measure.losses_and_gradients(program, task, _changed(stacks, *changes))

    def losses(results: list[Arrays]) -> np.ndarray:
        return np.array([each[LOSS] for each in results])

    halves, replaced, nothing = results(_half), results(_half, _replaced(features=False)), results(_times(0.0))
    uneven, even = (losses(results(_times(*factors))) for factors in ((1.0, 0.5, 0.25, 0.125), (0.5,)))
    rest = np.nan_to_num(losses(nothing))  # Not finite if the loss is divided by the sum of the weights.
    # In several models the labels of one may be the features of another, of whose batch a layer takes statistics.
    if one.layers.synchronized and len(by_name(task.model, "model")) > 1:
        replaced = halves
    same = all(close(a[name], b[name]) for a, b in zip(halves, replaced, strict=True) for name in a)
    if not same or close(one.losses, losses(halves), tolerance=PROMISE):
        text = "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights"
    elif close(one.losses, uneven, tolerance=PROMISE):
        text = "the loss is the same with sample weights of 1 and of 0.5: multiply each example's loss by its own"
    elif close(even - rest, (one.losses - rest) / 4):
        text = "a quarter of the loss is left with half the sample weights: multiply by them once, not twice"
    else:
        text = ""
    sound = "examples of weight 0 do not count in the loss, others by their weights"
    yield Check(not text, where, text or sound)
    if names := _not_added(task, nothing):
        text = f"the loss does not contain the regularization of {', '.join(names)}: add "
        yield Check(False, where, text + "tf.nn.scale_regularization_loss(model.losses)")


def check_metrics(program: Program, task: Task, batches: Batches) -> Iterator[Check]:
    """Checks that no metric of a dataset depends on examples of weight 0. The steps must leave the model as it is."""
    initial = program.run.checkpoints.state.values() if batches.split == "train" else {}
    hidden = [(each, tf.identity(each)) for each in program.run.hidden.unlisted.values()]  # A loss may draw from one.
    stacks = list(batches.iterator().take(batches.steps_per_pass))

    def results(*stacks: Any) -> dict[str, float]:
        for variable, value in hidden:
            variable.assign(value)
        for optimizer in by_name(task.optimizer, "optimizer").values() if initial else ():
            optimizer.learning_rate.assign(0.0)
        for stack, first, count in stacks:
            program.run_steps[batches.split](stack, first, count)
        found = program.run.objects.results(batches.name)
        if initial:  # A step may assign a learning rate, or divide by the sum of the sample weights.
            program.run.checkpoints.state.assign(initial)
        return found

    without = results(*_changed(stacks, _half))
    ((nothing, first, _),) = _changed(stacks[:1], _times(0.0))
    other = results(*_changed(stacks, _half, _replaced(features=not initial)), (nothing, first, 1))
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


def _times(*factors: float) -> Change:
    """Multiplies the sample weights of each batch by factors, over and over."""

    def change(stack: Any) -> Any:
        features, labels, sample_weights, *lengths = stack
        return (
            features,
            labels,
            sample_weights * np.resize(np.array(factors, np.float32), sample_weights.shape[1]),
            *lengths,
        )

    return change


def _half(stack: Any) -> Any:
    """Sets the sample weights of the second half of each batch to 0."""
    size = stack[2].shape[1]
    return _times(*(float(place < size // 2) for place in range(size)))(stack)


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


def _not_added(task: Task, batches: list[Arrays]) -> list[str]:
    """Returns weights and layers whose regularization is not in the results of examples that all have weight 0."""
    names = {id(variable): name for name, variable in trainable_variables(task.model).items()}
    models = by_name(task.model, "model").values()
    missing = [
        each.path
        for model in models
        for each in model.trainable_variables
        if each.regularizer and float(each.regularizer(each))
        if not any(results[names[id(each.value)]].any() for results in batches)
    ]
    if missing or any(results[LOSS] for results in batches):
        return missing
    return [layer.name for model in models for layer in layers_of(model) if layer._losses]
