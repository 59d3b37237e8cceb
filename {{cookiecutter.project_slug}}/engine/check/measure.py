"""Results of one replica or several for the same few batches, which --check compares."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.metrics import ResultNames
from engine.model.variables import by_name, layers_of, trainable_variables
from engine.protocols import Task
from engine.run.evaluation import Program
from engine.settings import Settings

Arrays = dict[str, np.ndarray]  # Variable -> its value, gradient or change.

BATCHES = 3
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")  # Attributes of Keras layers: how much they draw.
LEARNING_RATE = 2.0**14  # So large that a step shows the gradient: the weight itself rounds none of it away.
TOLERANCE = 1e-4
ROUNDED_BY = 2.0**-20  # Changes every weight by eight roundings of float32, as they add up over the layers.
DRAWS = 3  # Several, because rounding shows only where a ReLU, or a maximum, is about to turn.
MARGIN = 10  # One replica and two round many more numbers differently, not only the weights.


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

    losses: list[float]  # One for each batch.
    gradients: list[Arrays]  # One for each batch.
    rounding: dict[str, float]
    """Variable -> how much its gradient changes, at most, when the weights change by a few roundings."""
    metrics: dict[str, float]
    without_gradient: list[str]
    layers: Layers


def measure(program: Program, task: Task, settings: Settings, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns their results for a few batches, without randomness.

    Call it under `few_examples` and `recording_optimizers`. Raises BadInput if the loss or a gradient is not finite, or
    a step changes a variable that no checkpoint contains.
    """
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    layers = _make_comparable(program, task)
    program.run.hidden.check(program.run.checkpoints.state.variables())
    stacks = first_stacks(program)
    losses, gradients = losses_and_gradients(program, task, stacks)
    _check_finite(losses, gradients)
    rounding = _effect_of_rounding(program, task, lambda: losses_and_gradients(program, task, stacks)[1], gradients)
    optimizers = by_name(task.optimizer, "optimizer").values()
    updated = {path for optimizer in optimizers for path in optimizer.updated}
    trainable = [each.path for model in by_name(task.model, "model").values() for each in model.trainable_variables]
    without_gradient = [path for path in trainable if path not in updated]
    for optimizer in optimizers:
        optimizer.learning_rate.assign(0.0)  # So all metrics are of the same weights.
    metrics = program.train_epoch(1)  # The batches of this epoch are being prepared already.
    with program.run.evaluation_weights():
        metrics |= {**program.validate(), **program.test()}
    return Measured(losses, gradients, rounding, metrics, without_gradient, layers)


def _make_comparable(program: Program, task: Task) -> Layers:
    """Switches randomness off where a number gives its strength, and synchronizes every BatchNormalization."""
    layers = [layer for model in by_name(task.model, "model").values() for layer in layers_of(model)]
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

    step = program.run.hidden.training  # This traces the step, so layers are changed before.
    assert step is not None  # It is None only beside other processes.
    changed = step.changed

    def draws(generator: keras.random.SeedGenerator) -> bool:
        states = program.strategy.experimental_local_results(generator.state.value)
        return any(id(each.handle) in changed for each in states)

    still_random = [layer.name for layer in layers if any(map(draws, layer._seed_generators))]
    return Layers(list(dict.fromkeys([*random, *still_random])), still_random, synchronized, unsynchronized)


def first_stacks(program: Program) -> list[tuple[Any, int, int]]:
    """Returns the batches of the first epoch: stacks, the index of the first batch in each, and how many to take."""
    batches = program.batches["train"]
    return list(batches.iterator().take(batches.steps_per_pass))


def losses_and_gradients(
    program: Program, task: Task, stacks: Sequence[tuple[Any, int, int]]
) -> tuple[list[float], list[Arrays]]:
    """Returns the loss and the gradients of each batch, all from the program's present state."""
    state, losses, gradients = program.run.checkpoints.state, [], []
    initial, before = state.values(), _weights(task)
    for stack, first, count in stacks:
        for index in range(first, first + count):
            losses += program.run_steps["train"](stack, index, 1).numpy().tolist()
            gradients.append(_differences(before, _weights(task), LEARNING_RATE))
            state.assign(initial)
    return losses, gradients


