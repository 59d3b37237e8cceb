"""Batches hold the right examples, once each, whatever the number of replicas and input pipelines."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, batches_of_two_workers, joined, whole
from record_files import write_records
from streaming import stream

from config import Config
from engine.data import Records
from engine.data.batches import Batches, per_replica_batch_size
from engine.data.stacks import stack_sizes
from engine.errors import BadInput


def numbers(count: int) -> tf.data.Dataset:
    """Returns `count` examples whose features and labels are their number."""
    return tf.data.Dataset.range(count).map(lambda number: (number, number))


def unchanged(features, labels, *, training):
    return features, labels


def batches(
    split: str = "train",
    *,
    count: int = 37,
    load_examples: Callable[..., Any] | None = None,
    prepare_example: Callable[..., Any] = unchanged,
    replicas: int = 1,
    pipelines: tuple[int, int] = (1, 0),
    **settings: Any,
) -> Batches:
    """Returns batches of 8; `pipelines` is the number of processes, and which of them this is."""
    config = Config(**{"simulated_devices": replicas, "global_batch_size": 8, "seed": 5, **settings})
    return batches_of(split, load_examples or (lambda _: numbers(count)), prepare_example, config, pipelines=pipelines)


def of_replicas(found: Batches, *, number: int = 0, first_step: int = 0) -> list[list[list[np.ndarray]]]:
    """Returns each batch of a pass as [features, labels, weights] for each replica of this process."""
    sizes = stack_sizes(found.steps_per_pass, first_step, found._bytes_of_share)
    stacks = iter(found._stacks_of_process(number, first_step, sizes))
    taken = []
    for size in sizes[0]:
        on_replicas = [[part.numpy() for part in stack] for stack in next(stacks)]
        assert all(len(part) == size for stack in on_replicas for part in stack)
        taken += [[[part[step] for part in stack] for stack in on_replicas] for step in range(size)]
    return taken


def all_shares(found: Batches, *, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns what a process gives its replicas in a pass: a share of a batch for each in turn."""
    return [share for batch in of_replicas(found, first_step=first_step) for share in batch]


# --- Examples of all processes ----------------------------------------------------------------------------------------


