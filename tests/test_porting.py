"""Jobs from elsewhere, ported to the hooks of this project: they give the numbers of the loops they come from."""

import csv
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ports
from pages import blocks, put, sections
from rendering import PROJECT, TASKS, TEMPLATE

sys.path.insert(0, str(PROJECT))

import train
from config import Config
from engine.cluster.strategy import create_strategy

create_strategy(Config(strategy="mirrored", simulated_devices=5))  # As in tests/engine: once in a process.

# The loop in tests/loops, its port in tests/tasks, the settings, and the numbers of replicas that share each batch.
SHORT_BATCHES = {"global_batch_size": 50, "keep_last_batch": True}  # Of 360 examples, the last 10.
PORTS = {
    "article": ("article", "tabular_regression", {"global_batch_size": 50}, (1, 5)),
    "tutorial": ("tutorial", "tutorial_cnn", SHORT_BATCHES, (2,)),
    "tutorial, other denominator": ("tutorial", "tutorial_cnn", SHORT_BATCHES, (5,)),
    "orbit": ("orbit", "bert", {"global_batch_size": 40, "global_clipnorm": 1.0}, (5,)),
}
EPOCHS = 2


def load(*paths: Path) -> ModuleType:
    """Runs files as one module, as if what the later ones define had been written into the first one."""
    module = sys.modules["port"] = ModuleType("port")
    for path in paths:
        module.__file__ = str(path)
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))  # noqa: S102
    return module


def numbers_of_the_loop(
    loop: ModuleType, port: ModuleType, settings: Config, strategy: tf.distribute.Strategy
) -> tuple[list, list, list]:
    """Returns what the loop comes to: [(steps, their mean loss)], metrics by epoch, weights.

    The loop reads and prepares the examples itself. The project gives it the order of their numbers, and the model.
    """
    port.config = settings

    def batched(split: str, numbers: Sequence[int] | None = None) -> tf.data.Dataset:
        columns = loop.read(split)
        if numbers is not None:
            columns = tf.nest.map_structure(lambda column: column[numbers], columns)
        return tf.data.Dataset.from_tensor_slices(columns).batch(settings.global_batch_size)

    epochs = [batched("train", numbers) for numbers in ports.numbers_in_order(port, settings)]
    evaluation = {split: batched(split) for split in ("validation", "test")}
    keras.utils.clear_session()
    keras.utils.set_random_seed(settings.seed)
    losses, rows, model = loop.run(port, settings, strategy, epochs, evaluation)
    return losses, rows, [variable.numpy() for variable in model.trainable_variables]


def numbers_of_the_project(port: ModuleType, settings: Config) -> tuple[list, list, list]:
    """Returns what our project comes to: the loss of each step, metrics by epoch, weights."""
    train.build(settings)
    assert train.strategy.num_replicas_in_sync == settings.simulated_devices
    take_steps, losses = train.run_steps["train"], []

    def noted_steps(*arguments: Any) -> tf.Tensor:
        losses.append(take_steps(*arguments))
        return losses[-1]

    train.run_steps["train"] = noted_steps
    rows = [train.train_epoch(epoch) | train.evaluate_split("validation", epoch) for epoch in range(EPOCHS)]
    rows[-1] |= train.evaluate_split("test")
    weights = [variable.numpy() for variable in port.model.trainable_variables]
    return np.concatenate(losses).tolist(), rows, weights


