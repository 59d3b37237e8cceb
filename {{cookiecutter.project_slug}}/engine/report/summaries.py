"""TensorBoard's files. Each dataset has a folder of its own, so that a metric's curves share a chart."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api as hparams

from engine.files import write_atomically, writing
from engine.model.metrics import ResultNames, split_of

TENSORBOARD = "tensorboard"


class Summaries:
    """The summaries in one folder, and in a folder below it for each dataset."""

    def __init__(self, folder: Path, names: ResultNames) -> None:
        """Writes nothing yet, because the directory must stay empty until the run starts."""
        self._folder, self._names = folder, names
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def cut(self, step: int) -> None:
        """Removes the summaries of later steps and of the result, so that a resumed run does not show them twice."""
        for name in ("", *self._names.datasets):
            for path in sorted((self._folder / name).glob("events.out.tfevents.*")):
                _cut(path, -1 if split_of(name) == "test" else step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars; "<dataset>/<metric>" goes to the dataset's folder as "<metric>"."""
        folders: dict[str, dict[str, float]] = {}
        for column, value in values.items():
            name = self._names.dataset(column)
            folders.setdefault(name, {})[column.removeprefix(f"{name}/")] = value
        for name, scalars in folders.items():
            with self.at(step, name):
                for tag, value in scalars.items():
                    tf.summary.scalar(tag, value)

    def settings(self, step: int, settings: Mapping[str, Any]) -> None:
        """Writes the settings as a table, and as the hyperparameters of the run, which can be numbers and texts."""
        cells = {name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in settings.items()}
        lines = ["| setting | value |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in cells.items())]
        simple = {name: each if isinstance(each, bool | int | float) else str(each) for name, each in settings.items()}
        with self.at(step):
            tf.summary.text("settings", "\n".join(lines))
            hparams.hparams(simple, trial_id=simple.get("run_dir"))

    @contextlib.contextmanager
    def at(self, step: int, name: str = "") -> Iterator[None]:
        """Writes the summaries of the code inside at a step, to the folder of a dataset."""
        with writing(self._folder):
            if name not in self._writers:
                self._writers[name] = tf.summary.create_file_writer(str(self._folder / name))
            with self._writers[name].as_default(step=step):
                yield
            self._writers[name].flush()


def _cut(path: Path, step: int) -> None:
    """Removes the events after a step from a file, and an end that was damaged when the run was killed.

    Hyperparameters are removed too, because TensorBoard shows the first ones, and the run's are the latest.
    """
    kept, is_intact = [], True
    with writing(path):
        try:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = Event.FromString(record)
                if event.step <= step and not any(value.tag.startswith("_hparams_/") for value in event.summary.value):
                    kept.append(record)
                else:
                    is_intact = False
        except tf.errors.DataLossError:
            is_intact = False

    def write(temporary: Path) -> None:
        with tf.io.TFRecordWriter(str(temporary)) as writer:
            for record in kept:
                writer.write(record)

    if not is_intact:
        write_atomically(path, write)
