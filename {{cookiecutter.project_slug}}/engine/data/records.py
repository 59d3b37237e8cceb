"""Record files as task.load_examples gives them."""

import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from engine.data.record_examples import RecordExamples, in_file_order
from engine.data.record_index import FileIndex, index_files, is_cache, is_remote
from engine.errors import BadInput


class Records:
    """TFRecord files, for task.load_examples to return; an example is one record (string, scalar).

    Records("data/train-*.tfrecord"), or several paths and patterns. The order in which they are given does not matter.
    """

    def __init__(self, *patterns: str | Path | list[str | Path]) -> None:
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
        return in_file_order(files).take(-1 if self._count is None else self._count)

    def as_numpy_iterator(self) -> Iterator[bytes]:
        """Yields the records in the order of the files, to look at."""
        return self.dataset().as_numpy_iterator()

    def paths(self, hook: str) -> list[str]:
        """Returns the files, in the same order on every machine. Raises BadInput if a pattern matches none."""
        found: dict[str, str] = {}
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

    def examples(self, hook: str, shuffle_bytes: int | None) -> RecordExamples:
        """Returns the examples; with None they are not shuffled. Raises BadInput if they cannot be read."""
        files = index_files(self.paths(hook))
        sha256 = hashlib.sha256("".join(each.sha256 for each in files).encode()).hexdigest()
        length = sum(each.length for each in files)
        fingerprint = {"patterns": str(self), "files": len(files), "records": length, "sha256": sha256}
        files = _shortened(files, self._count) if self._count is not None else files
        return RecordExamples(files, hook, shuffle_bytes, fingerprint)


def _shortened(files: list[FileIndex], count: int) -> list[FileIndex]:
    shortened = []
    for each in files:
        offsets = each.offsets[: count + 1]
        count -= len(offsets) - 1
        shortened.append(FileIndex(each.path, offsets, each.sha256))
        if not count:
            break
    return shortened
