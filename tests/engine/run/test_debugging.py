"""--eager and --limit-steps: hooks that can be looked into, and whole runs in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model

import task
import train
from config import Config

LIMITED = ("--global-batch-size=60", "--limit-steps=3", "--steps-per-execution=2")
pytestmark = pytest.mark.usefixtures("linear")


@pytest.mark.long
def test_hooks_in_python_are_clipped_averaged_and_taken_in_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They also see values, and the next build compiles them again."""
    seen: list[Any] = []
    train_step = task.train_step

    def noted_step(batch: Any) -> tf.Tensor:
        seen.append(train_step(batch))
        return seen[-1]

    def losses(*, eager: bool) -> list[float]:
        seen.clear()
        options = {"micro_batches": 3, "global_clipnorm": 0.1, "ema_decay": 0.9, "eager": eager}
        train.build(Config(global_batch_size=12, limit_steps=2, simulated_devices=1, **options))
        trained = train.train_epoch()["train/loss"]
        with train.run.evaluation_weights():
            return [trained, train.evaluate_split("validation")["validation/loss"]]

    # A BatchNormalization has the statistics of a micro-batch, and gradient descent shows how long a gradient is.
    monkeypatch.setattr(task, "create_model", lambda: linear_model(keras.layers.BatchNormalization()))
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    monkeypatch.setattr(task, "train_step", noted_step)
    expected = losses(eager=True)
    assert len(seen) == 2 * 3
    assert all(0 < float(loss) < 10 for loss in seen)
    np.testing.assert_allclose(losses(eager=False), expected, rtol=1e-5)
    assert not any(hasattr(loss, "numpy") for loss in seen)


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
