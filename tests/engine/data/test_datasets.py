"""Splits that are missing or have several sets, batches of their own size, and epochs of any number of steps."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import whole
from streaming import stream

from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import Batches, load_splits
from engine.data.element_spec import leaves
from engine.data.examples import DatasetExamples
from engine.errors import BadInput

SPLITS = ("train", "validation", "test")


def numbers(first: int, count: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(first, first + count).map(lambda number: (number, number))


def load(examples: dict[str, Any], *, replicas: int = 1, prepare: Any = None, **settings: Any) -> dict[str, Batches]:
    """Returns the batches of what task.load_examples returns for each split."""
    config = Config(**{"global_batch_size": 8, "seed": 3, "simulated_devices": replicas, **settings})
    prepare = prepare or (lambda features, labels: (features, labels))
    task = SimpleNamespace(load_examples=lambda split: examples[split], prepare_example=prepare)
    return load_splits(SPLITS, task, config, create_strategy(config))


def features(batches: Batches, *place: int, **options: Any) -> list[list[int]]:
    """Returns the features, without padding, of the global batches that `whole` returns."""
    return [numbers[weights > 0].tolist() for numbers, _, weights in whole(batches, *place, **options)]


def joined(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def test_splits_may_be_missing_and_have_several_sets() -> None:
    sets = {"easy": numbers(100, 11), "very-hard_2.0": numbers(200, 5)}
    batches = load({"train": numbers(0, 20), "validation": sets, "test": None})
    names = {"train": "train", "validation/easy": "validation", "validation/very-hard_2.0": "validation"}
    assert {name: each.split for name, each in batches.items()} == names
    assert joined(features(batches["validation/easy"])) == list(range(100, 111))
    assert joined(features(batches["validation/very-hard_2.0"])) == list(range(200, 205))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train": None}, r"task.load_examples\('train'\) returned a NoneType"),
    ({"train": {"one": numbers(0, 20)}}, r"task.load_examples\('train'\) returned a dict"),
    ({"test": {"a/b": numbers(0, 9)}}, r"task.load_examples\('test'\) returned a dataset called 'a/b': use letters"),
    ({"test": {7: numbers(0, 9)}}, r"task.load_examples\('test'\) returned a dataset called 7: use letters"),
    ({"test": {"a": numbers(0, 9), "b": None}}, r"task.load_examples\('test'\)\['b'\] returned a NoneType"),
    ({"validation": {"none": numbers(0, 0)}}, r"task.load_examples\('validation'\)\['none'\] returned no examples"),
    (
        {"validation": {"shorts": numbers(0, 9).map(lambda one, two: (tf.cast(one, tf.int16), two))}},
        r"task.load_examples\('validation'\)\['shorts'\] and task.prepare_example gave \(int16.*'train' gave \(int64",
    ),
    ({"train": numbers(0, 9).repeat()}, r"task.load_examples\('train'\) returned endless examples"),
    ({"train": numbers(0, 9).filter(lambda number, _: number > 2)}, "returned examples of unknown number"),
    ({"train": tf.data.Dataset.range(9)}, r"'labels' \(task.prepare_example gets .*: int64\[\], as task.load_examples"),
    (
        {"train": numbers(0, 9).map(lambda number, label: (number, label, [1.0, 2.0]))},
        r"returned sample weights of \(2,\): each must be one number",
    ),
    (
        {"train": tf.data.Dataset.range(9).map(lambda length: (tf.ones(length), 0))},
        r"task.prepare_example returned \(float32\[None\], int32\[\]\) for task.load_examples\('train'\): each must",
    ),
    ({"train": numbers(0, 7)}, r"--global-batch-size 8 is larger than the 7 examples of task.load_examples\('train'\)"),
]


def test_examples_that_cannot_be_used_are_refused() -> None:
    for examples, reason in REFUSED:
        with pytest.raises(BadInput, match=reason):
            load({"train": numbers(0, 20), "validation": None, "test": None, **examples})


def test_batch_that_no_memory_has_room_for_is_refused() -> None:
    examples = {"train": numbers(0, 20), "validation": None, "test": None}
    with pytest.raises(
        BadInput, match=r"a batch of 2000000000 examples takes .*, more than the memory of this machine"
    ):
        load(examples, global_batch_size=2 * 10**9, keep_last_batch=True)


def test_validation_in_an_epoch_needs_a_validation() -> None:
    examples = {"train": numbers(0, 20), "validation": None, "test": numbers(0, 9)}
    with pytest.raises(BadInput, match=r"--validate-every-steps 2: task.load_examples\('validation'\) returned None"):
        load(examples, validate_every_steps=2)


def test_evaluation_batches_have_a_size_of_their_own() -> None:
    examples = {"train": numbers(0, 20), "validation": numbers(0, 37), "test": numbers(0, 1)}
    batches = load(examples, replicas=2, evaluation_batch_size=20)
    found = {
        name: (each.global_batch_size, each.per_replica_batch_size, each.steps_per_pass)
        for name, each in batches.items()
    }
    assert found == {"train": (8, 4, 2), "validation": (20, 10, 2), "test": (20, 10, 1)}
    assert features(batches["validation"]) == [list(range(20)), list(range(20, 37))]
    assert features(batches["test"]) == [[0]]
    with pytest.raises(BadInput, match=r"--evaluation-batch-size 1 is too small for 2 replica\(s\): use 2 or more"):
        load(examples, replicas=2, evaluation_batch_size=1)


def numbered_texts(text: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.strings.to_number(text, tf.int64), label


def test_epochs_are_cut_from_the_passes() -> None:
    steps, train = 3, numbers(0, 37).map(lambda number, _: (tf.strings.as_string(number), number))
    examples, options = {"train": train, "validation": None, "test": None}, {"keep_last_batch": True}
    by_pass = load(examples, prepare=numbered_texts, **options)["train"]
    stream = [batch for number in range(2) for batch in features(by_pass, number)]
    for order in (joined(stream[:5]), joined(stream[5:])):
        assert sorted(order) == list(range(37))
    made = load(examples, prepare=numbered_texts, replicas=2, steps_per_epoch=steps, **options)["train"]
    assert (made.steps_per_pass, made.steps_per_epoch) == (5, steps)
    assert features(made, count=2 * steps) == stream[: 2 * steps]
    assert features(made, 1, steps - 1, count=1) == stream[2 * steps - 1 : 2 * steps]
    feed = made.iterator()
    for epoch in range(2):
        assert made.iterator(epoch) is feed  # One iterator goes on over epochs and passes.
        assert sum(count for *_, count in feed.take(steps)) == steps
        of_epoch = stream[epoch * steps : (epoch + 1) * steps]
        assert made.examples_in(epoch) == len(joined(of_epoch))
        assert made.examples_in(epoch, 1, steps - 1) == len(joined(of_epoch[1:]))
    # The same step of another pass.
    assert made.iterator(7) is not feed
    # Without the last batch five of the 37 are dropped.
    assert load(examples, prepare=numbered_texts)["train"].examples_in(1) == 32
    # Batch 3 of the second pass is number 8 of all: the second of the third epoch.
    error = tf.errors.InvalidArgumentError(None, None, "lost")
    assert "in the batches from step 2 of epoch 3 on" in str(made.rejection(error, 7))


def sha256(dataset: tf.data.Dataset) -> str:
    examples = DatasetExamples(dataset, "hook", None)
    examples.cache()
    return examples.sha256


OTHERS: list[tuple[Any, Any]] = [
    (np.arange(200), np.arange(200).astype(np.int32)),
    (np.arange(200), np.arange(200)[::-1]),
    (np.arange(200), np.where(np.arange(200) == 0, 7, np.arange(200))),
    (np.arange(16), np.where(np.arange(16) == 15, 7, np.arange(16))),
    (np.zeros(3, np.float32), np.array([0.0, -0.0, 0.0], np.float32)),
    (["a", ""], ["", "a"]),
    (tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1], [2, 3]])),
    ([f"data/{name}/0.png" for name in "abc"], [f"data/{name}/0.png" for name in "abd"]),
]


@pytest.mark.parametrize("streams", [False, True])
def test_other_examples_have_another_hash(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if streams:
        stream(monkeypatch, 10)
    make = tf.data.Dataset.from_tensor_slices
    for values, others in OTHERS:
        assert sha256(make(values)) == sha256(make(values)) != sha256(make(others))
    # In memory, examples of all parts are compared; a stream begins with those that are.
    assert (sha256(make(np.arange(200))) == sha256(make(np.where(np.arange(200) == 199, 7, np.arange(200))))) == streams
    # The files may be elsewhere.
    assert sha256(make(["data/a/0.png"])) == sha256(make(["/mnt/other/data/a/0.png"]))


def test_hash_reads_little_of_a_large_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, 10)
    read = []

    def examples():
        for number in range(10_000):
            read.append(number)
            yield number

    dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
    sha256(dataset.apply(tf.data.experimental.assert_cardinality(10_000)))
    assert len(read) < 100


def test_evaluations_draw_other_numbers_than_training_and_each_other_and_repeat_them() -> None:
    def draw(features, labels, *, training, seed):
        return tf.random.stateless_uniform([], seed, maxval=2**31 - 1, dtype=tf.int32), labels

    examples = {"train": numbers(0, 16), "validation": {"a": numbers(0, 16), "b": numbers(0, 16)}, "test": None}
    batches = load(examples, prepare=draw)
    drawn = {name: joined(features(each)) for name, each in batches.items()}
    assert len(set(joined(drawn.values()))) == 3 * 16
    assert joined(features(batches["validation/b"], 3)) == drawn["validation/b"]


def test_features_are_named_by_their_keys_in_the_order_of_tensorflow() -> None:
    for features, names in ((1, ["features"]), (({"b": 2, "a": 3}, 1), ["features/0/a", "features/0/b", "features/1"])):
        assert list(leaves(features)) == names
        assert list(leaves(features).values()) == tf.nest.flatten(features)
