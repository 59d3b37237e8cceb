"""The loop's numbers are those of a computation by hand: NumPy, no TensorFlow, one replica."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import Batches, load_splits
from engine.model.variables import model_variables
from engine.run.state import weights_sha256

EPOCHS = 2
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


def by_hand(
    batches: Batches, global_batch_size: int, global_clipnorm: float, ema_decay: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[float]]:
    """Returns what SGD with momentum comes to in float64: kernel, bias, their averages, and each epoch's loss."""
    kernel, bias = (variable.numpy().astype("float64") for variable in linear_model().trainable_variables)
    averages = [kernel.copy(), bias.copy()]
    velocities = [np.zeros_like(kernel), np.zeros_like(bias)]
    epoch_losses = []
    clipped = updates = 0
    for epoch in range(EPOCHS):
        losses_seen, weights_seen = [], []
        # The order of the examples is the engine's, and has tests of its own.
        for batch in batches.one_by_one(epoch):
            features, labels, weights = (part.numpy() for part in batch)
            probabilities, losses = softmax_losses(kernel, bias, features.astype("float64"), labels)
            errors = (probabilities - np.eye(CLASSES)[labels]) * weights[:, None] / global_batch_size
            gradients = [features.T @ errors + 2 * L2 * kernel, errors.sum(axis=0)]
            norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
            clipped += norm > global_clipnorm
            decay = min(ema_decay, (1 + updates) / (10 + updates))
            updates += 1
            for variable, velocity, gradient, average in zip(
                (kernel, bias), velocities, gradients, averages, strict=True
            ):
                velocity *= MOMENTUM
                velocity -= LEARNING_RATE * gradient * min(1.0, global_clipnorm / norm)
                variable += velocity
                average *= decay
                average += (1.0 - decay) * variable
            losses_seen.append(losses)
            weights_seen.append(weights)
        epoch_losses.append(np.average(np.concatenate(losses_seen), weights=np.concatenate(weights_seen)))
    assert clipped >= 3, "The limit does not bind."
    return kernel, bias, *averages, epoch_losses


# Four replicas cannot share a batch of 10 in 2 micro-batches each, so some are padded.
@pytest.mark.parametrize(
    ("replicas", "global_batch_size"), [*(pytest.param(each, 12, marks=pytest.mark.long) for each in (1, 2)), (4, 10)]
)
def test_training_equals_numpy(replicas: int, global_batch_size: int) -> None:
    options = {"global_clipnorm": 0.3, "ema_decay": 0.8}
    settings = {"global_batch_size": global_batch_size, "keep_last_batch": True, "micro_batches": 2, **options}
    # Without simulated devices a batch is whole, so NumPy sees what all replicas see together.
    batches = load_splits(train.SPLITS, task, Config(**settings), create_strategy(Config()))["train"]
    kernel, bias, mean_kernel, mean_bias, losses = by_hand(batches, global_batch_size, **options)
    expected = weighted_means(mean_kernel, mean_bias, list(examples("validation").batch(5).as_numpy_iterator()))

    train.build(Config(**settings, simulated_devices=replicas))
    found = [train.train_epoch(epoch)["train/loss"] for epoch in range(EPOCHS)]

    assert train.strategy.num_replicas_in_sync == replicas
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(task.model.layers[0].kernel.numpy(), kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.model.layers[0].bias.numpy(), bias, rtol=1e-5, atol=1e-6)
    with train.run.evaluation_weights():
        np.testing.assert_allclose(task.model.layers[0].kernel.numpy(), mean_kernel, rtol=1e-5, atol=1e-6)
        results = train.evaluate_split("validation")
        assert results == pytest.approx({f"validation/{name}": each for name, each in expected.items()}, rel=1e-5)
        assert train.evaluate_split("validation") == results
    np.testing.assert_allclose(task.model.layers[0].kernel.numpy(), kernel, rtol=1e-5, atol=1e-6)
    # A step returns its batch's loss.
    features, labels, weights = (part.numpy() for part in next(batches.one_by_one()))
    expected_loss = (softmax_losses(kernel, bias, features, labels)[1] * weights).sum() / global_batch_size
    (loss,) = train.run_steps["train"](*next(train.batches["train"].iterator().take(1))).numpy()
    assert loss == pytest.approx(expected_loss + L2 * (kernel**2).sum(), rel=1e-5)


def test_result_is_of_the_best_weights_and_the_fingerprint_of_the_last(tmp_path, monkeypatch) -> None:
    # A rate at which the validation accuracy goes up and down: the best epoch is not the last.
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(3.0, momentum=MOMENTUM))
    flags = ["--global-batch-size=12", "--epochs=4", "--monitor=validation/accuracy", "--seed=4"]
    result = train.main([f"--run-dir={tmp_path}", *flags])
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    scores = [float(row["validation/accuracy"]) for row in rows]
    assert result["best_epoch"] == 1 + scores.index(max(scores)) < 4
    # The test ended with the best weights in place.
    assert train.evaluate_split("test")["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)
    assert weights_sha256(model_variables(task.model)) != result["weights_sha256"]
    train.run.checkpoints.restore(train.run.checkpoints.paths()[-1])
    assert weights_sha256(model_variables(task.model)) == result["weights_sha256"]
