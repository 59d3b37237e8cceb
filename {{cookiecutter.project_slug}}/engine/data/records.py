"""Examples in TFRecord files, read in any order: each process reads its share of a batch only, from wherever it is.

An epoch's sequence of records is that of the blocks, each some consecutive records of a file, in shuffled order. It is
cut into lanes of equal length, as many as `lane_count` says, and a batch takes an equal piece of each lane. Before
that, the records of a lane are shuffled in groups. The groups of all lanes together are what is held in memory.

Everything follows from the seed of the epoch and from the place of a record, which is its number in the sequence.
"""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.data.examples import Examples, shuffled
from engine.data.record_index import FileIndex, damaged, index_files, is_cache, is_remote
from engine.errors import BadInput

MOST_LANES = 64
# Consecutive records that are read at once. A set of few bytes has smaller blocks, and so many of them.
BYTES_OF_BLOCK = 2**18
BLOCKS_OF_SMALL_SET = 1024
# Where nothing is shuffled, a group is only what is read ahead.
BYTES_WITHOUT_SHUFFLE = 2**24
# What a record takes in memory besides its data.
BYTES_BESIDES = 300
# The next group of a lane is read when so much of the one before is left.
READ_AHEAD = 1 / 8


class Records:
    """TFRecord files, for task.load_examples to return; an example is one record (string, scalar).

    Records("data/train-*.tfrecord"), or several paths and patterns. The order in which they are given does not matter.
    """

    def __init__(self, *patterns: str | Path | list[str | Path]) -> None:
        """Looks for no file yet."""
        given = [each for pattern in patterns for each in (pattern if isinstance(pattern, list | tuple) else [pattern])]
        self.patterns = [os.fspath(each) for each in given]
        self._count: int | None = None

    def __str__(self) -> str:
        return ", ".join(self.patterns)

    def take(self, count: int) -> "Records":
        """Returns the first records only."""
        taken = Records(*self.patterns)
        taken._count = count if self._count is None else min(count, self._count)
        return taken

    def dataset(self) -> tf.data.Dataset:
        """Returns the records in the order of the files, to look at."""
        files = index_files(self.paths("task.load_examples"))
        return _in_file_order(files).take(-1 if self._count is None else self._count)

    def as_numpy_iterator(self) -> Iterator[bytes]:
        """Yields the records in the order of the files, to look at."""
        return self.dataset().as_numpy_iterator()

    def paths(self, hook: str) -> list[str]:
        """Returns the files, in the same order on every machine. Raises BadInput if a pattern matches none."""
        if not self.patterns:
            raise BadInput(f"{hook} returned Records without a file: give paths or patterns")
        found = {}
        for pattern in self.patterns:
            if is_cache(pattern):  # As from a glob that finds hidden files too.
                continue
            if is_remote(pattern):
                matches = tf.io.gfile.glob(pattern)
            else:  # A name may look like a pattern.
                matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
            matches = [path for path in matches if not is_cache(path)]
            if not matches:
                raise BadInput(f"{hook} returned Records({pattern!r}), which matches no file: give the path of some")
            # One file may have several names.
            found.update((path if is_remote(path) else os.path.realpath(path), path) for path in matches)
        return sorted(found.values())

    def examples(self, hook: str, shuffle_bytes: int | None) -> Examples:
        """Returns the examples; None: they are not shuffled. Raises BadInput if they cannot be read."""
        files = index_files(self.paths(hook))
        sha256 = hashlib.sha256("".join(each.sha256 for each in files).encode()).hexdigest()
        length = sum(each.length for each in files)
        fingerprint = {"patterns": str(self), "files": len(files), "records": length, "sha256": sha256}
        files = _shortened(files, self._count) if self._count is not None else files
        return RecordExamples(files, hook, shuffle_bytes, fingerprint)


def examples_of(loaded: Any, hook: str, shuffle_bytes: int | None) -> Examples:
    """Returns what a hook has loaded as examples; None: they are not shuffled. Raises BadInput if it cannot be used."""
    if isinstance(loaded, Records):
        return loaded.examples(hook, shuffle_bytes)
    return Examples(loaded, hook, shuffle_bytes)


def _shortened(files: list[FileIndex], count: int) -> list[FileIndex]:
    kept = []
    for each in files:
        offsets = each.offsets[: count + 1]
        count -= len(offsets) - 1
        kept.append(FileIndex(each.path, offsets, each.sha256))
        if not count:
            break
    return kept


def _in_file_order(files: list[FileIndex]) -> tf.data.Dataset:
    return tf.data.TFRecordDataset([each.path for each in files])


def lane_count(global_batch_size: int) -> int:
    """Returns into how many lanes an epoch is cut: as many as can be of up to 64, and the same for any processes."""
    return max(lanes for lanes in range(1, MOST_LANES + 1) if global_batch_size % lanes == 0)


