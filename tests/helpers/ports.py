"""Jobs from elsewhere, ported with task.py alone: their data, and the order in which other loops take it."""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

LENGTH, VOCABULARY = 16, 60
SPLITS = {"train": 360, "validation": 40, "test": 50}


def sentences(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of pairs of sentences, [CLS] one [SEP] other [SEP] padding, and 1 where both are equal."""
    random = np.random.default_rng(len(split))
    count = SPLITS[split]
    labels = random.integers(0, 2, count, "int32")
    one, other = random.integers(4, VOCABULARY, (2, count, 5), "int32")
    tokens = np.zeros((count, LENGTH), "int32")
    tokens[:, 0], tokens[:, 1:6], tokens[:, [6, 12]] = 2, one, 3
    tokens[:, 7:12] = np.where(labels[:, None] == 1, one, other)
    return tokens, labels


def numbers_in_order(port: ModuleType, settings: Any) -> list[list[int]]:
    """Returns the numbers of the training examples that each epoch of our input takes, in its order.

    `port` is a task whose load_examples gives (features, labels). Other loops are given this order and nothing else.
    """
    from engine.cluster.strategy import create_strategy
    from engine.data import load_splits

    def load_numbered(split: str) -> Any:
        # With the examples themselves, because what fits in memory is shuffled in another order.
        return port.load_examples(split).enumerate().map(lambda number, example: ((number, example[0]), example[1]))

    hooks = SimpleNamespace(load_examples=load_numbered, prepare_example=lambda features, labels: (features[0], 0))
    batches = load_splits(["train"], hooks, settings, create_strategy(settings))["train"]
    epochs = []
    for epoch in range(settings.epochs):
        numbers, _, weights = (np.concatenate(part) for part in zip(*batches.one_by_one(epoch), strict=True))
        epochs.append(numbers[weights > 0].tolist())
        # No example comes twice, and only those that fill no batch are missing.
        assert set(epochs[-1]) <= set(range(batches.number_of_examples))
        assert len(set(epochs[-1])) == len(epochs[-1]) == batches.number_of_examples - batches.dropped
    assert epochs[0] != epochs[1]
    return epochs
