"""The recipes of docs/steps.md, taken from the page as they stand there, on one replica, two and four."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import config
import task
import train
from engine.check.check import check_task
from engine.model.variables import model_variables
from pages import blocks, put, sections

RECIPES = sections("steps.md")
WITH_CODE = [title for title, text in RECIPES.items() if "```python" in text]
LOAD_EXAMPLES = task.load_examples

Apply = Callable[..., None]
Values = dict[str, np.ndarray]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts the blocks of a recipe into the modules that they are for, and other hooks into task.py."""
    monkeypatch.setattr(task, "create_model", small_model)
    monkeypatch.setattr(task, "load_examples", few_examples)
    monkeypatch.setattr(task, "create_optimizer", create_optimizer)

    def apply(title: str, **hooks: Any) -> None:
        for name, hook in hooks.items():
            monkeypatch.setattr(task, name, hook, raising=False)
        for block in blocks(RECIPES[title]):
            put(block, config if "class Config" in block else task, monkeypatch, tmp_path)
        monkeypatch.setattr(train, "Config", config.Config)

    return apply


def few_examples(split: str) -> tf.data.Dataset | None:
    return None if split == "test" else LOAD_EXAMPLES(split).take(120)


def small_model() -> keras.Model:
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Its updates are in proportion to the gradient, so a gradient that is too large is not hidden."""
    return keras.optimizers.SGD(0.5)


def trained(
    steps: int = 3, reference: Callable[..., float] | None = None, **settings: Any
) -> tuple[list[float], Values, dict[str, float]]:
    """Returns the losses of some steps, the weights after them, and the metrics of training and validation.

    Compares the first loss with what `reference` makes of the batch, before the step.
    """
    train.build(config.Config(limit_steps=steps, **{"global_batch_size": 16, **settings}))
    expected = reference(*batches(1)[0]) if reference else None
    iterator = train.batches["train"].iterator().take(steps)
    losses = [loss for stack, first, count in iterator for loss in train.run_steps["train"](stack, first, count)]
    assert expected is None or float(losses[0]) == pytest.approx(expected, rel=1e-5)
    metrics = train.run.objects.results("train") | train.validate()
    return list(map(float, losses)), weights(), metrics


def weights() -> Values:
    return {name: variable.numpy() for name, variable in model_variables(task.model).items()}


def batches(count: int) -> list[Any]:
    """Returns the first batches of training, of one replica, as NumPy arrays."""
    taken = train.batches["train"].one_by_one()
    return [tf.nest.map_structure(lambda part: part.numpy(), batch) for batch, _ in zip(taken, range(count))]


def assert_close(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Compares losses, weights and metrics; of an array, with its largest value."""
    for (path, one), other in zip(enumerate(tf.nest.flatten(found)), tf.nest.flatten(expected), strict=True):
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale, err_msg=str(path))


REPLICAS = pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])


