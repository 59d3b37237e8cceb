"""What the hooks of task.py have to keep to."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config

PROJECT = Path(__file__).parent.parent


@pytest.mark.parametrize("split", train.SPLITS)
def test_examples_come_in_the_same_order_every_time(split: str) -> None:
    once, again = (list(task.load_examples(split).as_numpy_iterator()) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        for one, other in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
            np.testing.assert_array_equal(one, other)


def test_batches_are_prepared_the_same_way_every_time(settings: Config) -> None:
    train.build(settings)
    once, again = (next(train.batches["train"].distribute(train.strategy, epoch=1)) for _ in range(2))
    for one, other in zip(tf.nest.flatten(once), tf.nest.flatten(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_everything_is_traced_once(settings: Config) -> None:
    train.build(settings)
    for epoch in range(3):
        train.train_epoch(epoch)
        train.validate()
    train.test()
    traces = {split: function.experimental_get_tracing_count() for split, function in train.run_steps.items()}
    assert traces == {"train": 1, "validation": 1, "test": 1}


def test_readme_lists_the_todo_hooks() -> None:
    marked = [
        (path.name, todo)
        for path in sorted(PROJECT.glob("*.py"))
        for todo in re.findall(r"^ *# TODO\(you\): (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+\.py)` \| `[^`]+` \| (.*) \|$", readme, re.MULTILINE)
    assert listed == marked
