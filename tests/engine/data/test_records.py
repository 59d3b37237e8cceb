"""Batches of record files: each record once, the same for any number of processes, and read where they begin."""

import glob
import gzip
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, batches_of_two_workers
from processes import until
from record_files import shuffle_in, write_records

from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import Batches, Records, load_splits, record_index, segments
from engine.data.examples import Shard
from engine.data.record_index import index_files
from engine.data.segments import Blocks, segment_count
from engine.errors import BadInput

SIZES = [123, 3, 251, 60]  # Records in each file.
COUNT = sum(SIZES)


def write(folder: Path, sizes: list[int] = SIZES, data: Callable[[int], bytes] = lambda number: b"") -> Records:
    return Records(write_records(folder, sizes, data))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return write(tmp_path_factory.mktemp("records"), data=lambda number: bytes(number % 7))


@pytest.fixture(params=["complete", "in windows"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a segment is shuffled completely, or in many windows."""
    if request.param == "in windows":
        shuffle_in(monkeypatch, 60_000, block=100)
    return request.param


def number_of(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.int64)[0]
    return number, number


def batches(
    loaded: Any,
    split: str = "train",
    *,
    prepare_example: Callable[..., Any] = number_of,
    replicas: int = 1,
    pipelines: tuple[int, int] = (1, 0),
    **settings: Any,
) -> Batches:
    config = Config(**{"simulated_devices": replicas, "global_batch_size": 24, "seed": 5, **settings})
    return batches_of(split, lambda _: loaded, prepare_example, config, pipelines=pipelines)


def whole(found: Batches, *, epoch: int = 0, first_step: int = 0) -> list[list[np.ndarray]]:
    """Returns every global batch as [features, labels, weights], its replicas' shares joined."""
    local_results = found._strategy.experimental_local_results
    return [
        [np.concatenate([share.numpy() for share in local_results(part)]) for part in batch]
        for batch in found.one_by_one(epoch, first_step)
    ]


def shares(
    loaded: Records, number: int, *, size: int = 24, first_step: int = 0, seed: int | None = 7
) -> list[np.ndarray]:
    """Returns the places and numbers of the records that each process reads in an epoch, [steps, per batch, 2]."""
    examples = loaded.examples("load_examples", None if seed is None else 2**29)
    steps = examples.length // size
    first, seed = tf.constant(first_step * size, tf.int64), None if seed is None else tf.constant(seed, tf.int64)
    found = []
    for process in range(number):
        part = slice(process * size // number, (process + 1) * size // number)
        shard = Shard(size, part, steps * size)
        stream = examples.one_by_one(shard, first, seed)
        pairs = stream.batch(4096).map(lambda places, found: (places, tf.strings.substr(found, 0, 8)))
        pairs = pairs.map(lambda places, heads: (places, tf.io.decode_raw(heads, tf.int64)[:, 0]))
        places, numbers = (np.concatenate(each) for each in zip(*pairs.as_numpy_iterator(), strict=True))
        found.append(np.reshape(np.stack([places, numbers], axis=1), [steps - first_step, shard.size, 2]))
    return found


# --- The order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", pytest.param("validation", marks=pytest.mark.long)])
def test_batches_are_the_same_for_any_number_of_replicas(
    split: str, files: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffle_in(monkeypatch, 60_000, block=100)
    one, two, four = (whole(batches(files, split, replicas=replicas), epoch=1) for replicas in (1, 2, 4))
    for expected, *found in zip(one, two, four, strict=True):
        for each in found:
            np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("size", [60, pytest.param(100, marks=pytest.mark.long)])
def test_batches_are_the_same_for_any_number_of_processes(
    size: int, files: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the segments can be dealt out to them, and where two processes share one."""
    shuffle_in(monkeypatch, 60_000, block=100)
    (expected,) = shares(files, 1, size=size)
    assert len(expected) == COUNT // size
    for number in (2, 3, 7):
        np.testing.assert_array_equal(np.concatenate(shares(files, number, size=size), axis=1), expected)


def test_without_shuffling_the_order_is_that_of_the_files_cut_into_segments(files: Records, memory: str) -> None:
    (found,) = shares(files, 1, size=24, seed=None)
    steps = COUNT // 24
    expected = np.arange(steps * 24).reshape(24, steps).T  # 24 segments, and one record of each in a batch.
    np.testing.assert_array_equal(found[..., 0], expected)
    np.testing.assert_array_equal(found[..., 1], expected)


@pytest.mark.parametrize("size", [1, 24, 64, 67, 96, 128, 192, 256, 1000, 4096])
def test_segments_divide_the_batch_and_are_as_many_as_can_be(size: int) -> None:
    segments = segment_count(size, bytes_of_batch=1000 * size)
    assert size % segments == 0
    assert segments == max(divisor for divisor in range(1, 65) if size % divisor == 0)


@pytest.mark.parametrize("workers", [2, 64, 100, 128, 1000])
def test_workers_read_no_segment_that_another_one_reads_too(workers: int) -> None:
    """Unless it is small: of a small record, a worker may read 32 times what it uses, which is still little."""
    size = 32 * workers
    for bytes_of_record in (100, 1000, 16_000, 110_000):
        segments = segment_count(size, size * bytes_of_record)
        per_batch = size // segments
        for worker in range(workers):
            first, end = worker * 32 // per_batch, -(-(worker + 1) * 32 // per_batch)
            read = (end - first) * per_batch
            assert read == 32 or read * bytes_of_record < 2**20


def test_training_visits_each_record_of_the_whole_batches_once_and_leaves_out_others_each_epoch(
    files: Records, memory: str
) -> None:
    made = batches(files)
    assert (made.number_of_examples, made.steps_per_pass, made.dropped) == (COUNT, 18, COUNT % 24)
    orders = [np.concatenate([labels for _, labels, _ in whole(made, epoch=epoch)]) for epoch in range(3)]
    for order in orders:
        assert len(set(order.tolist())) == 18 * 24
        assert set(order.tolist()) <= set(range(COUNT))
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order.tolist()) for order in orders}) == 3
    again = np.concatenate([labels for _, labels, _ in whole(batches(files), epoch=2)])
    np.testing.assert_array_equal(again, orders[2])
    other = np.concatenate([labels for _, labels, _ in whole(batches(files, seed=6), epoch=2)])
    assert not np.array_equal(other, orders[2])


@pytest.mark.parametrize(
    ("split", "keep"), [("train", True), pytest.param("validation", False, marks=pytest.mark.long)]
)
def test_padding_has_weight_0_and_every_record_counts_once(
    split: str, keep: bool, files: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffle_in(monkeypatch, 60_000, block=100)
    for count in (1, 25, COUNT):
        made = batches(files.take(count), split, keep_last_batch=keep, replicas=2)
        found = whole(made)
        assert len(found) == made.steps_per_pass == -(-count // 24)
        assert Counter(np.concatenate([labels[weights == 1] for _, labels, weights in found])) == Counter(range(count))
        # All padding is in the last batch.
        assert [int(weights.sum()) for _, _, weights in found] == [24] * (count // 24) + [count % 24]


def test_each_window_of_a_segment_is_shuffled_by_itself_and_in_another_order(files: Records) -> None:
    examples = files.examples("load_examples", 2**29)
    examples.records_in_memory = 100
    shard = Shard(1, slice(0, 1), COUNT)
    stream = examples.one_by_one(shard, tf.constant(0, tf.int64), tf.constant(7, tf.int64))
    places = np.array([place.numpy() for place, _ in stream])
    # One segment, whose windows have 50 places each, the first one 51.
    orders = [places[begin : begin + 50] - begin for begin in range(51, 401, 50)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)


def test_place_of_no_record_is_in_the_graph_of_a_pass(files: Records) -> None:
    """It would be there once for each pass and function, and a graph has at most 2 GB."""
    examples = files.examples("load_examples", 2**29)

    @tf.function
    def a_pass() -> tf.Tensor:
        shard = Shard(24, slice(0, 24), COUNT // 24 * 24)
        stream = examples.one_by_one(shard, tf.constant(0, tf.int64), tf.constant(7, tf.int64))
        return stream.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1)

    assert a_pass() == COUNT // 24 * 24
    graph = a_pass.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    sizes = [tf.make_ndarray(node.attr["value"].tensor).size for node in nodes if node.op == "Const"]
    assert max(sizes) < 24


def test_each_record_and_epoch_has_a_seed_of_its_own(files: Records) -> None:
    def seeds(record: tf.Tensor, *, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return number_of(record)[0], seed

    made = batches(files, prepare_example=seeds)
    drawn = [tuple(seed) for epoch in (0, 1) for _, seeds, _ in whole(made, epoch=epoch) for seed in seeds]
    assert len(set(drawn)) == 2 * 18 * 24


def test_files_sorted_by_class_are_mixed_as_by_a_perfect_shuffle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten classes one after the other, of which much less is in memory than all of it."""
    loaded = write(tmp_path, [2000] * 10, data=lambda number: bytes(92))
    shuffle_in(monkeypatch, 1_700_000, block=200)  # A tenth in the windows, each of many blocks.
    (found,) = shares(loaded, 1, size=64)
    classes = np.stack([np.bincount(batch // 2000, minlength=10) for batch in found[..., 1]])
    spread = ((classes - 6.4) ** 2 / 6.4).sum(axis=1)  # Of chi-squared distribution, with 9 degrees of freedom.
    assert len(spread) == 312
    assert 8 < spread.mean() < 10
    assert spread.max() < 40
    # And batches that follow each other.
    neighbours = classes[:-1] + classes[1:]
    assert 8 < ((neighbours - 12.8) ** 2 / 12.8).sum(axis=1).mean() < 11.5


# --- Where a run goes on, and what is read ----------------------------------------------------------------------------


@pytest.mark.parametrize("first_step", [pytest.param(1, marks=pytest.mark.long), 13])
def test_resume_goes_on_with_the_same_batches(first_step: int, files: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(record: tf.Tensor, *, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.random.stateless_uniform([], seed), number_of(record)[1]

    shuffle_in(monkeypatch, 60_000, block=100)
    for prepare_example in (number_of, draw):
        made = batches(files, prepare_example=prepare_example)
        expected = whole(made, epoch=2)[first_step:]
        found = whole(made, epoch=2, first_step=first_step)
        for one, other in zip(found, expected, strict=True):
            for part, same in zip(one, other, strict=True):
                np.testing.assert_array_equal(part, same)


def bytes_read(function: Callable[[], Any]) -> int:
    """Returns how many bytes this process reads from files meanwhile."""

    before = bytes_read_so_far()
    function()
    return bytes_read_so_far() - before


def bytes_read_so_far() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


def test_segments_start_to_read_together(tmp_path: Path) -> None:
    """Storage may answer late."""
    loaded = write(tmp_path, [4000, 2000, 2192], data=lambda number: bytes(1000))
    examples = loaded.examples("load_examples", 2**29)
    shard = Shard(32, slice(0, 32), 8192)
    stream = iter(examples.one_by_one(shard, tf.constant(0, tf.int64), tf.constant(7, tf.int64)))
    before = bytes_read_so_far()
    next(stream)  # Of the first segment.
    until(lambda: bytes_read_so_far() - before >= 8192 * 1000, seconds=20)


@pytest.mark.long
def test_first_batch_reads_little_anywhere_and_each_process_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = write(tmp_path, [4000, 2000, 2192], data=lambda number: bytes(1000))
    size = 8192 * 1024
    shuffle_in(monkeypatch, 2**21, block=2**12)

    def first_batch(step: int) -> Callable[[], Any]:
        examples = loaded.examples("load_examples", 2**19)
        shard = Shard(32, slice(0, 32), 8192)
        stream = examples.one_by_one(shard, tf.constant(step * 32, tf.int64), tf.constant(7, tf.int64))
        return lambda: list(stream.take(32))

    def count(batches: int, _: Any) -> int:
        return batches + 1

    for part in (0.0, 0.5, 0.9):
        # A window of each segment, half of the memory, and what is read ahead.
        assert bytes_read(first_batch(int(part * 256))) < 2 * 2**21
    for number in (1, 2, 4):
        parts = [bytes_read(lambda part=part: part.batch(1024).reduce(0, count)) for part in streams(loaded, number)]
        # Where a window ends in a block, the records around it are read twice, from a point each 4 KiB.
        assert all(0.97 < part / (size / number) < 1.25 for part in parts)


def streams(loaded: Records, number: int) -> list[tf.data.Dataset]:
    examples = loaded.examples("load_examples", 2**19)
    parts = [slice(32 // number * process, 32 // number * (process + 1)) for process in range(number)]
    first, seed = tf.constant(0, tf.int64), tf.constant(7, tf.int64)
    return [examples.one_by_one(Shard(32, part, 8192), first, seed) for part in parts]


@pytest.mark.long
@pytest.mark.parametrize("complete", [True, False])
def test_each_of_a_million_records_is_read_once_by_any_number_of_processes(
    complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = write(tmp_path, [400_000, 1, 99_999, 250_003, 130_000, 20_000, 100_000])
    if not complete:
        shuffle_in(monkeypatch, 2**21, block=2**13)  # Of 24 MB.
    size = 48
    (expected,) = shares(loaded, 1, size=size)
    assert len(expected) == 1_000_003 // size
    counts = np.bincount(expected[..., 1].ravel(), minlength=1_000_003)
    assert counts.max() == 1
    assert counts.sum() == 1_000_003 // size * size
    for number in (2, 3, 4) if complete else (3,):
        np.testing.assert_array_equal(np.concatenate(shares(loaded, number, size=size), axis=1), expected)
    rest = shares(loaded, 2, size=size, first_step=17_000)
    np.testing.assert_array_equal(np.concatenate(rest, axis=1), expected[17_000:])


def test_workers_with_steps_of_their_own_share_the_records_of_an_epoch(files: Records) -> None:
    """As with parameter servers, where the pipeline is made in the graph of a worker."""
    config = Config(simulated_devices=1, global_batch_size=24, seed=5)
    made = batches_of_two_workers(lambda _: files.take(240), number_of, config)

    @tf.function
    def five_batches(pipeline: tf.Tensor) -> tf.Tensor:
        labels = tf.zeros([0], tf.int64)
        for batch in made.endless(0, 0, 2, pipeline).take(5):
            labels = tf.concat([labels, batch[1]], axis=0)
        return labels

    of_each = [set(five_batches(tf.constant(number, tf.int64)).numpy().tolist()) for number in range(2)]
    assert [len(each) for each in of_each] == [120, 120]
    assert set.union(*of_each) == set(range(240))


# --- What is refused, and what is streamed ----------------------------------------------------------------------------


def test_paths_and_patterns_give_each_file_once_and_in_order(tmp_path: Path) -> None:
    loaded = write(tmp_path)
    (tmp_path / "odd[1].tfrecord").write_bytes((tmp_path / "train-1.tfrecord").read_bytes())
    expected = [
        str(tmp_path / name) for name in ("odd[1].tfrecord", *(f"train-{number}.tfrecord" for number in range(4)))
    ]
    pattern = str(tmp_path / "train-*.tfrecord")
    for given in ([pattern, expected[0], expected[2]], [[expected[0], Path(pattern)]], [tmp_path / "*.tfrecord"]):
        assert Records(*given).paths("hook") == expected
    assert sum(each.length for each in index_files(expected)) == COUNT + 3
    # The indexes beside the files are no records, and one file may have several names, in any order.
    other_name, names = tmp_path / "train-9.tfrecord", sorted(tmp_path.glob("*"))
    other_name.symlink_to(tmp_path / "train-0.tfrecord")
    for given in ([other_name, *names], [*names, other_name]):
        assert Records(*given).paths("hook") == expected
    other_name.unlink()
    assert loaded.take(5).take(10).examples("hook", None).length == 5
    tf.io.gfile.makedirs("ram://glob")
    for name in "ba":
        with tf.io.TFRecordWriter(f"ram://glob/{name}.tfrecord") as writer:
            writer.write(b"0")
    remote = Records("ram://glob/*.tfrecord")
    assert remote.paths("hook") == ["ram://glob/a.tfrecord", "ram://glob/b.tfrecord"]
    assert len(list(remote.examples("hook", None).unshuffled())) == 2


def test_indexes_that_cannot_be_cached_beside_the_files_are_cached_beside_the_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    loaded = write(tmp_path / "data", [50])
    # A folder that cannot be written would not do: root, who runs tests in containers, can write anywhere.
    (tmp_path / "data" / ".train-0.tfrecord.index").mkdir()
    batches(loaded, run_dir=tmp_path / "runs" / "first")
    assert len(list(tmp_path.glob("runs/.record_index/*"))) == 1
    assert not list(tmp_path.glob("runs/first"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["*.none"], "task.load_examples('train') returned Records('*.none'), which matches no file: give the path of"),
        (["ram://none/*"], "returned Records('ram://none/*'), which matches no file"),
        ([], "Records got no path: pass paths or patterns"),
        ([os.curdir], ". cannot be read (Is a directory)"),
    ],
)
def test_records_without_a_file_are_refused(given: list[str], reason: str) -> None:
    with pytest.raises(BadInput) as refused:
        batches(Records(*given))
    assert reason in str(refused.value)


def test_records_of_workers_files_are_refused(files: Records) -> None:
    config = Config(simulated_devices=2, global_batch_size=8)
    with pytest.raises(BadInput, match="takes an input_context and returned Records: remove it from load_examples"):
        batches_of("train", lambda split, input_context=None: files, number_of, config, pipelines=(2, 0))


def spoiled(folder: Path, number: int) -> Records:
    """Writes files of which the second has a record whose data were changed."""
    loaded = write(folder, [50, 50, 50], data=lambda number: bytes(100))
    path = folder / "train-1.tfrecord"
    content = bytearray(path.read_bytes())
    content[number * 124 + 60] ^= 1
    path.write_bytes(content)
    return loaded


@pytest.mark.parametrize(("point", "in_memory"), [(64, 50), (300, 2**22)])
def test_records_between_points_are_read_and_named(
    point: int, in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any place, also of a file that has records without data or larger than the distance of points."""
    monkeypatch.setattr(segments, "POINTS_IN_MEMORY", in_memory)
    monkeypatch.setattr(record_index, "POINTS_OF_SMALL_FILE", 1)
    monkeypatch.setattr(record_index, "BYTES_OF_POINT", point)
    draw = np.random.default_rng(point)
    loaded = write(tmp_path, [97, 130, 61], data=lambda number: bytes(draw.choice([0, 5, 100, 40_000])))
    shuffle_in(monkeypatch, 60_000, block=2 * point)
    (expected,) = shares(loaded, 1)
    assert len(set(expected[..., 1].ravel())) == 288 // 24 * 24
    for first_step in (1, 5, 11):
        np.testing.assert_array_equal(shares(loaded, 1, first_step=first_step)[0], expected[first_step:])
    np.testing.assert_array_equal(np.concatenate(shares(loaded, 3), axis=1), expected)
    (few,) = shares(loaded.take(110), 1, size=10)
    assert sorted(few[..., 1].ravel()) == list(range(110))
    path = tmp_path / "train-1.tfrecord"
    offsets = np.cumsum([0, *(len(record) + 16 for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator())])
    content = bytearray(path.read_bytes())
    content[offsets[77] + 13] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"train-1.tfrecord: record 77, counted from 0, at byte {offsets[77]} is"):
        whole(batches(loaded))


def test_index_in_memory_does_not_grow_with_the_files(files: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = index_files(sorted(glob.glob(files.patterns[0])))
    for limit in (2**22, 30, 10):
        monkeypatch.setattr(segments, "POINTS_IN_MEMORY", limit)
        blocks = Blocks(indexes)
        assert sum(len(index.points) - 2 for index in blocks.files) <= limit
        assert sum(index.length for index in blocks.files) == COUNT


@pytest.mark.parametrize("split", ["train", "validation"])
def test_record_with_wrong_data_is_named_when_it_is_read(split: str, tmp_path: Path) -> None:
    made = batches(spoiled(tmp_path, 17), split, keep_last_batch=True)
    with pytest.raises(BadInput) as refused:
        whole(made)
    assert str(refused.value) == (
        f"{tmp_path}/train-1.tfrecord: record 17, counted from 0, at byte {17 * 124} is damaged (the checksum of its "
        "data is wrong): restore the file from a backup, or write it again without that record"
    )


def test_record_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return number_of(record)[0], tf.io.decode_raw(record, tf.int64, fixed_length=8)[0]

    loaded = write(tmp_path, [50, 50], data=lambda number: b"" if number != 67 else b"odd")
    made = batches(
        loaded, prepare_example=lambda record: (parse(record)[0], tf.reshape(tf.io.decode_raw(record, tf.int64), []))
    )
    with pytest.raises(
        BadInput, match=rf"prepare_example failed on record 17, counted from 0, of {tmp_path}/train-1.tf"
    ):
        whole(made)


def test_file_that_is_gone_is_named(tmp_path: Path) -> None:
    made = batches(write(tmp_path))
    (tmp_path / "train-2.tfrecord").unlink()
    with pytest.raises(BadInput, match=r"train-2.tfrecord"):
        whole(made)


def test_compressed_file_is_refused(tmp_path: Path) -> None:
    loaded = write(tmp_path)
    path = tmp_path / "train-2.tfrecord"  # Beside others that are not.
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(BadInput, match=rf"{path} is compressed: unpack it, or read it with tf.data.TFRecordDataset"):
        batches(loaded)


# --- Examples of any structure ----------------------------------------------------------------------------------------


def numbered(count: int, form: Callable[[tf.Tensor], Any]) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).map(form)


FORMS = {
    "one tensor": (lambda number: number, lambda number: (number, number)),
    "a dict": (lambda number: {"a": number, "b": number}, lambda both: (both["a"], both["b"])),
    "a tuple of one": (lambda number: (number,), lambda number: (number, number)),
    "a weight that goes past": (lambda number: (number, number, number), lambda one, other: (one, other)),
    "a weight that is handed over": (lambda number: (number, number, 7), lambda one, two, _: (one, two, one)),
    "a weight made here": (lambda number: number, lambda number: (number, number, tf.cast(number, tf.float64))),
    "all parts": (lambda number: (number,) * 4, lambda *parts: (parts[0], parts[3])),
}


@pytest.mark.parametrize("form", FORMS)
def test_prepare_example_is_given_what_load_examples_gives(form: str) -> None:
    loaded, prepare_example = FORMS[form]
    weighted = "weight" in form
    for hook in (prepare_example, lambda *parts, seed: prepare_example(*parts)):
        if weighted and hook is not prepare_example:
            continue  # It takes any number of parts, so no weight goes past it.
        found = whole(batches(numbered(24, loaded), "validation", prepare_example=hook))
        ((features, labels, weights),) = found
        np.testing.assert_array_equal(features, np.arange(24))
        np.testing.assert_array_equal(labels, np.arange(24))
        np.testing.assert_array_equal(weights, np.arange(24) if weighted else np.ones(24))


@pytest.mark.parametrize(
    ("loaded", "prepare_example", "reason"),
    [
        (
            lambda n: (n, n),
            lambda one: (one, one),
            "takes 1 positional argument but 2 were given (task.prepare_example gets examples one by one, the parts of",
        ),
        (
            lambda n: n,
            lambda one, two: (one, two),
            "missing 1 required positional argument: 'two' (task.prepare_example gets",
        ),
        (lambda n: n, lambda one: one, "return (features, labels) or (features, labels, weight)"),
        (lambda n: n, lambda one: (one, one, [one, one]), "returned sample weights of (2,): each must be one number"),
        (lambda n: n, lambda one: (one, one, {"a": one}), "sample weights of a dict: each must be one number; return"),
        (lambda n: n, lambda one: (one, one, (one, 1.0)), "sample weights of a tuple: each must be one number; return"),
    ],
)
def test_examples_and_hooks_that_do_not_fit_are_refused(
    loaded: Callable[..., Any], prepare_example: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(BadInput) as refused:
        batches(numbered(24, loaded), prepare_example=prepare_example)
    assert reason in str(refused.value)


def test_records_of_every_split_share_what_prepares_them(files: Records) -> None:
    class Task:
        load_examples = staticmethod(lambda split: files)
        prepare_example = staticmethod(number_of)

    config = Config(simulated_devices=1)
    found = load_splits(("train", "validation", "test"), Task, config, create_strategy(config))
    assert {split: each.fingerprint()["examples"] for split, each in found.items()} == dict.fromkeys(found, COUNT)
    assert batches(files).fingerprint() == batches(files).fingerprint() != batches(files.take(COUNT - 1)).fingerprint()