# Of several processes, each feeds as many replicas as the others.
@pytest.mark.parametrize(
    ("split", "replicas", "processes", "micro_batches", "keeps_last", "is_streamed", "is_seeded"),
    [
        ("train", 4, 2, 1, True, False, False),
        ("train", 3, 3, 1, False, True, True),
        pytest.param("train", 3, 1, 2, False, False, True, marks=pytest.mark.long),
        pytest.param("validation", 5, 1, 1, False, False, False, marks=pytest.mark.long),
        ("validation", 2, 2, 1, False, True, False),
    ],
)
def test_replicas_and_processes_share_the_batches_of_one_with_padding_of_weight_0(
    split: str,
    replicas: int,
    processes: int,
    micro_batches: int,
    keeps_last: bool,
    is_streamed: bool,
    is_seeded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with the order of one replica, shared by NumPy."""
    if is_streamed:
        stream(monkeypatch, buffer_size=20)
    draw = np.random.default_rng([replicas, processes, micro_batches])
    count, size = (int(draw.integers(*each)) for each in ((20, 60), (6, 13)))
    first_step, number = int(draw.integers(0, 3)), int(draw.integers(0, 3))

    def load(_: str) -> tf.data.Dataset:
        return tf.data.Dataset.range(count).map(lambda each: (each, each, each + 1))  # The last is a weight.

    def seeded(features, labels, *, seed):
        return features, seed

    options = {"global_batch_size": size, "keep_last_batch": keeps_last, "load_examples": load}
    if is_seeded:
        options["prepare_example"] = seeded
    expected = joined(whole(batches(split, **options), number))
    features, labels, weights = expected
    # Each example once, and those that fill no batch only where padding fills it.
    kept = features[weights > 0]
    assert len(features) == (count // size if split == "train" and not keeps_last else -(-count // size))
    assert len(set(kept.tolist())) == len(kept) == min(count, len(features) * size)
    np.testing.assert_array_equal(
        weights, np.where(np.arange(features.size).reshape(weights.shape) < count, features + 1, 0)
    )
    assert split == "train" or kept.tolist() == list(range(count))
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


def test_evaluation_counts_each_example_once() -> None:
    for count in (1, 37):
        made = batches("validation", count=count, replicas=2)
        features, labels, weights = joined(whole(made))
        assert weights.dtype == np.float32
        assert features.shape == (made.steps_per_pass, 8) == (-(-count // 8), 8)
        np.testing.assert_array_equal(weights.ravel(), np.arange(features.size) < count)
        np.testing.assert_array_equal(features[weights == 1], np.arange(count))
        np.testing.assert_array_equal(labels, features)
        assert made.dropped == 0


def test_training_leaves_out_the_remainder_and_another_one_each_epoch() -> None:
    made = batches()
    assert (made.steps_per_pass, made.dropped) == (4, 5)
    seen = [joined(whole(made, epoch))[0].ravel() for epoch in range(3)]
    for order in seen:
        assert len(set(order.tolist())) == 32
    left_out = [set(range(37)) - set(order.tolist()) for order in seen]
    assert left_out[0] != left_out[1] != left_out[2]


@pytest.mark.parametrize("kind", ["numbers", pytest.param("records", marks=pytest.mark.long)])
def test_workers_with_their_own_steps_share_the_examples_of_an_epoch(kind: str, tmp_path) -> None:
    """As with parameter servers, where the pipeline is made in the graph of a worker."""
    config = Config(simulated_devices=1, global_batch_size=4, seed=5)
    if kind == "records":
        records = Records(write_records(tmp_path, [13, 27]))
        made = batches_of_two_workers(lambda _: records, lambda each: (tf.io.decode_raw(each, tf.int64)[0], 0), config)
    else:
        made = batches_of_two_workers(lambda _: numbers(40), unchanged, config)

    @tf.function
    def ten_batches(pipeline: tf.Tensor) -> tf.Tensor:
        features = tf.zeros([0], tf.int64)
        for batch in made.endless(0, 0, 2, pipeline).take(10):
            features = tf.concat([features, batch[0]], axis=0)
        return features

    # Each has 20 of the 40, again and again.
    of_each = [Counter(ten_batches(tf.constant(number, tf.int64)).numpy().tolist()) for number in range(2)]
    assert [set(counted.values()) for counted in of_each] == [{2}, {2}]
    assert sorted([*of_each[0], *of_each[1]]) == list(range(40))


def test_dataset_is_let_go_once_its_examples_are_kept() -> None:
    loaded = []

    def load(_: str) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((np.arange(40), np.arange(40)))
        loaded.append(weakref.ref(dataset))
        return dataset

    made = batches(load_examples=load)
    made.examples.cache()
    gc.collect()
    assert loaded[0]() is None


def test_pipeline_prepares_its_own_share_only() -> None:
    prepared = []

    def noted(features, labels, *, training):
        features = tf.py_function(lambda number: prepared.append(int(number)) or number, [features], tf.int64)
        return tf.ensure_shape(features, []), labels

    # In evaluation, because the next epoch's, which may be under way already, are the same.
    all_shares(batches("validation", prepare_example=noted, replicas=2, count=40, pipelines=(2, 1)))
    assert set(prepared) == {number for number in range(40) if number % 8 >= 4}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_skipping_continues_with_the_next_unseen_batch_and_prepares_nothing_before_it(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_streamed:
        stream(monkeypatch, buffer_size=20)
    prepared = []

    def noted(features, labels, *, training, seed):
        tf.py_function(lambda *seed: prepared.append(tuple(map(int, seed))), tf.unstack(seed), [])
        return features, tf.cast(seed, tf.int64)

    made = batches(prepare_example=noted)
    reference = whole(made, 2)
    prepared.clear()
    rest = whole(made, 2, 3)
    for expected, found in zip(reference[3:], rest, strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
    seeds = [{tuple(seed) for batch in batches for seed in batch[1].tolist()} for batches in (reference[:3], rest)]
    assert not set(prepared) & seeds[0]
    assert set(prepared) >= seeds[1]


def test_batch_that_is_too_small_for_the_replicas_is_refused() -> None:
    assert per_replica_batch_size(65, 5) == 13
    assert per_replica_batch_size(33, 2) == 17
    assert per_replica_batch_size(33, 2, micro_batches=4) == 20
    with pytest.raises(BadInput, match=r"--global-batch-size 2 is too small for 4 replica\(s\): use 4 or more"):
        per_replica_batch_size(2, 4)
    with pytest.raises(BadInput, match=r"too small for 4 replica\(s\), in 2 micro-batches each: use 8 or more"):
        per_replica_batch_size(7, 4, micro_batches=2)


REFUSED_EXAMPLES = {
    "returned a list: return a tf.data.Dataset": [1, 2],
    "returned endless examples": numbers(9).repeat(),
    "returned examples of unknown number": numbers(9).filter(lambda number, _: number > 2),
    r"argument: 'labels' \(task.prepare_example gets .*: int64\[\], as task.load_examples": tf.data.Dataset.range(9),
    r"returned sample weights of float32\[2\]: each must be one number": (
        tf.data.Dataset.from_tensor_slices(([[1.0, 2.0]] * 9, [0] * 9, [[1.0, 2.0]] * 9))
    ),
    r"task.prepare_example returned \(float32\[None\], int32\[\]\) for task.load": (
        tf.data.Dataset.range(9).map(lambda length: (tf.ones(length), 0))
    ),
    "--global-batch-size 8 is larger than the 7 examples": numbers(7),
}


def test_examples_that_cannot_be_batched_are_refused() -> None:
    for reason, examples in REFUSED_EXAMPLES.items():
        with pytest.raises(BadInput, match=reason) as refused:
            batches(load_examples=lambda _, examples=examples: examples)
        assert "task.load_examples('train')" in str(refused.value)


def test_set_that_holds_fewer_examples_than_it_says_is_refused() -> None:
    def load(_: str) -> tf.data.Dataset:
        fewer = numbers(40).filter(lambda number, _: number < 30)
        return fewer.apply(tf.data.experimental.assert_cardinality(40))

    with pytest.raises(BadInput, match=r"task.load_examples\('train'\): .* contained only 30 elements: give"):
        whole(batches(load_examples=load))


# --- Examples sharded by file -----------------------------------------------------------------------------------------


def load_own_files(split: str, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    """Three files, of 10, 22 and 7 examples; a pipeline reads every so many-th file."""
    files = [range(10), range(10, 32), range(32, 39)]
    if input_context:
        files = files[input_context.input_pipeline_id :: input_context.num_input_pipelines]
    return tf.data.Dataset.from_tensor_slices([number for file in files for number in file]).map(lambda n: (n, n))


def test_evaluation_of_files_counts_each_example_once_in_equally_many_steps() -> None:
    one = batches("validation", load_examples=load_own_files)
    assert (one.number_of_examples, one.steps_per_pass) == (39, 5)
    counted = Counter()
    for pipeline in range(2):
        own = batches("validation", load_examples=load_own_files, replicas=2, pipelines=(2, pipeline))
        # Files of 17 and of 22 examples, 4 of a batch from each.
        assert (own.number_of_examples, own.steps_per_pass, own.dropped) == (39, 6, 0)
        shares = all_shares(own)
        assert len(shares) == 6
        for features, _, weights in shares:
            counted.update(features[weights == 1].tolist())
    assert counted == Counter(range(39))


def test_training_on_files_takes_equally_many_steps_and_resumes() -> None:
    drawn = []

    def draw(features, labels, *, training, seed):
        return tf.random.stateless_uniform([], seed), labels

    for pipeline, files in enumerate(({*range(10), *range(32, 39)}, set(range(10, 32)))):
        own = batches(load_examples=load_own_files, prepare_example=draw, replicas=2, pipelines=(2, pipeline))
        assert (own.steps_per_pass, own.dropped) == (4, 7)
        shares = all_shares(own)
        seen = [int(label) for _, labels, _ in shares for label in labels]
        assert len(seen) == len(set(seen)) == 16
        assert set(seen) <= files
        drawn += [float(feature) for features, _, _ in shares for feature in features]
        for one, other in zip(all_shares(own, first_step=3), shares[3:], strict=True):
            for part, same in zip(one, other, strict=True):
                np.testing.assert_array_equal(part, same)
    # No two examples, of whichever worker, have the same augmentation.
    assert len(set(drawn)) == 32


def test_examples_of_an_epoch_inside_a_pass_are_those_without_the_padding_of_every_process() -> None:
    options = {"keep_last_batch": True, "steps_per_epoch": 5}
    own = [
        batches(load_examples=load_own_files, replicas=2, pipelines=(2, pipeline), **options) for pipeline in range(2)
    ]
    # Files of 17 and of 22 examples: the first process has padding from the fifth batch of six on.
    assert own[0].steps_per_pass == 6
    real = sum(int((weights == 1).sum()) for each in own for _, _, weights in all_shares(each)[:5])
    assert [each.examples_in(0) for each in own] == [real, real] == [37, 37]
    # The rest of the first pass, and four batches of the second.
    assert own[0].examples_in(1) == 2 + 32


def test_worker_without_a_file_is_refused() -> None:
    def load(split: str, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        return numbers(0 if input_context and input_context.input_pipeline_id else 10)

    with pytest.raises(BadInput, match="for worker 1 of 2 returned no examples"):
        batches(load_examples=load, replicas=2, pipelines=(2, 1))
