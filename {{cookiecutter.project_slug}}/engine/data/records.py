"""TFRecord files: Records, which task.load_examples returns, and their records as examples.

The order of the records follows from a seed. Each process reads its shard only, from any place in them. A pass goes
over the records in the order of the blocks, which are shuffled; a block is some consecutive records of a file. This
sequence is cut into segments of equal length, as many as `segment_count` says, and a batch takes equally many records
of each segment. Before that, the records of a segment are shuffled in windows. The windows of all segments together are
in memory. A record's place is its number in the sequence; all else follows from the seed of the pass.
"""

import fnmatch
import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from engine.data.element_spec import megabytes
from engine.data.examples import Examples, Shard, shuffled
from engine.data.record_index import BYTES_OF_POINT, FileIndex, index_files, is_remote
from engine.errors import BadInput

BLOCKS_AT_ONCE = 256  # Blocks that a process reads at the same time, because storage may answer late.
BYTES_WITHOUT_SHUFFLE = 2**26  # For what is read ahead where nothing is shuffled.
BYTES_BESIDES = 300  # Memory that a record takes besides its data.
SEGMENTS = 64  # At most; of large batches as many as give each segment this many records and bytes of a batch.
RECORDS_OF_SEGMENT, BYTES_OF_SEGMENT = 32, 2**18
BYTES_OF_BLOCK = BYTES_OF_POINT  # A block is consecutive records that are read at once.
BLOCKS_OF_SMALL_DATASET = 1024  # The blocks of a small dataset are smaller, and there are about this many.
BLOCKS_IN_MEMORY = 2**22  # The blocks of large data are larger, and there are about this many.
READ_AHEAD = 1 / 8  # The next window of a segment is read when this fraction of the one before is left.


class Records:
    """TFRecord files, for task.load_examples to return; an example is one record (string, scalar).

    Records("data/train-*.tfrecord"), or several paths and patterns. The order in which they are given does not matter.
    """

    def __init__(self, *patterns: str | Path | list[str | Path]) -> None:
        """Each is a path or a pattern, or a list of them."""
        self.patterns = list(map(os.fspath, tf.nest.flatten(patterns)))
        self._count: int | None = None

    def take(self, count: int) -> "Records":
        """Returns the first records only."""
        taken = Records(*self.patterns)
        taken._count = count if self._count is None else min(count, self._count)
        return taken

    def dataset(self) -> tf.data.Dataset:
        """Returns the records in the order of the files, to look at."""
        paths = self.paths("task.load_examples")
        return tf.data.TFRecordDataset(paths).take(-1 if self._count is None else self._count)

    def as_numpy_iterator(self) -> Iterator[bytes]:
        """Yields the records in the order of the files, to look at."""
        return self.dataset().as_numpy_iterator()

    def paths(self, hook: str) -> list[str]:
        """Returns the files, in the same order on every machine. Raises BadInput if a pattern matches none."""
        paths: list[str] = []
        for pattern in self.patterns:
            matches = tf.io.gfile.glob(pattern) if is_remote(pattern) else _files(pattern)
            if not matches:
                raise BadInput(f"{hook} returned Records({pattern!r}), which matches no file: give the path of some")
            paths += matches
        # One file may have several names: its first one is used.
        names = {path if is_remote(path) else os.path.realpath(path): path for path in sorted(paths, reverse=True)}
        return sorted(names.values())

    def examples(self, hook: str, shuffle_bytes: int | None, index_folder: Path | None = None) -> "RecordExamples":
        """Returns the examples; with `shuffle_bytes` None they are not shuffled.

        Indexes are cached in `index_folder`, if any. Raises BadInput if a file cannot be read.
        """
        files = index_files(self.paths(hook), index_folder)
        taken, left = [], sum(file.length for file in files) if self._count is None else self._count
        for file in files:
            taken += [file.take(left)] if left > 0 else []
            left -= file.length
        return RecordExamples(taken, hook, shuffle_bytes)


