"""Where the records of TFRecord files are: found without reading the records, and cached beside the files.

A record is its length (8 bytes), a checksum of the length, its data, which are skipped, and a checksum of the data. The
index of a file is cached in a hidden file beside it, and made again when the file's size or time of change differs, or
when the cache is damaged.
"""

import array
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import uuid
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, Unavailable, asked_to_stop
from engine.retries import until_read

VERSION = 2
FILES_AT_ONCE = 16  # Storage may answer late.
SECONDS_BETWEEN_LINES = 10.0
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
    offsets: np.ndarray  # Where each record begins, and where the last one ends, int64 [records + 1].
    sha256: str  # It covers the lengths and checksums of all records, and not the file's name.

    @property
    def length(self) -> int:
        """The number of records."""
        return len(self.offsets) - 1


def index_files(paths: list[str]) -> list[FileIndex]:
    """Returns the index of each file. Raises BadInput, naming the file, unless it contains complete records."""
    # In any order, so that processes that start together make the indexes of other files, and find the rest cached.
    order = random.SystemRandom().sample(paths, len(paths))
    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        pending = {path: threads.submit(_index, path) for path in order}
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
        done, others = concurrent.futures.wait(pending, SECONDS_BETWEEN_LINES, concurrent.futures.FIRST_EXCEPTION)
        for each in done:
            each.result()
        if not others:
            return
        if asked_to_stop.is_set():
            raise Unavailable(f"stopped by a signal when {len(done)} of {len(pending)} record files had an index")
        console.print(f"{len(done)} of {len(pending)} record files have an index, which is made once")


def _index(path: str) -> tuple[FileIndex, bool]:
    """Returns the index of a file, and whether it is in a cache now."""

    def read() -> tuple[dict[str, Any], FileIndex, bool]:
        key = _key(path)
        cached = _read_cache(path, key)
        return key, cached or _make(path, key["size"]), cached is not None

    try:
        key, index, is_cached = until_read(read, path, obeys_signals=True)
    except (OSError, tf.errors.OpError) as problem:
        reason = getattr(problem, "strerror", None) or getattr(problem, "message", None) or problem
        raise BadInput(f"{path} cannot be read ({reason}): restore it, or exclude it") from None
    return index, is_cached or _write_cache(index, key)


# --- Making -----------------------------------------------------------------------------------------------------------


def _make(path: str, size: int) -> FileIndex:
    if not size:
        raise BadInput(f"{path} is empty: write it again, or exclude it")
    with tf.io.gfile.GFile(path, "rb") if is_remote(path) else open(path, "rb") as file:
        offsets, headers, checksums = _walk(file, size)
    wrong = np.flatnonzero(~_are_headers(headers))
    if not len(headers) or 0 in wrong:
        if headers.tobytes().startswith(COMPRESSED):
            raise BadInput(f"{path} is compressed: unpack it, or read it with tf.data.TFRecordDataset")
        raise BadInput(f"{path} is not a TFRecord file (its first record's length is damaged): exclude it")
    if len(wrong):
        raise damaged(path, wrong[0], offsets[wrong[0]], "the checksum of its length is wrong")
    if offsets[-1] > size:
        raise damaged(path, len(offsets) - 2, offsets[-2], "it is cut short")
    return FileIndex(path, offsets, hashlib.sha256(headers.tobytes() + checksums).hexdigest())


def _walk(file: BinaryIO, size: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Returns offsets, headers (uint8 [n, 12]) and checksums (4 bytes each) of the records.

    The last offset is beyond the size of the file if the last record is cut short.
    """
    end, offsets, headers, checksums = 0, array.array("q", [0]), bytearray(), bytearray()
    header = file.read(HEADER)
    while header:
        if len(header) < HEADER:
            offsets.append(size + 1)
            break
        headers += header
        length = min(int.from_bytes(header[:8], "little"), size)  # A length that is wrong may be huge.
        end += HEADER + length + FOOTER
        offsets.append(end)
        if end > size:
            break
        file.seek(end - FOOTER)
        following = file.read(FOOTER + HEADER)
        checksums += following[:FOOTER]
        header = following[FOOTER:]
    return np.array(offsets, np.int64), np.frombuffer(bytes(headers), np.uint8).reshape(-1, HEADER), bytes(checksums)


def damaged(path: str, number: int, offset: int, reason: str) -> BadInput:
    """Returns the error for a record that cannot be read."""
    what_to_do = "restore the file from a backup, or write it again without that record"
    return BadInput(f"{path}: record {number}, counted from 0, at byte {offset} is damaged ({reason}): {what_to_do}")


def is_remote(path: str) -> bool:
    """Returns whether TensorFlow, and not the operating system, can open a path, such as gs://bucket/file."""
    return "://" in path


def is_cache(path: str) -> bool:
    """Returns whether a file is the index of another one beside it, complete or being written."""
    folder, name = os.path.split(path)
    found = re.fullmatch(r"\.(.+)\.index(\..*)?", name)
    return found is not None and tf.io.gfile.exists(os.path.join(folder, found[1]))


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
        found = tf.io.gfile.stat(path)
        size, changed = found.length, found.mtime_nsec
    else:  # TensorFlow would round the time to seconds.
        size, changed = os.stat(path).st_size, os.stat(path).st_mtime_ns
    return {"version": VERSION, "name": os.path.basename(path), "size": size, "changed": changed}


def _cache_path(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.index")


def _read_cache(path: str, key: dict[str, Any]) -> FileIndex | None:
    """Returns the index that is cached, or None without an intact one that matches the key."""
    try:
        with tf.io.gfile.GFile(_cache_path(path), "rb") as file:
            first_line, body = file.read().split(b"\n", 1)
        head = json.loads(first_line)
        if head["body_sha256"] != hashlib.sha256(body).hexdigest() or head["key"] != key:
            return None
        return FileIndex(path, np.frombuffer(body, "<i8").astype(np.int64), head["sha256"])
    except (tf.errors.OpError, ValueError, TypeError, KeyError):
        return None


def _write_cache(index: FileIndex, key: dict[str, Any]) -> bool:
    """Caches an index, completely or not at all; returns whether it did."""
    body = index.offsets.astype("<i8").tobytes()
    head = {"sha256": index.sha256, "key": key, "body_sha256": hashlib.sha256(body).hexdigest()}
    cache = _cache_path(index.path)
    temporary = f"{cache}.{uuid.uuid4().hex}"  # Several processes may write at once.
    try:
        with tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + body)
        tf.io.gfile.rename(temporary, cache, overwrite=True)
    except tf.errors.OpError:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(temporary)
        return False
    return True
