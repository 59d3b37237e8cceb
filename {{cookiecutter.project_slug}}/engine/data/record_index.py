"""Where the records of TFRecord files are: found without reading the records, and cached beside the files.

A record is its length (8 bytes), a checksum of the length, its data, which are skipped, and a checksum of the data. An
index contains points, which are some of the records, because the places of all would take gigabytes: whoever wants the
other records skips those after a point. The index of a file is cached in a hidden file beside it, or beside the run
where that folder cannot be written. It is made again when the file's size or time of change differs, or when the cache
is damaged.
"""

import array
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, Unavailable, asked_to_stop
from engine.files import until_read

VERSION = 3
BYTES_OF_POINT = 2**15  # The first record at or after each multiple of this is a point.
POINTS_OF_SMALL_FILE = 1024  # The points of a small file are closer, and there are about this many.
RECORDS_AT_ONCE = 2**16  # Records that are checked together while an index is made.
FILES_AT_ONCE = 16  # Storage may answer late.
SECONDS_BETWEEN_LINES = 10.0
SECONDS_OF_LEFTOVER = 3600.0  # A cache that is still being written after this time was left by a process that died.
HEADER, FOOTER = 12, 4  # Bytes of a record before and behind its data.
# The first bytes of files that gzip or zlib has compressed.
COMPRESSED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
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


def index_files(paths: list[str], second_folder: Path | None = None) -> list[FileIndex]:
    """Returns the index of each file, cached beside it or else in `second_folder`, if any.

    Raises BadInput, naming the file, unless it contains complete records.
    """
    # In any order, so that processes that start together make the indexes of other files, and find the rest cached.
    order = random.SystemRandom().sample(paths, len(paths))
    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        pending = {path: threads.submit(_index, path, second_folder) for path in order}
        try:
            _wait_for(list(pending.values()))
            indexes = [pending[path].result() for path in paths]
        finally:
            threads.shutdown(cancel_futures=True)
    if not_cached := [index.path for index, is_cached in indexes if not is_cached]:
        console.print(f"The index of {not_cached[0]} cannot be cached: it is made again at each start")
    return [index for index, _ in indexes]


def _wait_for(pending: list[concurrent.futures.Future]) -> None:
    """Returns when all indexes are made; prints how many are. Raises the exception of the first one that fails."""
    while True:
        done, not_done = concurrent.futures.wait(pending, SECONDS_BETWEEN_LINES, concurrent.futures.FIRST_EXCEPTION)
        made = sum(future.exception() is None for future in done)
        if asked_to_stop.is_set() and made < len(pending):
            raise Unavailable(f"stopped by a signal when {made} of {len(pending)} record files had an index")
        for future in done:
            future.result()
        if not not_done:
            return
        console.print(f"{made} of {len(pending)} record files have an index, which is made once")


def _index(path: str, second_folder: Path | None) -> tuple[FileIndex, bool]:
    """Returns the index of a file, and whether it is in a cache now."""
    caches = _cache_paths(path, second_folder)

    def read() -> tuple[dict[str, Any], FileIndex, bool]:
        key = _key(path)
        cached = next(filter(None, (_read_cache(cache, path, key) for cache in caches)), None)
        return key, cached or _make(path, key["size"]), cached is not None

    try:
        key, index, is_cached = until_read(read, path, obeys_signals=True)
    except (OSError, tf.errors.OpError) as problem:
        reason = getattr(problem, "strerror", None) or getattr(problem, "message", None) or problem
        raise BadInput(f"{path} cannot be read ({reason}): restore it, or exclude it") from None
    return index, is_cached or any(_write_cache(cache, index, key) for cache in caches)


# --- Making -----------------------------------------------------------------------------------------------------------


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
                if headers.tobytes().startswith(COMPRESSED):
                    raise BadInput(f"{path} is compressed: unpack it, or read it with tf.data.TFRecordDataset")
                raise BadInput(f"{path} is not a TFRecord file (its first record's length is damaged): exclude it")
            if len(wrong):
                raise damaged(path, first + wrong[0], offsets[wrong[0]], "the checksum of its length is wrong")
            if asked_to_stop.is_set():
                raise Unavailable(f"stopped by a signal while the index of {path} was made")
            if offsets[-1] > size:
                if _key(path)["size"] > size:
                    raise BadInput(f"{path} is still being written: start again when it is complete")
                raise damaged(path, first + len(offsets) - 2, offsets[-2], "it is cut short")
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


