"""How many steps one call of a compiled function runs: --steps-per-execution."""

import collections
from typing import Any

from engine.cluster.workers import Workers


class Chunks:
    """The lengths of the chunks in which the steps of each split are run."""

    def __init__(self, settings: Any, workers: Workers) -> None:
        """`settings` has eager, steps_per_execution, checkpoint_every_steps and validate_every_steps."""
        self._is_measured = settings.steps_per_execution == "auto" and not settings.eager
        first = 1 if settings.steps_per_execution == "auto" else settings.steps_per_execution
        self._steps: dict[str, int] = collections.defaultdict(lambda: first)
        self._every = [each for each in (settings.checkpoint_every_steps, settings.validate_every_steps) if each]
        self._workers = workers

    def next(self, split: str, *, left: int, step: int) -> int:
        """Returns how many steps of a split to run now.

        Args:
            split: "train", "validation" or "test".
            left: how many are left of this pass.
            step: training steps done in all.
        """
        count = min(self._steps[split], left)
        if split == "train":
            # To the next multiple, counted from the first epoch on, so that resumes move none.
            count = min([count, *(every - step % every for every in self._every)])
        return count

    def took(self, split: str, count: int, seconds: float) -> None:
        """Notes how long a chunk took; every worker has to call it."""
        if self._is_measured and count == self._steps[split]:
            # A second's worth, reached by doubling: the first call compiles, and so looks slow.
            self._steps[split] = self._workers.broadcast(max(1, min(2 * count, int(count / seconds))))
