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
    noise_size: int = 16
    """Random numbers that the generator makes an image from."""
    beta_1: float = 0.5
    """How much of its direction Adam keeps from step to step, for both models."""
    gradient_penalty: float = 0.1
    """Weight of the squared slope of the discriminator at real images in its loss."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 60
    global_batch_size: int = 32
    learning_rate: float = 1e-3
    ema_decay: float | None = 0.995
    # The losses of a generator and a discriminator work against each other, so neither says which weights are best.
    monitor: str = "validation/distance"
    monitor_direction: Literal["auto", "min", "max"] = "min"


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
