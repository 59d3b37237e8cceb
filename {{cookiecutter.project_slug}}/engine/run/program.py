"""What --check and the evaluation use of train.py, which hands itself to them."""

from typing import Any, Protocol

import tensorflow as tf

from engine.data.batches import Batches
from engine.data.stacks import CompiledSteps
from engine.run.run import Run


class Program(Protocol):
    """The module train.py: its global objects and its passes over the splits."""

    SPLITS: tuple[str, str, str]
    strategy: tf.distribute.Strategy
    batches: dict[str, Batches]
    """Dataset ("train", "validation" or "validation/<name>", "test" or "test/<name>") -> its batches."""
    run_steps: dict[str, CompiledSteps]
    """Split -> takes steps on a stack of batches, in the graph; returns their losses ([count])."""
    run: Run
    """How far the run has come, and what it keeps on disk."""

    def build(self, settings: Any) -> None:
        """Makes the global objects for other settings; writes nothing."""

    def train_epoch(self, epoch: int = 0) -> dict[str, float]:
        """Returns the training metrics of an epoch, counted from 0."""

    def validate(self, epoch: int = 0) -> dict[str, float]:
        """Returns the validation metrics of the weights as they are; {} without a validation."""

    def test(self) -> dict[str, float]:
        """Returns the test metrics of the weights as they are; {} without a test."""