def damaged(path: str, number: int, offset: int, reason: str) -> BadInput:
    """Returns the error for a record that cannot be read."""
    return BadInput(
        f"{path}: record {number}, counted from 0, at byte {offset} is damaged ({reason}): restore the file "
        "from a backup, or write it again without that record"
    )


def is_remote(path: str) -> bool:
    """Returns whether TensorFlow, and not the operating system, can open a path, such as gs://bucket/file."""
    return "://" in path


def is_cache(path: str) -> bool:
    """Returns whether a file is the index of a file beside it, complete or being written."""
    folder, name = os.path.split(path)
    match = re.fullmatch(r"\.(.+)\.index(\..*)?", name)
    return match is not None and tf.io.gfile.exists(os.path.join(folder, match[1]))


def _are_headers(headers: np.ndarray) -> np.ndarray:
    """Returns for each header (uint8 [n, 12]) whether it is a length and the masked CRC-32C of that length."""
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    for column in headers[:, :8].T:
        crc = CRC_TABLE[(crc ^ column) & 0xFF] ^ crc >> 8
    crc = ~crc
    masked = (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
    return masked == headers[:, 8:].copy().view("<u4")[:, 0]


# --- Caching ----------------------------------------------------------------------------------------------------------


def _key(path: str) -> dict[str, Any]:
    """Returns the key (version, name, size, time of change) that a cached index must match."""
    if is_remote(path):
        status = tf.io.gfile.stat(path)
        size, changed = status.length, status.mtime_nsec
    else:  # TensorFlow would round the time to seconds.
        size, changed = os.stat(path).st_size, os.stat(path).st_mtime_ns
    return {"version": VERSION, "name": os.path.basename(path), "size": size, "changed": changed}


def _cache_paths(path: str, second_folder: Path | None) -> list[str]:
    """Returns where the index of a file may be cached, the best place first."""
    folder, name = os.path.split(path)
    caches = [os.path.join(folder, f".{name}.index")]
    if second_folder is not None:  # Files of several folders may have the same name.
        absolute = path if is_remote(path) else os.path.abspath(path)
        caches.append(os.path.join(second_folder, f"{hashlib.sha256(absolute.encode()).hexdigest()}.index"))
    return caches


def _read_cache(cache: str, path: str, key: dict[str, Any]) -> FileIndex | None:
    """Returns the index of `path` that is cached, or None without an intact one that matches the key."""
    try:
        with tf.io.gfile.GFile(cache, "rb") as file:
            first_line, body = file.read().split(b"\n", 1)
        head = json.loads(first_line)
        if head["body_sha256"] != hashlib.sha256(body).hexdigest() or head["key"] != key:
            return None
        return FileIndex(path, np.frombuffer(body, "<i8").astype(np.int64).reshape(-1, 2), head["sha256"])
    except (tf.errors.OpError, ValueError, TypeError, KeyError):
        return None


def _write_cache(cache: str, index: FileIndex, key: dict[str, Any]) -> bool:
    """Caches an index, completely or not at all; returns whether it did."""
    body = index.points.astype("<i8").tobytes()
    head = {"sha256": index.sha256, "key": key, "body_sha256": hashlib.sha256(body).hexdigest()}
    temporary = f"{cache}.{uuid.uuid4().hex}"  # Several processes may write at once.
    try:
        tf.io.gfile.makedirs(os.path.dirname(cache) or ".")
        _remove_leftovers(os.path.dirname(cache) or ".")
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
        tf.io.gfile.rename(temporary, cache, overwrite=True)
    except tf.errors.OpError:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(temporary)
        return False
    return True


@functools.cache
def _remove_leftovers(folder: str) -> None:
    """Removes, once in a process, what processes that were killed while they wrote a cache have left in a folder."""
    for name in tf.io.gfile.listdir(folder):
        if re.fullmatch(r"(\..+|[0-9a-f]{64})\.index\.[0-9a-f]{32}", name):
            path = os.path.join(folder, name)
            with contextlib.suppress(tf.errors.OpError):  # Its process may have renamed it.
                if time.time() - tf.io.gfile.stat(path).mtime_nsec / 1e9 > SECONDS_OF_LEFTOVER:
                    tf.io.gfile.remove(path)