@pytest.mark.long
@pytest.mark.parametrize("name", PORTS)
def test_port_gives_the_numbers_of_the_loop_it_comes_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_name, task_name, values, counts = PORTS[name]
    loop, port = load(TEMPLATE / f"tests/loops/{loop_name}.py"), load(PROJECT / "task.py", TASKS / f"{task_name}.py")
    port.divides_by_examples = "denominator" in name
    monkeypatch.setattr(train, "task", port)
    settings = Config(epochs=EPOCHS, learning_rate=1e-3, **values)
    one_device = tf.distribute.MirroredStrategy(["CPU:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    expected_losses, expected_rows, expected_weights = numbers_of_the_loop(loop, port, settings, one_device)
    for replicas in counts:
        losses, rows, weights = numbers_of_the_project(port, dataclasses.replace(settings, simulated_devices=replicas))
        for steps, expected in expected_losses:
            loss, losses = np.mean(losses[:steps]), losses[steps:]
            assert loss == pytest.approx(expected, rel=1e-5)
        assert not losses
        for row, expected in zip(rows, expected_rows, strict=True):
            assert {metric: row[metric] for metric in expected} == pytest.approx(expected, rel=1e-5)
        assert_same_weights(weights, expected_weights)


@pytest.mark.long
def test_port_gives_the_numbers_of_keras_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, port = load(TEMPLATE / "tests/loops/keras_fit.py").run, load(PROJECT / "task.py", TASKS / "keras_fit.py")
    monkeypatch.setattr(train, "task", port)
    # EarlyStopping's min_delta and ReduceLROnPlateau, as the pages for users have them.
    callbacks = {
        "from_keras_fit.md": "EarlyStopping with min_delta",
        "recipes.md": "A smaller rate when nothing improves",
    }
    for page, title in callbacks.items():
        (block,) = blocks(sections(page)[title])
        put(block, train, monkeypatch, tmp_path)
    monkeypatch.setattr(train, "MIN_DELTA", 0.05)  # So large that the run soon ends.
    reduce_on_plateau = functools.partial(train.reduce_on_plateau, min_delta=train.MIN_DELTA)
    monkeypatch.setattr(train, "reduce_on_plateau", reduce_on_plateau)
    epochs, patience, rate = 30, 4, 0.005
    flags = [f"--epochs={epochs}", f"--patience={patience}", f"--learning-rate={rate}", "--global-batch-size=50"]
    settings = Config(epochs=epochs, patience=patience, learning_rate=rate, global_batch_size=50)
    order = ports.numbers_in_order(port, settings)
    keras.utils.clear_session()
    keras.utils.set_random_seed(settings.seed)
    options = {"epochs": epochs, "batch_size": 50, "learning_rate": rate, "patience": patience}
    history, test, last, best, last_rate = fit(port.create_model, order, **options, min_delta=train.MIN_DELTA)
    # Every callback had something to do.
    assert patience + 1 < len(history["loss"]) < epochs
    assert last_rate < rate
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        more = ["--global-clipnorm=0.5", f"--simulated-devices={replicas}", f"--run-dir={folder}"]
        result = train.main([*flags, *more])
        assert train.strategy.num_replicas_in_sync == replicas
        rows = list(csv.DictReader((folder / "metrics.csv").read_text(encoding="utf-8").splitlines()))
        for metric in ("loss", "digit_loss", "ink_loss", "digit_accuracy", "ink_mae"):
            found = {split: [float(row[f"{split}/{metric}"]) for row in rows] for split in ("train", "validation")}
            assert found["train"] == pytest.approx(history[metric], rel=1e-5), metric
            if metric in ("digit_loss", "ink_loss"):
                # To Keras the short last batch of an evaluation counts as much as a full one in an output's loss.
                assert found["validation"] != pytest.approx(history[f"val_{metric}"], rel=1e-5), metric
                continue
            assert found["validation"] == pytest.approx(history[f"val_{metric}"], rel=1e-5), metric
            assert result[f"test/{metric}"] == pytest.approx(test[metric], rel=1e-5), metric
        assert float(port.optimizer.learning_rate.numpy()) == pytest.approx(last_rate)
        assert_same_weights(port.model.get_weights(), best)
        train.run.checkpoints.restore(train.run.checkpoints.paths()[-1])
        assert_same_weights(port.model.get_weights(), last)


def assert_same_weights(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for weight, wanted in zip(found, expected, strict=True):
        # All that moves the bias of attention keys is rounding.
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-5 * max(np.abs(wanted).max(), 0.1))


# --- The page ---------------------------------------------------------------------------------------------------------


def test_page_names_only_what_there_is() -> None:
    page = (TEMPLATE / "docs/porting.md").read_text(encoding="utf-8")
    flags = {f"--{each.name.replace('_', '-')}" for each in dataclasses.fields(Config)}
    tables = re.findall(r"(?m)^\|---\|---\|---\|\n((?:\|.*\|\n)+)", page)
    assert len(tables) == len({loop for loop, *_ in PORTS.values()})
    for row in "".join(tables).splitlines():
        theirs, ours, _ = row.split("|")[1:-1]
        names = re.findall(r"`([^`]+)`", ours)
        assert re.findall(r"`[^`]+`", theirs) and names, row
        for name in names:
            file, _, defined = name.partition(":")
            if name not in flags:
                code = (PROJECT / file).read_text(encoding="utf-8")
                assert re.search(rf"(?m)^\s*(?:(?:def|class) {defined}\b|{defined}:)", code), name
    tutorial = (TASKS / "tutorial_cnn.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?s)```python\n(.*?)```", page)
    assert all(f"    {line}\n" in tutorial for line in block.splitlines())
