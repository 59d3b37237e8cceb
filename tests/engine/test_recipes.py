"""The recipes of docs/recipes.md, taken from the page as they stand there, and run."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model

import config
import task
import train
from pages import blocks, put_section, sections, untested
from rendering import PROJECT
from rendering import run as run_program

RECIPES = sections("recipes.md")
# The only ones whose imports a project does not install.
TRACKERS = dict(re.findall(r"(?ms)^### ([^\n]+)\n(.*?)(?=^### |\Z)", RECIPES.pop("Trackers")))
FLAGS = ("--epochs=2", "--global-batch-size=60", "--simulated-devices=1", "--limit-steps=2")

Apply = Callable[[str], None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    return lambda title: put_section(RECIPES[title], monkeypatch, tmp_path)


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)


def run(folder: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Runs train.py with flags; returns its result and the rows of metrics.csv."""
    result = train.main([*FLAGS, f"--run-dir={folder}", *flags])
    lines = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    return result, [{name: float(text) for name, text in row.items()} for row in csv.DictReader(lines)]


def test_every_recipe_is_run() -> None:
    assert not untested(RECIPES, __file__)


def test_weight_of_a_loss_follows_the_step(apply: Apply, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apply("A number that changes while the run trains")
    monkeypatch.setattr(task, "create_model", lambda: linear_model(keras.layers.ActivityRegularization(l2=1.0)))
    train.build(config.Config(simulated_devices=0, run_dir=tmp_path))
    images, labels, weights = tf.ones([64, 8, 8, 1]), tf.zeros([64], tf.int32), tf.ones([64])

    @tf.function  # As in a step, of which a number of Python would be a constant.
    def loss() -> tf.Tensor:
        return task.compute_loss(labels, task.model(images), weights)[0]

    losses = []
    for step in (0, 500, 1000, 2000):
        task.optimizer.iterations.assign(step)
        losses.append(float(loss()))
    rise = losses[2] - losses[0]
    assert rise > 0
    assert losses == pytest.approx([losses[0], losses[0] + rise / 2, losses[2], losses[2]])


def test_rate_rises_and_falls_in_straight_lines(apply: Apply) -> None:
    apply("Warm-up, then a straight line to zero")
    task.config = config.Config(learning_rate=0.01)
    rate = task.create_optimizer(80)._learning_rate  # 8 of the 80 steps are warm-up.
    expected = [0.005, *(0.01 * (80 - step) / 72 for step in (20, 40, 60, 80))]
    assert [float(rate(step)) for step in (4, 20, 40, 60, 80)] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("direction", "options"),
    [
        ("min", {"patience": 2, "cooldown": 2, "factor": 0.1}),
        ("max", {"patience": 3, "min_delta": 0.3, "cooldown": 1, "min_lr": 0.1, "factor": 0.5}),
    ],
)
def test_rates_are_reduced_as_by_reducelronplateau(
    direction: str, options: dict[str, float], apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts go through JSON after each epoch, as in a run that is stopped and resumed each time."""
    apply("A smaller rate when nothing improves")
    scores = np.random.default_rng(3).integers(0, 6, 80) / 10 + np.linspace(1.0, 0.2, 80).round(1)
    scores *= 1.0 if direction == "min" else -1.0
    ours, model = keras.optimizers.SGD(0.8), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.8), "mse")
    callback = keras.callbacks.ReduceLROnPlateau("score", mode=direction, **options)
    callback.set_model(model)
    callback.on_train_begin()
    objects = SimpleNamespace(optimizers={"learning_rate": ours}, monitor_direction=direction)
    monkeypatch.setattr(train, "objects", objects, raising=False)
    monkeypatch.setattr(train, "run", SimpleNamespace(user_state={}), raising=False)
    rates = set()
    for epoch, score in enumerate(scores.tolist()):
        train.reduce_on_plateau(score, **options)
        train.run.user_state = json.loads(json.dumps(train.run.user_state))
        callback.on_epoch_end(epoch, {"score": score})
        rates.add(float(ours.learning_rate.numpy()))
        assert ours.learning_rate.numpy() == model.optimizer.learning_rate.numpy()
    assert len(rates) > 2


@pytest.mark.long
def test_state_of_ones_own_ends_a_run_after_a_stop_too(
    apply: Apply, linear: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply("State of your own that a resumed run keeps")
    scores = iter([5.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(
        train, "evaluate_split", lambda split, *_: {"validation/loss": next(scores)} if split == "validation" else {}
    )
    run(tmp_path / "run", "--epochs=3")
    result, _ = run(tmp_path / "run", "--epochs=9")
    assert result["epochs"] == 5


@pytest.mark.long
def test_two_rates_are_halved_together_and_stay_so_after_a_stop(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Two learning rates, for encoder and head")
    apply("A smaller rate when nothing improves")
    scores = iter([1.0, *[2.0] * 20])  # The first epoch stays the best one.
    monkeypatch.setattr(
        train, "evaluate_split", lambda split, *_: {"validation/loss": next(scores)} if split == "validation" else {}
    )
    flags = ("--limit-steps=1", "--learning-rate=0.01")
    run(tmp_path / "run", "--epochs=3", *flags)  # Stopped after two of three epochs without a better one.
    _, rows = run(tmp_path / "run", "--epochs=5", *flags)
    assert [row["learning_rate/head"] for row in rows] == pytest.approx([0.01] * 4 + [0.005])
    assert [row["learning_rate/encoder"] for row in rows] == pytest.approx([0.001] * 4 + [0.0005])
    assert len(re.findall(r"learning rate.* 0\.01 -> 0\.005", capsys.readouterr().out)) == 1


def test_encoder_and_head_have_rates_of_their_own(apply: Apply) -> None:
    apply("Two learning rates, for encoder and head")
    train.build(config.Config(global_batch_size=60, learning_rate=0.01, simulated_devices=1))
    before = {each.path: each.numpy() for each in task.model.trainable_variables}
    for stack, first, count in train.batches["train"].iterator().take(1):
        train.run_steps["train"](stack, first, count)
    # The first step of Adam is as long as the rate, and shorter where the gradient is tiny.
    moved = {each.path: np.abs(each.numpy() - before[each.path]).max() for each in task.model.trainable_variables}
    for path, distance in moved.items():
        rate = 0.001 if "conv2d" in path else 0.01
        assert 0.5 * rate < distance < 1.01 * rate, path


@pytest.mark.long
def test_frozen_encoder_stays_until_a_second_run_trains_it(apply: Apply, tmp_path: Path) -> None:
    apply("Frozen layers, and a second run that trains them too")

    def encoder_changes(*flags: str) -> bool:
        train.build(train.read_settings(train.Config, [*FLAGS, *flags]))
        first = task.model.get_layer("encoder").get_weights()
        run(tmp_path / str(len(flags)), *flags)
        return not all(map(np.array_equal, task.model.get_layer("encoder").get_weights(), first))

    assert not encoder_changes("--freeze-encoder")
    assert encoder_changes(f"--init-from={tmp_path / '1'}", "--epochs=1")


def test_part_of_the_model_starts_with_the_weights_of_a_file(apply: Apply, tmp_path: Path) -> None:
    """Two blocks of the encoder are alike, and 8 of the model's 10 variables are in the file."""
    apply("Weights for a part of the model")
    train.build(config.Config(simulated_devices=1))
    trained = task.model.layers[0]
    trained.set_weights([np.random.default_rng(1).normal(size=each.shape) for each in trained.get_weights()])
    expected = trained.get_weights()
    trained.save(tmp_path / "encoder.keras")
    trained.save_weights(tmp_path / "encoder.weights.h5")
    tf.train.Checkpoint(encoder=trained, step=tf.Variable(3)).write(str(tmp_path / "encoder"))
    for name in ("encoder.keras", "encoder.weights.h5", "encoder"):
        task.config = config.Config(encoder_weights=tmp_path / name)
        model = task.create_model()
        assert len(model.layers[0].weights) == 8
        for value, wanted in zip(model.layers[0].get_weights(), expected, strict=True):
            np.testing.assert_array_equal(value, wanted)


@pytest.mark.long
def test_several_outputs_and_missing_labels_are_the_same_on_two_replicas(apply: Apply, tmp_path: Path) -> None:
    for title in ("Several outputs, each with its loss", "Several losses, where labels are missing"):
        apply(title)
    flags = ("--epochs=1", "--limit-steps=100", "--simulated-devices")
    two, one = (run(tmp_path / count, *flags, count)[0] for count in ("2", "1"))
    for name, value in one.items():
        assert name in ("seconds", "goodput", "weights_sha256") or two[name] == pytest.approx(value, rel=1e-4), name

    images, labels = held_out_examples()
    outputs = {name: each.numpy().astype("float64") for name, each in task.model(images, training=False).items()}
    logits, is_odd = outputs["class"], labels % 2
    of_class = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(labels)), labels]
    of_odd = np.log1p(np.exp(np.where(is_odd, -1, 1) * outputs["is_odd"][:, 0]))
    assert one["test/loss"] == pytest.approx((of_class + 2 * of_odd * (labels < 5)).mean(), rel=1e-5)
    is_right = (outputs["is_odd"][:, 0] > 0) == is_odd
    assert one["test/accuracy_is_odd"] == pytest.approx(is_right[labels < 5].mean(), rel=1e-5)


