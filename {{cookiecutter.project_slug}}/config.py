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
    data: Literal["digits", "fashion_mnist"] = "digits"
    """scikit-learn's 1,797 digits, or the 70,000 pieces of clothing of Fashion-MNIST, which are downloaded once."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 30
    global_batch_size: int = 32
    learning_rate: float = 3e-3


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
