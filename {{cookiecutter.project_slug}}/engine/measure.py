"""What one replica or several compute of the same few batches, for --check to compare."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from engine.objects import by_name, trainable_variables
from engine.replicas import layers_of

BATCHES = 3
# One step at this learning rate shows the gradient: it is so large that the weight itself rounds none of it away.
LEARNING_RATE = 2.0**14
TOLERANCE = 1e-4
# Attributes of Keras layers that hold the strength of their randomness.
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What some replicas computed of the same batches, from the same weights."""

    loss: float
    gradients: dict[str, np.ndarray]
    metrics: dict[str, float]
    regularization: float
    without_gradient: list[str]
    outside_scope: list[str]
    traces: dict[str, int]
    random_layers: list[str]
    still_random: list[str]
    synchronized: list[str]
    unsynchronized: list[str]


class _Recorder(keras.optimizers.SGD):
    """Plain gradient descent that notes which variables it was given a gradient for."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.updated = getattr(self, "updated", set()) | {
            variable.path for grad, variable in zip(grads, trainable_variables, strict=True) if grad is not None
        }
        return super().apply(grads, trainable_variables)


def measure(program: ModuleType, task: ModuleType, settings: Any, replicas: int) -> Measured:
    """Builds the program for `replicas` and returns what they compute of a few batches, without randomness.

    Call it under `few_examples` and `recording_optimizers`.

    Raises:
        BadInput: the loss or a gradient is not finite.
    """
    program.build(dataclasses.replace(settings, simulated_devices=replicas))
    layers = [layer for each in by_name(task.model, "model").values() for layer in layers_of(each)]
    synchronized = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
    random_layers, still_random, unsynchronized = switch_off(layers)
    models = by_name(task.model, "model").values()
    optimizers = by_name(task.optimizer, "optimizer").values()
    regularization = sum(float(loss) for model in models for loss in model.losses)

    variables = trainable_variables(task.model)
    before = {name: variable.numpy() for name, variable in variables.items()}
    (loss,) = program.batches["train"].feed(program.strategy).run(program.run_steps["train"], 1)
    gradients = {name: (before[name] - variable.numpy()) / LEARNING_RATE for name, variable in variables.items()}
    if not np.isfinite(loss):
        raise BadInput(f"task.compute_loss: the loss is {loss} on the first batch: it has to be finite")
    for name, gradient in gradients.items():
        if not np.isfinite(gradient).all():
            raise BadInput(
                f"task.compute_loss: the gradient of {name} is not finite, though the loss is: look for sqrt(0), 0/0 "
                "or log(0)"
            )

    # At 0 all metrics are of the same weights.
    for name, variable in variables.items():
        variable.assign(before[name])
    if program.moving_average:
        program.moving_average.start_anew()
    for optimizer in optimizers:
        optimizer.learning_rate.assign(0.0)
    program.progress.add("train", 1, seconds=0.0, waited=0.0)  # The epoch, and its feed, go on after that step.
    metrics = program.train_epoch(0)
    with program.weights_to_keep():
        metrics |= {**program.validate(), **program.test()}

    updated = set().union(*(getattr(optimizer, "updated", set()) for optimizer in optimizers))
    traces = {split: function.experimental_get_tracing_count() for split, function in program.run_steps.items()}
    count = tf.TensorSpec((), tf.int32)
    stack_spec = program.batches["train"].stack_spec(program.strategy)
    concrete = program.run_steps["train"].get_concrete_function(stack_spec, count, count)
    return Measured(
        loss=float(loss),
        gradients=gradients,
        metrics=metrics,
        regularization=regularization,
        without_gradient=[v.path for model in models for v in model.trainable_variables if v.path not in updated],
        outside_scope=_outside_scope(program.strategy, concrete.graph.variables) if replicas > 1 else [],
        traces=traces,
        random_layers=random_layers,
        still_random=still_random,
        synchronized=synchronized,
        unsynchronized=unsynchronized,
    )


def _outside_scope(strategy: tf.distribute.Strategy, variables: Any) -> list[str]:
    """Returns the names of the variables a graph uses that belong to no variable of the strategy."""
    return [
        variable.name
        for variable in variables
        if not hasattr(variable, "_distributed_container") and not strategy.extended.variable_created_in_scope(variable)
    ]


def switch_off(layers: list[keras.layers.Layer]) -> tuple[list[str], list[str], list[str]]:
    """Takes randomness out of the layers, and synchronizes them.

    Returns the names of the random layers, of those among them that could not be switched off, and of those that were
    not synchronized.
    """
    random_layers, still_random, unsynchronized = [], [], []
    for layer in layers:
        strengths = [name for name in RANDOMNESS if isinstance(getattr(layer, name, None), float)]
        if any(getattr(layer, name) for name in strengths):
            random_layers.append(layer.name)
        for name in strengths:
            setattr(layer, name, 0.0)
        if not strengths and any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()):
            random_layers.append(layer.name)
            still_random.append(layer.name)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable:
            layer.synchronized = True
            unsynchronized.append(layer.name)
    return random_layers, still_random, unsynchronized


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
    """Returns the names of the variables whose gradients differ by more than rounding."""
    # A gradient that is zero but for rounding, as that of a bias before a normalization, has nothing to agree on.
    floor = 1e-6 * max((np.abs(gradient).max(initial=0.0) for gradient in one.gradients.values()), default=0.0)
    return [name for name in one.gradients if not close(one.gradients[name], other.gradients[name], floor=floor)]