def assert_same_on_one(
    replicas: int, reference: Callable[..., float] | None = None, **settings: Any
) -> tuple[list[float], Values, dict[str, float]]:
    """Trains on several replicas and on one, with the loss of the `reference`; returns the results of one."""
    settings = {"micro_batches": 1, **settings}
    found = trained(simulated_devices=replicas, **settings)
    expected = trained(reference=reference, simulated_devices=1, **{**settings, "micro_batches": 1})
    assert_close(found, expected)
    return expected


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype("float64")
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def cross_entropy(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return -np.take_along_axis(log_softmax(logits), labels[..., None].astype(int), axis=-1)[..., 0]


def test_every_recipe_is_run() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert len(WITH_CODE) >= 12
    assert not [title for title in WITH_CODE if f'"{title}"' not in tested]


def test_blocks_are_short() -> None:
    for title in WITH_CODE:
        for block in blocks(RECIPES[title]):
            lines = [line for line in block.splitlines() if line]
            assert len(lines) <= 40, title
            assert max(map(len, lines)) <= 100, title


# --- Random numbers ---------------------------------------------------------------------------------------------------


@REPLICAS
def test_noise_is_that_of_the_example(replicas: int, apply: Apply) -> None:
    apply("Random numbers in a step")

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        noise = [tf.random.stateless_normal((8, 8, 1), seed) for seed in features["seed"]]
        logits = task.model(features["image"] + 0.1 * np.stack(noise)).numpy()
        return cross_entropy(labels, logits).mean()

    assert_same_on_one(replicas, loss, micro_batches=2)
    seeds = [batch[0]["seed"] for batch in (*batches(3), next(train.batches["train"].one_by_one(1)))]
    assert len({tuple(seed) for each in seeds for seed in np.asarray(each)}) == 4 * 16


# --- Means over something other than examples -------------------------------------------------------------------------


def token_examples(split: str) -> tf.data.Dataset | None:
    """Rows of pixels, and as labels how bright each row is; 0 is a row of padding."""
    examples = few_examples(split)
    return examples and examples.map(lambda image, label: (image, tf.cast(image[:, 4, 0] // 4.0, tf.int32)))


def token_model() -> keras.Model:
    layers = [keras.layers.Reshape((8, 8)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def prepare_plainly(features: tf.Tensor, labels: Any) -> tuple[tf.Tensor, Any]:
    return features / 16.0, labels


@REPLICAS
def test_each_token_counts_the_same(replicas: int, apply: Apply) -> None:
    hooks = {"load_examples": token_examples, "create_model": token_model, "prepare_example": prepare_plainly}
    apply("A mean over tokens", **hooks)

    def loss(features: np.ndarray, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        return cross_entropy(labels, task.model(features).numpy())[labels != 0].mean()

    assert_same_on_one(replicas, loss, micro_batches=2)


def boxes(split: str) -> tf.data.Dataset | None:
    def box(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {"is_object": tf.cast(label < 3, tf.float32), "box": image[2:4, 2:4, 0][0] / 16.0}

    def four(image: tf.Tensor, labels: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {**labels, "box": tf.concat([labels["box"], 1.0 - labels["box"]], axis=0)}

    examples = few_examples(split)
    return examples and examples.map(box).map(four)


def box_model() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, {"is_object": keras.layers.Dense(1)(hidden), "box": keras.layers.Dense(4)(hidden)})


@REPLICAS
def test_boxes_are_averaged_over_the_objects(replicas: int, apply: Apply) -> None:
    hooks = {"load_examples": boxes, "create_model": box_model, "prepare_example": prepare_plainly}
    apply("A term for positives only", **hooks)

    def loss(features: np.ndarray, labels: Any, sample_weights: np.ndarray) -> float:
        found = {name: each.numpy().astype("float64") for name, each in task.model(features).items()}
        is_object = labels["is_object"].astype(bool)
        entropy = np.log1p(np.exp(np.where(is_object, -1, 1) * found["is_object"][:, 0]))
        return entropy.mean() + np.square(labels["box"] - found["box"])[is_object].mean()

    assert_same_on_one(replicas, loss, micro_batches=2, monitor="validation/box_loss")


def two_heads(split: str) -> tf.data.Dataset | None:
    def labels(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {"digit": tf.where(label == 7, -1, label), "is_odd": tf.where(label > 3, -1, label % 2)}

    examples = few_examples(split)
    return examples and examples.map(labels)


def two_headed_model() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, {"digit": keras.layers.Dense(10)(hidden), "is_odd": keras.layers.Dense(2)(hidden)})


@REPLICAS
def test_heads_are_averaged_over_their_labels(replicas: int, apply: Apply) -> None:
    hooks = {"load_examples": two_heads, "create_model": two_headed_model, "prepare_example": prepare_plainly}
    apply("Several heads with missing labels", **hooks)

    def loss(features: np.ndarray, labels: Any, sample_weights: np.ndarray) -> float:
        logits = {head: each.numpy()[labels[head] >= 0] for head, each in task.model(features).items()}
        return sum(cross_entropy(labels[head][labels[head] >= 0], each).mean() for head, each in logits.items())

    assert_same_on_one(replicas, loss, micro_batches=2, monitor="validation/digit_loss")
