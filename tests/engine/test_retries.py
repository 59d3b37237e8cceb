"""Faults of a network or a disk: the examples are read again from the same place, and only long faults end a run."""

import csv
import errno
import io
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of
from record_files import shuffle_in, write_records
from small import linear_model
from streaming import stream
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import task
import train
from config import Config
from engine import errors, files
from engine.data import record_index, records, stacks
from engine.data.records import Records
from engine.data.stacks import StackIterator
from engine.errors import BadInput, CannotWrite, Unavailable, asked_to_stop
from engine.model.metrics import ResultNames
from engine.report import tables
from engine.report.report import Summaries
from engine.signals import signals

FLAGS = ("--epochs=1", "--global-batch-size=64", "--steps-per-execution=3", "--checkpoint-every-steps=7")
LOAD_EXAMPLES = task.load_examples


class Faults:
    """Raises an error at chosen moments, each once: the numbers count calls, over all threads."""

    def __init__(self, *moments: int, problem: Exception | None = None) -> None:
        self.problem = problem or OSError(errno.EIO, os.strerror(errno.EIO))
        self.moments, self.calls, self.raised = set(moments), 0, 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1
            is_now = self.calls in self.moments
            self.raised += is_now
        if is_now:
            raise self.problem

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, before each call of which an error may be raised."""
        return lambda *arguments, **options: (self(), function(*arguments, **options))[1]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of all waits, which take no time."""
    found: list[float] = []

    monkeypatch.setattr(files, "wait", found.append)
    return found


def generated(fails: Callable[[], None], count: int = 200) -> Callable[[str], tf.data.Dataset]:
    """Returns a hook whose examples are their number and a text."""

    def load_examples(_: str) -> tf.data.Dataset:
        def examples() -> Iterator[tuple[np.ndarray, int]]:
            for number in range(count):
                fails()
                yield np.full([3], number, np.float32), number

        spec = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int64)
        dataset = tf.data.Dataset.from_generator(examples, output_signature=spec)
        return dataset.apply(tf.data.experimental.assert_cardinality(count))

    return load_examples


def labels(load_examples: Any, prepare_example: Any, *, replicas: int = 1) -> list[Any]:
    config = Config(strategy="mirrored", simulated_devices=replicas, global_batch_size=20)
    return labels_of(batches_of("train", load_examples, prepare_example, config))


def labels_of(batches: Any, passes: int = 2) -> list[Any]:
    """Returns the labels of some passes, in the order in which steps take them, and which steps share an execution.

    Workers whose executions differ wait for each other for ever.
    """
    found: list[Any] = []
    for epoch in range(passes):
        for stack, first, count in batches.iterator(epoch).take(batches.steps_per_epoch):
            found.append((first, count))
            for index in range(count):
                batch = batches.stacks.pick(stack, tf.constant(first + index))
                local = batches.stacks.strategy.experimental_local_results(batch[1])
                found += np.concatenate([np.asarray(each) for each in local]).tolist()
    return found


