"""A profile of some training steps for TensorBoard: what each device and the host did, and when."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from engine.console import console

# The first chunks compile, or are short.
CHUNKS_BEFORE = 3
CHUNKS = 3
STEPS_PER_CHUNK = 10


class Profile:
    """The profile of a run, written once it has trained some chunks of steps."""

    def __init__(self, directory: Path | None, *, records: bool) -> None:
        """Writes nothing yet; TensorBoard finds the profile in `directory`, its log directory. None makes no profile.

        Of several workers one `records`, and all take the same steps.
        """
        self._directory = directory
        self._records = records
        self._is_recording = False
        self._chunks = 0

    def steps_at_most(self, split: str, count: int) -> int:
        """Returns how many of `count` steps the next chunk may take: few while they are recorded."""
        few = self._directory and split == "train" and CHUNKS_BEFORE <= self._chunks < CHUNKS_BEFORE + CHUNKS
        return min(count, STEPS_PER_CHUNK) if few else count

    @contextlib.contextmanager
    def chunk(self, split: str) -> Iterator[None]:
        """Counts a chunk of training steps, and records it if it is its turn."""
        if not self._directory or split != "train":
            yield
            return
        if self._chunks == CHUNKS_BEFORE and self._records:
            tf.profiler.experimental.start(str(self._directory))
            self._is_recording = True
        yield
        self._chunks += 1
        if self._chunks == CHUNKS_BEFORE + CHUNKS:
            self._stop()
            console.print(
                f"Profiled {CHUNKS} chunks of steps: pip install xprof, then xprof --logdir {self._directory}"
            )

    def close(self) -> None:
        """Writes what there is, and says so, if the run was too short."""
        if self._directory and self._chunks < CHUNKS_BEFORE + CHUNKS:
            self._stop()
            console.print(
                f"--profile: the run had {self._chunks} chunks of training steps; a profile is of the "
                f"{CHUNKS} after the first {CHUNKS_BEFORE}"
            )

    def _stop(self) -> None:
        if self._is_recording:
            tf.profiler.experimental.stop()
        self._is_recording = False
