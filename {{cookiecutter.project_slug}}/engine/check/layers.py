"""Makes one replica and two comparable: switches the randomness of layers off, and synchronizes them."""

import contextlib
import dataclasses
from types import ModuleType

import keras

from engine.model.replicas import layers_of
from engine.model.variables import by_name
from engine.run.program import Program

# Attributes of Keras layers that hold the strength of their randomness.
RANDOMNESS = ("rate", "stddev", "dropout", "recurrent_dropout")


@dataclasses.dataclass(frozen=True)
class Layers:
    """The names of the layers that make one replica and two differ."""

    random: list[str]
    still_random: list[str]
    """Those that cannot be switched off."""
    synchronized: list[str]
    unsynchronized: list[str]
    """Those that are synchronized now."""


def make_comparable(program: Program, task: ModuleType) -> Layers:
    """Switches randomness off, where a number gives its strength, and synchronizes every BatchNormalization.

    Call it before anything is traced.
    """
    layers = [layer for model in by_name(task.model, "model").values() for layer in layers_of(model)]
    synchronized = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
    random, unsynchronized = [], []
    for layer in layers:
        strengths = [name for name in RANDOMNESS if isinstance(getattr(layer, name, None), float)]
        if any(getattr(layer, name) for name in strengths):
            random.append(layer.name)
        for name in strengths:
            with contextlib.suppress(AttributeError):  # It may be one of a layer inside this one, which has its turn.
                setattr(layer, name, 0.0)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable:
            layer.synchronized = True
            unsynchronized.append(layer.name)

    changed = program.run.hidden.training.changed  # This traces the training step.

    def draws(generator: keras.random.SeedGenerator) -> bool:
        states = program.strategy.experimental_local_results(generator.state.value)
        return any(id(each.handle) in changed for each in states)

    still_random = [layer.name for layer in layers if any(map(draws, layer._seed_generators))]
    return Layers(list(dict.fromkeys([*random, *still_random])), still_random, synchronized, unsynchronized)
