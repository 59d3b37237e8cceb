"""Checks of what the steps use: sample weights, regularizers, metrics; and where their gradients jump.

A step is repeated on the same batches with other sample weights. Examples of weight 0 are replaced by others, which
must change nothing, because padding consists of them. What a step updates, its graph shows.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.check import measure
from engine.check.measure import LOSS, SAMPLE_WEIGHTS, Arrays, Measured
from engine.check.results import PROMISE, TOLERANCE, Check, close, differing_metrics, hook_of_step
from engine.data.batches import Batches
from engine.model.global_batch import adds_losses
from engine.model.variables import by_name, inner_variable, layers_of, trainable_variables
from engine.tracing import Traced, operations_of, place

FEATURES, LABELS, _, LENGTHS = range(4)  # The parts of a stack; only padded examples have lengths.
KERAS = Path(keras.__file__).parent
# Operations whose gradient jumps, by an operation that only their gradient contains, of the same input.
JUMPS = {"Sign": "Abs", "GreaterEqual": "Maximum", "LessEqual": "Minimum"}
FLOOR = 1e-6  # The largest epsilon.
OTHERS = {"layers", "models", "metrics", "optimizers"}  # Folders of Keras.
SMOOTH = {"huber", "log_cosh"}  # Losses that contain such an operation, and whose gradient does not jump.


def check_loss(program: Any, task: Any, one: Measured) -> Iterator[Check]:
    """Checks that the loss of training uses sample weights and regularizers. `one` was measured on this program."""
    stacks, where = one.stacks, hook_of_step(task, "compute_loss")

    def results(factors: Any, *replaced: int) -> list[Arrays]:
        return measure.losses_and_gradients(program, task, _changed(stacks, factors, *replaced))

    def losses(results: list[Arrays]) -> np.ndarray:
        return np.array([each[LOSS] for each in results])

    def are_same(found: list[Arrays], others: list[Arrays], tolerance: float) -> bool:
        # The losses alone may be equal: of a new model that predicts the same for all examples.
        return all(
            close(a[name], b[name], tolerance=tolerance) for a, b in zip(found, others, strict=True) for name in a
        )

    size = program.batches["train"].global_batch_size
    # What a layer normalizes, measures, or adds to the loss, it takes of all features, so only the labels are replaced.
    # In several models the labels of one may be the features of another.
    replaced: tuple[int, ...] = (FEATURES, LABELS, LENGTHS)
    if one.layers.synchronized:
        replaced = () if len(by_name(task.model, "model")) > 1 else (LABELS,)
    elif _loss_layers(task) or measure.changed_unlisted(program):
        replaced = (LABELS,)
    halves, others, nothing = results(_first_half(size)), results(_first_half(size), *replaced), results(0.0)
    uneven, even = results(0.5 ** (np.arange(size) % 4)), losses(results(0.5))
    rest = np.nan_to_num(losses(nothing))  # Not finite if the loss is divided by the sum of the weights.
    of_others = nothing if _loss_layers(task) else results(0.0, FEATURES, LABELS)
    has_weights = any(tf.reduce_any(stack[SAMPLE_WEIGHTS][:, size // 2 :] > 0.0) for stack, _, _ in stacks)
    text = ""
    if (
        not are_same(halves, others, TOLERANCE)
        or not are_same(nothing, of_others, TOLERANCE)
        or (has_weights and are_same(one.batches, halves, PROMISE))
    ):
        text = "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights, and "
        text += "mask them in a loss that uses engine.model.gather_batch"
    elif are_same(one.batches, uneven, PROMISE):
        text = "the loss is the same with sample weights of 1 and of 0.5: multiply each example's loss by its own"
    elif close(even - rest, (one.losses - rest) / 4):
        text = "a quarter of the loss is left with half the sample weights: multiply by them once, not twice"
    yield Check(not text, where, text or "examples of weight 0 do not count in the loss, others by their weights")
    if not np.isfinite(losses(nothing)).all():
        if any(each.regularizer for model in _models(task) for each in model.trainable_variables):
            text = "not checked that the loss contains the regularization, because without weights it is not finite: "
            yield Check(True, where, text + "divide by the sum of the weights with tf.math.divide_no_nan")
    elif names := _not_added(task, nothing):
        text = f"the loss does not contain the regularization of {', '.join(names)}: add "
        yield Check(False, where, text + "tf.nn.scale_regularization_loss(model.losses)")


def _not_added(task: Any, batches: list[Arrays]) -> list[str]:
    """Returns weights and layers whose regularization is not in the results of examples that all have weight 0."""
    names = {id(variable): name for name, variable in trainable_variables(task.model).items()}
    missing = [
        each.path
        for model in _models(task)
        for each in model.trainable_variables
        if each.regularizer and float(each.regularizer(each))
        if (name := names[id(each.value)]) in batches[0] and not any(results[name].any() for results in batches)
    ]
    if missing or any(results[LOSS] for results in batches):
        return missing
    return _loss_layers(task)


def _loss_layers(task: Any) -> list[str]:
    """Returns the layers that add losses of their own, such as regularizers of activities."""
    return [layer.name for model in _models(task) for layer in layers_of(model) if adds_losses(layer)]


def _models(task: Any) -> list[keras.Model]:
    return list(by_name(task.model, "model").values())


def check_metrics(program: Any, task: Any, batches: Batches, stacks: list[tuple[Any, int, int]]) -> Iterator[Check]:
    """Checks that no metric of a dataset depends on examples of weight 0; `stacks` has a pass over its batches.

    The steps must leave the model as it is.
    """
    half = _first_half(batches.global_batch_size)
    is_training, state = batches.split == "train", program.run.checkpoints.state
    variables = state.variables() if is_training else program.run.objects.per_replica_weights.values()
    local = program.strategy.experimental_local_results
    initial = [(part, tf.identity(part)) for variable in variables for part in local(variable)]

    def results(stacks: list[tuple[Any, int, int]]) -> dict[str, float]:
        for stack, first, count in stacks:
            program.run_steps[batches.split](stack, first, count)
        found = program.run.objects.results(batches.name)
        for variable, value in initial:
            variable.assign(value)
        return found

    without = results(_changed(stacks, half))
    replaced = _changed(stacks, half, *((LABELS,) if is_training else (FEATURES, LABELS, LENGTHS)))
    ((stack, first, _),) = _changed(stacks[:1], 0.0)  # A batch of padding alone.
    for name in differing_metrics(program.run.objects.names, without, results([*replaced, (stack, first, 1)])):
        text = f"{name} depends on examples of weight 0, such as padding: pass sample_weight=sample_weights to it"
        yield Check(False, hook_of_step(task, "update_metrics", batches.split), text)


def check_updated_metrics(program: Any, task: Any) -> Iterator[Check]:
    """Checks that the steps of each split update all metrics of the split, and no others."""
    local = program.strategy.experimental_local_results
    owners = {
        id(one.handle): (split, name)
        for split, metrics in task.metrics.items()
        for name, metric in metrics.items()
        for variable in metric.variables
        for one in local(inner_variable(variable))
    }
    for split, steps in program.run_steps.items():
        graph, where = steps.graph(), hook_of_step(task, "update_metrics", split)
        assert graph is not None  # It is None only in other processes.
        updated = {owners[handle] for handle in Traced(graph).changed if handle in owners}
        if others := [each for each in owners.values() if each in updated and each[0] != split]:
            other, name = others[0]
            text = f"the {split} steps update metrics[{other!r}][{name!r}]: update metrics[{split!r}] there"
            yield Check(False, where, text)
            continue
        for of, name in dict.fromkeys(owners.values()):
            if of == split and (of, name) not in updated:
                yield Check(False, where, f"{split}/{name} is never updated: update it, or remove it in create_metrics")


def _first_half(size: int) -> np.ndarray:
    return np.arange(size) < size // 2


def _changed(stacks: list[tuple[Any, int, int]], factors: Any, *replaced: int) -> list[tuple[Any, int, int]]:
    """Returns stacks with the sample weights multiplied by factors ([] or [batch]).

    In the `replaced` parts, the first half of each batch stands in the place of the second half too.
    """
    size, changed = stacks[0][0][SAMPLE_WEIGHTS].shape[1], []
    places = np.arange(size) % max(size // 2, 1)
    for stack, first, count in stacks:
        repeated = tf.nest.map_structure(lambda part: tf.gather(part, places, axis=1), stack)
        parts = [repeated[index] if index in replaced else part for index, part in enumerate(stack)]
        parts[SAMPLE_WEIGHTS] *= tf.cast(factors, tf.float32)
        changed.append((tuple(parts), first, count))
    return changed


# --- Operations in the hooks ------------------------------------------------------------------------------------------


def jumps(graph: tf.Graph) -> str:
    """Returns the places of operations in the loss whose gradient jumps; "" without any."""
    # Such an operation and its gradient's share their first input.
    found = ((each, JUMPS[each.type]) for each in operations_of(graph) if each.type in JUMPS and _has_gradient(each))
    return _places(each for one, kind in found for each in one.inputs[0].consumers() if each.type == kind)


def _is_floor(operation: tf.Operation) -> bool:
    """Returns whether one input is an epsilon, which keeps a denominator from 0, as in tf.math.l2_normalize."""
    values = [tf.get_static_value(each) for each in operation.inputs]
    return any(value is not None and 0.0 < np.max(value, initial=0.0) <= FLOOR for value in values)


def _has_gradient(operation: tf.Operation) -> bool:
    return operation.inputs[0].dtype.is_floating and not _is_floor(operation)


def draws(graph: tf.Graph) -> str:
    """Returns the places of random operations that hooks call themselves; "" without any."""
    return _places(each for each in operations_of(graph) if each.type.startswith("StatelessRandom"))


def _places(operations: Iterable[tf.Operation]) -> str:
    return "".join(dict.fromkeys(place(each) for each in operations if _is_of_hook(each)))


def _is_of_hook(operation: tf.Operation) -> bool:
    """Returns whether a hook, or a Keras loss, calls an operation, and not a layer or an optimizer."""
    frames = [each for each in operation.traceback if KERAS in Path(each.filename).parents]
    folders = {folder for each in frames for folder in Path(each.filename).relative_to(KERAS).parts[1:2]}
    return folders.isdisjoint(OTHERS) and SMOOTH.isdisjoint(each.name for each in frames)
