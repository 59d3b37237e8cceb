"""TFRecord files: Records, which task.load_examples returns, and their records as examples.

The order of the records follows from a seed. Each process reads its shard only, from any place in them. A pass goes
over the records in the order of the blocks, which are shuffled; a block is some consecutive records of a file. This
sequence is cut into segments of equal length, as many as `segment_count` says, and a batch takes equally many records
of each segment. Before that, the records of a segment are shuffled in windows. The windows of all segments together are
in memory. A record's place is its number in the sequence; all else follows from the seed of the pass.
"""

import dataclasses
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from engine.data.element_spec import megabytes
from engine.data.examples import Examples, Shard
from engine.data.pipelines import shuffled
from engine.data.record_index import FileIndex, damaged, index_files, is_cache, is_remote
from engine.errors import BadInput
from engine.exceptions import may_pass

SEGMENTS = 64  # At most; of large batches as many as give each segment this many records and bytes of a batch.
RECORDS_OF_SEGMENT, BYTES_OF_SEGMENT = 32, 2**18
BLOCKS_AT_ONCE = 256  # Blocks that a process reads at the same time, because storage may answer late.
BYTES_OF_BLOCK = 2**18  # A block is consecutive records that are read at once.
BLOCKS_OF_SMALL_DATASET = 1024  # The blocks of a small dataset are smaller, and there are about this many.
BYTES_WITHOUT_SHUFFLE = 2**24  # Memory for the windows where nothing is shuffled, to read ahead.
BYTES_BESIDES = 300  # Memory that a record takes besides its data.
READ_AHEAD = 1 / 8  # The next window of a segment is read when this fraction of the one before is left.


class Records:
    """TFRecord files, for task.load_examples to return; an example is one record (string, scalar).

    Records("data/train-*.tfrecord"), or several paths and patterns. The order in which they are given does not matter.
    """

    def __init__(self, *patterns: str | Path | list[str | Path]) -> None:
        """Raises BadInput unless each is a path or a pattern, or a list of them."""
        given = tf.nest.flatten(patterns)
        wrong = [repr(each) for each in given if not isinstance(each, str | os.PathLike)]
        if wrong or not given:
            rule = "pass paths or patterns of TFRecord files; task.prepare_example gets each record, and parses it"
            raise BadInput(f"Records got {wrong[0] if wrong else 'no path'}: {rule}")
        self.patterns = list(map(os.fspath, given))
        self._count: int | None = None

    def take(self, count: int) -> "Records":
        """Returns the first records only. Raises BadInput unless `count` is a positive integer."""
        if not isinstance(count, int) or count < 1:
            raise BadInput(f"Records.take got {count!r}: pass a positive integer")
        taken = Records(*self.patterns)
        taken._count = count if self._count is None else min(count, self._count)
        return taken

    def dataset(self) -> tf.data.Dataset:
        """Returns the records in the order of the files, to look at."""
        files = index_files(self.paths("task.load_examples"))
        return tf.data.TFRecordDataset([each.path for each in files]).take(-1 if self._count is None else self._count)

    def as_numpy_iterator(self) -> Iterator[bytes]:
        """Yields the records in the order of the files, to look at."""
        return self.dataset().as_numpy_iterator()

    def paths(self, hook: str) -> list[str]:
        """Returns the files, in the same order on every machine. Raises BadInput if a pattern matches none."""
        found: list[str] = []
        for pattern in self.patterns:
            if is_cache(pattern):  # A glob that finds hidden files returns the caches, too.
                continue
            if is_remote(pattern):
                matches = tf.io.gfile.glob(pattern)
            else:  # A name may look like a pattern.
                matches = [pattern] if _exists(pattern) else _files(pattern)
            matches = [path for path in matches if not is_cache(path)]
            if not matches:
                raise BadInput(f"{hook} returned Records({pattern!r}), which matches no file: give the path of some")
            found += matches
        # One file may have several names: its first one is used.
        names = {path if is_remote(path) else os.path.realpath(path): path for path in sorted(found, reverse=True)}
        return sorted(names.values())

    def examples(self, hook: str, shuffle_bytes: int | None) -> "RecordExamples":
        """Returns the examples; with None they are not shuffled. Raises BadInput if they cannot be read."""
        files = index_files(self.paths(hook))
        if self._count is not None:
            firsts = itertools.accumulate((each.length for each in files), initial=0)
            left = [(each, self._count - first) for each, first in zip(files, firsts, strict=False)]
            files = [dataclasses.replace(each, offsets=each.offsets[: count + 1]) for each, count in left if count > 0]
        return RecordExamples(files, hook, shuffle_bytes)


