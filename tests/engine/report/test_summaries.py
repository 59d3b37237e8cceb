"""TensorBoard: what its own reader finds in the files."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from engine.model.metrics import ResultNames
from engine.report.report import Report, Summaries

NAMES = ResultNames({"train": {}, "validation": {}, "test": {}}, ["train", "validation/easy", "test"])


def shown(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Returns tag -> (step, value) of what is in a folder, without what is in folders below it."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()["tensors"]
    return {
        tag: [(each.step, tf.make_ndarray(each.tensor_proto).tolist()) for each in events.Tensors(tag)] for tag in tags
    }


def row(epoch: int, **metrics: float) -> dict[str, Any]:
    counters = {"epoch": epoch, "step": 10 * epoch, "seconds": 1.5, "examples_per_second": 20.0, "learning_rate": 0.5}
    return {**counters, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def opened(run_dir: Path, epochs_done: int = 0) -> Report:
    config: Any = SimpleNamespace(run_dir=run_dir, epochs=5, monitor="validation/loss")
    return Report(config, NAMES, "min", {"epochs": epochs_done, "validation": 0, "step": 10 * epochs_done}, [])


def test_datasets_of_a_metric_have_one_tag_in_folders_of_their_own(tmp_path: Path) -> None:
    report = opened(tmp_path)
    report.epoch(row(1, train__loss=0.5, validation__easy__loss=0.25), is_best=True)
    report.result(10, {"test/loss": 0.75}, best=0.25)
    folder = tmp_path / "tensorboard"
    assert shown(folder / "train") == {"loss": [(10, 0.5)]}
    assert shown(folder / "validation/easy") == {"loss": [(10, 0.25)]}
    assert shown(folder / "test") == {"loss": [(10, 0.75)]}
    of_run = shown(folder)
    assert of_run == {
        "waited": [(10, 0.0)],
        "learning_rate": [(10, 0.5)],
        "examples_per_second": [(10, 20.0)],
        "best/validation/loss": [(10, 0.25)],
    }


def test_executions_of_steps_are_in_steps_csv_and_in_tensorboard(tmp_path: Path) -> None:
    report = opened(tmp_path)
    for step, losses in ((1, [1.0]), (3, [2.0, 4.0]), (4, [5.0]), (5, [8.0])):  # Short ones share a row, their mean.
        report.steps(step, 1, np.array(losses), len(losses), 0.375, lambda: {"learning_rate": 0.5})
        assert (tmp_path / "steps.csv").exists() == (step >= 4)
    report.epoch({**row(1), "learning_rate": 0.25}, is_best=False)
    report.end()
    assert (tmp_path / "steps.csv").read_text().splitlines() == [
        "step,epoch,loss,steps_per_second,learning_rate",
        f"4,1,3.0,{4 / 1.125},0.5",
        f"5,1,8.0,{1 / 0.375},0.25",
    ]
    of_run = shown(tmp_path / "tensorboard")
    assert of_run["steps/loss"] == [(4, 3.0), (5, 8.0)]
    assert of_run["steps/learning_rate"] == [(4, 0.5), (5, 0.25)]


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    for first, last in ((1, 4), (3, 5), (6, 6)):
        # After the third and fourth epoch it was killed before a checkpoint; after the fifth one it had ended.
        report = opened(tmp_path, epochs_done=first - 1)
        for epoch in range(first, last + 1):
            report.steps(10 * epoch, epoch, np.array([1.0]), 1, 2.0, dict)
            report.epoch(row(epoch, train__loss=first + epoch / 8), is_best=False)
        report.result(10 * last, {"test/loss": float(last)}, best=1.0)
        # A kill leaves half a record at the end of the file that is being written.
        with max((folder / "train").iterdir(), key=lambda path: path.stat().st_mtime_ns).open("ab") as events:
            events.write(b"half a record")
        time.sleep(1.1)  # TensorBoard reads files in the order of their names, which begin with the second.
    losses = [(10, 1.125), (20, 1.25), (30, 3.375), (40, 3.5), (50, 3.625), (60, 6.75)]
    assert shown(folder / "train") == {"loss": losses}
    assert shown(folder / "test") == {"loss": [(50, 5.0), (60, 6.0)]}
    assert [int(each.split(",")[0]) for each in (tmp_path / "steps.csv").read_text().splitlines()[1:]] == [
        *range(10, 61, 10)
    ]


def test_no_number_of_python_becomes_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow keeps each of these tensors for ever: gigabytes in a run of a month."""
    kinds = set()

    def scalar(tag: str, value: Any) -> None:
        kinds.update((type(value), type(tf.summary.experimental.get_step())))

    monkeypatch.setattr(tf.summary, "scalar", scalar)
    Summaries(tmp_path, NAMES).add(3, {"train/loss": 0.5, "waited": 1})
    assert kinds == {np.float32, np.int64}


def test_what_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    Summaries(tmp_path / "evaluation", NAMES).add(10, {"loss": 1.0})
    Summaries(tmp_path, NAMES).resume_after(0)
    assert shown(tmp_path / "evaluation") == {"loss": [(10, 1.0)]}
