"""The blocks of docs/from_keras_fit.md, taken from the page as they stand there, and compared with Keras's `fit`."""

import csv
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
from pages import blocks, put, sections
from rendering import PROJECT

PAGE = (PROJECT / "docs/from_keras_fit.md").read_text(encoding="utf-8")
SECTIONS, RECIPES = sections("from_keras_fit.md"), sections("recipes.md")
BATCH, RATE = 60, 0.1

Apply = Callable[[str], None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts the blocks of a section into the modules that they are for, until the test's end."""

    def apply(title: str, page: dict[str, str] = SECTIONS) -> None:
        for block in blocks(page[title]):
            module: ModuleType = train if "In `train.py`" in page[title] else task
            folder = tmp_path / f"block {len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            put(block, module, monkeypatch, folder)

    return apply


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


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").read_text(encoding="utf-8").splitlines()))


def run(folder: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Runs train.py with flags; returns its result and the rows of metrics.csv."""
    base = ["--global-batch-size=60", "--simulated-devices=1", "--limit-steps=1", f"--run-dir={folder}"]
    return train.main([*base, *flags]), rows_of(folder)


def fit(optimizer: keras.optimizers.Optimizer, **options: Any) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Returns the history and the weights of a `fit` on one device, with two epochs in our order."""
    order = ports.numbers_in_order(task, task.config)

    def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = load_digits(return_X_y=True)
        last = np.arange(len(images)) % 10
        chosen = (last == 7) if split == "validation" else (last % 5 != 0) & (last != 7)
        return images[chosen].reshape(-1, 8, 8, 1).astype("float32") / 16.0, labels[chosen]

    steps = len(order[0]) // BATCH
    images, labels = (column[order[0] + order[1]] for column in arrays("train"))
    keras.utils.clear_session()
    keras.utils.set_random_seed(task.config.seed)
    model = create_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["sparse_top_k_categorical_accuracy"])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH),
        epochs=2,
        steps_per_epoch=steps,
        validation_data=arrays("validation"),
        validation_batch_size=BATCH,
        shuffle=False,
        verbose=0,
        **options,
    )
    return history.history, model.get_weights()


