"""The blocks of docs/from_keras_fit.md, taken from the page as they stand there, and compared with Keras's `fit`."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import ports
import task
import train
from config import Config
from pages import put_section, sections, untested

SECTIONS, RECIPES = sections("from_keras_fit.md"), sections("recipes.md")
BATCH = 60

Apply = Callable[..., None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    return lambda title, page=SECTIONS: put_section(page[title], monkeypatch, tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the task a dense network on digits without augmentation, trained by SGD."""
    monkeypatch.setattr(task, "config", Config(epochs=2, global_batch_size=BATCH), raising=False)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features / 16.0, labels))
    monkeypatch.setattr(task, "create_model", create_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(task.config.learning_rate))


def create_model() -> keras.Model:
    regularizer = keras.regularizers.L2(0.01)
    hidden = keras.layers.Dense(16, activation="gelu", kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), hidden, keras.layers.Dense(10)])


def run(folder: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Runs train.py with flags; returns its result and the rows of metrics.csv."""
    flags = ("--global-batch-size=60", "--simulated-devices=1", "--limit-steps=1", f"--run-dir={folder}", *flags)
    return train.main(flags), list(csv.DictReader((folder / "metrics.csv").read_text(encoding="utf-8").splitlines()))


def fit(optimizer: keras.optimizers.Optimizer, **options: Any) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Returns the history and the weights of a `fit` on one device, with two epochs in our order."""
    order = ports.numbers_in_order(task, task.config)
    examples = {split: task.load_examples(split).as_numpy_iterator() for split in ("train", "validation")}
    arrays = {split: [np.stack(part) for part in zip(*each, strict=True)] for split, each in examples.items()}
    keras.utils.clear_session()
    keras.utils.set_random_seed(task.config.seed)
    model = create_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    images, labels = (part[order[0] + order[1]] for part in arrays["train"])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((images / 16.0, labels)).batch(BATCH),
        epochs=2,
        steps_per_epoch=len(order[0]) // BATCH,
        validation_data=(arrays["validation"][0] / 16.0, arrays["validation"][1]),
        validation_batch_size=BATCH,
        shuffle=False,
        verbose=0,
        **options,
    )
    return history.history, model.get_weights()


def test_every_block_is_run() -> None:
    assert not untested(SECTIONS, __file__)


def test_class_weight_metrics_clipping_and_val_loss_are_those_of_fit(
    apply: Apply, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply("class_weight")
    apply("Metrics and weights")
    apply("val_loss as in Keras")
    clipped = {"learning_rate": 0.1, "clipvalue": 0.01}
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(**clipped))
    history, expected = fit(keras.optimizers.SGD(**clipped), class_weight=dict(enumerate(task.CLASS_WEIGHTS)))
    train.build(Config(epochs=2, global_batch_size=BATCH, simulated_devices=2))
    rows = [train.train_epoch(epoch) | train.evaluate_split("validation", epoch) for epoch in range(2)]
    for weight, wanted in zip(task.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert [row["validation/loss"] for row in rows] == pytest.approx(history["val_loss"], rel=1e-5)
    for split, theirs in (("train", "accuracy"), ("validation", "val_accuracy")):
        assert [row[f"{split}/accuracy"] for row in rows] == pytest.approx(history[theirs], rel=1e-5)


def test_weights_by_output_scale_the_loss_of_their_output(apply: Apply) -> None:
    apply("Several outputs, each with its loss", RECIPES)
    apply("Sample weights by output")
    train.build(Config(global_batch_size=BATCH, simulated_devices=1))
    _, labels, weights = next(train.batches["train"].one_by_one())
    zeros = {"class": tf.zeros([BATCH, 10]), "is_odd": tf.zeros([BATCH, 1])}
    loss, per_example = task.compute_loss(labels, zeros, weights)
    digits = labels["class"].numpy()
    expected = np.where(digits >= 8, 2.0, 1.0) * np.log(10) + np.where(digits == 0, 0.0, 0.5) * np.log(2)
    np.testing.assert_allclose(per_example, expected, rtol=1e-6)
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-5)


def test_examples_are_those_of_a_validation_split_and_of_a_pydataset(apply: Apply) -> None:
    images, labels = load_digits(return_X_y=True)
    apply("validation_split")
    found = {split: list(task.load_examples(split).as_numpy_iterator()) for split in ("train", "validation")}
    assert task.load_examples("test") is None
    # Keras cuts the arrays at this place.
    end = math.floor(len(images) * 0.8)
    assert (len(found["train"]), len(found["validation"])) == (end, len(images) - end)
    np.testing.assert_array_equal(found["validation"][0][0].ravel(), images[end])

    apply("A PyDataset")
    found = list(task.load_examples("validation").as_numpy_iterator())
    np.testing.assert_array_equal([label for _, label in found], labels[300:600])
    np.testing.assert_array_equal(found[-1][0].ravel(), images[599])


def test_only_what_is_better_by_min_delta_counts(apply: Apply, small: None, monkeypatch, tmp_path: Path) -> None:
    apply("EarlyStopping with min_delta")
    monkeypatch.setattr(train, "MIN_DELTA", 0.25)
    scores = iter([2.0, 1.5, 1.4, 1.3, 1.26])
    monkeypatch.setattr(
        train, "evaluate_split", lambda split, *_: {"validation/loss": next(scores)} if split == "validation" else {}
    )
    result, rows = run(tmp_path / "run", "--epochs=9", "--patience=3")
    assert len(rows) == 5
    assert (result["best_epoch"], result["best_validation/loss"]) == (2, 1.5)


@pytest.mark.long
def test_epochs_go_on_as_the_page_says_after_a_stop(apply: Apply, small: None, tmp_path: Path) -> None:
    apply("validation_freq")
    run(tmp_path / "validated", "--epochs=3")
    _, rows = run(tmp_path / "validated", "--epochs=5")
    assert [bool(row["validation/loss"]) for row in rows] == [False, True, True, True, True]
    apply("LearningRateScheduler")
    run(tmp_path / "halved", "--epochs=3", "--learning-rate=0.4")
    _, rows = run(tmp_path / "halved", "--epochs=5", "--learning-rate=0.4")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