def measure_updates(program: Program, task: Task) -> tuple[Arrays, dict[str, float]]:
    """Returns how an epoch with the real optimizers changes each weight, and how much rounding changes that.

    The program must be newly built. Its state is restored.
    """
    _make_comparable(program, task)
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
    program: Program, task: Task, compute: Callable[[], list[Arrays]], exact: list[Arrays]
) -> dict[str, float]:
    """Returns how much the arrays of `compute` change, at most, if all weights are rounded differently."""
    initial, weights = program.run.checkpoints.state.values(), _weights(task)
    largest = dict.fromkeys(weights, 0.0)
    for draw in range(DRAWS):
        random = np.random.default_rng(draw)
        for name, variable in trainable_variables(task.model).items():
            signs = random.choice([-1.0, 1.0], weights[name].shape)
            variable.assign((weights[name] * (1.0 + ROUNDED_BY * signs)).astype(weights[name].dtype))
        for one, other in zip(exact, compute(), strict=True):
            for name, difference in _differences(one, other).items():
                largest[name] = max(largest[name], float(np.abs(difference).max(initial=0.0)))
        program.run.checkpoints.state.assign(initial)
    return largest


def _weights(task: Task) -> Arrays:
    return {name: variable.numpy() for name, variable in trainable_variables(task.model).items()}


def _differences(one: Arrays, other: Arrays, unit: float = 1.0) -> Arrays:
    return {name: (one[name] - other[name]) / unit for name in one}


def _check_finite(losses: Sequence[float], gradients: Sequence[Arrays]) -> None:
    hint = "on one of the first batches: look for sqrt(0), 0/0 or log(0)"
    for loss, by_variable in zip(losses, gradients, strict=True):
        if not np.isfinite(loss):
            raise BadInput(f"task.compute_loss: the loss is {loss} {hint}")
        for name, gradient in by_variable.items():
            if not np.isfinite(gradient).all():
                raise BadInput(f"task.compute_loss: the gradient of {name} is not finite, though the loss is, {hint}")


class _Recorder(keras.optimizers.SGD):
    """Plain gradient descent that records which variables get a gradient."""

    def __init__(self) -> None:
        super().__init__(LEARNING_RATE)
        self.updated: set[str] = set()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        pairs = zip(grads, trainable_variables, strict=True)
        self.updated |= {variable.path for gradient, variable in pairs if gradient is not None}
        return super().apply(grads, trainable_variables)


def recording_optimizers(task: Task) -> contextlib.AbstractContextManager[object]:
    """Replaces the task's optimizers with recorders."""
    create_optimizer = task.create_optimizer

    def create_recorders(total_steps: int) -> Any:
        created = create_optimizer(total_steps)
        return {name: _Recorder() for name in created} if isinstance(created, Mapping) else _Recorder()

    return mock.patch.object(task, "create_optimizer", create_recorders)


def few_examples(task: Task, global_batch_size: int) -> contextlib.AbstractContextManager[object]:
    """Shortens every split to a few batches, the last of them incomplete."""
    load_examples = task.load_examples
    count = BATCHES * global_batch_size + global_batch_size // 2

    def load_few(split: str) -> Any:
        return each_dataset(load_examples(split), lambda examples: examples.take(count))

    return mock.patch.object(task, "load_examples", load_few)


def close(one: Any, other: Any, *, floor: float = 1e-9) -> bool:
    """Returns whether two numbers or arrays differ by at most rounding, or `floor`."""
    one, other = np.asarray(one), np.asarray(other)
    scale = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
    return bool(np.abs(one - other).max(initial=0.0) <= TOLERANCE * scale + floor)


def differing_gradients(one: Measured, other: Measured) -> list[str]:
    """Returns the names of the variables whose gradients differ by more than rounding, in most batches.

    `one` is the result of one replica. Rounding can switch a ReLU or a maximum, and change the gradient by a hundredth:
    in a few batches and with some weights, but not with others close to them.
    """
    pairs = zip(one.gradients, other.gradients, strict=True)
    differing = [set(differing_arrays(*pair, one.rounding)) for pair in pairs]
    return [name for name in one.rounding if 2 * sum(name in each for each in differing) > len(differing)]


def differing_metrics(names: ResultNames, one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Returns the names of the metrics that differ by more than rounding; of an array, its first such element."""
    differing: dict[str, str] = {}
    for name, value in one.items():
        if not close(value, other[name]):
            differing.setdefault(names.arrays.get(name, name), name)
    return list(differing.values())


def differing_arrays(one: Arrays, other: Arrays, rounding: Mapping[str, float]) -> list[str]:
    """Returns the names of the variables that differ by more than rounding."""
    # The gradient of a bias before a normalization is zero except for rounding, which differs.
    zero = 1e-6 * max((float(np.abs(array).max(initial=0.0)) for array in one.values()), default=0.0)
    return [name for name in one if not close(one[name], other[name], floor=MARGIN * (zero + rounding[name]))]
