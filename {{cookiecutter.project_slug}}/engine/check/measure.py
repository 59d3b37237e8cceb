"""What one replica or several compute of the same few batches, for --check to compare."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from engine.model.objects import by_name, trainable_variables
from engine.model.replicas import layers_of
from engine.run.program import Program
from engine.tracing import Traced

Arrays = dict[str, np.ndarray]

BATCHES = 3
# One step at this learning rate shows the gradient: it is so large that the weight itself rounds none of it away.
LEARNING_RATE = 2.0**14
TOLERANCE = 1e-4
# What rounding does is tried by changing every weight by this much, so often. Eight roundings of float32, because they
# add up from layer to layer; more than one draw, because it shows only where a ReLU, or a maximum, is about to turn.
ROUNDED_BY = 2.0**-20
DRAWS = 3
# One replica and two round many more numbers differently, not only the weights.
MARGIN = 10
# Attributes of Keras layers that hold the strength of their randomness.
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What some replicas computed of the same batches, from the same weights."""

    losses: list[float]
    """The loss of each batch."""
    gradients: list[Arrays]
    """The gradient of each batch by variable."""
    rounding: Arrays
    """How much a gradient changes, at most, if the weights change by one rounding; measured on one replica only."""
    metrics: dict[str, float]
    weight_losses: float
    """The regularization of the weights."""
    added_losses: float
    """What else is in model.losses for the first batch: by add_loss, or of activities; on one replica only."""
    without_gradient: list[str]
    traces: dict[str, int]
    random_layers: list[str]
    still_random: list[str]
    """Those of them that cannot be switched off."""
    losses_again: list[float]
    """The losses once more, of weights that are rounded otherwise; measured on one replica only."""
    hidden: list[str]
    """The variables that a step changes and Keras does not list; each replica has its own."""
    step: Traced
    """What the training steps do."""
    synchronized: list[str]
    unsynchronized: list[str]

    @property
    def loss(self) -> float:
        """The loss of the first batch."""
        return self.losses[0]


class _Recorder(keras.optimizers.SGD):
    """Plain gradient descent that notes which variables it was given a gradient for."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.updated = getattr(self, "updated", set()) | {
            variable.path for grad, variable in zip(grads, trainable_variables, strict=True) if grad is not None
        }
        return super().apply(grads, trainable_variables)


def measure(program: Program, task: ModuleType, settings: Any, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns what they compute of a few batches, without randomness.

    Call it under `few_examples` and `recording_optimizers`.

    Raises:
        BadInput: the loss or a gradient is not finite, or a step changes what no checkpoint holds.
    """
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    layers = layers_of_task(task)
    synchronized = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
    random_layers, unsynchronized = switch_off(layers)
    program.run.objects.hidden.check(program.run.checkpoints.state.variables())
    still_random = drawing_layers(program, layers)
    models = by_name(task.model, "model").values()
    optimizers = by_name(task.optimizer, "optimizer").values()
    batches, state = program.batches["train"], program.run.checkpoints.state
    stacks = list(batches.feed().take(batches.steps))

    def of_each_batch() -> Iterator[tuple[float, Arrays]]:
        for stack, first, count in stacks:
            for index in range(first, first + count):
                before = weights_of(task)
                (loss,) = program.run_steps["train"](stack, index, 1).numpy()
                yield loss, _differences(before, weights_of(task), LEARNING_RATE)
                _assign(task, before)

    initial = state.values()
    losses, gradients = zip(*of_each_batch(), strict=True)
    _check_finite(losses, gradients)
    losses_again, differences = [], []
    for draw in range(DRAWS if replicas == 1 else 0):
        state.assign(initial)
        _assign(task, rounded_otherwise(weights_of(task), draw))
        losses_again, others = zip(*of_each_batch(), strict=True)
        differences += [_differences(*pair) for pair in zip(gradients, others, strict=True)]
    state.assign(initial)

    # At this rate all metrics are of the same weights.
    for optimizer in optimizers:
        optimizer.learning_rate.assign(0.0)
    metrics = program.train_epoch(1)  # The feed is there now.
    with program.run.weights_to_keep():
        metrics |= {**program.validate(), **program.test()}

    updated = set().union(*(getattr(optimizer, "updated", set()) for optimizer in optimizers))
    traces = {split: function.experimental_get_tracing_count() for split, function in program.run_steps.items()}
    return Measured(
        losses=[float(loss) for loss in losses],
        gradients=list(gradients),
        rounding=_largest(differences),
        metrics=metrics,
        weight_losses=sum(float(each.regularizer(each)) for each in _regularized(models)),
        added_losses=_added_losses(task, stacks[0]) if replicas == 1 else 0.0,
        without_gradient=[v.path for model in models for v in model.trainable_variables if v.path not in updated],
        traces=traces,
        random_layers=[*random_layers, *(name for name in still_random if name not in random_layers)],
        still_random=still_random,
        losses_again=losses_again,
        hidden=[name.removeprefix("hidden/") for name in program.run.objects.hidden.changed()],
        step=program.run.objects.hidden.training,
        synchronized=synchronized,
        unsynchronized=unsynchronized,
    )


