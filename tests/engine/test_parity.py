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
from engine.model.variables import model_variables

EPOCHS = 2
EXAMPLES = 2 * 48 + 5
BATCH = 50
LIMIT = 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """A task in short, and the settings to train it with."""

    examples: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]
    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    per_example_loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    settings: dict[str, Any]


def sentences() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens [EXAMPLES, 7], 0 for padding, a label per token, -1 for padding, and weights [EXAMPLES]."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 20, size=(EXAMPLES, 7)).astype("int32")
    tokens[np.arange(7) >= generator.integers(1, 8, size=EXAMPLES)[:, None]] = 0
    return tokens, np.where(tokens == 0, -1, tokens % 3), np.ones(EXAMPLES, "float32")


def classes_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def tokens_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Returns each sentence's mean over the tokens that are not padding, [share]."""
    mask = tf.cast(labels >= 0, tf.float32)
    losses = keras.losses.sparse_categorical_crossentropy(tf.maximum(labels, 0), predictions, from_logits=True)
    return tf.reduce_sum(losses * mask, axis=1) / tf.reduce_sum(mask, axis=1)


def images() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns images [EXAMPLES, 4, 4, 3], a class per pixel [EXAMPLES, 4, 4], and weights [EXAMPLES]."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(EXAMPLES, 4, 4, 3)).astype("float32")
    return features, (features[..., 0] > 0.3).astype("int32"), generator.uniform(0.5, 2, EXAMPLES).astype("float32")


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


CASES = {
    "a label per pixel, two losses, weights, synchronized BatchNorm, L2, clipping, XLA": Case(
        images,
        segmenter,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        pixels_loss,
        {"simulated_devices": 2, "jit": True},
    ),
    # The replicas cannot share a batch equally, so some per-replica batches are padded.
    "embedding, masked tokens, AdamW, padding, clipping, 2 micro-batches": Case(
        sentences,
        tagger,
        lambda: keras.optimizers.AdamW(0.01, epsilon=1e-5),
        tokens_loss,
        {"simulated_devices": 3, "micro_batches": 2},
    ),
}


def plain_tensorflow(case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns weights and metrics of a loop with no strategy, no micro-batches, no padding and no engine.

    The engine gives the order of the examples' numbers only, and it has tests of its own.
    """
    order = ports.numbers_in_order(task, Config(epochs=EPOCHS, global_batch_size=BATCH))
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model, optimizer = case.model(), case.optimizer()
    for numbers in order:
        losses_seen, weights_seen = [], []
        for start in range(0, len(numbers), BATCH):
            features, labels, weights = (column[numbers[start : start + BATCH]] for column in case.examples())
            with tf.GradientTape() as tape:
                losses = case.per_example_loss(labels, model(features, training=True))
                loss = tf.reduce_sum(losses * weights) / BATCH + sum(model.losses)
            # An embedding's gradient as one tensor: the norm and Adam's moments of its slices are other numbers.
            gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]
            gradients, norm = tf.clip_by_global_norm(gradients, LIMIT)
            assert norm > LIMIT, "The limit does not bind."
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses_seen.append(losses)
            weights_seen.append(weights)
    mean = np.average(np.concatenate(losses_seen), weights=np.concatenate(weights_seen))
    return {variable.path: variable.numpy() for variable in model.variables}, {"train/loss": mean}


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
        "load_examples": lambda split: tf.data.Dataset.from_tensor_slices(case.examples()),
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
    train.build(Config(global_batch_size=BATCH, global_clipnorm=LIMIT, **case.settings))
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

    def trained(**settings: Any) -> tuple[dict, dict]:
        train.build(Config(ema_decay=0.9, global_clipnorm=0.1, **settings))
        metrics = train.train_epoch(0)
        values = {name: variable.numpy() for name, variable in model_variables(gan.model).items()}
        with train.run.evaluation_weights():
            averages = {f"average of {name}": each.numpy() for name, each in model_variables(gan.model).items()}
        return values | averages, metrics

    assert_same(trained(simulated_devices=replicas, micro_batches=2), trained())