def held_out_examples() -> tuple[np.ndarray, np.ndarray]:
    images, labels = (np.stack(part) for part in zip(*task.load_examples("test").as_numpy_iterator(), strict=True))
    return images / 16.0, labels


def test_confidence_is_the_mean_over_all_examples(apply: Apply, linear: None) -> None:
    apply("A metric of your own")
    monitor = {"monitor": "validation/confidence", "monitor_direction": "max"}
    train.build(config.Config(simulated_devices=2, global_batch_size=100, **monitor))
    images, labels = held_out_examples()
    logits = task.model(images, training=False).numpy().astype("float64")
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = probabilities[np.arange(len(labels)), labels].mean()
    assert train.evaluate_split("test")["test/confidence"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 3])
def test_largest_error_is_the_maximum_over_all_examples(replicas: int, apply: Apply, linear: None) -> None:
    apply("A metric that is a maximum")
    train.build(config.Config(simulated_devices=replicas, global_batch_size=99, micro_batches=3))
    images, labels = held_out_examples()
    losses = keras.losses.sparse_categorical_crossentropy(labels, task.model(images), from_logits=True).numpy()
    # The last one has the largest loss, and weight 0.
    assert train.evaluate_split("test")["test/largest_error"] == pytest.approx(losses.max(), rel=1e-5)
    assert train.train_epoch()["train/largest_error"] > 0.0


