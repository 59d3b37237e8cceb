"""The step that is being traced in this thread: what apply_gradients, sum_over_batch and others inside it share."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import tensorflow as tf

from engine.settings import Settings

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

_thread = threading.local()  # Its `step` is the thread's Step. Each replica is traced in a thread of its own.


@dataclasses.dataclass
class Step:
    """A step of one replica, and how far its tracing is."""

    batch: Any = None  # The complete per-replica batch, before it is cut into micro-batches; None outside a step.
    settings: Settings | None = None  # None unless it is a step of the training.
    is_last: bool = True  # Whether this micro-batch is the last one, in which apply_gradients updates.
    updates: int = 0  # How often this micro-batch has called apply_gradients, and sum_over_batch.
    counts: int = 0
    # The sums of the gradients of the micro-batches so far, for each of these calls of apply_gradients.
    gradients: list[list[Gradient]] = dataclasses.field(default_factory=list)
    counted: list[tf.Tensor] = dataclasses.field(default_factory=list)  # What sum_over_batch returned, for each call.
    operations: int = 0  # The number of operations in the graph at the first call of apply_gradients.

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of the step."""
        return self.settings.micro_batches if self.settings else 1


def current_step() -> Step:
    """Returns the step that is being traced in this thread; one without a batch outside a step."""
    return getattr(_thread, "step", None) or Step()


@contextlib.contextmanager
def step_on(batch: Any, settings: Settings | None = None) -> Iterator[Step]:
    """Yields the step to which the hooks that are called inside belong.

    `batch` is the complete per-replica batch (features, labels, sample_weights); `settings` are given in training.
    """
    before = getattr(_thread, "step", None)
    _thread.step = step = Step(batch, settings)
    try:
        yield step
    finally:
        _thread.step = before