def _exists(path: str) -> bool:
    """Returns whether a path exists. Raises OSError for a fault that may pass, unlike os.path.exists."""
    try:
        os.stat(path)
    except (OSError, ValueError) as problem:  # ValueError: there is a zero byte in it.
        if may_pass(problem):
            raise
        return False
    return True


def _files(pattern: str) -> list[str]:
    """Returns the files that match. Raises OSError if a folder cannot be listed, where glob returns a part of them."""
    folder, name = os.path.split(pattern)
    if re.search(r"[*?[]", folder) or "**" in name or not os.path.isdir(folder or "."):
        return glob.glob(pattern, recursive=True)
    names = (each for each in os.listdir(folder or ".") if not each.startswith(".") or name.startswith("."))
    return [os.path.join(folder, each) for each in fnmatch.filter(names, name)]


def segment_count(examples_per_batch: int, bytes_of_batch: float) -> int:
    """Returns the number of segments of a pass: the largest that divides a batch, the same for any processes.

    A process that shares a segment with others reads all of it, so more than 64 processes need more segments.
    """
    large = min(examples_per_batch // RECORDS_OF_SEGMENT, int(bytes_of_batch) // BYTES_OF_SEGMENT)
    return max(count for count in range(1, max(SEGMENTS, large) + 1) if examples_per_batch % count == 0)


class RecordExamples(Examples):
    """The records of files, never cached."""

    def __init__(self, files: list[FileIndex], hook: str, shuffle_bytes: int | None) -> None:
        """`shuffle_bytes` is for the windows of all processes that share a batch; None: no shuffling."""
        super().__init__(hook, sum(each.length for each in files), tf.TensorSpec([], tf.string))
        self.sha256 = hashlib.sha256("".join(each.sha256 for each in files).encode()).hexdigest()
        self._file_first = np.cumsum([0, *(each.length for each in files)])
        self._bytes_of_files = sum(int(each.offsets[-1]) for each in files)
        bytes_of_block = min(BYTES_OF_BLOCK, max(1, self._bytes_of_files // BLOCKS_OF_SMALL_DATASET))
        blocks = [_blocks(each.offsets, bytes_of_block) for each in files]
        block_files = np.repeat(np.arange(len(files)), [len(each) - 1 for each in blocks])
        block_firsts = np.concatenate([each[:-1] for each in blocks]) + self._file_first[block_files]
        block_sizes = np.concatenate(list(map(np.diff, blocks)))
        self.most_in_block = int(block_sizes.max())
        with tf.init_scope(), tf.device("CPU:0"):  # Made once. As constants they would be in every graph.
            self.paths = tf.constant([each.path for each in files])
            self.blocks = [tf.constant(each, tf.int64) for each in (block_files, block_firsts, block_sizes)]
            # The offsets of all files, one file after the other; a file of n records has n + 1.
            self.offsets = tf.constant(np.concatenate([each.offsets for each in files]), tf.int64)
        # Views of the same memory, because an index may take gigabytes.
        views = np.split(np.asarray(self.offsets), self._file_first[1:-1] + np.arange(1, len(files)))
        self._files = [dataclasses.replace(each, offsets=view) for each, view in zip(files, views, strict=True)]
        self._window_bytes = shuffle_bytes or BYTES_WITHOUT_SHUFFLE
        self.bytes_of_record = self._bytes_of_files / self.length
        self.records_in_memory = int(self._window_bytes / (self.bytes_of_record + BYTES_BESIDES))

    def cache(self) -> None:
        """Does nothing: the operating system caches files that are read often."""

    def describe_shuffling(self, processes: int) -> tuple[str, int]:
        taken = min(self._bytes_of_files, self._window_bytes) // processes
        return f"by records, in blocks and windows, {megabytes(taken)} in each process", taken

    def one_by_one(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None) -> tf.data.Dataset:
        segments = _Segments(self, shard, first, seed)
        per_batch, places = segments.per_batch, shard.places
        first_segment, end_segment = places.start // per_batch, -(-places.stop // per_batch)
        count = end_segment - first_segment
        of_shard = tf.data.Dataset.range(first_segment, end_segment)
        read = functools.partial(segments.read, at_once=max(1, BLOCKS_AT_ONCE // count))
        together = of_shard.interleave(read, cycle_length=count, block_length=per_batch, num_parallel_calls=count)
        taken = count * per_batch
        if taken == shard.size:
            return together
        # The first or the last segment is shared with another process.
        own = slice(places.start - first_segment * per_batch, places.stop - first_segment * per_batch)
        return together.batch(taken).map(lambda places, records: (places[own], records[own])).unbatch()

    def unshuffled(self) -> tf.data.Dataset:
        return tf.data.TFRecordDataset([each.path for each in self._files]).take(self.length).enumerate()

    def rejection(self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str) -> BadInput:
        if found := re.search(r"corrupted record at (\d+)", str(problem)):
            offset = int(found[1])
            for each in self._files:
                number = int(np.searchsorted(each.offsets, offset, side="right")) - 1
                if number < each.length and not _can_be_read(each, number):
                    return damaged(each.path, number, each.offsets[number], "the checksum of its data is wrong")
        return super().rejection(problem, one_by_one, during)

    def _name(self, number: int) -> str:
        file = int(np.searchsorted(self._file_first, number, side="right")) - 1
        return f"record {number - self._file_first[file]}, counted from 0, of {self._files[file].path}"


def _blocks(offsets: np.ndarray, bytes_of_block: int) -> np.ndarray:
    """Returns the numbers of the records at which the blocks of a file begin, and the number of its records."""
    starts = np.searchsorted(offsets[:-1], np.arange(0, offsets[-1], bytes_of_block))
    return np.unique([*starts, len(offsets) - 1])


def _can_be_read(file: FileIndex, number: int) -> bool:
    start, end = file.offsets[number : number + 2]
    # TensorFlow iterates over a dataset with a byte offset only if another dataset's function makes it.
    block = tf.data.Dataset.from_tensors((file.path, start, end - start, np.int64(1)))
    return bool(list(block.flat_map(_read_block).ignore_errors()))


class _Segments:
    """The segments of a pass, and their windows."""

    def __init__(self, examples: RecordExamples, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None) -> None:
        size, steps = shard.examples_per_batch, shard.end // shard.examples_per_batch
        self._count = segment_count(size, size * examples.bytes_of_record)
        self.per_batch = per_batch = size // self._count  # Records of a segment in each batch.
        self._segment_length = tf.constant(steps * per_batch, tf.int64)
        self._skipped = tf.cast(first // size * per_batch, tf.int64)
        # The last batch's records are in its first segments, and the rest of it is padding.
        self._in_other_batches = (steps - 1) * per_batch
        self._in_last_batch = tf.constant(min(size, examples.length - (steps - 1) * size), tf.int64)
        window = examples.records_in_memory // self._count
        self._is_one_window = steps * per_batch <= window
        # Otherwise two windows of a segment are in memory at times: one that is used up, and the next.
        self._window = steps * per_batch if self._is_one_window else max(per_batch, window // 2)
        self._records, self._seed = _in_block_order(examples, seed), seed
        self._number_of_records = tf.constant(examples.length, tf.int64)

    def read(self, segment: tf.Tensor, at_once: int) -> tf.data.Dataset:
        """Returns (place, record) of a segment, one by one; it may read `at_once` blocks at the same time."""
        # The first windows differ in length, so that not all segments read at the same time.
        length, window = self._segment_length, self._window
        first_end = length if self._is_one_window else tf.minimum(length, (segment + 1) * window // self._count + 1)
        first_window = tf.maximum((self._skipped - first_end) // window + 1, 0)
        end_window = (length - first_end + window - 1) // window + 1

        def begin_of(number: tf.Tensor) -> tf.Tensor:
            return tf.clip_by_value(first_end + (number - 1) * window, 0, length) * tf.sign(number)

        def read_window(number: tf.Tensor) -> tf.data.Dataset:
            return self._read_window(segment, number, begin_of(number), begin_of(number + 1), at_once)

        windows = tf.data.Dataset.range(first_window, end_window).flat_map(read_window)
        return windows.prefetch(max(self.per_batch, int(window * READ_AHEAD)))

    def _read_window(
        self, segment: tf.Tensor, number: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, at_once: int
    ) -> tf.data.Dataset:
        """Returns (place, record) from `begin` to `end`, counted in the segment; the first ones may be skipped."""
        in_segments_before = tf.minimum(segment * self.per_batch, self._in_last_batch)
        first_place = segment * self._in_other_batches + in_segments_before
        in_last_batch = tf.clip_by_value(self._in_last_batch - segment * self.per_batch, 0, self.per_batch)
        records = self._in_other_batches + in_last_batch
        first_padding = self._number_of_records + segment * self.per_batch - in_segments_before
        end_of_records = tf.clip_by_value(end, begin, tf.maximum(begin, records))
        first = first_place + begin
        examples = self._records(first, first_place + end_of_records, at_once).enumerate(first)
        if self._seed is not None:
            seed = tf.stack([self._seed, 1])
            for each in (segment, number):
                seed = tf.random.experimental.stateless_fold_in(seed, each)
            # Use both seed words: the first does not depend on the last fold_in.
            seed_of_order = tf.random.stateless_uniform([], seed, maxval=2**31 - 1, dtype=tf.int64)
            # This moves the records; tf.gather would copy them.
            examples = shuffled(examples, tf.maximum(end_of_records - begin, 1), seed_of_order)
        last_record = self._records(self._number_of_records - 1, self._number_of_records)
        padding = last_record.repeat(end - end_of_records).enumerate(first_padding + end_of_records - records)
        return examples.concatenate(padding).skip(tf.maximum(self._skipped - begin, 0))


def _in_block_order(examples: RecordExamples, seed: tf.Tensor | None) -> Callable[..., tf.data.Dataset]:
    """Returns a function that reads the records of a pass, in the order of their blocks, from one place to another."""
    files, firsts, sizes = examples.blocks
    order = tf.range(tf.size(sizes, tf.int64))
    if seed is not None:
        order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
    files, firsts, sizes = (tf.gather(each, order) for each in (files, firsts, sizes))
    ends = tf.cumsum(sizes)

    def records(begin: tf.Tensor, end: tf.Tensor, at_once: int = 1) -> tf.data.Dataset:
        first_block = tf.searchsorted(ends, [begin], side="right", out_type=tf.int64)[0]
        end_block = tf.searchsorted(ends, [end], side="left", out_type=tf.int64)[0] + 1
        read = slice(first_block, end_block)
        begins = ends[read] - sizes[read]
        skipped = tf.maximum(begin - begins, 0)
        counts = tf.minimum(end, ends[read]) - begins - skipped
        # A file before adds one offset more than it has records.
        numbers = firsts[read] + skipped + files[read]
        starts, stops = tf.gather(examples.offsets, numbers), tf.gather(examples.offsets, numbers + counts)
        paths = tf.gather(examples.paths, files[read])
        blocks = tf.data.Dataset.from_tensor_slices((paths, starts, stops - starts, counts))
        if at_once == 1:
            return blocks.flat_map(_read_block)
        # All of a block comes before the next one, so the order is the same. Twice this length is buffered, and filled
        # with errors where a file is gone.
        length = examples.most_in_block
        return blocks.interleave(_read_block, cycle_length=at_once, block_length=length, num_parallel_calls=at_once)

    return records


def _read_block(path: tf.Tensor, start: tf.Tensor, size: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Returns consecutive records of a file, and reads no byte besides."""
    # tf.data.TFRecordDataset always starts at a file's first record.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], byte_offsets=[start], compression_type="", buffer_size=size
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(count)
