"""What the evaluation and --check use of train.py, which is the module that they are handed."""

from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from engine.run.run import Run


class Program(Protocol):
    """The module train.py. Its objects are there once `build` has been called, and made anew by each call."""

    SPLITS: tuple[str, ...]
    strategy: tf.distribute.Strategy
    batches: dict[str, Any]
    run_steps: dict[str, Callable[..., tf.Tensor]]
    run: Run

    def build(self, settings: Any) -> None: ...

    def train_epoch(self, epoch: int = 0) -> dict[str, float]: ...

    def validate(self, epoch: int = 0) -> dict[str, float]: ...

    def test(self) -> dict[str, float]: ...
