"""Your settings. Each one is a flag of train.py: python train.py --help."""

import dataclasses
from pathlib import Path
from typing import Literal

from engine.command_line import check_command_line
from engine.errors import BadInput
from engine.settings import ChangeableOnResume, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Trains a two-tower recommender with a custom loop: the same results on one device and on many.

    A run directory that contains a checkpoint is resumed; a finished run is reported and not trained again.
    """

    # TODO(you): Add the settings of your task; each becomes a flag and is recorded with the run.
    records: ChangeableOnResume[Path] = Path("data/records")
    """Folder of users.jsonl, items.jsonl, train.tfrecord, validation.tfrecord and test.tfrecord, as prepare_data.py
    makes them. The default is made if it does not exist."""
    vector_length: int = 32
    """Length of the vectors of users and items, whose product is the score."""
    hidden: int = 64
    """Units of the hidden layer of the ranking head."""
    retrieval_weight: float = 1.0
    """Weight of the loss of finding the item that the user chose."""
    ranking_weight: float = 0.1
    """Weight of the loss of predicting whether the user liked the item."""
    items_at_once: int = 4096
    """Items of a block, when all items are ranked: a larger block needs more memory. Does not affect results."""
    new_items_only: bool = False
    """Rank only items that the user does not have in training, in evaluations and predictions."""
    best: int = 10
    """Number of items that predictions and the exported model return."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 4
    global_batch_size: int = 1024
    learning_rate: float = 0.05
    monitor: str = "validation/recall_at_10"
    monitor_direction: Literal["auto", "min", "max"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vector_length", "hidden", "items_at_once", "best"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1: pass 1 or more")
        for name in ("retrieval_weight", "ranking_weight"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 0: pass 0 or more")


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