def measure_updates(program: Program, task: ModuleType, *, draws: int = 0) -> tuple[Arrays, Arrays]:
    """Returns how an epoch of a few steps with the real optimizers changes each weight, and what rounding does to that.

    The program is built, and keeps the state that it has. Rounding is tried `draws` times.
    """
    batches, state = program.batches["train"], program.run.checkpoints.state
    stacks = list(batches.feed().take(batches.steps))
    initial = state.values()

    def changes(before: Arrays) -> Arrays:
        state.assign(initial)
        _assign(task, before)
        for stack, first, count in stacks:
            program.run_steps["train"](stack, first, count)
        return _differences(before, weights_of(task))

    before = weights_of(task)
    exact = changes(before)
    others = [changes(rounded_otherwise(before, draw)) for draw in range(draws)]
    state.assign(initial)
    return exact, _largest([_differences(exact, each) for each in others])


def weights_of(task: ModuleType) -> Arrays:
    """Returns the values of the trainable variables by name."""
    return {name: variable.numpy() for name, variable in trainable_variables(task.model).items()}


def rounded_otherwise(values: Arrays, draw: int) -> Arrays:
    """Returns values in which each number is larger or smaller, at random, by as much as some roundings make it."""
    random = np.random.default_rng(draw)
    signs = {name: random.choice([-1.0, 1.0], value.shape) for name, value in values.items()}
    return {name: (value * (1.0 + ROUNDED_BY * signs[name])).astype(value.dtype) for name, value in values.items()}


def layers_of_task(task: ModuleType) -> list[keras.layers.Layer]:
    """Returns all layers of all models, however deeply nested."""
    return [layer for model in by_name(task.model, "model").values() for layer in layers_of(model)]


def _assign(task: ModuleType, values: Arrays) -> None:
    for name, variable in trainable_variables(task.model).items():
        variable.assign(values[name])


def _differences(one: Arrays, other: Arrays, unit: float = 1.0) -> Arrays:
    return {name: (one[name] - other[name]) / unit for name in one}


def _largest(each: Sequence[Arrays]) -> Arrays:
    return {name: max(np.abs(arrays[name]).max(initial=0.0) for arrays in each) for name in (each[0] if each else ())}


def _check_finite(losses: Sequence[float], gradients: Sequence[Arrays]) -> None:
    for loss, of_batch in zip(losses, gradients, strict=True):
        if not np.isfinite(loss):
            raise BadInput(f"task.compute_loss: the loss is {loss} on one of the first batches: it has to be finite")
        for name, gradient in of_batch.items():
            if not np.isfinite(gradient).all():
                raise BadInput(
                    f"task.compute_loss: the gradient of {name} is not finite, though the loss is: look for sqrt(0), "
                    "0/0 or log(0)"
                )


