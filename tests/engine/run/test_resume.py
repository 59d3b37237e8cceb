"""Runs that are stopped, killed, moved or resumed otherwise than they began."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from short_runs import FLAGS, kill, rows, run
from small_states import read_checkpoint

import task
import train
from config import Config
from engine.command_line import read_settings
from engine.report.tables import COLUMNS
from engine.run import RunDirectory
from engine.run.checkpoint_files import checkpoint_paths

pytestmark = pytest.mark.usefixtures("same_model")


def assert_equal(run_dir: Path, result: dict[str, Any], whole: Path) -> None:
    """Compares a run, whose result is given, with one that was not interrupted."""
    expected = json.loads((whole / "result.json").read_text(encoding="utf-8"))
    assert result == {name: expected[name] for name in result}
    assert rows(run_dir) == rows(whole)
    assert rows(run_dir, "validations.csv") == rows(whole, "validations.csv")


def test_killed_run_ends_bit_equal_and_is_traced_once(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short last chunks and batches, saves within epochs, validations and the test are all run by the same graphs."""

    def traces() -> dict[str, int]:
        return {split: steps.trace_count() for split, steps in train.run_steps.items()}

    # The lengths of executions and the saves do not affect the results.
    flags = (*FLAGS, "--steps-per-execution=6", "--checkpoint-every-steps=7")
    before, after = tmp_path / "before", tmp_path / "elsewhere" / "after"
    kill(9, before, *flags)
    assert traces() == {"train": 1, "validation": 1, "test": 1}
    *_, older, newest = train.run.checkpoints.paths()
    data = newest / "state.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:1000])

    after.parent.mkdir()
    before.rename(after)
    capsys.readouterr()
    assert_equal(after, run(after, *flags), whole)
    out = capsys.readouterr().out
    assert f"{newest.name} is skipped" in out
    assert f"resumed from {older.name}" in out
    assert traces() == {"train": 1, "validation": 1, "test": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_every_variable_is_restored_on_another_number_of_replicas(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    saved, record = read_checkpoint(checkpoint_paths(whole / "checkpoints")[-1])
    assert record["epoch"] == 2
    train.build(read_settings(Config, [*FLAGS, "--epochs=3", "--simulated-devices=3", f"--run-dir={tmp_path / 'run'}"]))
    RunDirectory(train.config, train.strategy).restore(train.run)
    restored = train.run.checkpoints.state.values()
    assert restored.keys() == saved.keys()
    for name, value in saved.items():
        if name in train.run.checkpoints.state.per_replica:
            # The first replica keeps its seeds. Metrics are 0 after an epoch; statistics become their mean.
            count = 1 if "seed_generator" in name else 3
            expected = value.mean(axis=0) if name.endswith(("moving_mean", "moving_variance")) else value[0]
            np.testing.assert_allclose(restored[name][:count], [expected] * count, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(restored[name], value, err_msg=name)
    assert np.isfinite(train.train_epoch(2)["train/loss"])


def looping(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook with a loop over a tensor in front, which only AutoGraph makes possible in a graph."""

    @functools.wraps(hook)
    def with_loop(*arguments: Any, **options: Any) -> Any:
        total = 0
        for number in tf.range(3):
            total += number
        with tf.control_dependencies([tf.debugging.assert_equal(total, 3)]):
            return hook(*arguments, **options)

    return with_loop


def test_run_stopped_in_a_validation_ends_bit_equal_with_hooks_that_loop_and_report_with_averaged_weights(
    whole: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, traced, folder = [], [], shutil.copytree(stopped, tmp_path / "run")

    @tf.function
    def compiled_predictions(features: tf.Tensor) -> dict[str, tf.Tensor]:
        traced.append(features)
        return task.predict_step(features)

    def on_report(row: dict[str, Any], run_dir: Path, settings: Config) -> None:
        # Layers of each kind are called with the weights of one replica, outside the steps.
        compiled_predictions(tf.ones([3, 8, 8, 1]))
        seen.append((row, run_dir, settings.ema_decay, task.model.layers[1].kernel.numpy()))
        tf.summary.image("ones", tf.ones([1, 8, 8, 1]))
        raise ValueError("a mistake")

    # Statistics of each replica's own are averaged before a validation, and must not be a second time.
    record = json.loads((stopped / "checkpoints" / "step-00000016" / "progress.json").read_text(encoding="utf-8"))
    assert record["steps_of_pass"] == {"train": 16, "validation": 2}
    monkeypatch.setattr(task, "on_report", on_report, raising=False)
    for name in ("prepare_example", "compute_loss", "update_metrics", "train_step", "evaluation_step"):
        monkeypatch.setattr(task, name, looping(getattr(task, name)))
    assert_equal(folder, run(folder, *FLAGS), whole)
    assert len(traced) == 1
    reported = [(row["epoch"], row["step"], *found) for row, *found, _ in seen]
    assert reported == [(1, 20, folder, 0.9), (2, 40, folder, 0.9)]
    assert seen[-1][0].keys() >= {*COLUMNS, "train/loss", "validation/accuracy"}
    values, _ = read_checkpoint(train.run.checkpoints.paths()[-1])
    (average,) = [value for name, value in values.items() if value.shape == (64, 10) and "average" in name]
    np.testing.assert_array_equal(seen[-1][-1], average.astype(np.float32))
    events = max((folder / "tensorboard").glob("events*.v2"), key=lambda path: path.stat().st_mtime_ns)
    images = [
        event.step
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.tag == "ones"
    ]
    assert images == [20, 40]
