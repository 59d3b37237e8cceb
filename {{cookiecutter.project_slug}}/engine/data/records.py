"""TFRecord files: Records, which task.load_examples returns, and their records as examples."""

import bisect
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from engine.data.element_spec import megabytes
from engine.data.examples import Examples, Shard
from engine.data.record_index import FILES_AT_ONCE, FOOTER, HEADER, FileIndex, damaged, index_files, is_cache, is_remote
from engine.data.segments import Blocks, Segments, read_block
from engine.errors import BadInput, may_pass

BLOCKS_AT_ONCE = 256  # Blocks that a process reads at the same time, because storage may answer late.
BYTES_WITHOUT_SHUFFLE = 2**26  # For the windows where nothing is shuffled. Shorter ones begin further from points.
BYTES_BESIDES = 300  # Memory that a record takes besides its data.


class Records:
    """TFRecord files, for task.load_examples to return; an example is one record (string, scalar).

    Records("data/train-*.tfrecord"), or several paths and patterns. The order in which they are given does not matter.
    """

    def __init__(self, *patterns: str | Path | list[str | Path]) -> None:
        """Raises BadInput unless each is a path or a pattern, or a list of them."""
        given = tf.nest.flatten(patterns)
        wrong = [repr(pattern) for pattern in given if not isinstance(pattern, str | os.PathLike)]
        if wrong or not given:
            raise BadInput(
                f"Records got {wrong[0] if wrong else 'no path'}: pass paths or patterns of TFRecord files; "
                "task.prepare_example gets each record, and parses it"
            )
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
        return tf.data.TFRecordDataset([file.path for file in files]).take(-1 if self._count is None else self._count)

    def as_numpy_iterator(self) -> Iterator[bytes]:
        """Yields the records in the order of the files, to look at."""
        return self.dataset().as_numpy_iterator()

    def paths(self, hook: str) -> list[str]:
        """Returns the files, in the same order on every machine. Raises BadInput if a pattern matches none."""
        paths: list[str] = []
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
            paths += matches
        # One file may have several names: its first one is used.
        names = {path if is_remote(path) else os.path.realpath(path): path for path in sorted(paths, reverse=True)}
        return sorted(names.values())

    def examples(self, hook: str, shuffle_bytes: int | None, index_folder: Path | None = None) -> "RecordExamples":
        """Returns the examples; with `shuffle_bytes` None they are not shuffled.

        Indexes that cannot be cached beside their files are cached in `index_folder`. Raises BadInput if a file cannot
        be read.
        """
        files = index_files(self.paths(hook), index_folder)
        if self._count is not None:
            left = [(file, self._count - first) for file, first in zip(files, _first_records(files), strict=False)]
            files = [file.take(count) for file, count in left if count > 0]
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

    def cache(self) -> None:
        """Does nothing: the operating system caches files that are read often."""

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

    def rejection(self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str) -> BadInput:
        match = re.search(r"corrupted record at (\d+)", str(problem))
        if match and (damage := _first_damaged(self._blocks.files, int(match[1]))):
            return damaged(*damage, "the checksum of its data is wrong")
        return super().rejection(problem, one_by_one, during)

    def _name(self, number: int) -> str:
        firsts = _first_records(self._blocks.files)
        file = bisect.bisect_right(firsts, number) - 1
        return f"record {number - firsts[file]}, counted from 0, of {self._blocks.files[file].path}"


def _first_records(files: list[FileIndex]) -> list[int]:
    """Returns the number of the first record of each file, and at last the number of all records."""
    return list(itertools.accumulate((file.length for file in files), initial=0))


def _first_damaged(files: list[FileIndex], offset: int) -> tuple[str, int, int] | None:
    """Returns file, number and offset of the first record that cannot be read around an offset in any of the files."""
    files = [file for file in files if offset < file.size]
    befores = [np.searchsorted(file.points[:-1, 1], offset, side="right") - 1 for file in files]
    begins, ends = (
        np.array([file.points[before + step] for file, before in zip(files, befores, strict=True)]).reshape(-1, 2)
        for step in (0, 1)
    )

    def lengths(index: tf.Tensor, path: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.data.Dataset:
        """Returns the file's index with the length of each record of its block, up to the damaged one."""
        records = read_block(path, begin[1], end[1] - begin[1], tf.constant(0, tf.int64), end[0] - begin[0])
        return records.map(lambda record: (index, tf.strings.length(record))).ignore_errors()

    # One graph for all files, because a function for each of thousands would take minutes to make.
    blocks = tf.data.Dataset.from_tensor_slices((np.arange(len(files)), [file.path for file in files], begins, ends))
    records = blocks.interleave(lengths, FILES_AT_ONCE, num_parallel_calls=FILES_AT_ONCE)
    counted = np.zeros_like(begins)  # Intact records, and their bytes, of each block.
    for indexes, sizes in records.batch(4096).as_numpy_iterator():
        np.add.at(counted, indexes, np.stack([np.ones_like(sizes), HEADER + sizes + FOOTER], axis=1))
    for file, begin, intact, end in zip(files, begins, counted, ends, strict=True):
        number, place = (begin + intact).tolist()
        if number < end[0]:
            return file.path, number, place
    return None
