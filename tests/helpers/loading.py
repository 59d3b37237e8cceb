"""The batches of one dataset, made from hooks."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from config import Config
from engine.cluster.strategy import create_strategy
from engine.data.batches import Batches
from engine.data.preparation import Preparation
from engine.data.splits import load_datasets


def batches_of(
    split: str,
    load_examples: Callable[..., Any],
    prepare_example: Callable[..., Any],
    config: Config,
    *,
    strategy: tf.distribute.Strategy | None = None,
    pipelines: tuple[int, int] = (1, 0),
) -> Batches:
    """Returns the batches of one process; `pipelines` is the number of processes, and which of them it is."""
    # The indexes of record files are written beside the run, and a default run directory is in the current folder.
    config = dataclasses.replace(config, run_dir=Path(tempfile.gettempdir(), config.run_dir))
    (examples,) = load_datasets(split, load_examples, config).values()
    preparation = Preparation(prepare_example, training=split == "train", pad_to=config.pad_to or ())
    strategy = strategy or create_strategy(config)
    return Batches(split, examples, preparation, strategy, config, tf.distribute.InputContext(*pipelines))


def whole(batches: Batches, epoch: int = 0, first_step: int = 0, count: int | None = None) -> list[list[np.ndarray]]:
    """Returns `count` global batches from a step of an epoch on, or the rest of it, as [features, labels, weights]."""
    local_results = batches.stacks.strategy.experimental_local_results
    iterator = batches.new_iterator(epoch, first_step)
    found = []
    # Without tracing a function that picks a batch, which takes longer than all the rest.
    for stack, first, taken in iterator.take(count or batches.steps_per_epoch - first_step):
        parts = [np.concatenate([share.numpy() for share in local_results(part)], axis=1) for part in stack]
        found += [[part[index] for part in parts] for index in range(first, first + taken)]
    return found


def joined(batches: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns features, labels and weights of batches of equal size, each in one array: [batches, batch, ...]."""
    return [np.stack(parts) for parts in zip(*batches, strict=True)]
