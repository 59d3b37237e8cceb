"""Record files for tests, and less memory to shuffle them in than --shuffle-megabytes can say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf


def write_records(folder: Path, sizes: list[int], data: Callable[[int], bytes] = lambda number: b"") -> str:
    """Writes files of so many records, which begin with their number over all files; returns their pattern."""
    number = 0
    for name, size in enumerate(sizes):
        with tf.io.TFRecordWriter(str(folder / f"train-{name}.tfrecord")) as writer:
            for _ in range(size):
                writer.write(number.to_bytes(8, "little") + data(number))
                number += 1
    return str(folder / "train-*.tfrecord")


def shuffle_in(monkeypatch: pytest.MonkeyPatch, memory: int, *, block: int) -> None:
    """Gives all record files so many bytes to shuffle in, and blocks of so many."""
    from engine.data import records

    make = records.RecordExamples.__init__

    def make_with(self: Any, files: Any, hook: str, shuffle_bytes: int | None, *more: Any) -> None:
        make(self, files, hook, None if shuffle_bytes is None else memory, *more)

    monkeypatch.setattr(records.RecordExamples, "__init__", make_with)
    monkeypatch.setattr(records, "BYTES_WITHOUT_SHUFFLE", memory)
    monkeypatch.setattr(records, "BYTES_OF_BLOCK", block)
    monkeypatch.setattr(records, "BLOCKS_AT_ONCE", 24)  # To start so many reads takes longer than small blocks do.
