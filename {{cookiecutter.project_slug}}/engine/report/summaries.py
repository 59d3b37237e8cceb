"""TensorBoard's files. Each dataset has a folder of its own, so that a metric's curves share a chart."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api as hparams

from engine.files import until_read, until_written, write_atomically, writing
from engine.model.metrics import ResultNames, split_of

TENSORBOARD = "tensorboard"
# TensorBoard shows the first hyperparameters that it finds, and follows the last file in the order of their names.
HYPERPARAMETERS = "events.out.tfevents.0.hyperparameters"
CALLS_PER_FILE = 10_000  # A resumed run reads one file, not all that a run of weeks has written.
BYTES_AROUND_RECORD = 16


class Summaries:
    """The summaries in one folder, and in a folder below it for each dataset."""

    def __init__(self, folder: Path, names: ResultNames) -> None:
        """Writes nothing yet, because the directory must stay empty until the run starts."""
        self._folder, self._names = folder, names
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._calls: Counter[str] = Counter()

    def cut(self, step: int) -> None:
        """Removes the summaries of later steps and of the result, so that a resumed run does not show them twice."""
        for name in ("", *self._names.datasets):
            last = -1 if split_of(name) == "test" else step
            # If two files begin at the same step, the later one has the later second in its name.
            paths = sorted((self._folder / name).glob("*.from*.v2"), key=lambda path: (_first_step(path), path.name))
            kept = [path for path in paths if _first_step(path) <= last]
            for path in paths[len(kept) :]:
                with writing(path):
                    until_written(functools.partial(path.unlink, missing_ok=True), path)
            for path in kept[-1:]:  # An earlier file ends before this one begins.
                _cut(path, last)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars; "<dataset>/<metric>" goes to the dataset's folder as "<metric>"."""
        folders: dict[str, dict[str, float]] = {}
        for column, value in values.items():
            name = self._names.dataset(column)
            folders.setdefault(name, {})[column.removeprefix(f"{name}/")] = value
        for name, scalars in folders.items():
            with writing(self._folder):
                until_written(functools.partial(self._add, step, name, scalars), self._folder / name)

    def _add(self, step: int, name: str, scalars: dict[str, float]) -> None:
        with self._at(step, name):
            for tag, value in scalars.items():
                tf.summary.scalar(tag, np.float32(value))

    def settings(self, step: int, settings: Mapping[str, Any]) -> None:
        """Writes the settings as a table, and as the hyperparameters of the run, which can be numbers and texts."""
        cells = {name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in settings.items()}
        lines = ["| setting | value |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in cells.items())]
        simple = {name: value if isinstance(value, int | float) else str(value) for name, value in settings.items()}
        with self.at(step):
            tf.summary.text("settings", "\n".join(lines))
        summary = hparams.hparams_pb(simple, trial_id=simple.get("run_dir"))
        events = Event(file_version="brain.Event:2"), Event(wall_time=time.time(), step=step, summary=summary)
        _write(self._folder / HYPERPARAMETERS, [event.SerializeToString() for event in events])

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Writes the summaries of the code inside at a step."""
        with writing(self._folder), self._at(step):
            yield

    @contextlib.contextmanager
    def _at(self, step: int, name: str = "") -> Iterator[None]:
        if name not in self._writers:
            folder, suffix = self._folder / name, f".from{step}.v2"
            self._writers[name] = tf.summary.create_file_writer(str(folder), filename_suffix=suffix)
        try:
            # TensorFlow never frees the tensor that it makes of a number of Python.
            with self._writers[name].as_default(step=np.int64(step)):
                yield
            self._writers[name].flush()
        except tf.errors.OpError:
            del self._writers[name]  # Events behind half an event in a file cannot be read.
            raise
        self._calls[name] += 1
        if self._calls[name] % CALLS_PER_FILE == 0:
            self._writers.pop(name).close()


def _first_step(path: Path) -> int:
    """Returns the first step in a file, by its name: "events.out.tfevents.<second>.<host>.from1200.v2"."""
    return int(path.suffixes[-2].removeprefix(".from"))


def _cut(path: Path, step: int) -> None:
    """Removes the events after a step from a file, and an end that was damaged when the run was killed."""
    records = list(RawEventFileLoader(str(path)).Load())
    size = until_read(path.stat, path).st_size
    is_intact = sum(len(record) + BYTES_AROUND_RECORD for record in records) == size
    kept = [record for record in records if Event.FromString(record).step <= step]
    if not is_intact or len(kept) < len(records):
        _write(path, kept)


def _write(path: Path, records: list[bytes]) -> None:
    def write(temporary: Path) -> None:
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for record in records:
                writer.write(record)

    write_atomically(path, write)