def _files(pattern: str) -> list[str]:
    """Returns the files that match. Raises OSError if a folder cannot be listed, where glob returns a part of them."""
    if os.path.exists(pattern):  # A name may look like a pattern.
        return [pattern]
    folder, name = os.path.split(pattern)
    if re.search(r"[*?[]", folder) or "**" in name or not os.path.isdir(folder or "."):
        return glob.glob(pattern, recursive=True)
    names = [file for file in os.listdir(folder or ".") if not file.startswith(".") or name.startswith(".")]
    return [os.path.join(folder, file) for file in fnmatch.filter(names, name)]


class RecordExamples(Examples):
    """The records of files, never cached."""

    def __init__(self, files: list[FileIndex], hook: str, shuffle_bytes: int | None) -> None:
        """`shuffle_bytes` is for the windows of all processes that share a batch; None: no shuffling."""
        super().__init__(hook, sum(file.length for file in files), tf.TensorSpec([], tf.string))
        self.sha256 = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
        self._blocks = Blocks(files)
        self._window_bytes = shuffle_bytes or BYTES_WITHOUT_SHUFFLE
        self.records_in_memory = int(self._window_bytes / (self._blocks.bytes_of_record + BYTES_BESIDES))

    def describe_shuffling(self, processes: int) -> tuple[str, int]:
        taken = min(self._blocks.bytes_of_files, self._window_bytes) // processes
        return f"by records, in blocks and windows, {megabytes(taken)} in each process", taken

    def one_by_one(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None) -> tf.data.Dataset:
        segments = Segments(self._blocks, self.records_in_memory, shard, first, seed)
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
        return tf.data.TFRecordDataset([file.path for file in self._blocks.files]).take(self.length).enumerate()

    def _name(self, number: int) -> str:
        for file in self._blocks.files:
            if number < file.length:
                break
            number -= file.length
        return f"record {number}, counted from 0, of {file.path}"


