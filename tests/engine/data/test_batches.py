"""Batches hold the right examples, once each, whatever the number of replicas and input pipelines."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, batches_of_two_workers
from streaming import stream

from config import Config
from engine.data import stacks
from engine.data.batches import Batches, per_replica_batch_size
from engine.data.splits import check_same_structure
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


def whole(found: Batches, *, epoch: int = 0, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns every global batch as [features, labels, weights], its replicas' shares joined."""
    local_results = found._strategy.experimental_local_results
    joined = [
        [np.concatenate([share.numpy() for share in local_results(part)]) for part in batch]
        for batch in found.one_by_one(epoch, first_step)
    ]
    assert len(joined) == found.steps_per_pass - first_step
    return joined


def all_shares(found: Batches, *, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns what one of two processes gives its replicas in a pass: a share of a batch for each in turn."""
    sizes = stack_sizes(found.steps_per_pass, first_step, found._bytes_of_share)
    stacks = iter(found._stacks_of_process(0, first_step, sizes))
    taken = []
    for size in sizes[0]:
        on_replicas = [[part.numpy() for part in stack] for stack in next(stacks)]
        assert len(on_replicas) == 8 // 2 // found.per_replica_batch_size
        assert all(len(part) == size for stack in on_replicas for part in stack)
        taken += [[part[number] for part in stack] for number in range(size) for stack in on_replicas]
    return taken


def test_stacks_hold_more_steps_the_smaller_the_share_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stack is a call, of which TensorFlow keeps some memory for ever in a cluster."""
    monkeypatch.setattr(stacks, "BYTES_OF_STACK", 20 * 160)  # A batch of 8 has 160 bytes.
    largest = {}
    for processes in (1, 2, 4):
        plan = batches(count=1600, replicas=4, pipelines=(processes, 0)).iterator().plan(200)
        largest[processes] = max(count for _, count in plan)
    assert largest == {1: 20, 2: 40, 4: 64}  # And no more, because a long pass has several stacks.


def test_workers_with_their_own_steps_share_the_examples_of_an_epoch() -> None:
    """As with parameter servers, where the pipeline is made in the graph of a worker."""
    config = Config(simulated_devices=1, global_batch_size=8, seed=5)
    made = batches_of_two_workers(lambda _: numbers(40), unchanged, config)

    @tf.function
    def five_batches(pipeline: tf.Tensor) -> tf.Tensor:
        features = tf.zeros([0], tf.int64)
        for batch in made.endless(0, 0, 2, pipeline).take(5):
            features = tf.concat([features, batch[0]], axis=0)
        return features

    # Each has 20 of the 40, again and again.
    of_each = [Counter(five_batches(tf.constant(number, tf.int64)).numpy().tolist()) for number in range(2)]
    assert [set(counted.values()) for counted in of_each] == [{2}, {2}]
    assert sorted([*of_each[0], *of_each[1]]) == list(range(40))


def test_evaluation_counts_each_example_once() -> None:
    for count in (1, 8, 37):
        made = batches("validation", count=count, replicas=2)
        counted = Counter()
        for features, labels, weights in whole(made):
            np.testing.assert_array_equal(features, labels)
            assert weights.dtype == np.float32
            assert len(features) == 8
            counted.update(features[weights == 1].tolist())
            assert set(weights) <= {0.0, 1.0}
        assert counted == Counter(range(count))
        assert made.dropped == 0


def test_evaluation_by_several_processes_counts_each_example_once() -> None:
    for count in (1, 8, 37):
        counted = Counter()
        for index in range(2):
            process = batches("validation", count=count, replicas=4, pipelines=(2, index))
            for features, _, weights in all_shares(process):
                counted.update(features[weights == 1].tolist())
        assert counted == Counter(range(count))


def test_training_leaves_out_the_remainder_and_another_one_each_epoch() -> None:
    made = batches()
    assert (made.steps_per_pass, made.dropped) == (4, 5)
    seen = [np.concatenate([batch[0] for batch in whole(made, epoch=epoch)]) for epoch in range(3)]
    for order in seen:
        assert len(set(order.tolist())) == 32
    left_out = [set(range(37)) - set(order.tolist()) for order in seen]
    assert left_out[0] != left_out[1] != left_out[2]


def test_kept_last_batch_is_padded_with_weight_0() -> None:
    made = batches(keep_last_batch=True)
    assert (made.steps_per_pass, made.dropped) == (5, 0)
    found = whole(made)
    kept = np.concatenate([features[weights == 1] for features, _, weights in found])
    assert sorted(kept.tolist()) == list(range(37))
    assert found[-1][2].sum() == 5


@pytest.mark.parametrize("split", ["train", "validation"])
def test_global_batches_are_the_same_for_any_number_of_replicas(split: str) -> None:
    one, four = (whole(batches(split, replicas=replicas), epoch=1) for replicas in (1, 4))
    for expected, found in zip(one, four, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_global_batches_are_the_same_for_any_number_of_input_pipelines() -> None:
    reference = [features for features, _, _ in whole(batches(replicas=4))]
    # Each process feeds two of the four replicas, which get what they get in one process.
    processes = [batches(replicas=4, pipelines=(2, index)) for index in range(2)]
    parts = [[share[0] for share in all_shares(process)] for process in processes]
    for step, expected in enumerate(reference):
        shares = [share for part in parts for share in part[2 * step : 2 * step + 2]]
        np.testing.assert_array_equal(np.concatenate(shares), expected)


@pytest.mark.parametrize("is_kept", [True, False])
def test_dataset_is_let_go_once_its_examples_are_kept(is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_kept:
        stream(monkeypatch, buffer_size=10)
    loaded = []

    def load(_: str) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((np.arange(40), np.arange(40)))
        loaded.append(weakref.ref(dataset))
        return dataset

    made = batches(load_examples=load)
    made.examples.cache()
    gc.collect()
    assert (loaded[0]() is None) == is_kept


def test_pipeline_prepares_its_own_share_only() -> None:
    prepared = []

    def noted(features, labels, *, training):
        return tf.py_function(lambda number: prepared.append(int(number)) or number, [features], tf.int64), labels

    def shaped(features, labels, *, training):
        features, labels = noted(features, labels, training=training)
        return tf.ensure_shape(features, []), labels

    # In evaluation, because the next epoch's, which may be under way already, are the same.
    made = batches("validation", prepare_example=shaped, replicas=2, count=40, pipelines=(2, 1))
    all_shares(made)
    assert set(prepared) == {number for number in range(40) if number % 8 >= 4}


def test_skipping_continues_with_the_next_unseen_batch_and_prepares_nothing_before_it() -> None:
    prepared = []

    def noted(features, labels, *, training, seed):
        tf.py_function(lambda *seed: prepared.append(tuple(map(int, seed))), tf.unstack(seed), [])
        return features, tf.cast(seed, tf.int64)

    reference = whole(batches(prepare_example=noted), epoch=2)
    prepared.clear()
    rest = whole(batches(prepare_example=noted), epoch=2, first_step=3)
    for expected, found in zip(reference[3:], rest, strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
    seeds = [{tuple(seed) for batch in batches for seed in batch[1].tolist()} for batches in (reference[:3], rest)]
    assert not set(prepared) & seeds[0]
    assert set(prepared) >= seeds[1]


def test_every_example_and_epoch_gets_a_seed_of_its_own() -> None:
    def seeds(features, labels, *, training, seed):
        return features, seed

    made = batches(prepare_example=seeds)
    found = [tuple(seed) for epoch in (0, 1) for batch in whole(made, epoch=epoch) for seed in batch[1]]
    assert len(set(found)) == 64


def test_own_weights_are_kept_and_padding_has_none() -> None:
    def weighted(_: str) -> tf.data.Dataset:
        return numbers(5).map(lambda number, label: (number, label, number + 1))

    (batch,) = whole(batches("test", load_examples=weighted))
    assert batch[2].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]


def test_shuffle_goes_through_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, buffer_size=4)
    first = whole(batches())[0][0]
    assert max(first) < 8 + 4
    assert first.tolist() != sorted(first)


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "padded", "processes", "is_streamed"),
    [(3, 1, 9, 3, False), (3, 2, 12, 1, True), (5, 1, 10, 5, True), (5, 1, 10, 1, False)],
)
def test_padded_batches_have_the_same_examples_in_the_same_order(
    replicas: int, micro_batches: int, padded: int, processes: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_streamed:
        stream(monkeypatch, buffer_size=20)
    for split, first_step in (("train", 1), ("validation", 0)):
        expected = whole(batches(split), first_step=first_step)
        found: list[list[list[np.ndarray]]] = [[] for _ in expected]
        for index in range(processes):
            process = batches(split, replicas=replicas, pipelines=(processes, index), micro_batches=micro_batches)
            assert process.steps_per_pass == len(expected) + first_step
            for step, of_replicas in enumerate(batches_of_process(process, first_step)):
                found[step] += of_replicas
        for batch, (features, labels, weights) in zip(found, expected, strict=True):
            of_batch = padded if split == "train" else replicas * -(-8 // replicas)
            assert {len(of_replica[0]) for of_replica in batch} == {of_batch // replicas}
            own = [
                [part[: 8 // replicas + (number < 8 % replicas)] for part in each] for number, each in enumerate(batch)
            ]
            for found_part, part in zip(zip(*own, strict=True), (features, labels, weights), strict=True):
                np.testing.assert_array_equal(np.concatenate(found_part), part)
            for (numbers, _, sample_weights), kept in zip(batch, own, strict=True):
                assert not sample_weights[len(kept[2]) :].any()
                # The padding repeats an example: other values could fail where no example does.
                assert set(numbers[len(kept[0]) :]) <= {kept[0][-1]}


def batches_of_process(found: Batches, first_step: int) -> list[list[list[np.ndarray]]]:
    """Returns each batch of a pass as [features, labels, weights] for each replica of this process."""
    sizes = stack_sizes(found.steps_per_pass, first_step, found._bytes_of_share)
    stacks = iter(found._stacks_of_process(0, first_step, sizes))
    taken = []
    for size in sizes[0]:
        of_replicas = [[part.numpy() for part in stack] for stack in next(stacks)]
        taken += [[[part[number] for part in stack] for stack in of_replicas] for number in range(size)]
    return taken


def test_batch_that_is_too_small_for_the_replicas_is_refused() -> None:
    assert per_replica_batch_size(65, 5) == 13
    assert per_replica_batch_size(33, 2) == 17
    assert per_replica_batch_size(33, 2, micro_batches=4) == 20
    with pytest.raises(BadInput, match=r"--global-batch-size 2 is too small for 4 replica\(s\): use 4 or more"):
        per_replica_batch_size(2, 4)
    with pytest.raises(BadInput, match=r"too small for 4 replica\(s\), in 2 micro-batches each: use 8 or more"):
        per_replica_batch_size(7, 4, micro_batches=2)


def no_labels(_: str) -> tf.data.Dataset:
    return tf.data.Dataset.range(9)


def unknown_length(_: str) -> tf.data.Dataset:
    return numbers(9).filter(lambda number, _: number > 2)


REFUSED_EXAMPLES = {
    "a list": (lambda _: [1, 2], "returned a list: return a tf.data.Dataset"),
    "no examples": (lambda _: numbers(0), "returned no examples"),
    "endless": (lambda _: numbers(9).repeat(), "returned endless examples"),
    "unknown length": (unknown_length, "returned examples of unknown number"),
    "no labels": (
        no_labels,
        r"argument: 'labels' \(task.prepare_example gets .*: int64\[\], as task.load_examples",
    ),
    "a weight per feature": (
        lambda _: tf.data.Dataset.from_tensor_slices(([[1.0, 2.0]] * 9, [0] * 9, [[1.0, 2.0]] * 9)),
        r"returned sample weights of float32\[2\]: each must be one number",
    ),
    "too few": (lambda _: numbers(7), "--global-batch-size 8 is larger than the 7 examples"),
}


@pytest.mark.parametrize("case", REFUSED_EXAMPLES)
def test_examples_that_cannot_be_batched_are_refused(case: str) -> None:
    load_examples, reason = REFUSED_EXAMPLES[case]
    with pytest.raises(BadInput, match=reason) as refused:
        batches(load_examples=load_examples)
    assert "task.load_examples('train')" in str(refused.value)


def test_examples_of_unknown_shape_are_refused() -> None:
    def ragged(_: str) -> tf.data.Dataset:
        lengths = tf.data.Dataset.range(9)
        return lengths.map(lambda length: (tf.ones(length), 0))

    with pytest.raises(BadInput, match=r"task.prepare_example returned \(float32\[None\], int32\[\]\) for task.load"):
        batches(load_examples=ragged)


def test_splits_of_unequal_structure_are_refused() -> None:
    def wider(_: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((tf.ones([9, 2]), tf.ones([9])))

    splits = {"train": batches(), "validation": batches("validation", load_examples=wider)}
    with pytest.raises(BadInput, match=r"task.load_examples\('validation'\) .* gave .*float32\[2\].*'train' gave"):
        check_same_structure(splits)


# --- Examples sharded by file -----------------------------------------------------------------------------------------


def load_own_files(split: str, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    """Three files, of 10, 22 and 7 examples; a pipeline reads every so many-th file."""
    files = [range(10), range(10, 32), range(32, 39)]
    if input_context:
        files = files[input_context.input_pipeline_id :: input_context.num_input_pipelines]
    return tf.data.Dataset.from_tensor_slices([number for file in files for number in file]).map(lambda n: (n, n))


def test_files_of_one_process_are_all_files() -> None:
    made = batches("validation", load_examples=load_own_files)
    assert (made.number_of_examples, made.steps_per_pass) == (39, 5)


def test_evaluation_of_files_counts_each_example_once_in_equally_many_steps() -> None:
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
    stream = [all_shares(each)[:5] for each in own]
    real = sum(int((weights == 1).sum()) for shares in stream for _, _, weights in shares)
    assert [each.examples_in(0) for each in own] == [real, real] == [37, 37]
    # The rest of the first pass, and four batches of the second.
    assert own[0].examples_in(1) == 2 + 32


def test_worker_without_a_file_is_refused() -> None:
    def load(split: str, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        return numbers(0 if input_context and input_context.input_pipeline_id else 10)

    with pytest.raises(BadInput, match="for worker 1 of 2 returned no examples"):
        batches(load_examples=load, replicas=2, pipelines=(2, 1))


def test_set_that_holds_fewer_examples_than_it_says_is_refused(tmp_path) -> None:
    def load(_: str) -> tf.data.Dataset:
        fewer = numbers(40).filter(lambda number, _: number < 30)
        return fewer.apply(tf.data.experimental.assert_cardinality(40))

    with pytest.raises(BadInput, match=r"task.load_examples\('train'\): .* contained only 30 elements: give"):
        whole(batches(load_examples=load))
