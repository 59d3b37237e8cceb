"""What TensorBoard shows."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from engine.files import writing

TENSORBOARD = "tensorboard"


class Summaries:
    """The summaries of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: tf.summary.SummaryWriter | None = None

    def add(self, step: int, values: dict[str, float]) -> None:
        with self.at(step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Takes the summaries that are written inside, as of a step."""
        with writing(self._folder):
            # Made with the first values: before them there may be no run, whose directory has to be empty.
            self._writer = self._writer or tf.summary.create_file_writer(str(self._folder))
            with self._writer.as_default(step=step):
                yield
            self._writer.flush()