def segment_count(examples_per_batch: int, bytes_of_batch: float) -> int:
    """Returns the number of segments of a pass: the largest that divides a batch, the same for any processes.

    A process that shares a segment with others reads all of it, so more than 64 processes need more segments.
    """
    large = min(examples_per_batch // RECORDS_OF_SEGMENT, int(bytes_of_batch) // BYTES_OF_SEGMENT)
    return max(count for count in range(1, max(SEGMENTS, large) + 1) if examples_per_batch % count == 0)


class Blocks:
    """The blocks of record files, which begin at points of the files' indexes."""

    def __init__(self, files: list[FileIndex]) -> None:
        self.length, self.bytes_of_files = sum(file.length for file in files), sum(file.size for file in files)
        self.bytes_of_record = self.bytes_of_files / self.length
        bytes_of_block = min(BYTES_OF_BLOCK, self.bytes_of_files // BLOCKS_OF_SMALL_DATASET)
        bytes_of_block = max(1, bytes_of_block, self.bytes_of_files // BLOCKS_IN_MEMORY)
        self.files = [file.thinned(bytes_of_block) for file in files]
        file_of_block = np.repeat(np.arange(len(files)), [len(file.points) - 1 for file in self.files])
        offsets = np.concatenate([file.points[:-1, 1] for file in self.files])
        # The number of records of each block, and its bytes.
        counts, sizes = np.concatenate([np.diff(file.points, axis=0) for file in self.files]).T
        self._most_in_block = int(counts.max())
        with tf.init_scope(), tf.device("CPU:0"):  # Made once. As constants they would be in every graph.
            self._paths = tf.constant([file.path for file in files])
            self._blocks = [tf.constant(column, tf.int64) for column in (file_of_block, offsets, sizes, counts)]

    def in_order(self, seed: tf.Tensor | None) -> Callable[..., tf.data.Dataset]:
        """Returns a function that reads the records of a pass, in the order of their blocks, from place to place."""
        order = tf.range(tf.size(self._blocks[0], tf.int64))
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
        files, offsets, sizes, counts = (tf.gather(column, order) for column in self._blocks)
        ends = tf.cumsum(counts)

        def records(begin: tf.Tensor, end: tf.Tensor, at_once: int = 1) -> tf.data.Dataset:
            first_block = tf.searchsorted(ends, [begin], side="right", out_type=tf.int64)[0]
            end_block = tf.searchsorted(ends, [end], side="left", out_type=tf.int64)[0] + 1
            needed = slice(first_block, end_block)
            begins = ends[needed] - counts[needed]
            skipped = tf.maximum(begin - begins, 0)
            taken = tf.minimum(end, ends[needed]) - begins - skipped
            paths = tf.gather(self._paths, files[needed])
            blocks = tf.data.Dataset.from_tensor_slices((paths, offsets[needed], sizes[needed], skipped, taken))
            if at_once == 1:
                return blocks.flat_map(read_block)
            # All of a block comes before the next one, so the order is the same. Twice this length is buffered, and
            # filled with errors where a file is gone.
            length = self._most_in_block
            return blocks.interleave(read_block, cycle_length=at_once, block_length=length, num_parallel_calls=at_once)

        return records


def read_block(
    path: tf.Tensor, start: tf.Tensor, size: tf.Tensor, skipped: tf.Tensor, count: tf.Tensor
) -> tf.data.Dataset:
    """Returns `count` consecutive records of a file behind some that are skipped, and reads `size` bytes at `start`."""
    # tf.data.TFRecordDataset always starts at a file's first record. Its operation works only within other datasets.
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path], byte_offsets=[start], compression_type="", buffer_size=size
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).skip(skipped).take(count)


class Segments:
    """The segments of a pass, and their windows."""

    def __init__(
        self, blocks: Blocks, records_in_memory: int, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None
    ) -> None:
        size, steps = shard.examples_per_batch, shard.end // shard.examples_per_batch
        self._count = segment_count(size, size * blocks.bytes_of_record)
        self.per_batch = per_batch = size // self._count  # Records of a segment in each batch.
        self._segment_length = tf.constant(steps * per_batch, tf.int64)
        self._skipped = tf.cast(first // size * per_batch, tf.int64)
        # The last batch's records are in its first segments, and the rest of it is padding.
        self._in_other_batches = (steps - 1) * per_batch
        self._in_last_batch = tf.constant(min(size, blocks.length - (steps - 1) * size), tf.int64)
        window = records_in_memory // self._count
        self._is_one_window = steps * per_batch <= window
        # Otherwise two windows of a segment are in memory at times: one that is used up, and the next.
        self._window = steps * per_batch if self._is_one_window else max(per_batch, window // 2)
        self._records, self._seed = blocks.in_order(seed), seed
        self._number_of_records = tf.constant(blocks.length, tf.int64)

    def read(self, segment: tf.Tensor, at_once: int) -> tf.data.Dataset:
        """Returns (place, record) of a segment, one by one; it may read `at_once` blocks at the same time."""
        length, window = self._segment_length, self._window
        ahead = max(self.per_batch, int(window * READ_AHEAD))
        if self._seed is None:
            return self._read_window(segment, tf.constant(0, tf.int64), self._skipped, length, at_once).prefetch(ahead)
        # The first windows differ in length, so that not all segments read at the same time.
        first_end = length if self._is_one_window else tf.minimum(length, (segment + 1) * window // self._count + 1)
        first_window = tf.maximum((self._skipped - first_end) // window + 1, 0)
        end_window = (length - first_end + window - 1) // window + 1

        def begin_of(number: tf.Tensor) -> tf.Tensor:
            return tf.clip_by_value(first_end + (number - 1) * window, 0, length) * tf.sign(number)

        def read_window(number: tf.Tensor) -> tf.data.Dataset:
            return self._read_window(segment, number, begin_of(number), begin_of(number + 1), at_once)

        windows = tf.data.Dataset.range(first_window, end_window).flat_map(read_window)
        return windows.prefetch(ahead)

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
            for part in (segment, number):
                seed = tf.random.experimental.stateless_fold_in(seed, part)
            # Use both seed words: the first does not depend on the last fold_in.
            seed_of_order = tf.random.stateless_uniform([], seed, maxval=2**31 - 1, dtype=tf.int64)
            # This moves the records; tf.gather would copy them.
            examples = shuffled(examples, tf.maximum(end_of_records - begin, 1), seed_of_order)
        last_record = self._records(self._number_of_records - 1, self._number_of_records)
        padding = last_record.repeat(end - end_of_records).enumerate(first_padding + end_of_records - records)
        return examples.concatenate(padding).skip(tf.maximum(self._skipped - begin, 0))
