"""--pad-to: sequences of several lengths come to the same as if all were padded to the longest, on any replicas."""

import csv
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import predict
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import Batches, load_splits, splits
from engine.errors import BadInput
from rendering import TASKS

sys.path.insert(0, str(TASKS))

import tagging

LENGTHS = (8, 16, 64)
FLAGS = ("--epochs=1", "--global-batch-size=8", "--learning-rate=0.1", "--keep-last-batch")
COUNTS = {"train": 61, "validation": 30, "test": 13}
TIMES = ("seconds", "examples_per_second", "goodput")


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "task", tagging)
    monkeypatch.setitem(sys.modules, "task", tagging)
    monkeypatch.setattr(tagging, "padded_to", None)
    monkeypatch.setattr(tagging, "COUNTS", COUNTS)


def outcome(run_dir: Path, *flags: str) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Returns the metrics of each epoch and of the test, and the weights."""
    result = train.main([f"--run-dir={run_dir}", *FLAGS, *flags])
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = [{name: float(text) for name, text in row.items()} for row in csv.DictReader(lines)]
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
    tested = {name: value for name, value in result.items() if name.startswith("test/")}
    return [*rows, tested], [variable.numpy() for variable in tagging.model.weights]


@pytest.mark.long
def test_cut_sequences_give_the_numbers_of_padded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run on one replica in which task.prepare_example pads every sequence to one length."""
    flags = ("--simulated-devices=2", "--micro-batches=2", "--jit", "--pad-to", *map(str, LENGTHS))
    rows, weights = outcome(tmp_path / "cut", *flags)
    assert train.run_steps["train"].trace_count() == 1
    monkeypatch.setattr(tagging, "padded_to", max(LENGTHS))
    expected_rows, expected_weights = outcome(tmp_path / "padded", "--simulated-devices=1")
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    for weight, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- Batches ----------------------------------------------------------------------------------------------------------


def load(replicas: int = 1, **settings: Any) -> dict[str, Batches]:
    fixed = {"simulated_devices": replicas, "global_batch_size": 8, "keep_last_batch": True, "pad_to": LENGTHS}
    config = Config(**{**fixed, **settings})
    return load_splits(train.SPLITS, tagging, config, create_strategy(config))


def test_batch_is_as_long_as_its_longest_sequence_needs_on_all_replicas() -> None:
    made = load(replicas=2)["train"]
    assert made.element_spec[0]["tokens"].shape == made.element_spec[1].shape == [4, 64]
    seen, lengths = Counter(), Counter()
    for batch in made.one_by_one():
        tokens, tags, weights = (
            np.concatenate([share.numpy() for share in made.stacks.strategy.experimental_local_results(part)])
            for part in (batch[0]["tokens"], *batch[1:])
        )
        own = np.count_nonzero(tokens, axis=1)
        longest = max(own[weights > 0])
        assert tokens.shape == tags.shape == (8, min(each for each in LENGTHS if each >= longest))
        assert all(np.all(row[:length]) and not np.any(row[length:]) for row, length in zip(tokens, own, strict=True))
        seen.update(tuple(row[row > 0]) for row, weight in zip(tokens, weights, strict=True) if weight)
        lengths.update([tokens.shape[1]])
    assert seen == Counter(map(tuple, tagging.sequences("train")))
    assert len(lengths) > 1


def test_workers_with_their_own_steps_cut_their_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", tf.distribute.Strategy)
    monkeypatch.setattr(tf.distribute.coordinator, "experimental_get_current_worker_index", lambda: 0)
    monkeypatch.setattr(splits, "number_of_workers", lambda: 2)
    made = load()["train"]

    @tf.function
    def shapes() -> tf.Tensor:
        found = tf.zeros([0], tf.int32)
        for features, tags, _ in made.on_worker(0, 0).take(12):
            used = tf.reduce_max(tf.math.count_nonzero(features["tokens"], axis=1, dtype=tf.int32))
            found = tf.concat([found, [tf.shape(features["tokens"])[1], tf.shape(tags)[1], used]], axis=0)
        return found

    found = shapes().numpy().reshape(-1, 3)
    assert [(min(each for each in LENGTHS if each >= used),) * 2 for *_, used in found] == [(a, b) for a, b, _ in found]
    assert len(set(found[:, 0])) > 1


# Settings; what task.prepare_example pads to by itself; what is said.
REFUSED: list[tuple[dict[str, Any], int | None, str]] = [
    (
        {"pad_to": (8, 16)},
        None,
        r"on example 0, counted from 0, .*a sequence is longer than 16, the largest --pad-to: cut it, .*\] \[56\]",
    ),
    (
        {"pad_to": None},
        None,
        r"int32\[None\]\) for task.load_examples.*: each must be a tensor of .*or use --pad-to 64 128 256",
    ),
    ({}, 64, r"--pad-to 8 16 64: task.prepare_example .* where no tensor's first size differs"),
]


def test_lengths_that_do_not_go_with_the_examples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, padded_to, reason in REFUSED:
        monkeypatch.setattr(tagging, "padded_to", padded_to)
        with pytest.raises(BadInput, match=reason):
            list(load(**settings)["train"].one_by_one())


# --- The trained model ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_trained_model_takes_sequences_of_any_length(tmp_path: Path) -> None:
    flags = ("--simulated-devices=1", "--pad-to", *map(str, LENGTHS))
    outcome(tmp_path, *flags, "--export")
    serve = tf.saved_model.load(str(tmp_path / "export/saved_model")).signatures["serve"]
    tokens, shift = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]], np.int32), np.array([0, 1], np.int32)
    padded = np.pad(tokens, [(0, 0), (0, max(LENGTHS) - 5)])
    expected = tagging.model({"tokens": padded, "shift": shift}).numpy().argmax(-1)[:, :5]
    served = serve(tokens=tf.constant(tokens), shift=tf.constant(shift))["tags"].numpy()
    np.testing.assert_array_equal(served[tokens > 0], expected[tokens > 0])
    predictor = predict.load(tmp_path)
    predicted = predictor(np.array([b"1 2 3", b"4 5"], object))["tags"]
    assert predicted.shape == (2, max(LENGTHS))
    # Labels are made up, and with them the shift: it is 0 for all.
    expected = tagging.model({"tokens": padded, "shift": np.zeros_like(shift)}).numpy().argmax(-1)
    np.testing.assert_array_equal(predicted[padded > 0], expected[padded > 0])
