"""Where records are is found without reading them, cached, and found again when a file or its cache has changed."""

import glob
import gzip
import hashlib
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def test_points_are_those_of_the_format_and_a_glob_does_not_find_the_cache(file: Path, made: list[str]) -> None:
    expected = [[0, 0], [4, 370], [5, 70386], [6, 70414]]  # The first at or after each multiple of 70414 // 1024.
    for _ in range(2):
        (index,) = index_files([str(file)])
        np.testing.assert_array_equal(index.points, expected)
        assert index.length == len(LENGTHS)
    assert made == [str(file)]
    assert glob.glob(f"{file.parent}/*") == [str(path) for path in file.parent.glob("*.tfrecord")] == [str(file)]
    assert [path.name for path in file.parent.iterdir() if path != file] == [".a.tfrecord.index"]


@pytest.mark.parametrize("most", [3, 90_000])
def test_points_and_fingerprint_are_those_of_a_plain_walk(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the records are checked in several pieces, empty, or larger than the distance of points."""
    monkeypatch.setattr(record_index, "RECORDS_AT_ONCE", 100)
    path, draw = tmp_path / "a.tfrecord", np.random.default_rng(most)
    write(path, (draw.integers(0, most, 2000) * (draw.random(2000) < 0.8)).tolist())
    content, size = path.read_bytes(), path.stat().st_size
    step = min(2**15, size // 1024)
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
    for count in (1, 777, 1999, 5000):
        taken = index.take(count)
        assert taken.length == min(count, 2000)
        np.testing.assert_array_equal(taken.points[:-1], [point for point in points if point[0] < count])
        assert taken.size == min([point[1] for point in points if point[0] >= count], default=size)


def damage(cache: Path) -> None:
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)


def take_that_of_another(cache: Path) -> None:
    write(cache.with_name("b.tfrecord"), LENGTHS[::-1])
    changed = os.stat(cache.with_name("a.tfrecord")).st_mtime_ns
    os.utime(cache.with_name("b.tfrecord"), ns=(changed, changed))
    index_files([str(cache.with_name("b.tfrecord"))])
    cache.with_name(".b.tfrecord.index").rename(cache)


def take_that_of_the_previous_version(cache: Path) -> None:
    head, body = cache.read_bytes().split(b"\n", 1)
    cache.write_bytes(head.replace(b'"version": 3', b'"version": 2') + b"\n" + body)


CACHES = {
    "of the previous version": take_that_of_the_previous_version,
    "cut short": lambda cache: cache.write_bytes(cache.read_bytes()[:-8]),
    "no index": lambda cache: cache.write_bytes(os.urandom(1000)),
    "JSON of something else": lambda cache: cache.write_bytes(b"[]\n"),
    "damaged": damage,
    "of another file": take_that_of_another,
    "of a file that was written again": lambda cache: os.utime(cache.with_name("a.tfrecord"), ns=(1, 1)),
}


@pytest.mark.parametrize("case", CACHES)
def test_cache_that_does_not_fit_is_made_anew(case: str, file: Path, made: list[str]) -> None:
    (expected,) = index_files([str(file)])
    CACHES[case](file.with_name(".a.tfrecord.index"))
    made.clear()
    for _ in range(2):
        (found,) = index_files([str(file)])
        np.testing.assert_array_equal(found.points, expected.points)
        assert found.sha256 == expected.sha256
    assert made == [str(file)]


def test_index_that_cannot_be_cached_beside_its_file_is_cached_in_a_second_folder_or_made_again(
    file: Path, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    second_folder, namesake = file.parent / "runs" / "indexes", file.parent / "other" / file.name
    namesake.parent.mkdir()
    write(namesake, LENGTHS[::-1])
    paths = [str(file), str(namesake)]
    for path in (file, namesake):
        path.with_name(".a.tfrecord.index").mkdir()  # As root, who runs tests in containers, can write anywhere.
    for folder, times in ((None, 2), (second_folder, 1)):
        made.clear()
        first, again = index_files(paths, folder), index_files(paths, folder)
        assert sorted(made) == sorted(paths * times)
        for index, found in zip(first, again, strict=True):
            np.testing.assert_array_equal(found.points, index.points)
        assert first[0].sha256 != first[1].sha256
        line = f"The index of {file} cannot be cached: it is made again at each start\n"
        assert capsys.readouterr().out == ("" if folder else 2 * line)
    assert len(list(second_folder.iterdir())) == 2
    assert not [path for path in file.parent.iterdir() if path.name.startswith(".") and path.is_file()]


def test_caches_that_killed_processes_left_half_written_are_removed(file: Path) -> None:
    folder = file.parent / "indexes"
    folder.mkdir()
    for place, name in ((file.parent, ".b.tfrecord.index"), (folder, f"{'c' * 64}.index")):
        old, new, complete = (place / each for each in (f"{name}.{'0' * 32}", f"{name}.{'1' * 32}", name))
        for path in (old, new, complete):
            path.write_bytes(b"")
        for path in (old, complete):
            os.utime(path, (0, 0))
        index_files([str(file)], folder)
        assert [path.exists() for path in (old, new, complete)] == [False, True, True]
        if place == file.parent:  # The next time it is cached in the folder.
            file.with_name(".a.tfrecord.index").unlink()
            file.with_name(".a.tfrecord.index").mkdir()


def test_several_processes_may_write_at_once(file: Path) -> None:
    """Threads, which share more than processes do."""
    expected, found = index_files([str(file)])[0].points, []
    cache = str(file.with_name(".a.tfrecord.index"))
    stop = threading.Event()

    def write_again() -> None:
        index = record_index._make(str(file), file.stat().st_size)
        while not stop.is_set():
            assert record_index._write_cache(cache, index, record_index._key(str(file)))

    writers = [threading.Thread(target=write_again) for _ in range(4)]
    for each in writers:
        each.start()
    try:
        key = record_index._key(str(file))
        found = [record_index._read_cache(cache, str(file), key) for _ in range(300)]
    finally:
        stop.set()
        for each in writers:
            each.join()
    assert all(each is not None and np.array_equal(each.points, expected) for each in found)
    assert {path.name for path in file.parent.iterdir()} == {"a.tfrecord", ".a.tfrecord.index"}


def test_files_that_only_tensorflow_can_open_are_indexed_and_cached(made: list[str]) -> None:
    tf.io.gfile.makedirs("ram://index")
    write("ram://index/a.tfrecord")
    for _ in range(2):
        (index,) = index_files(["ram://index/a.tfrecord"])
        assert (index.length, index.size) == (len(LENGTHS), sum(LENGTHS) + 16 * len(LENGTHS))
    assert made == ["ram://index/a.tfrecord"]


# --- Files without complete records -----------------------------------------------------------------------------------


def change(offset: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]


STARTS = np.cumsum([0, *(length + 16 for length in LENGTHS)]).tolist()
HUGE = struct.pack("<Q", 2**63)


def record(number: int) -> str:
    return f"record {number}, counted from 0, at byte {STARTS[number]}"


BAD = {
    "empty": (lambda _: b"", "is empty: write it again"),
    "text": (lambda _: b"image,label\n1,2\n" * 9, "is not a TFRecord file (its first record's length"),
    "a few bytes": (lambda _: b"abc", "is not a TFRecord file"),
    "gzip": (gzip.compress, "is compressed: unpack it, or read it with tf.data.TFRecordDataset"),
    "zlib": (zlib.compress, "is compressed: unpack it"),
    "cut short in its data": (lambda content: content[: STARTS[4] + 500], f"{record(4)} is damaged (it is cut short)"),
    "cut short in its checksum": (lambda content: content[:-1], f"{record(5)} is damaged (it is cut short)"),
    "cut short in its length": (lambda content: content[: STARTS[4] + 3], record(4)),
    "wrong length": (change(STARTS[3] + 1), f"{record(3)} is damaged (the checksum of its length is wrong)"),
    "wrong checksum of a length": (change(STARTS[3] + 9), f"{record(3)} is damaged"),
    "huge length": (lambda content: content[: STARTS[3]] + HUGE + content[STARTS[3] + 8 :], f"{record(3)} is damaged"),
    "zeros behind": (lambda content: content + bytes(100), f"{record(6)} is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_named_with_record_and_offset(case: str, file: Path) -> None:
    spoil, reason = BAD[case]
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(BadInput) as refused:
        index_files([str(file)])
    assert str(refused.value).startswith(f"{file}")
    assert reason in str(refused.value)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    tf.io.gfile.makedirs(f"ram://{case}")
    with tf.io.gfile.GFile(f"ram://{case}/a.tfrecord", "wb") as remote:  # Which only TensorFlow can open.
        remote.write(file.read_bytes())
    with pytest.raises(BadInput) as refused_there:
        index_files([f"ram://{case}/a.tfrecord"])
    assert str(refused_there.value) == str(refused.value).replace(str(file), f"ram://{case}/a.tfrecord")


def test_folder_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot be read \(Is a directory\)"):
        index_files([str(tmp_path)])
    with pytest.raises(BadInput, match=r"missing cannot be read \(No such file or directory\)"):
        index_files([str(tmp_path / "missing")])


def test_file_that_grows_while_it_is_indexed_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not count as damaged. The size is read before the records."""
    content, find_key, sizes = file.read_bytes(), record_index._key, []

    def key_while_it_grows(path: str) -> dict[str, Any]:
        found = find_key(path)
        sizes.append(found["size"])
        file.write_bytes(content)
        return found

    file.write_bytes(content[:-700])
    monkeypatch.setattr(record_index, "_key", key_while_it_grows)
    with pytest.raises(BadInput, match=r"is still being written: start again when it is complete"):
        index_files([str(file)])
    assert sizes == [len(content) - 700, len(content)]


def test_index_of_a_large_file_is_given_up_at_a_signal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, steps = record_index._walk, []

    def walk_until_a_signal(*arguments: Any) -> Iterator[Any]:
        for number, step in enumerate(walk(*arguments)):
            steps.append(number)
            if number == 2:
                asked_to_stop.set()
            yield step

    monkeypatch.setattr(record_index, "RECORDS_AT_ONCE", 1)
    monkeypatch.setattr(record_index, "_walk", walk_until_a_signal)
    try:
        with pytest.raises(Unavailable, match="stopped by a signal when 0 of 1 record files had an index"):
            index_files([str(file)])
    finally:
        asked_to_stop.clear()
    assert steps == [0, 1, 2]


# --- Many files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Thirty files, each of which takes a moment, and those whose index was made."""
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
    return paths, made


def test_processes_that_start_together_share_the_work(many: tuple[list[str], list[str]]) -> None:
    paths, made = many
    with ThreadPoolExecutor(3) as processes:
        found = list(processes.map(index_files, [paths] * 3))
    for indexes in found:
        assert [index.path for index in indexes] == paths
        assert [index.size for index in indexes] == [os.stat(path).st_size for path in paths]
    assert set(made) == set(paths)
    assert len(made) < 2 * len(paths)  # And not three times.


def test_progress_is_printed_and_a_signal_is_obeyed(
    many: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(record_index, "SECONDS_BETWEEN_LINES", 0.2)
    index_files(many[0][:10])
    assert re.search(
        r"^[1-9] of 10 record files have an index, which is made once$", capsys.readouterr().out, re.MULTILINE
    )
    asked_to_stop.set()
    try:
        with pytest.raises(Unavailable, match=r"stopped by a signal when \d+ of 30 record files had an index"):
            index_files(many[0])
    finally:
        asked_to_stop.clear()
    assert len(many[1]) < 30


def test_file_that_cannot_be_indexed_ends_the_others(many: tuple[list[str], list[str]]) -> None:
    Path(many[0][7]).write_bytes(b"no records")
    with pytest.raises(BadInput, match=r"7\.tfrecord is not a TFRecord file"):
        index_files(many[0])
    assert len(many[1]) <= 30
