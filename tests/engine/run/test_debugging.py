"""--eager and --limit-steps: hooks that can be looked into, and whole runs in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from short_runs import rows, run
from small import linear_model

import task
import train
from config import Config

LIMITED = ("--global-batch-size=60", "--limit-steps=3", "--steps-per-execution=2")
pytestmark = pytest.mark.usefixtures("linear")


@pytest.mark.long
def test_hooks_in_python_are_clipped_averaged_and_taken_in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also see values, and the next build compiles them again."""
    seen: dict[str, list[Any]] = {"train_step": [], "prepare_example": []}
    train_step, prepare_example = task.train_step, task.prepare_example

    def noted_step(batch: Any) -> tf.Tensor:
        loss = train_step(batch)
        seen["train_step"].append(loss)
        return loss

    def noted_preparation(features: tf.Tensor, labels: tf.Tensor, *, training: bool, seed: tf.Tensor) -> Any:
        seen["prepare_example"].append(labels)
        return prepare_example(features, labels, training=training, seed=seed)

    def losses(*, eager: bool = True, **options: Any) -> np.ndarray:
        for values in seen.values():
            values.clear()
        train.build(Config(global_batch_size=12, limit_steps=2, simulated_devices=1, eager=eager, **options))
        trained = train.train_epoch()["train/loss"]
        with train.run.evaluation_weights():
            return np.array([trained, train.validate()["validation/loss"]])

    # A BatchNormalization has the statistics of a micro-batch, and gradient descent shows how long a gradient is.
    monkeypatch.setattr(task, "create_model", lambda: linear_model(keras.layers.BatchNormalization()))
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    monkeypatch.setattr(task, "train_step", noted_step)
    monkeypatch.setattr(task, "prepare_example", noted_preparation)
    # Each of them changes the results, so that --eager gives others if it lacks one.
    options = {"micro_batches": 3, "global_clipnorm": 0.1, "ema_decay": 0.9}
    expected = losses(**options)
    assert len(seen["train_step"]) == 2 * 3
    assert all(0 < float(loss) < 10 for loss in seen["train_step"])
    assert len(seen["prepare_example"]) >= 2 * 12
    assert all(0 <= int(label) < 10 for label in seen["prepare_example"])
    for missing in options:
        changed = losses(**{name: value for name, value in options.items() if name != missing})
        assert np.abs(changed / expected - 1.0).max() > 1e-3, missing
    np.testing.assert_allclose(losses(eager=False, **options), expected, rtol=1e-5)
    assert len(seen["train_step"]) < 2 * 3
    assert not any(hasattr(loss, "numpy") for loss in seen["train_step"])


def test_mistake_in_a_hook_in_python_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., tuple[int, str]]
) -> None:
    train_step = task.train_step

    def mistaken_step(batch: Any) -> Any:
        train_step(batch)
        return {}["loss"]

    monkeypatch.setattr(task, "train_step", mistaken_step)
    code, line = ended(tmp_path / "run", *LIMITED, "--eager", "--simulated-devices=1")
    assert (code, "KeyError: 'loss' (in train steps 1 to 2 of epoch 1)" in line) == (2, True), line


@pytest.mark.long
def test_limited_run_takes_so_many_steps_of_everything_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    sizes: list[float] = []
    create_optimizer, update_metrics = task.create_optimizer, task.update_metrics

    def counted(split: str, labels, predictions, per_example_loss, weights) -> None:
        update_metrics(split, labels, predictions, per_example_loss, weights)
        if split == "validation":
            tf.py_function(lambda total: sizes.append(float(total)), [tf.reduce_sum(weights)], [])

    monkeypatch.setattr(
        task, "create_optimizer", lambda total_steps: totals.append(total_steps) or create_optimizer(total_steps)
    )
    monkeypatch.setattr(task, "update_metrics", counted)
    flags = ("--global-batch-size=60", "--simulated-devices=1", "--steps-per-epoch=30", "--limit-steps=2")
    result = run(tmp_path, *flags, "--epochs=2", "--steps-per-execution=1")
    assert [row["step"] for row in rows(tmp_path)] == ["2", "4"]
    assert (totals, result["step"]) == ([4], 4)
    assert sizes == [60] * 4
    evaluated = train.main([f"--run-dir={tmp_path}", "--simulated-devices=1", "--evaluate-only"])
    best = float(rows(tmp_path)[result["best_epoch"] - 1]["validation/loss"])
    assert evaluated["validation/loss"] == pytest.approx(best, rel=1e-6)


def test_debugging_that_cannot_be_is_refused(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    for flags, reason in (
        (("--eager", "--jit"), "--jit compiles the hooks, which --eager does not: remove one of the two"),
        (("--eager", "--check"), "--check compiles the hooks, which --eager does not: remove one of the two"),
        (("--eager", "--strategy=multi_worker"), "--strategy multi_worker cannot be combined with --eager"),
        (("--limit-steps=0",), "--limit-steps 0 must be from 1 to"),
    ):
        code, line = ended(tmp_path / "run", *LIMITED, *flags)
        assert (code, reason in line) == (2, True), line
    assert not (tmp_path / "run").exists()
