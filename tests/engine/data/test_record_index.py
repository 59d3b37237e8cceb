"""Where records are is found without reading them, cached, and found again when a file or its cache has changed."""

import gzip
import hashlib
import os
import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from engine.data import record_index
from engine.data.record_index import index_files
from engine.errors import BadInput, Unavailable, asked_to_stop

LENGTHS = [0, 1, 5, 300, 70_000, 12]


def write(path: Path | str, lengths: list[int] = LENGTHS) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for length in lengths:
            writer.write(b"x" * length)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.tfrecord")
    return tmp_path / "data" / "a.tfrecord"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose index is made and not taken from a cache."""
    paths = []
    make = record_index._make
    monkeypatch.setattr(record_index, "_make", lambda path, size: paths.append(path) or make(path, size))
    return paths


def test_index_is_made_once_and_cached_beside_the_run(file: Path, made: list[str], tmp_path: Path) -> None:
    namesake = tmp_path / "other" / file.name
    namesake.parent.mkdir()
    write(namesake, LENGTHS[::-1])
    paths = [str(file), str(namesake)]
    first, again = (index_files(paths, tmp_path / "runs" / "indexes") for _ in range(2))
    assert sorted(made) == sorted(paths)
    assert [index.length for index in first] == [len(LENGTHS)] * 2
    assert [index.sha256 for index in first] == [index.sha256 for index in again]
    assert first[0].sha256 != first[1].sha256
    assert list(file.parent.iterdir()) == [file]
    # It is made again at each start where it cannot be cached.
    index_files(paths, file)
    assert sorted(made) == sorted(2 * paths)


@pytest.mark.parametrize("most", [3, 90_000])
def test_points_and_fingerprint_are_those_of_a_plain_walk(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the records are checked in several pieces, empty, or larger than the distance of points."""
    monkeypatch.setattr(record_index, "RECORDS_AT_ONCE", 100)
    path, draw = tmp_path / "a.tfrecord", np.random.default_rng(most)
    write(path, (draw.integers(0, most, 2000) * (draw.random(2000) < 0.8)).tolist())
    content, size = path.read_bytes(), path.stat().st_size
    step = min(2**18, size // 1024)
    points, headers, checksums, offset, number, multiple = [], b"", b"", 0, 0, 0
    while offset < size:
        if offset >= multiple:
            points.append((number, offset))
            multiple = (offset // step + 1) * step
        end = offset + 12 + int.from_bytes(content[offset : offset + 8], "little") + 4
        headers, checksums = headers + content[offset : offset + 12], checksums + content[end - 4 : end]
        offset, number = end, number + 1
    (index,) = index_files([str(path)])
    np.testing.assert_array_equal(index.points, [*points, (number, offset)])
    assert index.sha256 == hashlib.sha256(headers + checksums).hexdigest()


def damage(cache: Path) -> None:
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)


CACHES: dict[str, Callable[[Path, Path], object]] = {
    "something else": lambda cache, _: cache.write_bytes(b"[]\n"),
    "damaged": lambda cache, _: damage(cache),
    "of a file that was written again": lambda _, file: os.utime(file, ns=(1, 1)),
}


@pytest.mark.parametrize("case", CACHES)
def test_cache_that_does_not_fit_is_replaced(case: str, file: Path, made: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "indexes"
    (expected,) = index_files([str(file)], folder)
    (cache,) = folder.iterdir()
    CACHES[case](cache, file)
    made.clear()
    for _ in range(2):
        (found,) = index_files([str(file)], folder)
        assert (found.points.tolist(), found.sha256) == (expected.points.tolist(), expected.sha256)
    assert made == [str(file)]


def change(offset: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]


STARTS = np.cumsum([0, *(length + 16 for length in LENGTHS)]).tolist()
HUGE = struct.pack("<Q", 2**63)


def record(number: int) -> str:
    return f"record {number}, counted from 0, at byte {STARTS[number]}"


BAD = {
    "empty": (lambda _: b"", "is empty: write it again"),
    "text": (lambda _: b"image,label\n1,2\n" * 9, "is not an uncompressed TFRecord file (its first record's length"),
    "gzip": (gzip.compress, "is damaged): unpack it, read it with tf.data.TFRecordDataset"),
    "cut short in its data": (lambda content: content[: STARTS[4] + 500], f"{record(4)} is damaged (it is cut short)"),
    "cut short in its length": (lambda content: content[: STARTS[4] + 3], record(4)),
    "wrong length": (change(STARTS[3] + 1), f"{record(3)} is damaged (the checksum of its length is wrong)"),
    "huge length": (lambda content: content[: STARTS[3]] + HUGE + content[STARTS[3] + 8 :], f"{record(3)} is damaged"),
    "zeros behind": (lambda content: content + bytes(100), f"{record(6)} is damaged"),
}


def test_bad_file_is_named_with_record_and_offset(file: Path) -> None:
    content = file.read_bytes()
    for number, (spoil, reason) in enumerate(BAD.values()):
        remote = f"ram://{number}.tfrecord"  # Only TensorFlow can open it.
        for path in (str(file), remote):
            with tf.io.gfile.GFile(path, "wb") as spoiled:
                spoiled.write(spoil(content))
            with pytest.raises(BadInput, match=f"^{re.escape(path)}.*{re.escape(reason)}"):
                index_files([path])
        assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_processes_that_start_together_share_the_work_print_progress_and_obey_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of thirty files, each of which takes a moment."""
    paths, made = [str(tmp_path / f"{number}.tfrecord") for number in range(30)], []
    for path in paths:
        write(path, [len(path)])
    make = record_index._make

    def make_slowly(path: str, size: int) -> record_index.FileIndex:
        time.sleep(0.05)
        made.append(path)
        return make(path, size)

    monkeypatch.setattr(record_index, "_make", make_slowly)
    monkeypatch.setattr(record_index, "FILES_AT_ONCE", 1)  # In each of several processes.
    monkeypatch.setattr(record_index, "SECONDS_BETWEEN_LINES", 0.2)
    asked_to_stop.set()
    try:
        with pytest.raises(Unavailable, match=r"stopped by a signal while the index of .*\.tfrecord was made"):
            index_files(paths)
    finally:
        asked_to_stop.clear()
    assert len(made) < 30
    made.clear()
    with ThreadPoolExecutor(3) as processes:
        found = list(processes.map(index_files, [paths] * 3, [tmp_path / "indexes"] * 3))
    for indexes in found:
        assert [(index.path, index.size) for index in indexes] == [(path, os.stat(path).st_size) for path in paths]
    assert len(made) < 2 * len(paths)  # And not three times.
    assert re.search(r"(?m)^[1-9]\d* of 30 record files have an index, which is made once$", capsys.readouterr().out)
