"""The batches of one dataset, made from hooks."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from config import Config
from engine.cluster.strategy import create_strategy
from engine.data.batches import Batches
from engine.data.preparation import Preparation
from engine.data.splits import load_datasets, load_splits
from engine.data.worker_batches import WorkerBatches


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
    count, index = pipelines
    contexts = [tf.distribute.InputContext(count, number) for number in range(count)]
    (examples,) = load_datasets(split, load_examples, config, contexts[index]).values()
    lengths = [examples.length]
    if "input_context" in inspect.signature(load_examples).parameters:
        lengths = [load_datasets(split, load_examples, config, each)[split].length for each in contexts]
    preparation = Preparation(prepare_example, training=split == "train", pad_to=config.pad_to or ())
    strategy = strategy or create_strategy(config)
    return Batches(split, examples, lengths, preparation, strategy, config, contexts[index])


def batches_of_two_workers(
    load_examples: Callable[..., Any], prepare_example: Callable[..., Any], config: Config
) -> WorkerBatches:
    """Returns training batches as with parameter servers, without any."""
    task = SimpleNamespace(load_examples=load_examples, prepare_example=prepare_example)
    pool = SimpleNamespace(count=2)
    return load_splits(["train"], task, config, create_strategy(config), workers=pool)["train"]


def whole(batches: Batches, epoch: int = 0, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns every global batch of an epoch as [features, labels, weights], its replicas' shares joined."""
    local_results = batches._strategy.experimental_local_results
    return [
        [np.concatenate([share.numpy() for share in local_results(part)]) for part in batch]
        for batch in batches.one_by_one(epoch, first_step)
    ]


def joined(batches: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns features, labels and weights of batches of equal size, each in one array: [batches, batch, ...]."""
    return [np.stack(parts) for parts in zip(*batches, strict=True)]
