"""Where the records of TFRecord files are: found without reading the records, and cached beside the run.

A record is its length (8 bytes), a checksum of the length, its data, which are skipped, and a checksum of the data. An
index contains points, which are some of the records, because the places of all would take gigabytes: whoever wants the
other records skips those after a point. An index is made again when its file's size or time of change differs, or when
the cache is damaged.
"""

import array
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, Unavailable, asked_to_stop
from engine.files import until_read

VERSION = 5
BYTES_OF_POINT = 2**18  # The first record at or after each multiple of this is a point.
POINTS_OF_SMALL_FILE = 1024  # The points of a small file are closer, and there are about this many.
RECORDS_AT_ONCE = 2**16  # Records that are checked together while an index is made.
FILES_AT_ONCE = 16  # Storage may answer late.
SECONDS_BETWEEN_LINES = 10.0
HEADER, FOOTER = 12, 4  # Bytes of a record before and behind its data.
CRC_TABLE = np.arange(256, dtype=np.uint32)  # What each byte adds to a CRC-32C.
for _ in range(8):
    CRC_TABLE = np.where(CRC_TABLE & 1, CRC_TABLE >> 1 ^ np.uint32(0x82F63B78), CRC_TABLE >> 1)


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """Where the records of one file are."""

    path: str
    points: np.ndarray  # The number and the offset of some records; the last point is the end, int64 [points, 2].
    sha256: str  # It covers the lengths and checksums of all records, and not the file's name.

    @property
    def length(self) -> int:
        """The number of records."""
        return int(self.points[-1, 0])

    @property
    def size(self) -> int:
        """The bytes of the file up to the last point."""
        return int(self.points[-1, 1])

    def take(self, count: int) -> "FileIndex":
        """Returns the index of the first records; the offset of its end may be up to a point behind them."""
        count = min(count, self.length)
        kept = np.searchsorted(self.points[:, 0], count)
        return dataclasses.replace(self, points=np.vstack([self.points[:kept], [count, self.points[kept, 1]]]))

    def thinned(self, step: int) -> "FileIndex":
        """Returns the index with the first of its points at or after each multiple of `step` bytes, and the end."""
        kept = np.concatenate([[0], _first_after_multiples(self.points[:, 1], step), [len(self.points) - 1]])
        return dataclasses.replace(self, points=self.points[np.unique(kept)])


def index_files(paths: list[str], folder: Path | None = None) -> list[FileIndex]:
    """Returns the index of each file, cached in `folder`, if any.

    Raises BadInput, naming the file, unless it contains complete records.
    """
    # In any order, so that processes that start together make the indexes of other files, and find the rest cached.
    order, indexes = random.SystemRandom().sample(paths, len(paths)), {}
    printed = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        for path, index in zip(order, threads.map(functools.partial(_index, folder=folder), order), strict=True):
            indexes[path] = index
            if time.monotonic() > printed + SECONDS_BETWEEN_LINES:
                console.print(f"{len(indexes)} of {len(paths)} record files have an index, which is made once")
                printed = time.monotonic()
    return [indexes[path] for path in paths]


def _index(path: str, folder: Path | None) -> FileIndex:
    try:
        return until_read(lambda: _cached(path, folder), path, obeys_signals=True)
    except (OSError, tf.errors.OpError) as problem:
        reason = getattr(problem, "strerror", None) or getattr(problem, "message", None) or problem
        raise BadInput(f"{path} cannot be read ({reason}): restore it, or exclude it") from None


def _cached(path: str, folder: Path | None) -> FileIndex:
    """Returns the index of a file from its cache, or makes and caches it, completely or not at all."""
    size, changed = _size_and_time(path)
    if folder is None:
        return _make(path, size)
    # The key contains size and time, because the files of two workers may have one name.
    key = f"{VERSION} {path if is_remote(path) else os.path.abspath(path)} {size} {changed}"
    cache = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.index"
    with contextlib.suppress(OSError):
        digest, body = (content := cache.read_bytes())[:32], content[32:]
        if digest == hashlib.sha256(body).digest():
            return FileIndex(path, np.frombuffer(body[64:], "<i8").astype(np.int64).reshape(-1, 2), body[:64].decode())
    index = _make(path, size)
    body = index.sha256.encode() + index.points.astype("<i8").tobytes()
    temporary = folder / f".{uuid.uuid4().hex}"  # Several processes may write at once.
    with contextlib.suppress(OSError):  # Then it is made again at the next start.
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.replace(cache)
    return index


