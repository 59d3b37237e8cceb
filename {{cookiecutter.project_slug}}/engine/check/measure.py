"""Results of one replica or several for the same few batches, which --check compares."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from engine.check.recorder import recorded_gradients
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.variables import by_name, is_random_state, layers_of, trainable_variables
from engine.run.state import Values
from engine.settings import Settings
from engine.tracing import Traced

Arrays = dict[str, np.ndarray]  # Variable -> its value, gradient or change.

BATCHES = 3
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")  # Attributes of Keras layers: how much they draw.
ROUNDED_BY = 2.0**-20  # Changes every weight by eight roundings of float32, as they add up over the layers.
DRAWS = 3  # Several, because rounding shows only where a ReLU, or a maximum, is about to turn.
NEARBY = 2.0**-7  # Changes every weight enough that another ReLU, or maximum, is about to turn.
LOSS = "loss"  # Beside the names of the variables.
SAMPLE_WEIGHTS = 2  # The part of a stack.


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the layers that make one replica and two differ.

    The `still_random` layers are `random` and cannot be switched off. The `synchronized` ones normalize the batches of
    all replicas together, the `unsynchronized` ones among them only since the check changed them.
    """

    random: list[str]
    still_random: list[str]
    synchronized: list[str]
    unsynchronized: list[str]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of some replicas for the same batches, from the same weights."""

    batches: list[Arrays]  # The loss of each batch, and the gradient of each variable.
    nearby: list[Arrays]  # The same from weights nearby.
    half_padded: float  # The loss of the first batch with padding in its second half, which is the second replica's.
    # How much these change, at most, when the weights change by a few roundings. Of one replica; else empty.
    rounding: dict[str, float]
    assigned: Arrays  # The mirrored variables after a step, without the weights that it trains.
    metrics: dict[str, float]
    without_gradient: list[str]
    layers: Layers
    stacks: list[tuple[Any, int, int]]  # The batches, as `first_stacks` returns them.

    @property
    def losses(self) -> list[float]:
        """The loss of each batch."""
        return [float(each[LOSS]) for each in self.batches]


def measure(program: Any, task: Any, settings: Settings, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns their `results`."""
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    return results(program, task)


def results(program: Any, task: Any) -> Measured:
    """Returns the results of a new program for a few batches, without randomness.

    Build it under `few_examples` and `recording_optimizers`. Raises BadInput if the loss or a gradient is not finite,
    or a step changes a variable that no checkpoint contains.
    """
    layers, state = make_comparable(program, task), program.run.checkpoints.state
    stacks = first_stacks(program)
    batches = losses_and_gradients(program, task, stacks)
    _check_finite(batches)
    rounding: dict[str, float] = {}
    if program.strategy.num_replicas_in_sync == 1:
        rounding = rounding_of(batches, program, task, lambda: losses_and_gradients(program, task, stacks))
    with _moved_weights(program, task, NEARBY):
        nearby = losses_and_gradients(program, task, stacks)
    (padded,) = losses_and_gradients(program, task, [_half_padded(program, stacks[0])])
    assigned = _assigned(program, task, stacks[0])
    optimizers = by_name(task.optimizer, "optimizer").values()
    updated = {each for optimizer in optimizers for each in optimizer.updated}
    trainable = [each for model in by_name(task.model, "model").values() for each in model.trainable_variables]
    with state_restored(program) as initial:
        metrics = program.train_epoch(1)  # The batches of this epoch are being prepared already.
        with program.run.evaluation_weights():
            metrics |= {**program.validate(), **program.test()}
        for split in program.SPLITS:  # Another split's steps may have updated them by mistake.
            program.run.objects.reset(split)
        for name, value in state.values().items():
            if name.startswith("metrics/") and not np.array_equal(value, initial[name]):
                problem = f"reset_state of {name.removeprefix('metrics/')} does not make it as it was at first"
                raise BadInput(f"task.create_metrics: {problem}")
    return Measured(
        batches=batches,
        nearby=nearby,
        half_padded=float(padded[LOSS]),
        rounding=rounding,
        assigned=assigned,
        metrics=metrics,
        without_gradient=[each.path for each in trainable if id(each) not in updated],
        layers=layers,
        stacks=stacks,
    )


