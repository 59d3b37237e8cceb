"""Mistakes in the user's data and hooks: one line that names the place, exit code 2, and no whole state lost."""

import csv
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model
from streaming import stream

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import load_splits
from engine.errors import BadInput
from engine.model.build import TaskObjects

TIMES = ("seconds", "examples_per_second", "goodput")
FLAGS = ("--epochs=2", "--global-batch-size=60", "--simulated-devices=1")
LOAD_EXAMPLES = task.load_examples


def small_model() -> keras.Model:
    dropped = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *dropped])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)


@pytest.fixture
def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs train.main with flags; returns its one line, which has to end it with exit code 2."""

    def end(*flags: str, run_dir: Path = tmp_path / "run") -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={run_dir}", *FLAGS, *flags])
        assert ending.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return end


def test_fault_of_a_network_in_a_hook_may_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    def create_model() -> keras.Model:
        raise ConnectionResetError("by the server of the weights")

    monkeypatch.setattr(task, "create_model", create_model)
    with pytest.raises(SystemExit) as ending:
        train.main([f"--run-dir={tmp_path / 'run'}", *FLAGS])
    assert ending.value.code == 1  # Launchers start it again.
    assert "ConnectionResetError: by the server of the weights" in capsys.readouterr().err


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*"))


def few(split: str) -> tf.data.Dataset:
    return LOAD_EXAMPLES(split).take(90)


def generated(
    split: str, *, claimed: int = 90, real: int | None = None, fails_at: int | None = None, odd: int | None = None
) -> tf.data.Dataset:
    """Returns the examples to train on from a generator, with something wrong; those of other splits as they are."""
    if split != "train":
        return LOAD_EXAMPLES(split)
    examples = list(few(split).as_numpy_iterator())

    def generate():
        for number in range(claimed if real is None else real):
            if number == fails_at:
                raise OSError("shard 3 is gone")
            features, label = examples[number % len(examples)]
            yield features[:7] if number == odd else features, label

    signature = (tf.TensorSpec((None, 8, 1)), tf.TensorSpec((), tf.int32))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    if odd is None:
        dataset = dataset.map(lambda features, label: (tf.ensure_shape(features, (8, 8, 1)), label))
    return dataset.apply(tf.data.experimental.assert_cardinality(claimed))


def records(split: str) -> tf.data.Dataset:
    serialized = [tf.io.serialize_tensor(features).numpy() for features, _ in few(split)]
    serialized[61] = b"cut short" if split == "train" else serialized[61]
    return tf.data.Dataset.from_tensor_slices((serialized, np.zeros(len(serialized), np.int32)))


def texts(split: str, claimed: int | None = None) -> tf.data.Dataset:
    """Returns examples that are read anew in each epoch, as those with a text are."""
    dataset = few(split).map(lambda features, label: ({"image": features, "name": ""}, label))
    return dataset.apply(tf.data.experimental.assert_cardinality(claimed)) if claimed else dataset


def image_alone(features, labels):
    return features["image"], labels


def parse(features, labels):
    return tf.ensure_shape(tf.io.parse_tensor(features, tf.float32), (8, 8, 1)), labels


def shaped(features, labels):
    return tf.ensure_shape(features, (8, 8, 1)), labels


def look_up(features, labels):
    return features, tf.gather(tf.range(10) % 3, tf.where(tf.reduce_sum(features) == 311.0, 11, labels))


# The hooks; how many are shuffled at a time, if they are streamed; what is said.
BAD_EXAMPLES = {
    "generator raises, streamed": (
        {"load_examples": lambda split: generated(split, fails_at=57)},
        100,
        "task.load_examples('train') failed on example 57, counted from 0 (OSError: shard 3 is gone)",
    ),
    "fewer than claimed": (
        {"load_examples": lambda split: generated(split, real=70)},
        100,
        "expected to contain 90 elements but contained only 70 elements: give assert_cardinality",
    ),
    "more than claimed": (
        {"load_examples": lambda split: generated(split, real=100)},
        50,
        "expected to contain 90 elements but contained at least 91 elements: give assert_cardinality",
    ),
    "more than claimed, in whole batches": (
        {
            "load_examples": lambda split: texts(split, claimed=80) if split == "validation" else texts(split),
            "prepare_example": image_alone,
        },
        None,
        "task.load_examples('validation'): FailedPreconditionError: Input dataset was expected to contain 80 elements",
    ),
    "shapes differ": (
        {"load_examples": lambda split: generated(split, odd=43), "prepare_example": shaped},
        None,
        "example 43, counted from 0, of task.load_examples('train') (InvalidArgumentError: Shape of tensor",
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
        for batches in load_splits(train.SPLITS, task, config, create_strategy(config)).values():
            for epoch in range(2):
                list(batches.iterator(epoch).take(batches.steps_per_pass))
    assert said in str(refused.value)


def mislabelled(split: str, *, number: int) -> tf.data.Dataset:
    """Returns the examples of a split, one of which has a label that is no class."""
    return LOAD_EXAMPLES(split).enumerate().map(lambda place, it: (it[0], tf.where(place == number, 11, it[1])))


# What fails; whether the state up to there is whole, and saved.
FAULTS = {"train": (720, False), "validation": (160, True)}
GOES_ON = ("--epochs=1", "--steps-per-execution=3", "--checkpoint-every-steps=7", "--ema-decay=0.9")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run comes to in which nothing fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "create_model", small_model)
        stream(patch, buffer_size=100)
        return outcome(tmp_path_factory.mktemp("whole"), *GOES_ON)


@pytest.mark.parametrize("fault", ["train", pytest.param("validation", marks=pytest.mark.long)])
def test_run_with_a_fault_in_a_step_goes_on_bit_equal_once_it_is_fixed(
    fault: str, whole: dict[str, Any], ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream(monkeypatch, buffer_size=100)
    number, is_saved = FAULTS[fault]

    def load_examples(split: str) -> tf.data.Dataset:
        return mislabelled(split, number=number) if split == fault else LOAD_EXAMPLES(split)

    with monkeypatch.context() as broken:
        broken.setattr(task, "load_examples", load_examples)
        line = ended(*GOES_ON)
    # Steps had been taken since whatever was saved before, in the chunk that failed or in those before it.
    saved = saved_steps(tmp_path / "run")
    assert train.run.progress.step > 0
    assert (saved[-1] == train.run.progress.step) is is_saved
    assert f"resumes from {tmp_path / 'run' / 'checkpoints'}/step-{saved[-1]:08d}" in line
    assert line.startswith("ERROR: task.py:")
    assert "compute_loss: InvalidArgumentError: Received a label value of 11" in line
    assert f"(in {fault} step" in line
    if is_saved:
        assert outcome(tmp_path / "run", *GOES_ON) == whole


def outcome(run_dir: Path, *flags: str) -> dict[str, Any]:
    """Returns the result and the rows of a run, without times, and makes sure that the program returns the result."""
    result = train.main([f"--run-dir={run_dir}", *FLAGS, *flags])
    assert result == json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {"rows": [timeless(row) for row in rows], **timeless(result)}


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in TIMES}


def test_steps_before_an_unreadable_example_are_counted_and_no_others(
    ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of seventeen steps takes several stacks: of those that could be read every step is taken and saved."""
    monkeypatch.setattr(task, "create_model", linear_model)
    stream(monkeypatch, buffer_size=100)
    monkeypatch.setattr(task, "load_examples", lambda split: generated(split, claimed=1258, fails_at=900))
    ended("--steps-per-execution=17")
    assert saved_steps(tmp_path / "run") == [train.run.progress.step] == [int(train.task.optimizer.iterations.numpy())]
    assert 0 < train.run.progress.step < 17


