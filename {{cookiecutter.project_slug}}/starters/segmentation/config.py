"""Your settings. Each one is a flag of train.py: python train.py --help."""

import dataclasses
from typing import Literal

from engine.command_line import check_command_line
from engine.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Trains task.py with a custom loop: the same results on one device and on many.

    A run directory that contains a checkpoint is resumed; a finished run is reported and not trained again.
    """

    # TODO(you): Add the settings of your task; each becomes a flag and is recorded with the run.
    class_weights: tuple[float, float, float, float] = (0.5, 3.0, 3.0, 4.0)
    """How much a pixel of each class counts in the loss. With a mean of 1 over all pixels the learning rate fits."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 20
    global_batch_size: int = 16
    learning_rate: float = 3e-3
    monitor: str = "validation/mean_iou"
    monitor_direction: Literal["auto", "min", "max"] = "max"


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
