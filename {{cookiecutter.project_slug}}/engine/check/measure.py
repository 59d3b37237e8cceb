"""What one replica or several compute of the same few batches, for --check to compare."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import keras
import numpy as np

from engine.check.layers import Layers, make_comparable
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.objects import by_name, trainable_variables
from engine.run.program import Program

Arrays = dict[str, np.ndarray]

BATCHES = 3
# One step at this rate shows the gradient: it is so large that the weight itself rounds none of it away.
LEARNING_RATE = 2.0**14
TOLERANCE = 1e-4
# Rounding is tried by changing every weight by this much: eight roundings of float32, as they add up over the layers.
ROUNDED_BY = 2.0**-20
# More than one draw, because it shows only where a ReLU, or a maximum, is about to turn.
DRAWS = 3
# One replica and two round many more numbers differently, not only the weights.
MARGIN = 10


@dataclasses.dataclass(frozen=True)
class Measured:
    """What some replicas computed of the same batches, from the same weights."""

    losses: list[float]
    gradients: list[Arrays]
    """The gradient of each batch by variable."""
    rounding: Arrays
    """How much a gradient changes, at most, if the weights change by a few roundings."""
    metrics: dict[str, float]
    without_gradient: list[str]
    layers: Layers


def measure(program: Program, task: ModuleType, settings: Any, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns what they compute of a few batches, without randomness.

    Call it under `few_examples` and `recording_optimizers`.

    Raises:
        BadInput: the loss or a gradient is not finite, or a step changes what no checkpoint holds.
    """
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    layers = make_comparable(program, task)
    program.run.objects.hidden.check(program.run.checkpoints.state.variables())
    stacks = first_stacks(program)
    losses, gradients = losses_and_gradients(program, task, stacks)
    _check_finite(losses, gradients)
    rounding = _effect_of_rounding(program, task, lambda: losses_and_gradients(program, task, stacks)[1], gradients)
    models = by_name(task.model, "model").values()
    optimizers = by_name(task.optimizer, "optimizer").values()
    updated = set().union(*(optimizer.updated for optimizer in optimizers))
    for optimizer in optimizers:
        optimizer.learning_rate.assign(0.0)  # All metrics are of the same weights.
    metrics = program.train_epoch(1)  # Its batches are being prepared already.
    with program.run.weights_to_keep():
        metrics |= {**program.validate(), **program.test()}
    without_gradient = [each.path for model in models for each in model.trainable_variables if each.path not in updated]
    return Measured(losses, gradients, rounding, metrics, without_gradient, layers)


def first_stacks(program: Program) -> list[tuple[Any, int, int]]:
    """Returns where the batches of the first epoch are: stacks, the first batch's number in each, and how many."""
    batches = program.batches["train"]
    return list(batches.iterator().take(batches.steps_per_pass))


def losses_and_gradients(
    program: Program, task: ModuleType, stacks: Sequence[tuple[Any, int, int]]
) -> tuple[list[float], list[Arrays]]:
    """Returns the loss and the gradient of each batch, every one from the state that the program is in."""
    state, losses, gradients = program.run.checkpoints.state, [], []
    initial, before = state.values(), _weights(task)
    for stack, first, count in stacks:
        for index in range(first, first + count):
            losses += program.run_steps["train"](stack, index, 1).numpy().tolist()
            gradients.append(_differences(before, _weights(task), LEARNING_RATE))
            state.assign(initial)
    return losses, gradients


def measure_updates(program: Program, task: ModuleType) -> tuple[Arrays, Arrays]:
    """Returns how an epoch with the real optimizers changes each weight, and by how much rounding changes that.

    The program is newly built, and keeps its state.
    """
    make_comparable(program, task)
    state, stacks = program.run.checkpoints.state, first_stacks(program)
    initial = state.values()

    def changes() -> list[Arrays]:
        before = _weights(task)
        for stack, first, count in stacks:
            program.run_steps["train"](stack, first, count)
        changed = _differences(before, _weights(task))
        state.assign(initial)
        return [changed]

    exact = changes()
    return exact[0], _effect_of_rounding(program, task, changes, exact)


