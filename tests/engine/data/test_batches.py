"""Batches hold the right examples, once each, whatever the number of replicas and input pipelines."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loading
import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, joined, whole
from record_files import shuffle_in, write_records
from streaming import stream

from config import Config
from engine.data import Records, splits, stacks
from engine.data import batches as data_batches
from engine.data.batches import Batches


def numbers(count: int) -> tf.data.Dataset:
    """Returns `count` examples whose features and labels are their number."""
    return tf.data.Dataset.range(count).map(lambda number: (number, number))


def batches(
    split: str = "train",
    *,
    count: int = 37,
    load_examples: Callable[..., Any] | None = None,
    prepare_example: Callable[..., Any] = lambda features, labels: (features, labels),
    replicas: int = 1,
    pipelines: tuple[int, int] = (1, 0),
    **settings: Any,
) -> Batches:
    """Returns batches of 8; `pipelines` is the number of processes, and which of them this is."""
    config = Config(**{"simulated_devices": replicas, "global_batch_size": 8, "seed": 5, **settings})
    return batches_of(split, load_examples or (lambda _: numbers(count)), prepare_example, config, pipelines=pipelines)


def of_replicas(found: Batches, *, number: int = 0, first_step: int = 0) -> list[list[list[np.ndarray]]]:
    """Returns each batch of a pass as [features, labels, weights] for each replica of this process."""
    taken = []
    for of_process in found._stacks_of_process(number * found.steps_per_pass + first_step):
        on_replicas = [[part.numpy() for part in stack] for stack in of_process]
        size = len(on_replicas[0][0])
        assert all(len(part) == size for stack in on_replicas for part in stack)
        taken += [[[part[step] for part in stack] for stack in on_replicas] for step in range(size)]
        # The first stack begins before the step, and the last one ends where the pass does.
        begin = first_step - first_step % found.stack_size
        if len(taken) == found.steps_per_pass - begin:
            return taken[first_step - begin :]
    raise AssertionError("the stacks end before the pass does")


def all_shares(found: Batches, *, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns what a process gives its replicas in a pass: a share of a batch for each in turn."""
    return [share for batch in of_replicas(found, first_step=first_step) for share in batch]