def on_replicas(replicas: int, **settings: Any) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Returns the metrics of two epochs and the weights of our loop."""
    train.build(Config(epochs=2, global_batch_size=BATCH, learning_rate=RATE, simulated_devices=replicas, **settings))
    assert train.strategy.num_replicas_in_sync == replicas
    return [train.train_epoch(epoch) | train.validate(epoch) for epoch in range(2)], task.model.get_weights()


def assert_same_weights(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for weight, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_every_block_is_run() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    with_code = [title for title, text in SECTIONS.items() if "```python" in text]
    assert len(with_code) >= 8
    assert not [title for title in with_code if f'apply("{title}")' not in tested]


def test_tables_name_arguments_that_keras_has() -> None:
    """The first column of each table names arguments, callbacks and methods of Keras."""
    known = set(dir(keras.callbacks)) | set(dir(keras.utils)) | set(dir(keras.Model)) | {"with", "x", "y", "mode"}
    of = [keras.Model.compile, keras.Model.fit, keras.optimizers.AdamW]
    of += [keras.Model.evaluate, keras.Model.predict, keras.callbacks.History]
    of += [getattr(keras.callbacks, name).__init__ for name in dir(keras.callbacks) if name[0].isupper()]
    known |= {name for each in of for name in inspect.signature(each).parameters}
    known |= {"history", "LossScaleOptimizer", "tf", "stop_training"}
    rows = re.findall(r"(?m)^\| ([^|]*`[^|]*) \|", PAGE)
    assert len(rows) > 50
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row):
            assert re.match(r"\w+", code)[0] in known, row


def test_class_weight_and_metrics_are_those_of_fit(apply: Apply, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("class_weight")
    apply("Metrics and weights")
    create_metrics, update_metrics = task.create_metrics, task.update_metrics

    def create_with_top_k(split: str) -> dict[str, keras.metrics.Metric]:
        return {**create_metrics(split), "top_k": keras.metrics.SparseTopKCategoricalAccuracy()}

    def update_with_top_k(split, labels, predictions, per_example_loss, sample_weights) -> None:
        update_metrics(split, labels, predictions, per_example_loss, sample_weights)
        task.metrics[split]["top_k"].update_state(labels, predictions, sample_weight=sample_weights)

    monkeypatch.setattr(task, "create_metrics", create_with_top_k)
    monkeypatch.setattr(task, "update_metrics", update_with_top_k)
    history, expected = fit(keras.optimizers.SGD(RATE), class_weight=dict(enumerate(task.CLASS_WEIGHTS)))
    rows, found = on_replicas(2)
    assert_same_weights(found, expected)
    for name, theirs in (("accuracy", "accuracy"), ("top_k", "sparse_top_k_categorical_accuracy")):
        assert [row[f"train/{name}"] for row in rows] == pytest.approx(history[theirs], rel=1e-5)
        assert [row[f"validation/{name}"] for row in rows] == pytest.approx(history[f"val_{theirs}"], rel=1e-5)


@pytest.mark.long
def test_clipping_and_val_loss_are_those_of_fit(apply: Apply, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("val_loss as in Keras")
    clipping = {"clipvalue": 0.01}
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(RATE, **clipping))
    history, expected = fit(keras.optimizers.SGD(RATE, **clipping))
    rows, found = on_replicas(2)
    assert_same_weights(found, expected)
    assert [row["train/loss"] for row in rows] == pytest.approx(history["loss"], rel=1e-5)
    assert [row["validation/loss"] for row in rows] == pytest.approx(history["val_loss"], rel=1e-5)


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


def test_validation_split_is_the_last_part_of_the_arrays(apply: Apply) -> None:
    apply("validation_split")
    images, _ = load_digits(return_X_y=True)
    found = {split: list(task.load_examples(split).as_numpy_iterator()) for split in ("train", "validation")}
    assert task.load_examples("test") is None
    # Keras cuts the arrays at this place.
    end = math.floor(len(images) * 0.8)
    assert (len(found["train"]), len(found["validation"])) == (end, len(images) - end)
    np.testing.assert_array_equal(found["validation"][0][0].ravel(), images[end])


@pytest.mark.long
def test_examples_of_a_pydataset_are_trained_on(apply: Apply, small: None, tmp_path: Path) -> None:
    apply("A PyDataset")
    images, labels = load_digits(return_X_y=True)
    found = list(task.load_examples("validation").as_numpy_iterator())
    np.testing.assert_array_equal([label for _, label in found], labels[300:600])
    np.testing.assert_array_equal(found[-1][0].ravel(), images[599])
    result, _ = run(tmp_path / "run", "--epochs=1")
    assert 0.0 < result["test/loss"] < 10.0


def test_only_what_is_better_by_min_delta_counts(apply: Apply, small: None, monkeypatch, tmp_path: Path) -> None:
    apply("EarlyStopping with min_delta")
    monkeypatch.setattr(train, "MIN_DELTA", 0.25)
    scores = [2.0, 1.5, 1.4, 1.3, 1.26]
    remaining = iter(scores)
    monkeypatch.setattr(train, "validate", lambda epoch=0: {"validation/loss": next(remaining)})
    result, rows = run(tmp_path / "run", "--epochs=9", "--patience=3")
    assert len(rows) == 5
    assert (result["best_epoch"], result["best_validation/loss"]) == (2, 1.5)
    callback, model = keras.callbacks.EarlyStopping(min_delta=0.25, patience=3), keras.Sequential()
    model.stop_training = False
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, score in enumerate(scores):
        assert not model.stop_training
        callback.on_epoch_end(epoch, {"val_loss": score})
    assert model.stop_training
    assert callback.best_epoch + 1 == result["best_epoch"]


@pytest.mark.long
def test_every_second_epoch_is_validated(apply: Apply, small: None, tmp_path: Path) -> None:
    apply("validation_freq")
    run(tmp_path / "run", "--epochs=3")
    result, rows = run(tmp_path / "run", "--epochs=5")
    assert [bool(row["validation/loss"]) for row in rows] == [False, True, True, True, True]
    assert result["best_epoch"] in (2, 3, 4, 5)


@pytest.mark.long
def test_learning_rate_follows_the_epochs_after_a_stop_too(apply: Apply, small: None, tmp_path: Path) -> None:
    apply("LearningRateScheduler")
    run(tmp_path / "run", "--epochs=3", "--learning-rate=0.4")
    _, rows = run(tmp_path / "run", "--epochs=5", "--learning-rate=0.4")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