def _effect_of_rounding(
    program: Program, task: ModuleType, compute: Callable[[], list[Arrays]], exact: list[Arrays]
) -> Arrays:
    """Returns by how much, at most, `compute` returns something else if all weights are rounded otherwise."""
    initial, weights = program.run.checkpoints.state.values(), _weights(task)
    largest = dict.fromkeys(weights, 0.0)
    for draw in range(DRAWS):
        random = np.random.default_rng(draw)
        for name, variable in trainable_variables(task.model).items():
            signs = random.choice([-1.0, 1.0], weights[name].shape)
            variable.assign((weights[name] * (1.0 + ROUNDED_BY * signs)).astype(weights[name].dtype))
        for one, other in zip(exact, compute(), strict=True):
            for name, difference in _differences(one, other).items():
                largest[name] = max(largest[name], np.abs(difference).max(initial=0.0))
        program.run.checkpoints.state.assign(initial)
    return largest


def _weights(task: ModuleType) -> Arrays:
    return {name: variable.numpy() for name, variable in trainable_variables(task.model).items()}


def _differences(one: Arrays, other: Arrays, unit: float = 1.0) -> Arrays:
    return {name: (one[name] - other[name]) / unit for name in one}


def _check_finite(losses: Sequence[float], gradients: Sequence[Arrays]) -> None:
    hint = "on one of the first batches: look for sqrt(0), 0/0 or log(0)"
    for loss, by_variable in zip(losses, gradients, strict=True):
        if not np.isfinite(loss):
            raise BadInput(f"task.compute_loss: the loss is {loss} {hint}")
        for name in (name for name, gradient in by_variable.items() if not np.isfinite(gradient).all()):
            raise BadInput(f"task.compute_loss: the gradient of {name} is not finite, though the loss is, {hint}")


class _Recorder(keras.optimizers.SGD):
    """Plain gradient descent that notes which variables it was given a gradient for."""

    def __init__(self) -> None:
        super().__init__(LEARNING_RATE)
        self.updated: set[str] = set()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.updated.update(
            variable.path for grad, variable in zip(grads, trainable_variables, strict=True) if grad is not None
        )
        return super().apply(grads, trainable_variables)


def recording_optimizers(task: ModuleType) -> contextlib.AbstractContextManager[None]:
    """Replaces the task's optimizers by some that record which variables get a gradient."""
    create_optimizer = task.create_optimizer

    def create_recorders(total_steps: int) -> Any:
        created = create_optimizer(total_steps)
        return {name: _Recorder() for name in created} if isinstance(created, Mapping) else _Recorder()

    return mock.patch.object(task, "create_optimizer", create_recorders)


def few_examples(task: ModuleType, global_batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Shortens every split: a few whole batches, and a part of one."""
    load_examples = task.load_examples
    count = BATCHES * global_batch_size + global_batch_size // 2

    def load_few(split: str) -> Any:
        return each_dataset(load_examples(split), lambda examples: examples.take(count))

    return mock.patch.object(task, "load_examples", load_few)


def close(one: Any, other: Any, *, floor: float = 1e-9) -> bool:
    """Returns whether two numbers or arrays differ by no more than rounding, or than `floor`."""
    one, other = np.asarray(one), np.asarray(other)
    scale = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
    return bool(np.abs(one - other).max(initial=0.0) <= TOLERANCE * scale + floor)


def differing_gradients(one: Measured, other: Measured) -> list[str]:
    """Returns the names of the variables whose gradients differ by more than rounding, in every batch.

    `one` is of one replica. Rounding can turn a ReLU or a maximum over, and change the gradient by a hundredth: in some
    batches, with some weights, and not with others close to them.
    """
    differing = [
        set(differing_arrays(*pair, one.rounding)) for pair in zip(one.gradients, other.gradients, strict=True)
    ]
    return [name for name in one.rounding if all(name in each for each in differing)]


def differing_arrays(one: Arrays, other: Arrays, rounding: Arrays) -> list[str]:
    """Returns the names of the variables that differ by more than rounding."""
    # A gradient that is zero but for rounding, as that of a bias before a normalization, has nothing to agree on.
    zero = 1e-6 * max((np.abs(array).max(initial=0.0) for array in one.values()), default=0.0)
    return [name for name in one if not close(one[name], other[name], floor=MARGIN * (zero + rounding[name]))]