@contextlib.contextmanager
def state_restored(program: Any) -> Iterator[Values]:
    """Yields the values of the program's state, and gives them back to it at the end."""
    state = program.run.checkpoints.state
    initial = state.values()
    yield initial
    state.assign(initial)


def _assigned(program: Any, task: Any, batches: Any) -> Arrays:
    """Takes a step; returns `Measured.assigned`."""
    state = program.run.checkpoints.state
    recorded = {id(gradient) for gradient in recorded_gradients(task).values()}
    others = {name for name, variable in state.mirrored.items() if id(variable) not in recorded}
    others -= trainable_variables(task.model).keys()
    stack, first, _ = batches
    with state_restored(program):
        program.run_steps["train"](stack, first, 1)
        # Averages follow the weights, and a text has no rounding.
        return {
            name: np.asarray(value)
            for name, value in state.values().items()
            if name in others and not name.startswith("average/") and value.dtype != tf.string
        }


def make_comparable(program: Any, task: Any, *splits: str) -> Layers:
    """Switches randomness off where a number gives its strength, and synchronizes every BatchNormalization.

    Then it traces the steps of some splits, or of all.
    """
    layers = _layers(task)
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
    hidden = [name for name in changed_unlisted(program) if is_random_state(name)]
    still_random = [layer.name for layer in drawing_layers(program, task, "train")]
    still_random += [f"the generator {name}" for name in hidden]
    return Layers(list(dict.fromkeys([*random, *still_random])), still_random, synchronized, unsynchronized)


def changed_unlisted(program: Any) -> list[str]:
    """Returns the names of the variables that the steps change and Keras does not list."""
    changed = {handle for step in program.run.traced.values() for handle in step.changed}
    local = program.strategy.experimental_local_results
    return [
        name.removeprefix("hidden/")
        for name, variable in program.run.checkpoints.state.per_replica.items()
        if name.startswith("hidden/") and any(id(part.handle) in changed for part in local(variable))
    ]


def random_states(program: Any) -> list[tf.Variable]:
    """Returns the states of all random generators, each replica's own."""
    states = [each for name, each in program.run.objects.per_replica_weights.items() if is_random_state(name)]
    return [part for state in states for part in program.strategy.experimental_local_results(state)]


def drawing_layers(program: Any, task: Any, split: str) -> list[keras.layers.Layer]:
    """Returns the layers from whose random generators the steps of a split draw."""
    graph, local_results = program.run_steps[split].graph(), program.strategy.experimental_local_results
    changed = Traced(graph).changed if graph else ()

    def draws(generator: keras.random.SeedGenerator) -> bool:
        return any(id(each.handle) in changed for each in local_results(generator.state.value))

    return [layer for layer in _layers(task) if any(map(draws, layer._seed_generators))]


def draws_from_generators(program: Any, split: str) -> bool:
    """Returns whether the steps of a split draw from a random generator, which gives each replica its own numbers."""
    graph = program.run_steps[split].graph()
    changed = Traced(graph).changed if graph else ()
    return any(id(each.handle) in changed for each in random_states(program))


def depends_on_seeds(program: Any, evaluate: Callable[[], dict[str, float]], results: dict[str, float]) -> bool:
    """Returns whether other states of the random generators give an evaluation other results; changes none of them."""
    seeds = [(each, each.numpy()) for each in random_states(program)]
    if not seeds:
        return False
    for seed, value in seeds:
        seed.assign(value + 1)
    others = evaluate()
    for seed, value in seeds:
        seed.assign(value)
    return not np.array_equal([*others.values()], [*results.values()], equal_nan=True)


def first_stacks(program: Any) -> list[tuple[Any, int, int]]:
    """Returns the batches of the first epoch: stacks, the index of the first batch in each, and how many to take."""
    batches = program.batches["train"]
    return list(batches.iterator().take(batches.steps_per_pass))


