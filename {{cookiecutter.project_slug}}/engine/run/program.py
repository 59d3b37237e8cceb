"""The parts of train.py that --check and the evaluation use; train.py passes itself to them."""

from typing import Any, Protocol

import tensorflow as tf

from engine.data.batches import Batches
from engine.data.stacks import CompiledSteps
from engine.run.run import Run


class Program(Protocol):
    """The global objects and functions of train.py, which describes them."""

    SPLITS: tuple[str, str, str]
    strategy: tf.distribute.Strategy
    batches: dict[str, Batches]
    run_steps: dict[str, CompiledSteps]
    run: Run

    def build(self, settings: Any) -> None: ...
    def train_epoch(self, epoch: int = 0) -> dict[str, float]: ...
    def validate(self, epoch: int | None = None) -> dict[str, float]: ...
    def test(self) -> dict[str, float]: ...
