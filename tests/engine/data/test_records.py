"""Batches of record files: each record once, the same for any number of processes, and read where they begin."""

import glob
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, whole
from processes import until
from record_files import shuffle_in, write_records

from config import Config
from engine.data import Batches, Records, record_index, records
from engine.data.examples import Shard
from engine.data.record_index import index_files
from engine.data.records import Blocks, segment_count
from engine.errors import BadInput

SIZES = [123, 3, 251, 60]  # Records in each file.
COUNT = sum(SIZES)


def write(folder: Path, sizes: list[int] = SIZES, data: Callable[[int], bytes] = lambda number: b"") -> Records:
    return Records(write_records(folder, sizes, data))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return write(tmp_path_factory.mktemp("records"), data=lambda number: bytes(number % 7))


def number_of(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.int64)[0]
    return number, number


def batches(loaded: Records, prepare_example: Callable[..., Any] = number_of, **settings: Any) -> Batches:
    config = Config(simulated_devices=1, global_batch_size=12, **settings)
    return batches_of("train", lambda _: loaded, prepare_example, config)


class Order:
    """What several processes read of record files together: (place, number of the record), [steps, size, 2]."""

    def __init__(self, loaded: Records, processes: int = 1, *, size: int = 24, keeps_last: bool = False) -> None:
        examples = loaded.examples("load_examples", 2**29)
        self.steps = (examples.length + keeps_last * (size - 1)) // size
        ends = [process * size // processes for process in range(processes + 1)]
        shards = [Shard(size, slice(*each), self.steps * size) for each in itertools.pairwise(ends)]

        def of(shard: Shard) -> Callable[..., tf.Tensor]:
            def read(first_step: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
                stream = examples.one_by_one(shard, first_step * size, seed)
                places, records = stream.batch(self.steps * shard.size).get_single_element()
                numbers = tf.io.decode_raw(tf.strings.substr(records, 0, 8), tf.int64)[:, 0]
                return tf.reshape(tf.stack([places, numbers], axis=1), [-1, shard.size, 2])

            return tf.function(read, input_signature=[tf.TensorSpec([], tf.int64)] * 2)

        # Traced once for all seeds and places to start at, as in a run.
        self.of_processes = [of(shard) for shard in shards]

    def __call__(self, first_step: int = 0, seed: int = 7) -> np.ndarray:
        given = tf.constant(first_step, tf.int64), tf.constant(seed, tf.int64)
        return np.concatenate([read(*given) for read in self.of_processes], axis=1)


@pytest.mark.parametrize(
    ("size", "processes", "keeps_last", "memory", "point"),
    [(67, 3, False, 60_000, 64), (10, 2, True, 2**29, 2**15)],
)
def test_order_has_each_record_once_for_any_number_of_processes_and_from_any_step_on(
    size: int,
    processes: int,
    keeps_last: bool,
    memory: int,
    point: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of files with records without data or larger than the distance of points; in windows, and without."""
    monkeypatch.setattr(records, "BLOCKS_IN_MEMORY", 50 if point == 64 else 2**22)
    monkeypatch.setattr(record_index, "POINTS_OF_SMALL_FILE", 1)
    monkeypatch.setattr(record_index, "BYTES_OF_POINT", point)
    shuffle_in(monkeypatch, memory, block=2 * point)
    draw = np.random.default_rng(size)
    sizes = draw.integers(1, 120, 4).tolist()
    loaded = write(tmp_path, sizes, data=lambda number: bytes(draw.choice([0, 5, 100, 2000], p=[0.4, 0.3, 0.2, 0.1])))
    loaded, count = (loaded.take(sum(sizes) - 5), sum(sizes) - 5) if keeps_last else (loaded, sum(sizes))
    one, several = (Order(loaded, each, size=size, keeps_last=keeps_last) for each in (1, processes))
    expected, other = one(), one(seed=8)
    for each in (expected, other):
        places, numbers = each.reshape(-1, 2).T
        assert sorted(places) == list(range(one.steps * size))
        kept = numbers[places < count]
        assert len(set(kept.tolist())) == len(kept) == min(count, one.steps * size)
        assert set(kept.tolist()) <= set(range(count))
        # All padding is in the last batch, and copies an example.
        assert len(set(numbers[places >= count].tolist())) == keeps_last
        assert np.all(each[:-1, :, 0] < count)
    assert not np.array_equal(other[..., 1], expected[..., 1])
    if not keeps_last:
        assert set(other[..., 1].flat) != set(expected[..., 1].flat)
    np.testing.assert_array_equal(several(), expected)
    for order, first_step in zip((one, one, several), draw.integers(1, one.steps, 3), strict=True):
        np.testing.assert_array_equal(order(first_step), expected[first_step:])


def test_segments_divide_the_batch_and_no_two_workers_read_the_same_ones() -> None:
    """Unless they are small: of a small record, a worker may read 32 times what it uses, which is still little."""
    for size in (1, 24, 64, 67, 96, 128, 192, 256, 1000, 4096):
        assert segment_count(size, 1000 * size) == max(each for each in range(1, 65) if size % each == 0)
    for workers in (2, 64, 100, 128, 1000):
        size = 32 * workers
        for bytes_of_record in (100, 1000, 16_000, 110_000):
            per_batch = size // segment_count(size, size * bytes_of_record)
            for worker in range(workers):
                first, end = worker * 32 // per_batch, -(-(worker + 1) * 32 // per_batch)
                read = (end - first) * per_batch
                assert read == 32 or read * bytes_of_record < 2**20


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
    (read,) = Order(files).of_processes
    graph = read.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    sizes = [tf.make_ndarray(node.attr["value"].tensor).size for node in nodes if node.op == "Const"]
    assert max(sizes) < 24


@pytest.mark.long
def test_files_sorted_by_class_are_mixed_as_by_a_perfect_shuffle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten classes one after the other, of which much less is in memory than all of it."""
    loaded = write(tmp_path, [600] * 10, data=lambda number: bytes(92))
    shuffle_in(monkeypatch, 510_000, block=200)  # A tenth in the windows, each of many blocks.
    numbers = Order(loaded, size=32)()[..., 1]
    classes = np.stack([np.bincount(batch // 600, minlength=10) for batch in numbers])
    spread = ((classes - 3.2) ** 2 / 3.2).sum(axis=1)  # Of chi-squared distribution, with 9 degrees of freedom.
    assert len(spread) == 187
    assert 8 < spread.mean() < 10
    assert spread.max() < 40


def bytes_read_so_far() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


@pytest.mark.long
def test_first_batch_reads_little_anywhere_and_each_process_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, size = write(tmp_path, [4000, 2000, 2192], data=lambda number: bytes(1000)), 8192 * 1024

    def stream(shuffle_bytes: int, step: int = 0, places: slice = slice(0, 32)) -> tf.data.Dataset:
        first, seed = tf.constant(step * 32, tf.int64), tf.constant(7, tf.int64)
        return loaded.examples("load_examples", shuffle_bytes).one_by_one(Shard(32, places, 8192), first, seed)

    # All segments start to read together, as storage may answer late.
    before, iterator = bytes_read_so_far(), iter(stream(2**29))
    next(iterator)  # Of the first segment.
    until(lambda: bytes_read_so_far() - before >= 8192 * 1000, seconds=20)
    del iterator

    shuffle_in(monkeypatch, 2**21, block=2**12)
    for step in (0, 128, 230):
        examples, before = stream(2**19, step), bytes_read_so_far()
        list(examples.take(32))
        # A window of each segment, half of the memory, and what is read ahead.
        assert bytes_read_so_far() - before < 2 * 2**21
    for number in (1, 2, 4):
        for process in range(number):
            examples = stream(2**19, places=slice(32 // number * process, 32 // number * (process + 1)))
            before = bytes_read_so_far()
            examples.batch(1024).reduce(0, lambda count, _: count + 1)
            # Where a window ends in a block, the records around it are read twice, from a point each 4 KiB.
            assert 0.97 < (bytes_read_so_far() - before) / (size / number) < 1.25


@pytest.mark.long
def test_each_of_a_million_records_is_read_once_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = write(tmp_path, [400_000, 1, 99_999, 250_003, 130_000, 20_000, 100_000])
    shuffle_in(monkeypatch, 2**24, block=2**13)  # Of 324 MB, as records take 300 bytes besides their data.
    expected = Order(loaded, size=48)()
    assert len(expected) == 1_000_003 // 48
    counts = np.bincount(expected[..., 1].ravel(), minlength=1_000_003)
    assert counts.max() == 1
    assert counts.sum() == 1_000_003 // 48 * 48
    for processes in (2, 3, 4):
        order = Order(loaded, processes, size=48)
        np.testing.assert_array_equal(order(), expected)
    np.testing.assert_array_equal(order(17_000), expected[17_000:])


def test_paths_and_patterns_give_each_file_once_and_in_order(tmp_path: Path) -> None:
    loaded = write(tmp_path)
    (tmp_path / "odd[1].tfrecord").write_bytes((tmp_path / "train-1.tfrecord").read_bytes())
    names = ("odd[1].tfrecord", *(f"train-{number}.tfrecord" for number in range(4)))
    expected, pattern = [str(tmp_path / name) for name in names], str(tmp_path / "train-*.tfrecord")
    assert loaded.take(5).take(10).examples("hook", None).length == 5
    # One file may have several names, in any order.
    other_name, found = tmp_path / "train-9.tfrecord", sorted(tmp_path.glob("*"))
    other_name.symlink_to(tmp_path / "train-0.tfrecord")
    for given in ([pattern, expected[0], expected[2]], [[expected[0], Path(pattern)]], [other_name, *found]):
        assert Records(*given).paths("hook") == expected
    tf.io.gfile.makedirs("ram://glob")
    for name in "ba":
        with tf.io.TFRecordWriter(f"ram://glob/{name}.records") as writer:
            writer.write(b"0")
    remote = Records("ram://glob/*.records")
    assert remote.paths("hook") == ["ram://glob/a.records", "ram://glob/b.records"]
    assert len(list(remote.examples("hook", None).unshuffled())) == 2


def test_indexes_are_cached_beside_the_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    loaded = write(tmp_path / "data", [50])
    batches(loaded, run_dir=tmp_path / "runs" / "first")
    assert len(list(tmp_path.glob("runs/.record_index/*"))) == 1
    assert not list(tmp_path.glob("runs/first"))


def test_records_without_a_file_are_refused() -> None:
    for given, reason in {
        "*.none": "task.load_examples('train') returned Records('*.none'), which matches no file: give the path of",
        ".": ". cannot be read (Is a directory)",
    }.items():
        with pytest.raises(BadInput, match=re.escape(reason)):
            batches(Records(given))


def test_index_in_memory_does_not_grow_with_the_files(files: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = index_files(sorted(glob.glob(files.patterns[0])))
    for limit in (2**22, 30, 10):
        monkeypatch.setattr(records, "BLOCKS_IN_MEMORY", limit)
        blocks = Blocks(indexes)
        assert sum(len(index.points) - 2 for index in blocks.files) <= limit
        assert sum(index.length for index in blocks.files) == COUNT


def test_record_that_cannot_be_prepared_or_has_wrong_data_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_eight_bytes(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return number_of(record)[0], tf.reshape(tf.io.decode_raw(record, tf.int64), [])

    monkeypatch.setattr(record_index, "POINTS_OF_SMALL_FILE", 1)
    monkeypatch.setattr(record_index, "BYTES_OF_POINT", 300)
    path = tmp_path / "train-1.tfrecord"
    loaded = write(tmp_path, [50, 50], data=lambda number: b"" if number != 50 else b"odd")
    made = batches(loaded, of_eight_bytes)
    with pytest.raises(BadInput, match=rf"prepare_example failed on record 0, counted from 0, of {path}"):
        whole(made)
    content = bytearray(path.read_bytes())
    place = 17 * 24 + len(b"odd")
    content[place + 14] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        whole(batches(loaded))
    assert str(refused.value) == (
        f"task.load_examples('train') failed on record 17, counted from 0, of {path} (DataLossError: corrupted record "
        f"at {place + 12}): fix it, or drop it"
    )
