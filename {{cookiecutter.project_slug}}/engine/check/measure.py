"""Measures one replica or several on the same few batches, which --check compares."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from engine.check.comparison import LOSS, Arrays, BatchStacks, Layers, Measured, close, largest
from engine.check.recording import OF_OPTIMIZERS, move_weights, recorded_gradients
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.metrics import metric_results, split_of
from engine.model.variables import (
    Variables,
    inner_variable,
    is_random_state,
    layers_of,
    name_in_hook,
    trainable_variables,
)
from engine.run.state import Values
from engine.settings import Settings
from engine.tracing import Traced

BATCHES = 3
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")  # Attributes of Keras layers: how much they draw.
ROUNDED_BY = 2.0**-18  # Changes every weight by 32 roundings of float32, as they add up over the layers.
NEARBY = 2.0**-7  # Changes every weight enough that another ReLU, or maximum, is about to turn.
SAMPLE_WEIGHTS = 2  # The part of a stack.


def measure(program: Any, task: Any, settings: Settings, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns their `results`."""
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    return results(program, task)


def results(program: Any, task: Any) -> Measured:
    """Returns the results of a new program for a few batches, without randomness.

    Build it under `few_examples` and `recording_gradients`. Raises BadInput if the loss or a gradient is not finite,
    resetting a metric does not restore it, or a step changes a variable that no checkpoint contains.
    """
    layers, stacks = make_comparable(program, task), first_stacks(program)
    size, state = program.batches["train"].global_batch_size, program.run.checkpoints.state
    ((half_padded, first, _),) = changed_stacks(program, stacks[:1], np.arange(size) < size // 2)
    stacks.append((half_padded, first, 1))
    batches = losses_and_gradients(program, task, stacks)
    # If a replica of padding alone is the cause, one replica has another loss, which is reported later.
    judged = batches if program.strategy.num_replicas_in_sync == 1 else batches[:-1]
    for name, value in (item for arrays in judged for item in arrays.items()):
        if not np.isfinite(value).all():
            what = f"the loss is {value}" if name == LOSS else f"the gradient of {name}, not the loss, is not finite"
            raise BadInput(f"task.compute_loss: {what} on a batch, padded or not: look for sqrt(0), 0/0 or log(0)")
    rounding = rounding_of(batches, program, task, lambda: losses_and_gradients(program, task, stacks))
    with _moved_weights(program, task, NEARBY):
        nearby = losses_and_gradients(program, task, stacks)
    objects = program.run.objects
    with state_restored(program) as initial, mock.patch.object(objects, "results", functools.partial(counted, program)):
        metrics = program.train_epoch(1)  # The batches of this epoch are being prepared already.
        with program.run.evaluation_weights():
            metrics |= program.evaluate_split("validation") | program.evaluate_split("test")
        for split in program.SPLITS:  # Another split's steps may have updated them by mistake.
            objects.reset(split)
        values = state.values()
        own = {name: values[name] for name, made in objects.per_replica_weights.items() if made.dtype.is_floating}
        per_replica = [name_in_hook(name) for name, rows in own.items() if not close(rows, rows[:1])]
        for name, value in values.items():
            if name.startswith("metrics/") and not np.array_equal(value, initial[name]):
                metric = name.removeprefix("metrics/")
                raise BadInput(f"task.create_metrics: reset_state of {metric} does not make it as it was at first")
    updated, recorded = set(map(id, changed_by(program, "train").values())), recorded_gradients(program)
    unused = [name for name in trainable_variables(task.model) if id(recorded.get(name)) not in updated]
    return Measured(stacks, batches, nearby, rounding, metrics, unused, per_replica, layers)


# --- What makes replicas comparable -----------------------------------------------------------------------------------


def few_examples(task: Any, global_batch_size: int) -> contextlib.AbstractContextManager[object]:
    """Shortens every split to a few batches, the last of them incomplete."""
    load_examples = task.load_examples
    count = BATCHES * global_batch_size + global_batch_size // 2

    def load_few(split: str) -> Any:
        return each_dataset(load_examples(split), lambda examples: examples.take(count))

    return mock.patch.object(task, "load_examples", load_few)


def make_comparable(program: Any, task: Any, *splits: str) -> Layers:
    """Switches randomness off where a number gives its strength, and synchronizes every BatchNormalization.

    Then it traces the steps of some splits, or of all.
    """
    layers = list(layers_of(task.model))
    random, unsynchronized = [], []
    for layer in layers:
        strengths = [name for name in RANDOMNESS if isinstance(getattr(layer, name, None), float)]
        if any(getattr(layer, name) for name in strengths):
            random.append(layer.name)
        for name in strengths:
            with contextlib.suppress(AttributeError):  # It belongs to an inner layer, which is also in `layers`.
                setattr(layer, name, 0.0)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable:
            layer.synchronized = True
            unsynchronized.append(layer.name)
    synchronized = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
    program.run.trace({split: program.run_steps[split] for split in splits or program.run_steps})
    # An optimizer may draw, too; its updates are compared apart from the results.
    still_random = [name for name in drawing(program, task, "train") if name not in drawn_by_optimizers(program)]
    return Layers(list(dict.fromkeys([*random, *still_random])), still_random, synchronized, unsynchronized)


# --- What the steps change and draw -----------------------------------------------------------------------------------


def changed_by(program: Any, split: str) -> Variables:
    """Returns the variables of the state, by name, that the steps of a split change."""
    state, graph = program.run.checkpoints.state, program.run_steps[split].graph()
    changed = (program.run.traced.get(split) or Traced(graph)).changed
    return {
        name: variable
        for name, variable in (state.mirrored | state.per_replica).items()
        if any(id(part.handle) in changed for part in state.parts(name))
    }


def drawing(program: Any, task: Any, split: str) -> dict[str, keras.layers.Layer | None]:
    """Returns by name the layers from whose random generators the steps of a split draw, and generators of no layer."""
    attributes = [(layer, attribute) for layer in layers_of(task.model) for attribute in vars(layer).values()]
    seeds = [(layer, seed) for layer, seed in attributes if isinstance(seed, keras.random.SeedGenerator)]
    owners = {id(seed.state.value): layer for layer, seed in seeds}
    drawing: dict[str, keras.layers.Layer | None] = {}
    for name, state in changed_by(program, split).items():
        if is_random_state(name):
            layer = owners.get(id(state))
            drawing[layer.name if layer else f"the generator {name_in_hook(name)}"] = layer
    return drawing


def drawn_by_optimizers(program: Any) -> list[str]:
    """Returns the generators of optimizers from which the steps of a training draw, as `drawing` calls them."""
    objects = program.run.objects
    of_optimizers = objects.mirrored.keys() - objects.mirrored_weights.keys()
    names = [name for name in changed_by(program, "train") if is_random_state(name)]
    names = [name for name in names if name in of_optimizers or name.startswith(OF_OPTIMIZERS)]
    return [f"the generator {name_in_hook(name)}" for name in names]


def counted(program: Any, name: str) -> dict[str, Any]:
    """Returns the results of the metrics of a dataset, which it resets; if 0, 1 or NaN, with all of their variables."""
    objects, variables = program.run.objects, {}
    results = metric_results(objects.metrics, name, of_steps=True)
    for key, metric in objects.metrics[split_of(name)].items():
        numbers = [value for number, value in results.items() if objects.names.metrics[number][0] is metric]
        # Such a result may say nothing about a metric, because the model is not trained.
        if np.isin(np.nan_to_num(numbers), (0.0, 1.0)).all():
            values = (np.ravel(one.numpy()) for one in map(inner_variable, metric.variables) if one.dtype != tf.string)
            if (joined := np.concatenate([[], *values])).size:
                variables[f"{name}/{key} (its variables)"] = joined
    objects.reset(name)
    return results | variables


def depends_on_seeds(program: Any, split: str) -> bool:
    """Returns whether other states of the random generators give an evaluation other results; changes none of them."""
    with state_restored(program) as initial:
        results = program.evaluate_split(split)
        others = {name: np.asarray(value) + 1 for name, value in initial.items() if is_random_state(name)}
        program.run.checkpoints.state.assign(initial | others)
        return not np.array_equal([*program.evaluate_split(split).values()], [*results.values()], equal_nan=True)


# --- What is measured, each time from the same state ------------------------------------------------------------------


@contextlib.contextmanager
def state_restored(program: Any) -> Iterator[Values]:
    """Yields the values of the program's state, and gives them back to it at the end."""
    state = program.run.checkpoints.state
    initial = state.values()
    try:
        yield initial
    finally:
        state.assign(initial)


def first_stacks(program: Any, name: str = "train") -> BatchStacks:
    """Returns the batches of the first pass over a dataset."""
    batches = program.batches[name]
    return list(batches.iterator().take(batches.steps_per_pass))


def changed_stacks(program: Any, stacks: BatchStacks, factors: Any, *replaced: int) -> BatchStacks:
    """Returns stacks with the sample weights multiplied by factors ([] or [global_batch_size]).

    In the `replaced` parts, the first half of a replica's batch stands in the place of the second half too.
    """

    def change(*stack: Any) -> tuple[Any, ...]:
        size, replica = stack[SAMPLE_WEIGHTS].shape[1], tf.distribute.get_replica_context().replica_id_in_sync_group
        first_half = np.arange(size) % max(size // 2, 1)
        repeated = tf.nest.map_structure(lambda part: tf.gather(part, first_half, axis=1), stack)
        parts = [repeated[index] if index in replaced else part for index, part in enumerate(stack)]
        of_batch = np.broadcast_to(factors, size * program.strategy.num_replicas_in_sync).astype(np.float32)
        parts[SAMPLE_WEIGHTS] *= tf.gather(of_batch, size * tf.cast(replica, tf.int32) + tf.range(size))
        return tuple(parts)

    return [(program.strategy.run(change, args=tuple(stack)), first, count) for stack, first, count in stacks]


def losses_and_gradients(program: Any, task: Any, stacks: BatchStacks) -> list[Arrays]:
    """Returns `Measured.batches` of some stacks, all from the program's present state."""
    state, read, results = program.run.checkpoints.state, recorded_gradients(program), []
    # A step may assign a learning rate.
    changed = changed_by(program, "train").items()
    read |= {name: variable for name, variable in changed if name.endswith("/learning_rate")}
    with state_restored(program) as initial:
        for stack, first, count in stacks:
            for index in range(first, first + count):
                state.assign(initial)
                (loss,) = program.run_steps["train"](stack, index, 1).numpy()
                results.append({LOSS: loss, **{name: variable.numpy() for name, variable in read.items()}})
    return results


def measure_updates(program: Any, task: Any, stacks: BatchStacks) -> Arrays:
    """Returns how an epoch of these batches changes each weight. The state is restored."""
    weights = trainable_variables(task.model)
    before = {name: weight.numpy() for name, weight in weights.items()}
    with state_restored(program):
        move_weights(program)
        for stack, first, count in stacks:
            program.run_steps["train"](stack, first, count)
        return {name: weight.numpy() - before[name] for name, weight in weights.items()}


def rounding_of(exact: list[Arrays], program: Any, task: Any, compute: Callable[[], list[Arrays]]) -> dict[str, float]:
    """Returns how much the arrays `exact`, which `compute` returns, change at most when all weights change a little."""
    with _moved_weights(program, task, ROUNDED_BY):
        pairs = list(zip(exact, compute(), strict=True))
    return {name: max(largest(arrays[name] - moved[name]) for arrays, moved in pairs) for name in exact[0]}


@contextlib.contextmanager
def _moved_weights(program: Any, task: Any, by: float) -> Iterator[None]:
    """Multiplies each trainable weight by 1 + `by` or 1 - `by`, at random; restores the program's state."""
    random = np.random.default_rng(0)
    with state_restored(program):
        for variable in trainable_variables(task.model).values():
            value = variable.numpy()
            signs = random.choice([-1.0, 1.0], value.shape)
            variable.assign((value * (1.0 + by * signs)).astype(value.dtype))
        yield