@pytest.mark.long
def test_number_of_python_is_reported_and_decides_which_weights_are_best(
    apply: Apply, linear: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("A metric that Python computes")
    monitor = ("--monitor=validation/largest_weight", "--monitor-direction=min")
    result, rows = run(tmp_path / "run", *monitor)
    best = result["best_validation/largest_weight"]
    assert best == min(row["validation/largest_weight"] for row in rows)
    largest = max(abs(weight).max() for weight in task.model.get_weights())  # The test has restored the best ones.
    assert best == result["test/largest_weight"] == pytest.approx(largest)
    metrics = train.main([*FLAGS, f"--run-dir={tmp_path / 'run'}", "--evaluate-only", *monitor])
    assert metrics["validation/largest_weight"] == best
    assert train.main(["--check", *FLAGS[:2], *monitor])
    assert "validation/largest_weight, which Python computes, is 0." in capsys.readouterr().out


@pytest.mark.long
def test_gradient_norm_is_reported_and_the_same_in_micro_batches(apply: Apply, linear: None, tmp_path: Path) -> None:
    apply("The gradient's norm in metrics.csv")
    flags = ("--epochs=1", "--global-clipnorm=1e9")
    (whole,) = run(tmp_path / "whole", *flags)[1]
    (in_parts,) = run(tmp_path / "parts", *flags, "--micro-batches=3", "--simulated-devices=2")[1]
    # The loss scale begins so high that the first gradients overflow.
    (scaled,) = run(tmp_path / "scaled", "--epochs=1", "--limit-steps=20", "--precision=mixed_float16")[1]
    for row in (whole, scaled):
        assert 0.1 < row["train/gradient_norm"] < 100
    assert in_parts["train/gradient_norm"] == pytest.approx(whole["train/gradient_norm"], rel=1e-3)
    assert "validation/gradient_norm" not in whole


@pytest.mark.long
def test_images_go_to_tensorboard(apply: Apply, linear: None, tmp_path: Path) -> None:
    apply("Images in TensorBoard after every epoch")
    run(tmp_path / "run")
    (events,) = (tmp_path / "run/tensorboard").glob("events*.v2")
    written = [
        (event.step, value.tag, len(value.tensor.string_val))
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.tag in ("validation", "labels")
    ]
    # Width, height and eight images.
    assert written == [(2, "validation", 10), (2, "labels", 1), (4, "validation", 10), (4, "labels", 1)]


def test_class_weights_scale_the_loss_of_training_and_no_metric(apply: Apply, linear: None) -> None:
    apply("Class weights")
    train.build(train.read_settings(train.Config, ["--global-batch-size=4", "--simulated-devices=1"]))
    # All classes are equally likely.
    task.model.set_weights([np.zeros_like(each) for each in task.model.get_weights()])
    batch = tf.zeros([4, 8, 8, 1]), tf.constant([0, 8, 9, 9]), tf.constant([1.0, 1.0, 1.0, 0.0])
    entropy = np.log(10)
    assert float(train.strategy.run(task.evaluation_step, ("validation", batch))) == pytest.approx(3 * entropy / 4)
    assert float(train.strategy.run(task.train_step, (batch,))) == pytest.approx(3.5 * entropy / 4)
    for split in ("train", "validation"):
        assert float(task.metrics[split]["loss"].result()) == pytest.approx(entropy)


@pytest.mark.long
def test_text_is_looked_up_in_a_vocabulary_that_is_exported(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply("Text: a vocabulary in prepare_example")
    result, _ = run(tmp_path / "run", "--epochs=20", "--limit-steps=100", "--learning-rate=0.03", "--export")
    assert result["test/accuracy"] == 1.0
    monkeypatch.undo()
    served = tf.saved_model.load(str(tmp_path / "run/export/saved_model")).signatures["serve_examples"]
    assert served(tf.constant(["a good film", "a bad film"]))["label"].numpy().tolist() == [1, 0]


@pytest.mark.long
def test_no_recipe_starts_tensorflow_when_it_is_imported() -> None:
    """The CPU can be divided into simulated devices only before that."""
    pages = (RECIPES, *map(sections, ("losses.md", "gradients.md", "reproducibility.md")))
    found = [block for page in pages for text in page.values() for block in blocks(text)]
    program = f"""
import task, config, train, tensorflow as tf
for block in {found!r}:
    exec(block, vars(train if "def run_epochs" in block else config if "class Config" in block else task))
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
"""
    done = run_program("python", "-c", program, folder=PROJECT)
    assert done.returncode == 0, done.stderr


# --- Trackers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch, linear: None, tmp_path: Path) -> Callable[[str, str], Path]:
    """Trains with the hook of a tracker, two epochs and then, in a resumed run, one more."""

    def run(title: str, end: str) -> Path:
        run_dir = tmp_path / "run"
        for epochs in (2, 3):
            put_section(TRACKERS[title], monkeypatch, tmp_path)
            train.main([*FLAGS, f"--epochs={epochs}", f"--run-dir={run_dir}"])
            exec(end, vars(task))  # noqa: S102 - As the end of the process does.
        return run_dir

    return run


@pytest.mark.long
def test_mlflow(tracked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow  # Here, because it takes seconds.

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run_dir = tracked("MLflow", "mlflow.end_run()")
    (logged,) = mlflow.MlflowClient().search_runs(["0"])  # The resumed run went on in it.
    assert logged.info.run_id == (run_dir / "mlflow_run_id").read_text()
    assert (logged.info.run_name, logged.info.status, logged.data.params["seed"]) == ("run", "FINISHED", "0")
    history = mlflow.MlflowClient().get_metric_history(logged.info.run_id, "validation/loss")
    assert [each.step for each in history] == [2, 4, 6]
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("validation/loss")
    assert [each.value for each in history] == [float(row.split(",")[column]) for row in rows[1:]]


@pytest.mark.long
def test_weights_and_biases(tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = tracked("Weights & Biases", "wandb.finish()")
    name = (run_dir / "wandb_id").read_text()
    parts = [path.name for path in (run_dir / "wandb").glob("offline-run-*")]
    assert len(parts) == 2  # Of one run, for `wandb sync`.
    assert all(f"-{name}" in part for part in parts)