# Of several processes, each feeds as many replicas as the others.
@pytest.mark.parametrize(
    ("split", "source", "replicas", "processes", "micro_batches", "keeps_last", "is_seeded", "count", "size"),
    [
        ("train", "memory", 4, 2, 2, True, False, 54, 10),
        ("train", "stream", 3, 3, 1, False, True, 40, 7),
        ("validation", "records", 2, 2, 1, False, False, 37, 9),
    ],
)
def test_replicas_and_processes_share_the_batches_of_one_with_padding_of_weight_0(
    split: str,
    source: str,
    replicas: int,
    processes: int,
    micro_batches: int,
    keeps_last: bool,
    is_seeded: bool,
    count: int,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with the order of one replica, shared by NumPy."""
    first_step, number = 1, 2
    if source == "stream":
        stream(monkeypatch, buffer_size=20)
    loaded: Any = tf.data.Dataset.range(count)
    if source == "records":
        loaded = Records(write_records(tmp_path, [3, count - 3]))
        shuffle_in(monkeypatch, 10_000, block=100)

    def prepare(example, *, seed=None):  # The last part is a weight.
        example = tf.io.decode_raw(example, tf.int64)[0] if source == "records" else example
        return example, example if seed is None else seed, example + 1

    prepare_example = prepare if is_seeded else lambda example: prepare(example)
    options = {"global_batch_size": size, "keep_last_batch": keeps_last, "load_examples": lambda _: loaded}
    options["prepare_example"] = prepare_example
    expected = joined(whole(batches(split, **options), number))
    features, labels, weights = expected
    # Each example once, and those that fill no batch only where padding fills it.
    kept = features[weights > 0]
    assert len(features) == (count // size if split == "train" and not keeps_last else -(-count // size))
    assert len(set(kept.tolist())) == len(kept) == min(count, len(features) * size)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(
        weights, np.where(np.arange(features.size).reshape(weights.shape) < count, features + 1, 0)
    )
    if is_seeded:
        assert len(np.unique(labels.reshape(-1, 2), axis=0)) == features.size
    else:
        np.testing.assert_array_equal(labels, features)

    shared = [[] for _ in features[first_step:]]
    for index in range(processes):
        options |= {"replicas": replicas, "pipelines": (processes, index), "micro_batches": micro_batches}
        process = batches(split, **options)
        assert process.steps_per_pass == len(features)
        for step, batch in enumerate(of_replicas(process, number=number, first_step=first_step)):
            shared[step] += batch
    unit = replicas * (micro_batches if split == "train" else 1)
    for batch, parts in zip(shared, zip(*(part[first_step:] for part in expected), strict=True), strict=True):
        first = 0
        assert len(batch) == replicas
        for replica, found in enumerate(batch):
            end = first + size // replicas + (replica < size % replicas)
            for found_part, part in zip(found, parts, strict=True):
                assert len(found_part) == -(-size // unit) * unit // replicas
                np.testing.assert_array_equal(found_part[: end - first], part[first:end])
            # The padding repeats an example: other values could fail where no example does.
            assert set(found[0][end - first :]) <= {parts[0][end - 1]}
            assert not found[2][end - first :].any()
            first = end


def seeded(features, labels, *, seed):
    return features, seed


def test_training_leaves_out_the_remainder_and_another_one_each_epoch() -> None:
    made = batches(prepare_example=seeded)
    assert (made.steps_per_pass, made.dropped) == (4, 5)
    orders, seeds = zip(*(joined(whole(made, epoch))[:2] for epoch in range(3)), strict=True)
    left_out = [set(range(37)) - set(order.flat) for order in orders]
    assert [len(each) for each in left_out] == [5] * 3
    assert left_out[0] != left_out[1] != left_out[2]
    assert len(np.unique(np.reshape(seeds, [-1, 2]), axis=0)) == 3 * 32


def test_workers_with_their_own_steps_share_the_examples_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parameter servers, where the pipeline is made in the graph of a worker."""
    monkeypatch.setattr(loading, "Batches", partial(splits.WorkerBatches, load=lambda: numbers(40)))
    monkeypatch.setattr(splits, "number_of_workers", lambda: 2)
    made = batches(count=40, global_batch_size=4)

    @tf.function
    def ten_batches(pipeline: tf.Tensor) -> tf.Tensor:
        monkeypatch.setattr(tf.distribute.coordinator, "experimental_get_current_worker_index", lambda: pipeline)
        features = tf.zeros([0], tf.int64)
        for batch in made.on_worker(0, 0).take(10):
            features = tf.concat([features, batch[0]], axis=0)
        return features

    # Each has 20 of the 40, again and again.
    of_each = [Counter(ten_batches(tf.constant(number, tf.int64)).numpy().tolist()) for number in range(2)]
    assert [set(counted.values()) for counted in of_each] == [{2}, {2}]
    assert sorted([*of_each[0], *of_each[1]]) == list(range(40))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_process_goes_on_with_the_stack_of_the_next_unseen_batch_and_prepares_its_share_only(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_streamed:
        stream(monkeypatch, buffer_size=20)
    monkeypatch.setattr(data_batches, "BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(stacks, "STEPS_OF_STACK", (2, 2))
    prepared = []

    def noted(features, labels, *, seed):
        tf.py_function(lambda *seed: prepared.append(tuple(map(int, seed))), tf.unstack(seed), [])
        return features, tf.cast(seed, tf.int64)

    features, seeds, _ = joined(whole(batches(prepare_example=noted)))
    prepared.clear()
    process = batches(prepare_example=noted, replicas=2, pipelines=(2, 1))
    found = all_shares(process, first_step=3)
    np.testing.assert_array_equal([share[0] for share in found], features[3:, 4:])
    # The batches of the next epoch may be under way already.
    assert set(prepared) & set(map(tuple, seeds.reshape(-1, 2))) == set(map(tuple, seeds[2:, 4:].reshape(-1, 2)))
