"""Any number of replicas gives the numbers of a plain TensorFlow loop on one device, for every kind of task."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ports
import task
import train
from config import Config
from engine.model import gradients
from engine.model.variables import model_variables

EPOCHS = 2
EXAMPLES = 2 * 48 + 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A task in short, and the settings to train it with."""

    examples: Callable[[int], tuple]
    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    per_example_loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    replicas: int
    global_batch_size: int
    settings: dict[str, Any]


def sentences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [count, 7], 0 for padding, and a label per token; padding has label -1."""
    generator = np.random.default_rng(count)
    tokens = generator.integers(1, 20, size=(count, 7))
    lengths = generator.integers(1, 8, size=count)
    tokens[np.arange(7) >= lengths[:, None]] = 0
    return tokens.astype("int32"), np.where(tokens == 0, -1, tokens % 3).astype("int32")


def classes_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def tokens_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Returns each sentence's mean over the tokens that are not padding, [share]."""
    mask = tf.cast(labels >= 0, tf.float32)
    losses = keras.losses.sparse_categorical_crossentropy(tf.maximum(labels, 0), predictions, from_logits=True)
    return tf.reduce_sum(losses * mask, axis=1) / tf.reduce_sum(mask, axis=1)


def images(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns images [count, 4, 4, 3], a class per pixel [count, 4, 4], and weights [count]."""
    generator = np.random.default_rng(count)
    features = generator.normal(size=(count, 4, 4, 3)).astype("float32")
    return features, (features[..., 0] > 0.3).astype("int32"), generator.uniform(0.5, 2.0, count).astype("float32")


def pixels_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Returns each image's mean over its pixels of the sum of two weighted losses, [share]."""
    distance = tf.reduce_mean(tf.square(predictions - tf.one_hot(labels, 2)), axis=-1)
    return tf.reduce_mean(0.7 * classes_loss(labels, predictions) + 0.3 * distance, axis=(1, 2))


def segmenter() -> keras.Model:
    layers = [
        keras.layers.Dense(4, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.01)),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Activation("gelu"),
        keras.layers.Dense(2),
    ]
    return keras.Sequential([keras.Input((4, 4, 3)), *layers])


def tagger() -> keras.Model:
    return keras.Sequential(
        [keras.Input((7,), dtype="int32"), keras.layers.Embedding(20, 5), keras.layers.Dense(3)], name="tagger"
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.01, epsilon=1e-5)


CASES = {
    "a label per pixel, two losses, weights, synchronized BatchNorm, L2, clipping, XLA": Case(
        images, segmenter, sgd, pixels_loss, 2, 50, {"global_clipnorm": 0.05, "jit": True}
    ),
    # The replicas cannot share this batch equally, so some per-replica batches are padded.
    "embedding, masked tokens, AdamW, padding, clipping, 2 micro-batches": Case(
        sentences, tagger, adamw, tokens_loss, 3, 50, {"micro_batches": 2, "global_clipnorm": 0.05}
    ),
}


def batches_by_hand(case: Case) -> list[list[tuple]]:
    """Returns the batches of each epoch, (features, labels, weights), from NumPy.

    The engine gives the order of the examples' numbers only, and it has tests of its own.
    """
    features, labels, *weights = case.examples(EXAMPLES)
    columns = features, labels, weights[0] if weights else np.ones(len(labels), "float32")
    order = ports.numbers_in_order(task, Config(epochs=EPOCHS, global_batch_size=case.global_batch_size))
    starts = range(0, len(order[0]), case.global_batch_size)
    return [
        [tuple(column[numbers[start : start + case.global_batch_size]] for column in columns) for start in starts]
        for numbers in order
    ]


def plain_tensorflow(case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns weights and metrics of a loop with no strategy, no micro-batches, no padding and no engine."""
    order = batches_by_hand(case)
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model, optimizer = case.model(), case.optimizer()
    metrics = {}
    for batches in order:
        losses_seen, weights_seen = [], []
        for features, labels, weights in batches:
            with tf.GradientTape() as tape:
                losses = case.per_example_loss(labels, model(features, training=True))
                loss = tf.reduce_sum(losses * weights) / case.global_batch_size + sum(model.losses)
            # An embedding's gradient as one tensor: the norm and Adam's moments of its slices are other numbers.
            gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]
            gradients, norm = tf.clip_by_global_norm(gradients, limit := case.settings["global_clipnorm"])
            assert norm > limit, "The limit does not bind."
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses_seen.append(losses)
            weights_seen.append(weights)
        metrics["train/loss"] = np.average(np.concatenate(losses_seen), weights=np.concatenate(weights_seen))
    return {variable.path: variable.numpy() for variable in model.variables}, metrics


def assert_same(found: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert found[0].keys() == expected[0].keys()
    for name, weight in expected[0].items():
        np.testing.assert_allclose(
            found[0][name], weight, rtol=1e-5, atol=1e-5 * max(np.abs(weight).max(), 1e-3), err_msg=name
        )


@pytest.mark.parametrize("name", CASES)
def test_replicas_agree_with_plain_tensorflow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def update_metrics(split, labels, predictions, per_example_loss, weights):
        task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)

    case = CASES[name]
    hooks = {
        "load_examples": lambda split: tf.data.Dataset.from_tensor_slices(case.examples(EXAMPLES)),
        "prepare_example": lambda features, labels, *, training: (features, labels),
        "create_model": case.model,
        "create_optimizer": lambda total_steps: case.optimizer(),
        "create_loss_objects": lambda: {"label": case.per_example_loss},
        "create_metrics": lambda split: {"loss": keras.metrics.Mean()},
        "update_metrics": update_metrics,
    }
    for hook, function in hooks.items():
        monkeypatch.setattr(task, hook, function)
    expected = plain_tensorflow(case)
    settings = {"simulated_devices": case.replicas, "global_batch_size": case.global_batch_size, **case.settings}
    train.build(Config(**settings))
    for epoch in range(EPOCHS):
        metrics = train.train_epoch(epoch)
    assert_same(({variable.path: variable.numpy() for variable in task.model.variables}, metrics), expected)


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_two_models_with_two_optimizers_agree(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "tasks"))
    import gan

    load_examples = gan.load_examples
    monkeypatch.setattr(gan, "load_examples", lambda split: load_examples(split).take(96))
    monkeypatch.setattr(train, "task", gan)
    norms = []

    def applied(*arguments: Any) -> tf.Tensor:
        norms.append(gradients.apply_gradients(*arguments))
        return norms[-1]

    def trained(**settings: Any) -> tuple[dict, dict]:
        train.build(Config(ema_decay=0.9, global_clipnorm=0.1, **settings))
        metrics = train.train_epoch(0)
        values = {name: variable.numpy() for name, variable in model_variables(gan.model).items()}
        with train.run.evaluation_weights():
            averages = {f"average of {name}": each.numpy() for name, each in model_variables(gan.model).items()}
        return values | averages, metrics

    assert_same(trained(simulated_devices=replicas, micro_batches=2), trained())
    # Clipping works on each model by itself.
    monkeypatch.setattr(gan, "apply_gradients", applied)
    gradients.in_micro_batches(gan.train_step, train.config)(next(train.batches["train"].one_by_one()))
    assert min(float(each) for each in norms) > 0.1
