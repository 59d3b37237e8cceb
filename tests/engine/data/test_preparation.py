"""Examples are the same however they are read, and however many are prepared at a time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of
from streaming import stream

from config import Config
from engine.data import examples as examples_module
from engine.data.batches import Batches

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