def _half_padded(program: Any, batches: tuple[Any, int, int]) -> tuple[Any, int, int]:
    """Returns the first of the batches, with sample weights of 0 in the second half of the global batch."""
    stack, first, _ = batches
    half = program.batches["train"].global_batch_size // 2

    def pad(*parts: Any) -> tuple[Any, ...]:
        weights = parts[SAMPLE_WEIGHTS]
        size, replica = tf.shape(weights)[1], tf.distribute.get_replica_context().replica_id_in_sync_group
        is_example = size * tf.cast(replica, tf.int32) + tf.range(size) < half
        padded = weights * tf.cast(is_example, weights.dtype)
        return *parts[:SAMPLE_WEIGHTS], padded, *parts[SAMPLE_WEIGHTS + 1 :]

    return program.strategy.run(pad, args=tuple(stack)), first, 1


def losses_and_gradients(program: Any, task: Any, stacks: Sequence[tuple[Any, int, int]]) -> list[Arrays]:
    """Returns the LOSS and the gradients of each batch, all from the program's present state."""
    gradients, results = recorded_gradients(task), []
    with state_restored(program) as initial:
        for stack, first, count in stacks:
            for index in range(first, first + count):
                program.run.checkpoints.state.assign(initial)
                (loss,) = program.run_steps["train"](stack, index, 1).numpy()
                results.append({**{name: each.numpy() for name, each in gradients.items()}, LOSS: loss})
    return results


def measure_updates(program: Any, task: Any, stacks: Sequence[tuple[Any, int, int]]) -> Arrays:
    """Returns how an epoch of these batches, with the real optimizers, changes each weight. The state is restored."""
    before = _weights(task)
    with state_restored(program):
        for stack, first, count in stacks:
            program.run_steps["train"](stack, first, count)
        return _differences(before, _weights(task))


def rounding_of(exact: list[Arrays], program: Any, task: Any, compute: Callable[[], list[Arrays]]) -> dict[str, float]:
    """Returns how much the arrays `exact`, which `compute` returns, change at most when all weights change a little."""
    largest = dict.fromkeys(exact[0], 0.0)
    for draw in range(DRAWS):
        with _moved_weights(program, task, ROUNDED_BY, draw):
            for one, other in zip(exact, compute(), strict=True):
                for name, difference in _differences(one, other).items():
                    largest[name] = max(largest[name], float(np.abs(difference).max(initial=0.0)))
    return largest


@contextlib.contextmanager
def _moved_weights(program: Any, task: Any, by: float, seed: int = 0) -> Iterator[None]:
    """Multiplies each trainable weight by 1 + `by` or 1 - `by`, as `seed` says; restores the program's state."""
    random = np.random.default_rng(seed)
    with state_restored(program):
        for variable in trainable_variables(task.model).values():
            value = variable.numpy()
            signs = random.choice([-1.0, 1.0], value.shape)
            variable.assign((value * (1.0 + by * signs)).astype(value.dtype))
        yield


def _layers(task: Any) -> list[keras.layers.Layer]:
    return [layer for model in by_name(task.model, "model").values() for layer in layers_of(model)]


def _weights(task: Any) -> Arrays:
    return {name: variable.numpy() for name, variable in trainable_variables(task.model).items()}


def _differences(one: Arrays, other: Arrays) -> Arrays:
    return {name: one[name] - other[name] for name in one}


def _check_finite(batches: Sequence[Arrays]) -> None:
    hint = "on one of the first batches: look for sqrt(0), 0/0 or log(0)"
    for results in batches:
        if not np.isfinite(results[LOSS]):
            raise BadInput(f"task.compute_loss: the loss is {results[LOSS]} {hint}")
        for name, gradient in results.items():
            if not np.isfinite(gradient).all():
                raise BadInput(f"task.compute_loss: the gradient of {name} is not finite, though the loss is, {hint}")


def few_examples(task: Any, global_batch_size: int) -> contextlib.AbstractContextManager[object]:
    """Shortens every split to a few batches, the last of them incomplete."""
    load_examples = task.load_examples
    count = BATCHES * global_batch_size + global_batch_size // 2

    def load_few(split: str) -> Any:
        return each_dataset(load_examples(split), lambda examples: examples.take(count))

    return mock.patch.object(task, "load_examples", load_few)