def plain(features: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return features, label


def test_streamed_examples_are_neither_lost_nor_doubled_by_faults(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    stream(monkeypatch, buffer_size=20)
    expected = labels(generated(lambda: None), plain, replicas=2)
    # While it is hashed at the start, twice in the same place, and in the second pass.
    faults = Faults(3, 90, 150, 400)
    assert labels(generated(faults), plain, replicas=2) == expected
    assert faults.raised == 4
    assert len(waits) >= 3  # The last one may hit examples that are read ahead, and never used.
    said = "task.load_examples('train') cannot be read (OSError: [Errno 5] Input/output error): trying again in 1 s"
    assert next(line for line in capsys.readouterr().err.splitlines() if "trying again" in line) == said


def test_cached_examples_are_read_again_and_so_is_what_a_hook_reads(waits: list[float]) -> None:
    in_hook = Faults(5, 77, problem=tf.errors.UnavailableError(None, None, "the store restarts"))
    in_examples = Faults(1, 60, 250, problem=ConnectionResetError("by the server"))
    at_start = Faults(1, 2)

    def read(label: tf.Tensor) -> np.ndarray:
        in_hook()
        return np.full([3], label, np.float32)

    def prepare(features: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ensure_shape(tf.py_function(read, [label], tf.float32), [3]), label

    load_examples = at_start.before(generated(in_examples))
    assert labels(load_examples, prepare) == labels(generated(lambda: None), plain)
    assert (at_start.raised, in_examples.raised, in_hook.raised) == (2, 3, 2)
    assert len(waits) in (6, 7)  # Two examples that are prepared at the same time may fail in one attempt.


# --- Record files -----------------------------------------------------------------------------------------------------


def number_of(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.zeros([3]), tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.int64)[0]


@pytest.mark.long
def test_record_file_that_gives_io_errors_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers every read of unmapped memory with EIO."""
    shuffle_in(monkeypatch, 4000, block=200)
    pattern = write_records(tmp_path, [50, 30])
    file, intact, waited = tmp_path / "train-1.tfrecord", tmp_path / "intact", []
    batches = batches_of("train", lambda _: Records(pattern), number_of, Config(global_batch_size=20))
    expected = labels_of(batches, passes=1)
    file.rename(intact)
    file.symlink_to("/proc/self/mem")

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            file.unlink()
            intact.rename(file)

    monkeypatch.setattr(files, "wait", wait)
    assert labels_of(batches, passes=1) == expected
    assert waited == [1, 2, 4]


def test_index_of_a_file_is_made_again_and_a_folder_looked_at_again(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path, [5, 3])
    make, fails = record_index._make, Faults(1, 3)
    monkeypatch.setattr(record_index, "_make", fails.before(make))
    looks, stat = Faults(1), os.stat

    def failing(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("train-0.tfrecord"):
            looks()
        return stat(path, **options)

    monkeypatch.setattr(records.os, "stat", failing)
    # glob.glob returns what it has found so far, so a fault could leave out files.
    lists, listdir = Faults(1, 2), os.listdir
    monkeypatch.setattr(records.os, "listdir", lists.before(listdir))
    load = lambda _: Records(str(tmp_path / "train-0.tfrecord"), str(tmp_path / "train-[1].tfrecord"))  # noqa: E731
    assert batches_of("train", load, number_of, Config(global_batch_size=8)).number_of_examples == 8
    assert (fails.raised, looks.raised, lists.raised, len(waits)) == (2, 1, 2, 4)


def test_files_of_a_run_are_read_again(tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"seed": 1}', encoding="utf-8")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", Faults(1, 2).before(read))
    assert files.read_json(tmp_path / "config.json") == {"seed": 1}
    assert waits == [1, 2]
    monkeypatch.setattr(Path, "read_text", Faults(*range(1, 100)).before(read))
    with pytest.raises(Unavailable, match=r"config\.json still cannot be read"):
        files.read_json(tmp_path / "config.json")


# --- Files of a run ---------------------------------------------------------------------------------------------------


def test_files_are_written_again(tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    fails, replace = Faults(1, 2), Path.replace
    monkeypatch.setattr(Path, "replace", fails.before(replace))
    files.write_json(tmp_path / "result.json", {"loss": 0.5})
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": 0.5}
    assert waits == [1, 2]
    assert f"{tmp_path / 'result.json'} cannot be written (OSError: [Errno 5]" in capsys.readouterr().err
    always = Faults(*range(1, 100))
    monkeypatch.setattr(Path, "replace", always.before(replace))
    with pytest.raises(CannotWrite, match=r"result\.json cannot be written \(Input/output error\)"):
        files.write_json(tmp_path / "result.json", {"loss": 0.25})
    assert always.raised == len(files.SECONDS_TO_WAIT) + 1
    assert sum(files.SECONDS_TO_WAIT) == pytest.approx(4 * 60, rel=0.05)
    assert os.listdir(tmp_path) == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": 0.5}


def test_row_of_which_a_part_was_written_is_written_again(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.append_row(tmp_path / "steps.csv", {"step": 1, "loss": 0.5})
    fails = Faults(1)

    class Failing(csv.DictWriter):
        def __init__(self, lines: TextIO, *arguments: Any, **options: Any) -> None:
            super().__init__(lines, *arguments, **options)
            if fails.calls == 0:
                lines.write("2,0.")
                lines.flush()
            fails()

    monkeypatch.setattr(tables.csv, "DictWriter", Failing)
    tables.append_row(tmp_path / "steps.csv", {"step": 2, "loss": 0.25})
    assert (tmp_path / "steps.csv").read_text() == "step,loss\n1,0.5\n2,0.25\n"
    assert waits == [1]


def test_summaries_of_which_a_part_was_written_go_to_another_file(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files cuts an event in two."""
    monkeypatch.setattr(errors, "_PASSING_TEXT", re.compile("File too large"))
    summaries = Summaries(tmp_path, ResultNames({"train": {}}, ["train"]))
    summaries.add(1, {"train/loss": 0.5})
    (file,) = tmp_path.glob("train/*")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def wait(seconds: float) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        waits.append(seconds)

    monkeypatch.setattr(files, "wait", wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
    try:
        summaries.add(2, {"train/loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    summaries.add(3, {"train/loss": 0.125})
    assert waits == [1]
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    found = [(event.step, tf.make_ndarray(event.tensor_proto).item()) for event in events.Tensors("loss")]
    assert found == [(1, 0.5), (2, 0.25), (3, 0.125)]


# --- Faults that stay -------------------------------------------------------------------------------------------------


def test_faults_of_the_data_are_not_tried_again(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch, buffer_size=20)
    faults = Faults(*range(100, 10_000), problem=FileNotFoundError(errno.ENOENT, "no such file"))
    with pytest.raises(BadInput, match="failed on example") as rejected:
        labels(generated(faults), plain)
    assert rejected.value.exit_code == 2
    assert waits == []


@pytest.mark.long
def test_long_fault_ends_the_run_with_code_1_and_the_next_start_gives_the_same_bits(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    stream(monkeypatch, buffer_size=100)
    monkeypatch.setattr(stacks, "STEPS_OF_STACK", (1, 1))  # Two stacks of 16 and 3 batches for an epoch.

    def run(name: str) -> str:
        return train.main([f"--run-dir={tmp_path / name}", *FLAGS])["weights_sha256"]

    expected, next_stack, fails = run("whole"), StackIterator._next_stack, Faults(2, 3, 4)
    with monkeypatch.context() as broken, pytest.raises(SystemExit) as ended:
        broken.setattr(StackIterator, "_next_stack", fails.before(next_stack))
        broken.setattr(files, "SECONDS_TO_WAIT", (60, 180))
        run("gone")
    assert ended.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert waits[-2:] == [60, 180]
    assert "task.load_examples('train') still cannot be read, after 2 more attempts in 4 minutes" in line
    assert f"resumes from {tmp_path / 'gone' / 'checkpoints'}" in line
    assert run("gone") == expected


def test_signal_does_not_end_other_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SECONDS_AFTER_SIGNAL", 0.01)
    with signals.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked_to_stop.wait(10)
        for again in (files.until_written, files.until_read):
            gone = Faults(1, 2, 3, 4, 5)
            again(gone, "the file")
            assert gone.calls == 6
    assert not asked_to_stop.is_set()


def test_log_on_the_disk_that_fails_does_not_end_the_attempts(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as failing, open("/dev/full", "wb", buffering=0) as full:
        failing.setattr(files.sys, "stderr", io.TextIOWrapper(full, write_through=True))
        files.until_written(Faults(1, 2), "the file")
    assert waits == [1, 2]


def test_run_that_is_stopped_while_it_waits_for_data_ends_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    stream(monkeypatch, buffer_size=100)
    monkeypatch.setattr(stacks, "STEPS_OF_STACK", (1, 1))  # Two stacks of 16 and 3 batches for an epoch.
    next_stack, fails = StackIterator._next_stack, Faults(*range(5, 100))

    def failing(iterator: StackIterator) -> Any:
        if fails.calls == 4:  # The first stack of the second epoch is read, after two of the first and a validation's.
            os.kill(os.getpid(), signal.SIGTERM)
        return fails.before(next_stack)(iterator)

    with monkeypatch.context() as broken, pytest.raises(SystemExit) as ended:
        broken.setattr(StackIterator, "_next_stack", failing)
        train.main([f"--run-dir={tmp_path / 'run'}", *FLAGS, "--epochs=2"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 42, line
    assert fails.raised == 1  # It is not tried again.
    assert "the same command, without --fresh, resumes from" in line
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
