"""Mistakes in the user's data and hooks: one line that names the place, exit code 2, and no whole state lost."""

import concurrent.futures
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from small import linear_model
from streaming import stream

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import batches, load_splits, stacks
from engine.errors import BadInput
from engine.model.objects import TaskObjects

FLAGS = ("--epochs=1", "--global-batch-size=60", "--simulated-devices=1")
LOAD_EXAMPLES = task.load_examples


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)


@pytest.fixture
def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs train.main with flags; returns its one line, which has to end it with an exit code."""

    def end(*flags: str, code: int = 2) -> str:
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={tmp_path / 'run'}", *FLAGS, *flags])
        assert ending.value.code == code
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return end


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*"))


# --- Examples ---------------------------------------------------------------------------------------------------------


def few(split: str) -> tf.data.Dataset:
    return LOAD_EXAMPLES(split).take(90)


def generated(split: str, claimed: int = 90, fails_at: int | None = None) -> tf.data.Dataset:
    """Returns the examples to train on from a generator that may fail; others as they are."""
    if split != "train":
        return LOAD_EXAMPLES(split)
    examples = list(few(split).as_numpy_iterator())

    def generate():
        for number in range(claimed):
            if number == fails_at:
                raise OSError("shard 3 is gone")
            yield examples[number % 90]

    signature = (tf.TensorSpec((8, 8, 1)), tf.TensorSpec((), tf.int32))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(claimed))


def records(split: str) -> tf.data.Dataset:
    serialized = [tf.io.serialize_tensor(features).numpy() for features, _ in few(split)]
    serialized[61] = b"cut short" if split == "train" else serialized[61]
    return tf.data.Dataset.from_tensor_slices((serialized, np.zeros(len(serialized), np.int32)))


def parse(features, labels):
    return tf.ensure_shape(tf.io.parse_tensor(features, tf.float32), (8, 8, 1)), labels


def look_up(features, labels):
    return features, tf.gather(tf.range(10) % 3, tf.where(tf.reduce_sum(features) == 311.0, 11, labels))


# The hooks; how many are shuffled at a time, if they are streamed; what is said.
BAD_EXAMPLES = {
    "generator raises, streamed": (
        {"load_examples": lambda split: generated(split, fails_at=57)},
        100,
        "task.load_examples('train') failed on example 57, counted from 0 (OSError: shard 3 is gone)",
    ),
    "undecodable record": (
        {"load_examples": records, "prepare_example": parse},
        None,
        "task.prepare_example failed on example 61, counted from 0, of task.load_examples('train') (InvalidArgumentErr",
    ),
    "prepared together": (
        {"load_examples": few, "prepare_example": look_up},
        None,
        "(InvalidArgumentError: indices = 11 is not in [0, 10))",
    ),
}


@pytest.mark.parametrize("fault", BAD_EXAMPLES)
def test_bad_example_is_named_by_its_number(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, buffer_size, said = BAD_EXAMPLES[fault]
    if buffer_size:
        stream(monkeypatch, buffer_size)
    for name, hook in hooks.items():
        monkeypatch.setattr(task, name, hook)
    config = Config(global_batch_size=10)
    monkeypatch.setattr(task, "config", config, raising=False)
    with pytest.raises(BadInput) as refused:
        for batches in load_splits(["train"], task, config, create_strategy(config)).values():
            for epoch in range(2):
                list(batches.iterator(epoch).take(batches.steps_per_pass))
    assert said in str(refused.value)


# --- Steps ------------------------------------------------------------------------------------------------------------


# The split in which a step fails and the number of its example; whether the state up to there is whole, and saved.
@pytest.mark.parametrize(("fault", "number", "is_saved"), [("train", 720, False), ("validation", 160, True)])
def test_fault_in_a_step_is_named_and_only_a_whole_state_is_saved(
    fault: str, number: int, is_saved: bool, ended: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_examples(split: str) -> tf.data.Dataset:
        if split != fault:
            return LOAD_EXAMPLES(split)
        return LOAD_EXAMPLES(split).enumerate().map(lambda at, each: (each[0], tf.where(at == number, 11, each[1])))

    stream(monkeypatch, buffer_size=100)
    monkeypatch.setattr(task, "load_examples", load_examples)
    line = ended("--steps-per-execution=3", "--checkpoint-every-steps=7")
    # Steps had been taken since whatever was saved before, in the chunk that failed or in those before it.
    saved = saved_steps(tmp_path / "run")
    assert train.run.progress.step > 0
    assert (saved[-1] == train.run.progress.step) is is_saved
    assert f"resumes from {tmp_path / 'run' / 'checkpoints'}/step-{saved[-1]:08d}" in line
    assert line.startswith("ERROR: task.py:")
    assert "compute_loss: InvalidArgumentError: Received a label value of 11" in line
    assert f"(in {fault} step" in line


def test_steps_before_an_unreadable_example_are_counted_and_no_others(
    ended: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of seventeen steps takes several stacks: of those that could be read every step is taken and saved."""
    stream(monkeypatch, buffer_size=100)
    monkeypatch.setattr(batches, "BATCHES_AT_ONCE", 4)  # A stack then has four batches.
    monkeypatch.setattr(stacks, "STEPS_OF_STACK", (4, 4))
    monkeypatch.setattr(task, "load_examples", lambda split: generated(split, claimed=1258, fails_at=900))
    ended("--steps-per-execution=17")
    assert saved_steps(tmp_path / "run") == [train.run.progress.step] == [int(train.task.optimizer.iterations.numpy())]
    assert 0 < train.run.progress.step < 17


def test_mistake_in_a_hook_is_named_by_its_line(ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    one_hot = lambda split: LOAD_EXAMPLES(split).map(lambda features, label: (features, tf.one_hot(label, 10)))  # noqa: E731
    monkeypatch.setattr(task, "load_examples", one_hot)
    line = ended()
    assert re.search(r"task.py:\d+ compute_loss: ValueError: Argument `output` must have rank", line), line
    assert len(line) < 700


def test_fault_of_a_network_in_a_hook_may_pass(ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model() -> None:
        raise ConnectionResetError("by the server of the weights")

    monkeypatch.setattr(task, "create_model", create_model)
    # Launchers start it again.
    assert "ConnectionResetError: by the server of the weights" in ended(code=1)


@pytest.mark.parametrize("hook", ["create_model", "train_step"])
def test_exit_in_a_hook_is_an_error(hook: str, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(compile("def leave(*_):\n    raise SystemExit", str(task.__file__), "exec"), names)  # noqa: S102
    monkeypatch.setattr(task, hook, names["leave"])
    assert "task.py:2 leave: SystemExit" in ended()


def test_mistake_of_the_engine_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        return 1 / 0

    monkeypatch.setattr(TaskObjects, "learning_rates", broken)
    with pytest.raises(ZeroDivisionError):
        train.main([f"--run-dir={tmp_path}", *FLAGS])


@pytest.mark.long
def test_program_runs_outside_the_main_thread_and_returns_its_result(tmp_path: Path) -> None:
    """As in some notebooks."""
    flags = [f"--run-dir={tmp_path}", *FLAGS, "--limit-steps=1"]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        results = [threads.submit(train.main, flags).result() for _ in range(2)]
    assert results == [json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))] * 2
