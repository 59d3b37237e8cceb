"""Examples are the same however they are read, and however many are prepared at a time."""

import dataclasses
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of
from streaming import stream

from config import Config
from engine.data import examples as examples_module
from engine.data.batches import Batches
from engine.errors import BadInput
from engine.tracing import unrepeatable_in_preparation

COUNT = 37


def images(_: str) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    weights = random.random(COUNT, np.float32)
    return tf.data.Dataset.from_tensor_slices((random.random((COUNT, 6, 6, 3), np.float32), np.arange(COUNT), weights))


EXAMPLES = list(images("").as_numpy_iterator())


def batches(prepare_example: Callable[..., Any], split: str = "train", **settings: Any) -> Batches:
    fixed = {"simulated_devices": 2, "global_batch_size": 8, "seed": 1, "keep_last_batch": True}
    return batches_of(split, images, prepare_example, Config(**{**fixed, **settings}))


def contents(batches: Batches, epoch: int = 0) -> list[np.ndarray]:
    """Returns features (or each of several), labels and weights of all batches, in order."""
    local_results = batches._strategy.experimental_local_results
    found = [
        [np.concatenate([share.numpy() for share in local_results(part)]) for part in tf.nest.flatten(batch)]
        for batch in batches.one_by_one(epoch)
    ]
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def branching(features, labels):
    if tf.reduce_mean(features) > 0.5:
        features = 1.0 - features
    return features, labels


TOGETHER = {
    "as they are": lambda features, labels: (features, labels),
    "scaled": lambda features, labels: (features / 2.0 - 0.5, tf.one_hot(labels, COUNT)),
    "standardized": lambda features, labels: (tf.image.per_image_standardization(features), labels),
    "several": lambda features, labels: ({"a": features[..., 0], "b": tf.transpose(features)}, labels % 7),
    "branching": branching,
}
# What is made of a batch, and of all features at once by NumPy.
ONE_BY_ONE = {
    "Python": (
        lambda features, labels: (
            tf.ensure_shape(tf.py_function(lambda x: 2.0 * x, [features], tf.float32), (6, 6, 3)),
            labels,
        ),
        lambda features: 2.0 * features,
    ),
    "decoded": (
        lambda features, labels: (
            tf.ensure_shape(tf.io.decode_png(tf.io.encode_png(tf.cast(9.0 * features, tf.uint8)), 3), (6, 6, 3)),
            labels,
        ),
        lambda features: (np.float32(9.0) * features).astype(np.uint8),
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_batch_prepared_in_one_go_is_that_of_single_examples(name: str) -> None:
    made = batches(TOGETHER[name])
    assert made._prepared.takes_batches
    together = contents(made)
    made._prepared = dataclasses.replace(made._prepared, takes_batches=False)
    for one, other in zip(together, contents(made), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_cannot_be_prepared_in_one_go_is_prepared_one_by_one(name: str, split: str) -> None:
    prepare_example, by_numpy = ONE_BY_ONE[name]
    made = batches(prepare_example, split)
    assert not made._prepared.takes_batches
    expected = by_numpy(np.stack([features for features, _, _ in EXAMPLES]))
    features, labels, weights = contents(made)
    np.testing.assert_array_equal(features[weights > 0], expected[labels[weights > 0]])
    assert sorted(labels[weights > 0]) == list(range(COUNT))
    assert len(weights) == 40


def test_each_example_has_one_seed_on_any_number_of_replicas() -> None:
    drawn = []
    for replicas in (1, 2, 4):
        made = batches(
            lambda features, labels, *, seed: (tf.random.stateless_uniform([], seed), labels),
            global_batch_size=4,
            simulated_devices=replicas,
        )
        drawn.append(np.concatenate([contents(made, epoch=0)[0], contents(made, epoch=1)[0]]))
    assert len(np.unique(drawn[0])) == 2 * 40
    for each in drawn[1:]:
        np.testing.assert_array_equal(each, drawn[0])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_examples_in_memory_and_streamed_ones_are_the_same(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = contents(batches(TOGETHER["as they are"], split))
    monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", 0)
    streamed = contents(batches(TOGETHER["as they are"], split))
    for features, labels, weights in (kept, streamed):
        assert sorted(labels[weights > 0]) == list(range(COUNT))
        for feature, label, weight in zip(features, labels, weights, strict=True):
            np.testing.assert_array_equal(feature, EXAMPLES[label][0])
            assert weight in (0.0, EXAMPLES[label][2])
    # Both are shuffled, each in its way.
    assert np.array_equal(kept[1], streamed[1]) == (split == "validation")
    assert (split == "validation") == np.array_equal(kept[1][:COUNT], np.arange(COUNT))


def test_larger_set_than_the_shuffle_buffer_is_shuffled_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, buffer_size=3)
    labels = contents(batches(TOGETHER["as they are"]))[1]
    assert labels[0] < 3
    assert labels.tolist() != sorted(labels)


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("prepare_example", "is_found"),
    [
        (lambda features, labels: (features + np.random.normal(0.0, 0.3, (6, 6, 3)), labels), True),
        (lambda features, labels: (features + GENERATOR.normal(0.0, 0.3, (6, 6, 3)), labels), True),
        (lambda features, labels: (features + time.time() % 1, labels), True),
        (lambda features, labels, *, seed: (features + time.time() % 1, labels), True),
        (lambda features, labels: (features[:: random.choice([1, -1])], labels), True),
        (lambda features, labels: (features + np.random.default_rng(0).random(), labels), False),
        (TOGETHER["branching"], False),
    ],
)
def test_value_that_python_draws_once_for_all_examples_is_found(prepare_example: Callable, is_found: bool) -> None:
    traced = batches(prepare_example).traced
    assert traced is not None
    draws, _ = unrepeatable_in_preparation(traced)
    assert len(draws) == is_found
    assert all(re.match(r"a value .+ comes from Python, once for all examples, because", each) for each in draws)


def named_wrongly(features, labels):
    return featurs, labels  # noqa: F821


@pytest.mark.parametrize(
    ("prepare_example", "said", "is_of_other_examples"),
    [
        (named_wrongly, "name 'featurs' is not defined", False),
        (lambda features, labels: (Path("/missing").read_bytes(), labels), "No such file", False),
        (lambda features, labels: (tf.matmul(features, tf.zeros([7, 7])), labels), "Dimensions must be equal", True),
        (lambda features, labels: (features["image"], labels), "slice", True),
        (lambda features: (features, 0), "takes 1 positional argument but", True),
    ],
)
def test_examples_are_described_where_the_hook_may_expect_others(
    prepare_example: Callable, said: str, is_of_other_examples: bool
) -> None:
    with pytest.raises(BadInput, match=said) as rejected:
        batches(prepare_example)
    assert ("gets examples one by one" in str(rejected.value)) is is_of_other_examples