def _regularized(models: Iterable[keras.Model]) -> list[keras.Variable]:
    return [each for model in models for each in model.trainable_variables if each.regularizer is not None]


def _added_losses(task: ModuleType, stack: tuple[Any, int, int]) -> float:
    """Returns the losses that layers have added for the first batch, besides those of the weights."""
    models = list(by_name(task.model, "model").values())
    if len(models) > 1 or len(models[0].losses) <= len(_regularized(models)):
        return 0.0
    (features, *_), first, _ = stack
    models[0](tf.nest.map_structure(lambda part: part[first], features), training=True)
    return float(sum(models[0].losses)) - sum(float(each.regularizer(each)) for each in _regularized(models))


def switch_off(layers: list[keras.layers.Layer]) -> tuple[list[str], list[str]]:
    """Takes randomness out of the layers, where a number gives its strength, and synchronizes them.

    Call it before anything is traced. Returns the names of the random layers that it found, and of those that were not
    synchronized.
    """
    random_layers, unsynchronized = [], []
    for layer in layers:
        strengths = [name for name in RANDOMNESS if isinstance(getattr(layer, name, None), float)]
        if any(getattr(layer, name) for name in strengths):
            random_layers.append(layer.name)
        for name in strengths:
            with contextlib.suppress(AttributeError):  # It may be one of a layer inside this one, which has its turn.
                setattr(layer, name, 0.0)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable:
            layer.synchronized = True
            unsynchronized.append(layer.name)
    return random_layers, unsynchronized


def drawing_layers(program: Program, layers: list[keras.layers.Layer]) -> list[str]:
    """Returns the names of the layers that draw random numbers in a training step: those whose seeds it changes."""
    changed = program.run.objects.hidden.training.changed

    def draws(generator: keras.random.SeedGenerator) -> bool:
        states = program.strategy.experimental_local_results(generator.state.value)
        return any(id(each.handle) in changed for each in states)

    return [layer.name for layer in layers if any(map(draws, layer._seed_generators))]


def few_examples(task: ModuleType, global_batch_size: int) -> contextlib.AbstractContextManager[None]:
    """Shortens every split: a few whole batches, and a part of one."""
    load_examples = task.load_examples
    count = BATCHES * global_batch_size + global_batch_size // 2
    return _replaced(task, "load_examples", lambda split: load_examples(split).take(count))


def recording_optimizers(task: ModuleType) -> contextlib.AbstractContextManager[None]:
    create_optimizer = task.create_optimizer

    def create_recorders(total_steps: int) -> Any:
        created = create_optimizer(total_steps)
        recorders = {name: _Recorder(LEARNING_RATE) for name in by_name(created, "optimizer")}
        return recorders if isinstance(created, dict) else recorders["optimizer"]

    return _replaced(task, "create_optimizer", create_recorders)


@contextlib.contextmanager
def _replaced(task: ModuleType, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    original = getattr(task, name)
    setattr(task, name, hook)
    try:
        yield
    finally:
        setattr(task, name, original)


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
    return [
        name
        for name in one.gradients[0]
        if all(
            differs(mine[name], its[name], _floor(mine) + one.rounding[name])
            for mine, its in zip(one.gradients, other.gradients, strict=True)
        )
    ]


def differing_updates(one: Arrays, other: Arrays, rounding: Arrays) -> list[str]:
    """Returns the names of the variables that one replica and two change differently, by more than rounding does."""
    return [name for name in one if differs(one[name], other[name], _floor(one) + rounding[name])]


def differs(one: np.ndarray, other: np.ndarray, rounding: float) -> bool:
    """Returns whether two arrays differ by more than what a few roundings of this size make."""
    return not close(one, other, floor=MARGIN * rounding)


def _floor(arrays: Arrays) -> float:
    # A gradient that is zero but for rounding, as that of a bias before a normalization, has nothing to agree on.
    return 1e-6 * max((np.abs(array).max(initial=0.0) for array in arrays.values()), default=0.0)