def train_step(batch) -> None:
    """Returns no loss."""


def evaluation_step(split: str, batch) -> tf.Tensor:
    return batch[2]


PYTHON_MISTAKES = {
    "labels of a package": (
        "load_examples",
        lambda split: LOAD_EXAMPLES(split).map(lambda features, label: (features, tf.one_hot(label, 10))),
        r"task.py:\d+ compute_loss: ValueError: Argument `output` must have rank",
    ),
    "no loss": ("train_step", train_step, "ERROR: task.train_step returned None: return this replica's part of "),
    "losses": (
        "evaluation_step",
        evaluation_step,
        r"ERROR: task.evaluation_step returned <tf.Tensor '\S+' shape=\(60,\) dtype=float32>: return this ",
    ),
}


@pytest.mark.parametrize("mistake", PYTHON_MISTAKES)
def test_mistake_in_a_hook_is_named_by_its_line(mistake: str, ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    name, hook, said = PYTHON_MISTAKES[mistake]
    monkeypatch.setattr(task, name, hook)
    line = ended()
    assert re.search(said, line), line
    assert len(line) < 700


def test_mistake_of_the_engine_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        return 1 / 0

    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(TaskObjects, "learning_rates", broken)
    with pytest.raises(ZeroDivisionError):
        train.main([f"--run-dir={tmp_path}", *FLAGS])


# --- From a notebook --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_program_runs_outside_the_main_thread_and_returns_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[Any] = []

    def run() -> None:
        returned.append(train.main([f"--run-dir={tmp_path}", *FLAGS, "--epochs=1", "--limit-steps=1"]))

    monkeypatch.setattr(task, "load_examples", lambda split: LOAD_EXAMPLES(split).take(120))
    monkeypatch.setattr(task, "create_model", linear_model)
    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    result, again = returned
    assert result == again == json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
