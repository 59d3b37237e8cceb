"""The loop's numbers are those of a computation by hand: NumPy, no TensorFlow, one replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config

EPOCHS = 3
LEARNING_RATE = 0.2
MOMENTUM = 0.9
L2 = 0.01
CLASSES = 3


def examples(split: str) -> tf.data.Dataset:
    """Returns 37 weighted examples; no batch size divides them."""
    generator = np.random.default_rng({"train": 1, "validation": 2, "test": 3}[split])
    features = generator.normal(size=(37, 4)).astype("float32")
    labels = (features @ generator.normal(size=(4, CLASSES))).argmax(axis=1).astype("int32")
    weights = generator.uniform(0.5, 2.0, size=37).astype("float32")
    return tf.data.Dataset.from_tensor_slices((features, labels, weights))


def linear_model() -> keras.Model:
    kernel = keras.initializers.RandomNormal(seed=7)
    dense = keras.layers.Dense(CLASSES, kernel_initializer=kernel, kernel_regularizer=keras.regularizers.L2(L2))
    return keras.Sequential([keras.Input((4,)), dense])


@pytest.fixture(autouse=True)
def linear_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "load_examples", examples)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels, *, training: (features, labels))
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(
        task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    )


def softmax_losses(kernel: np.ndarray, bias: np.ndarray, features: np.ndarray, labels: np.ndarray):
    """Returns probabilities [batch, classes] and cross-entropies [batch] of softmax regression."""
    logits = features @ kernel + bias
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities, -np.log(probabilities[np.arange(len(labels)), labels])


def weighted_means(kernel: np.ndarray, bias: np.ndarray, batches: list) -> dict[str, float]:
    """Returns the weighted mean loss and accuracy over batches of (features, labels, weights)."""
    features, labels, weights = (np.concatenate(parts).astype("float64") for parts in zip(*batches, strict=True))
    probabilities, losses = softmax_losses(kernel, bias, features, labels.astype(int))
    right = probabilities.argmax(axis=1) == labels
    return {"loss": np.average(losses, weights=weights), "accuracy": np.average(right, weights=weights)}


def by_hand(global_batch_size: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Returns the kernel and the bias after SGD with momentum in float64, and the weighted loss of each epoch."""
    kernel, bias = (variable.numpy().astype("float64") for variable in linear_model().trainable_variables)
    velocities = [np.zeros_like(kernel), np.zeros_like(bias)]
    epoch_losses = []
    for epoch in range(EPOCHS):
        losses_seen, weights_seen = [], []
        # The order of the examples is the engine's, and has tests of its own.
        iterator = train.batches["train"].distribute(tf.distribute.get_strategy(), epoch=epoch)
        for features, labels, weights in (
            tf.nest.map_structure(lambda part: part.numpy(), batch) for batch in iterator
        ):
            probabilities, losses = softmax_losses(kernel, bias, features.astype("float64"), labels)
            errors = (probabilities - np.eye(CLASSES)[labels]) * weights[:, None] / global_batch_size
            gradients = [features.T @ errors + 2 * L2 * kernel, errors.sum(axis=0)]
            for variable, velocity, gradient in zip((kernel, bias), velocities, gradients, strict=True):
                velocity *= MOMENTUM
                velocity -= LEARNING_RATE * gradient
                variable += velocity
            losses_seen.append(losses)
            weights_seen.append(weights)
        epoch_losses.append(np.average(np.concatenate(losses_seen), weights=np.concatenate(weights_seen)))
    return kernel, bias, epoch_losses


@pytest.mark.parametrize("keep_last_batch", [False, True], ids=["whole batches", "padded last batch"])
@pytest.mark.parametrize(("replicas", "global_batch_size"), [(1, 12), (2, 12), (3, 12), (4, 12), (1, 37), (3, 9)])
def test_training_equals_numpy(replicas: int, global_batch_size: int, keep_last_batch: bool, tmp_path) -> None:
    # The iterator of one replica gives whole global batches, so that NumPy sees what all replicas see together.
    settings = {"run_dir": tmp_path, "global_batch_size": global_batch_size, "keep_last_batch": keep_last_batch}
    train.build(Config(**settings))
    kernel, bias, losses = by_hand(global_batch_size)
    expected = {
        split: weighted_means(kernel, bias, list(examples(split).batch(5).as_numpy_iterator()))
        for split in ("validation", "test")
    }

    train.build(Config(**settings, simulated_devices=replicas))
    found = [train.train_epoch(epoch)["train/loss"] for epoch in range(EPOCHS)]

    assert train.strategy.num_replicas_in_sync == replicas
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(task.model.layers[0].kernel.numpy(), kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.model.layers[0].bias.numpy(), bias, rtol=1e-5, atol=1e-6)
    for results, split in ((train.validate(), "validation"), (train.test(), "test")):
        for name, value in expected[split].items():
            assert results[f"{split}/{name}"] == pytest.approx(value, rel=1e-5)


def test_validation_and_test_do_not_mix_and_leave_nothing_behind(tmp_path) -> None:
    train.build(Config(run_dir=tmp_path, global_batch_size=12, simulated_devices=2))
    before = [variable.numpy() for variable in task.model.variables]
    first = (train.validate(), train.test())
    assert (train.validate(), train.test()) == first
    assert first[0]["validation/loss"] != first[1]["test/loss"]
    for variable, value in zip(task.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
