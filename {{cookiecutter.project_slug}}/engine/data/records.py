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

import tensorflow as tf

from engine.data.element_spec import megabytes
from engine.data.examples import Examples, Shard
from engine.data.record_index import FileIndex, index_files, is_remote
from engine.data.segments import Blocks, Segments
from engine.errors import BadInput

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
        if self._count is not None:
            left = [(file, self._count - first) for file, first in zip(files, _first_records(files), strict=False)]
            files = [file.take(count) for file, count in left if count > 0]
        return RecordExamples(files, hook, shuffle_bytes)


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
        firsts = _first_records(self._blocks.files)
        file = bisect.bisect_right(firsts, number) - 1
        return f"record {number - firsts[file]}, counted from 0, of {self._blocks.files[file].path}"


def _first_records(files: list[FileIndex]) -> list[int]:
    """Returns the number of the first record of each file, and at last the number of all records."""
    return list(itertools.accumulate((file.length for file in files), initial=0))
