"""The recipes of losses.md, gradients.md and reproducibility.md, with data and models that fit them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import config
import task
import train
from engine.model.variables import model_variables
from pages import put_section, sections

PAGES = sections("losses.md") | sections("gradients.md") | sections("reproducibility.md")
RECIPES = {title: text for title, text in PAGES.items() if "```python" in text}
LOAD_EXAMPLES, CREATE_OPTIMIZER = task.load_examples, task.create_optimizer
BATCH = 16


def few_examples(split: str) -> tf.data.Dataset | None:
    """Two batches, of which the second one has 12 examples."""
    return None if split == "test" else LOAD_EXAMPLES(split).take(28)


def labelled(label: Callable[..., Any]) -> Callable[[str], tf.data.Dataset | None]:
    """Returns a hook that gives these examples other labels, made of the image and the digit."""

    def load_examples(split: str) -> tf.data.Dataset | None:
        examples = few_examples(split)
        return examples and examples.map(lambda image, digit: (image, label(image, digit)))

    return load_examples


def box(image: tf.Tensor, digit: tf.Tensor) -> dict[str, tf.Tensor]:
    corner = image[2, 2:4, 0] / 16.0
    return {"is_object": tf.cast(digit < 3, tf.float32), "box": tf.concat([corner, 1.0 - corner], axis=0)}


def two_labels(image: tf.Tensor, digit: tf.Tensor) -> dict[str, tf.Tensor]:
    return {"digit": tf.where(digit == 7, -1, digit), "is_odd": tf.where(digit > 3, -1, digit % 2)}


def sentences(split: str) -> tf.data.Dataset | None:
    """Words from 2 to 18, after which comes padding."""

    def tokens(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = tf.cast(tf.reshape(image, [64]), tf.int32) + 2
        return tf.where(tf.range(64) < 50 + label, words, 0), label

    return None if split == "test" else LOAD_EXAMPLES(split).take(120).map(tokens)


def prepare_plainly(features: tf.Tensor, labels: Any) -> tuple[tf.Tensor, Any]:
    return features / 16.0, labels


def sequential(shape: tuple[int, ...], *layers: keras.layers.Layer, dtype: str = "float32") -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def dense(units: int = 8) -> keras.layers.Layer:
    return keras.layers.Dense(units, activation="tanh")


def small_model(last: int = 10) -> keras.Model:
    return sequential((8, 8, 1), keras.layers.Flatten(), dense(), keras.layers.Dense(last))


def model_of_two(**sizes: int) -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = dense()(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, {name: keras.layers.Dense(size)(hidden) for name, size in sizes.items()})


def with_convolution() -> keras.Model:
    hidden = [keras.layers.Conv2D(2, 3, activation="gelu"), keras.layers.Flatten()]
    return sequential((8, 8, 1), *hidden, keras.layers.Dense(10))


USUAL: dict[str, Any] = {
    "create_model": small_model,
    "load_examples": few_examples,
    # Its updates are in proportion to the gradient, so a gradient that is too large is not hidden.
    "create_optimizer": lambda total_steps: keras.optimizers.SGD(0.5),
}
# The hooks that go with a recipe, and the settings that it needs, besides the usual ones.
FITTING: dict[str, dict[str, Any]] = {
    "A mean over tokens": {
        # Rows of pixels, and as labels how bright each row is; 0 is a row of padding.
        "load_examples": labelled(lambda image, digit: tf.cast(image[:, 4, 0] // 4.0, tf.int32)),
        "create_model": lambda: sequential((8, 8, 1), keras.layers.Reshape((8, 8)), dense(), keras.layers.Dense(10)),
        "prepare_example": prepare_plainly,
    },
    "A term for positives only": {
        "load_examples": labelled(box),
        "create_model": lambda: model_of_two(is_object=1, box=4),
        "prepare_example": prepare_plainly,
        "monitor": "validation/box_loss",
    },
    "Several heads with missing labels": {
        "load_examples": labelled(two_labels),
        "create_model": lambda: model_of_two(digit=10, is_odd=2),
        "prepare_example": prepare_plainly,
        "monitor": "validation/digit_loss",
    },
    "Contrastive learning of one encoder (SimCLR)": {"create_model": lambda: small_model(6)},
    "Mean teacher": {"load_examples": labelled(lambda image, digit: tf.where(digit > 4, -1, digit))},
    "WGAN-GP with five critic updates": {
        "load_examples": lambda split: None if split == "test" else LOAD_EXAMPLES(split).take(120),
        "global_batch_size": 40,
        "monitor": "validation/distance",
        "monitor_direction": "min",
    },
    "Masked language model": {
        "load_examples": sentences,
        "create_model": lambda: sequential(
            (64,), keras.layers.Embedding(20, 8), dense(), keras.layers.Dense(20), dtype="int32"
        ),
    },
    "Layers that are frozen until a step": {"create_model": with_convolution, "epochs": 1},
}

Apply = Callable[..., dict[str, Any]]


def applier(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Apply:
    """Returns a function that puts a recipe, and what goes with it, into place, and returns the settings it needs."""

    def apply(title: str, **hooks: Any) -> dict[str, Any]:
        fitting = FITTING.get(title, {})
        settings = {name: each for name, each in fitting.items() if not callable(each)}
        for name, hook in {**USUAL, **fitting, **hooks}.items():
            if callable(hook):
                monkeypatch.setattr(task, name, hook, raising=False)
        if title == "Masked language model":  # Its loss is the mean over tokens.
            put_section(RECIPES["A mean over tokens"], monkeypatch, folder)
        put_section(RECIPES[title], monkeypatch, folder)
        if title == "Distillation from a trained teacher":
            settings["teacher"] = folder / "teacher.keras"
            small_model().save(settings["teacher"])
        return settings

    return apply


def build(replicas: int, **settings: Any) -> None:
    train.build(config.Config(simulated_devices=replicas, **{"global_batch_size": BATCH, **settings}))


def take_steps(count: int, epoch: int = 0) -> list[float]:
    """Takes the first steps of an epoch; returns their losses."""
    stacks = train.batches["train"].iterator(epoch).take(count)
    return [float(loss) for stack, first, size in stacks for loss in train.run_steps["train"](stack, first, size)]


def weights() -> dict[str, np.ndarray]:
    return {name: variable.numpy() for name, variable in model_variables(task.model).items()}


def assert_close(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Compares losses, weights and metrics; of an array, with its largest value."""
    for (path, one), other in zip(enumerate(tf.nest.flatten(found)), tf.nest.flatten(expected), strict=True):
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale, err_msg=str(path))