class RecordExamples(Examples):
    """The records of files as examples: see Examples. They are read from anywhere, and never kept."""

    def __init__(
        self, files: list[FileIndex], hook: str, shuffle_bytes: int | None, fingerprint: dict[str, Any]
    ) -> None:
        """`shuffle_bytes` is what the groups of all processes that share a batch may take; None: no shuffling."""
        length = sum(each.length for each in files)
        if not length:
            raise BadInput(f"{hook} returned no examples: each needs at least one")
        super().__init__(_in_file_order(files).take(length), hook, None, length)
        self._files, self.fingerprint = files, fingerprint
        self._file_first = np.cumsum([0, *(each.length for each in files)])
        size = sum(int(each.offsets[-1]) for each in files)
        bytes_of_block = min(BYTES_OF_BLOCK, max(1, size // BLOCKS_OF_SMALL_SET))
        blocks = [_blocks(each.offsets, bytes_of_block) for each in files]
        block_files = np.repeat(np.arange(len(files)), [len(each) - 1 for each in blocks])
        block_firsts = np.concatenate([each[:-1] for each in blocks]) + self._file_first[block_files]
        with tf.init_scope(), tf.device("CPU:0"):  # Made once. As constants they would be in every graph.
            constant = functools.partial(tf.constant, dtype=tf.int64)
            self.paths = tf.constant([each.path for each in files])
            self.blocks = (
                constant(block_files),
                constant(block_firsts),
                constant(np.concatenate(list(map(np.diff, blocks)))),
            )
            # Those of all files one after the other: a file of n records has n + 1.
            self.offsets = constant(np.concatenate([each.offsets for each in files]))
        self._bytes, self._budget = size, shuffle_bytes or BYTES_WITHOUT_SHUFFLE
        self._records_in_memory = int(self._budget / (size / length + BYTES_BESIDES))

    def keep(self) -> None:
        """Does nothing: what is read often is in the operating system's memory."""

    def describe_shuffling(self, *, streamed: bool, processes: int) -> tuple[str, int]:
        """Returns how the records are shuffled, and how many bytes that takes; see Examples.shuffled."""
        taken = min(self._bytes, self._budget) // processes
        megabytes = f"{max(1, round(taken / 2**20)):,} MB in each process"
        return f"by records, in blocks and groups, {megabytes}", taken

    def _on(self, number: int) -> str:
        file = int(np.searchsorted(self._file_first, number, side="right")) - 1
        return f"on record {number - self._file_first[file]}, counted from 0, of {self._files[file].path}"

    def refusal(self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str = "") -> BadInput:
        """Returns what to raise if records cannot be read or prepared; see Examples.refusal."""
        if found := re.search(r"corrupted record at (\d+)", str(problem)):
            offset = int(found[1])
            for each in self._files:
                number = int(np.searchsorted(each.offsets, offset, side="right")) - 1
                if number < each.length and not _can_be_read(each, number):
                    reason = "the checksum of its data is wrong"
                    return damaged(each.path, number, each.offsets[number], reason)
        return super().refusal(problem, one_by_one, during)

    def stream(self, size: int, first: tf.Tensor, end: int, share: slice, seed: tf.Tensor | None) -> tf.data.Dataset:
        """Returns (place, record) of a share of each batch, one by one; for the arguments see Examples.batches."""
        lanes = lane_count(size)
        piece, steps = size // lanes, end // size
        group = self._records_in_memory // lanes
        is_one_group = steps * piece <= group
        # Otherwise two groups of a lane are in memory at times: one that is used up, and the next.
        group = steps * piece if is_one_group else max(piece, group // 2)
        in_last_batch = tf.constant(min(size, self.length - (steps - 1) * size), tf.int64)
        lane_length, skipped = tf.constant(steps * piece, tf.int64), tf.cast(first // size * piece, tf.int64)
        sequence = _Sequence(self, seed)

        def lane_of(lane: tf.Tensor) -> tf.data.Dataset:
            # The first groups differ in length, so that not all lanes read at the same time.
            first_end = lane_length if is_one_group else tf.minimum(lane_length, (lane + 1) * group // lanes + 1)
            first_group = tf.maximum((skipped - first_end) // group + 1, 0)
            groups = (lane_length - first_end + group - 1) // group + 1

            # The last batch's records are in its first lanes, and the rest of it is padding.
            in_lanes_before = tf.minimum(lane * piece, in_last_batch)
            first_place = lane * (steps - 1) * piece + in_lanes_before
            records = (steps - 1) * piece + tf.clip_by_value(in_last_batch - lane * piece, 0, piece)
            first_padding = self.length + lane * piece - in_lanes_before

            def begin_of(number: tf.Tensor) -> tf.Tensor:
                return tf.clip_by_value(first_end + (number - 1) * group, 0, lane_length) * tf.sign(number)

            def group_of(number: tf.Tensor) -> tf.data.Dataset:
                begin, end = begin_of(number), begin_of(number + 1)
                end_of_records = tf.clip_by_value(end, begin, tf.maximum(begin, records))
                examples = sequence.examples(first_place + begin, first_place + end_of_records)
                if seed is not None:
                    seed_of_group = tf.stack([seed, 1])
                    for each in (lane, number):
                        seed_of_group = tf.random.experimental.stateless_fold_in(seed_of_group, each)
                    # Of both of its numbers: the first one knows nothing of what was folded in last.
                    seed_of_order = tf.random.stateless_uniform([], seed_of_group, maxval=2**31 - 1, dtype=tf.int64)
                    # Moves the records, which tf.gather would copy.
                    size = tf.maximum(end_of_records - begin, 1)
                    examples = shuffled(examples, size, seed_of_order)
                padding = sequence.padding(first_padding + end_of_records - records, end - end_of_records)
                return examples.concatenate(padding).skip(tf.maximum(skipped - begin, 0))

            groups = tf.data.Dataset.range(first_group, groups).flat_map(group_of)
            return groups.prefetch(max(piece, int(group * READ_AHEAD)))

        first_lane, end_lane = share.start // piece, -(-share.stop // piece)
        own = tf.data.Dataset.range(first_lane, end_lane)
        together = own.interleave(lane_of, cycle_length=end_lane - first_lane, block_length=piece)
        taken = (end_lane - first_lane) * piece
        if taken == share.stop - share.start:
            return together
        # The first or the last lane is shared with another process.
        low, high = share.start - first_lane * piece, share.stop - first_lane * piece
        return (
            together.enumerate()
            .filter(lambda number, _: (number % taken >= low) & (number % taken < high))
            .map(lambda _, example: example)
        )

    def batches(
        self,
        prepare: Callable[[tf.Tensor, Any], Any],
        size: int,
        first: tf.Tensor,
        end: int,
        *,
        at_once: int,
        share: slice,
        seed: tf.Tensor | None,
    ) -> tf.data.Dataset:
        """Returns prepared batches; see Examples.batches."""
        own = share.stop - share.start
        begin = first - first % (size * at_once)
        skipped = (first - begin) // size * own

        def prepare_from_first(number: tf.Tensor, batches: tuple[tf.Tensor, tf.Tensor]) -> Any:
            skip = tf.where(number == 0, skipped, 0)
            return tf.nest.map_structure(lambda part: part[skip:], prepare(*batches))

        batches = self.stream(size, begin, end, share, seed).batch(own * at_once).enumerate()
        return batches.map(prepare_from_first, num_parallel_calls=tf.data.AUTOTUNE)


def _blocks(offsets: np.ndarray, bytes_of_block: int) -> np.ndarray:
    """Returns the numbers of the records at which the blocks of a file begin, and that after the last one."""
    starts = np.searchsorted(offsets[:-1], np.arange(0, offsets[-1], bytes_of_block))
    return np.unique([*starts, len(offsets) - 1])


def _can_be_read(file: FileIndex, number: int) -> bool:
    start, end = file.offsets[number : number + 2]
    # TensorFlow cannot iterate over a dataset with an offset that is in no other one's function.
    block = tf.data.Dataset.from_tensors((file.path, start, end - start, np.int64(1)))
    try:
        next(iter(block.flat_map(_read_block)))
    except tf.errors.OpError:
        return False
    return True


class _Sequence:
    """The records of an epoch in the order of their blocks."""

    def __init__(self, examples: RecordExamples, seed: tf.Tensor | None) -> None:
        files, firsts, sizes = examples.blocks
        order = tf.range(tf.size(sizes, tf.int64))
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
        self._files, self._firsts, self._sizes = (tf.gather(each, order) for each in (files, firsts, sizes))
        self._ends = tf.cumsum(self._sizes)
        self._paths, self._offsets = examples.paths, examples.offsets
        self._length = tf.constant(examples.length, tf.int64)

    def examples(self, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        """Returns (place, record) of the places from `begin` to `end`."""
        return tf.data.Dataset.zip(tf.data.Dataset.range(begin, end), self._records(begin, end))

    def padding(self, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        """Returns (place, record) of places behind those of all records: copies of the last one."""
        last = self._records(self._length - 1, self._length).repeat(count)
        return tf.data.Dataset.zip(tf.data.Dataset.range(first, first + count), last)

    def _records(self, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        """Returns the records at the places from `begin` to `end`."""
        first_block = tf.searchsorted(self._ends, [begin], side="right", out_type=tf.int64)[0]
        end_block = tf.searchsorted(self._ends, [end], side="left", out_type=tf.int64)[0] + 1
        ends, sizes, firsts, files = (
            each[first_block:end_block] for each in (self._ends, self._sizes, self._firsts, self._files)
        )
        begins = ends - sizes
        skipped = tf.maximum(begin - begins, 0)
        counts = tf.minimum(end, ends) - begins - skipped
        # Where a file's offsets begin, and where the record's is among them.
        records = firsts + skipped + files
        starts, stops = tf.gather(self._offsets, records), tf.gather(self._offsets, records + counts)
        blocks = tf.data.Dataset.from_tensor_slices((tf.gather(self._paths, files), starts, stops - starts, counts))
        return blocks.flat_map(_read_block)


def _read_block(path: tf.Tensor, start: tf.Tensor, size: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Returns consecutive records of a file, and reads no byte besides."""
    # tf.data.TFRecordDataset always starts at a file's first record.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], byte_offsets=[start], compression_type="", buffer_size=size
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(count)
