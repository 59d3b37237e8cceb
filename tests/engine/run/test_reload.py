"""Examples that change between epochs: loaded again, the same after a stop, rejected where they would be wrong."""

import csv
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model

import task
import train
from engine.errors import BadInput, Stopped
from engine.signals import signals

FLAGS = ("--epochs=4", "--global-batch-size=4", "--simulated-devices=1", "--steps-per-execution=1")


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the task examples of user_state, to which each epoch adds four; the loss is their mean."""

    def load_examples(split: str) -> tf.data.Dataset:
        numbers = np.asarray(task.user_state.get("numbers", range(8))) if split == "train" else np.arange(4)
        images = np.broadcast_to(numbers[:, None, None, None], (len(numbers), 8, 8, 1)).astype("float32")
        return tf.data.Dataset.from_tensor_slices((images, np.zeros(len(numbers), "int32")))

    def train_step(batch) -> tf.Tensor:
        images, _, sample_weights = batch
        task.metrics["train"]["loss"].update_state(images[:, 0, 0, 0], sample_weight=sample_weights)
        task.optimizer.apply_gradients([(tf.ones_like(weight), weight) for weight in task.model.trainable_variables])
        return tf.reduce_sum(images[:, 0, 0, 0] * sample_weights) / 4.0

    def collect() -> None:
        numbers = task.user_state.setdefault("numbers", np.arange(8))
        task.user_state["numbers"] = np.append(numbers, numbers[-1] + 1 + np.arange(4) * (train.run.epoch + 1))

    def run_epochs() -> None:
        while train.run.should_continue():
            if train.run.starts_epoch:
                task.collect()
                train.run.reload("train")
            metrics = train.train_epoch(train.run.epoch)
            train.run.end_epoch(metrics | train.validate_and_keep_best(train.run.epoch))
            if train.run.epoch % 2 == 0:
                train.run.save()

    def evaluation_step(split: str, batch) -> tf.Tensor:
        task.metrics[split]["loss"].update_state(task.model(batch[0])[:, 0], sample_weight=batch[2])
        return tf.constant(0.0)

    for hook in (load_examples, train_step, evaluation_step, collect):
        monkeypatch.setattr(task, hook.__name__, hook, raising=False)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features, labels))
    monkeypatch.setattr(task, "create_metrics", lambda split: {"loss": keras.metrics.Mean()})
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.01))
    monkeypatch.setattr(train, "run_epochs", run_epochs)


def run(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """Trains; returns the hash of the weights, and the step and the mean of the examples of each epoch."""
    result = train.main([*FLAGS, f"--run-dir={folder}"])
    with (folder / "metrics.csv").open() as lines:
        return result["weights_sha256"], [(row["step"], row["train/loss"]) for row in csv.DictReader(lines)]


def expected() -> list[tuple[str, str]]:
    numbers, step, rows = list(range(8)), 0, []
    for epoch in range(4):
        numbers += [numbers[-1] + 1 + k * (epoch + 1) for k in range(4)]
        step += len(numbers) // 4
        rows.append((str(step), str(float(np.mean(numbers)))))
    return rows


def test_reloaded_examples_are_trained_on_and_a_stopped_run_has_the_same(
    growing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    assert undisturbed[1] == expected()
    assert train.run_steps["train"].trace_count() == 1
    # In the epochs, and while examples are collected, when user_state has changed already.
    collect, record_losses, stopped = task.collect, train.Run.record_losses, []

    def stop_in_epoch(run, one_pass, losses) -> None:
        record_losses(run, one_pass, losses)
        if run.progress.step in (4, 9) and run.progress.step not in stopped:
            stopped.append(run.progress.step)
            signals.signal = "SIGTERM"

    def fail_once() -> None:
        collect()
        if train.run.epoch == 3 and "failed" not in stopped:
            stopped.append("failed")
            raise ValueError("no more games")
        if train.run.epoch == 3 and "asked" not in stopped:
            stopped.append("asked")
            signals.signal = "SIGTERM"
            train.evaluate_split("validation")

    def fail_before_the_first_step(run, batches, epoch, start_pass=train.Run.start_pass):
        started = start_pass(run, batches, epoch)
        if (batches.split, epoch) == ("train", 3) and "unread" not in stopped:
            stopped.append("unread")
            raise BadInput("examples cannot be read")
        return started

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(train.Run, "record_losses", stop_in_epoch)
        patching.setattr(train.Run, "start_pass", fail_before_the_first_step)
        patching.setattr(task, "collect", fail_once)
        codes = []
        for _ in range(5):
            with pytest.raises(SystemExit) as ending:
                run(tmp_path / "run")
            codes.append(ending.value.code)
        assert codes == [42, 42, 2, 42, 2]
        assert run(tmp_path / "run") == undisturbed


def test_reload_is_rejected_where_steps_or_positions_would_be_wrong(
    growing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []

    def run_epochs() -> None:
        training = train.run.start_pass(train.batches["train"], 0)
        train.run.record_losses(training, [train.run_steps["train"](*taken) for taken in training.next_execution()])
        before = train.batches["train"]
        load_examples = task.load_examples
        for split, change in (
            ("train", lambda examples: examples),
            ("validation", lambda examples: examples.map(lambda image, label: (image[:4], label))),
            ("validation", lambda examples: {"easy": examples}),
        ):
            monkeypatch.setattr(task, "load_examples", lambda split, change=change: change(load_examples(split)))
            with pytest.raises(BadInput) as rejected:
                train.run.reload(split)
            messages.append(str(rejected.value))
            assert train.batches["train"] is before
        raise Stopped("here")

    monkeypatch.setattr(train, "run_epochs", run_epochs)
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert messages[0] == "run.reload('train') within a pass over 'train': call it before or after it"
    assert all("the steps need the same datasets, structure, shapes and dtypes" in text for text in messages[1:])