def _size_and_time(path: str) -> tuple[int, int]:
    if is_remote(path):
        status = tf.io.gfile.stat(path)
        return status.length, status.mtime_nsec
    return os.stat(path).st_size, os.stat(path).st_mtime_ns  # TensorFlow would round the time to seconds.


def _make(path: str, size: int) -> FileIndex:
    if not size:
        raise BadInput(f"{path} is empty: write it again, or exclude it")
    step = min(BYTES_OF_POINT, max(1, size // POINTS_OF_SMALL_FILE))
    first, end, points = 0, 0, [np.zeros([1, 2], np.int64)]
    digest, all_checksums = hashlib.sha256(), bytearray()
    with tf.io.gfile.GFile(path, "rb") if is_remote(path) else open(path, "rb") as file:
        for offsets, headers, checksums in _walk(file, size):
            wrong = np.flatnonzero(~_are_headers(headers))
            if not first and (not len(headers) or 0 in wrong):
                raise BadInput(
                    f"{path} is not an uncompressed TFRecord file (its first record's length is damaged): unpack it, "
                    "read it with tf.data.TFRecordDataset, or exclude it"
                )
            if len(wrong):
                raise _damaged(path, first + wrong[0], offsets[wrong[0]], "the checksum of its length is wrong")
            if asked_to_stop.is_set():
                raise Unavailable(f"stopped by a signal while the index of {path} was made")
            if offsets[-1] > size:
                raise _damaged(path, first + len(offsets) - 2, offsets[-2], "it is cut short")
            digest.update(headers.tobytes())
            all_checksums += checksums
            places = _first_after_multiples(offsets, step)
            points.append(np.stack([first + places, offsets[places]], axis=1))
            first, end = first + len(headers), offsets[-1]
    digest.update(all_checksums)
    points.append(np.array([[first, end]]))  # It may be a point already.
    return FileIndex(path, np.unique(np.concatenate(points), axis=0), digest.hexdigest())


def _walk(file: BinaryIO, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, bytearray]]:
    """Yields offsets, headers (uint8 [n, 12]) and checksums (4 bytes each) of RECORDS_AT_ONCE records after each other.

    The offset of their end is the last one. It is beyond the size of the file if the last record is cut short.
    """
    end, header = 0, file.read(HEADER)
    while header:
        offsets, headers, checksums = array.array("q", [end]), bytearray(), bytearray()
        while header and len(offsets) <= RECORDS_AT_ONCE:
            if len(header) < HEADER:
                end = size + 1
            else:
                headers += header
                length = min(int.from_bytes(header[:8], "little"), size)  # A length that is wrong may be huge.
                end += HEADER + length + FOOTER
            offsets.append(end)
            if end > size:
                header = b""
                break
            file.seek(end - FOOTER)
            following = file.read(FOOTER + HEADER)
            checksums += following[:FOOTER]
            header = following[FOOTER:]
        yield np.array(offsets), np.frombuffer(headers, np.uint8).reshape(-1, HEADER), checksums


def _first_after_multiples(offsets: np.ndarray, step: int) -> np.ndarray:
    """Returns which offsets behind the first are the first ones at or after a multiple of `step`."""
    return np.flatnonzero(np.diff(offsets // step)) + 1


def _damaged(path: str, number: int, offset: int, reason: str) -> BadInput:
    return BadInput(
        f"{path}: record {number}, counted from 0, at byte {offset} is damaged ({reason}): restore the file "
        "from a backup, or write it again without that record"
    )


def is_remote(path: str) -> bool:
    """Returns whether TensorFlow, and not the operating system, can open a path, such as gs://bucket/file."""
    return "://" in path


def _are_headers(headers: np.ndarray) -> np.ndarray:
    """Returns for each header (uint8 [n, 12]) whether it is a length and the masked CRC-32C of that length."""
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    for column in headers[:, :8].T:
        crc = CRC_TABLE[(crc ^ column) & 0xFF] ^ crc >> 8
    crc = ~crc
    masked = (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
    return masked == headers[:, 8:].copy().view("<u4")[:, 0]
