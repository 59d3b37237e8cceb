"""Your settings. Each one is a flag of train.py: python train.py --help."""

import dataclasses
from pathlib import Path

from engine.command_line import check_command_line
from engine.errors import BadInput
from engine.settings import ChangeableOnResume, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Trains a language model with a custom loop: the same results on one device and on many.

    A run directory that contains a checkpoint is resumed; a finished run is reported and not trained again.
    """

    # TODO(you): Add the settings of your task; each becomes a flag and is recorded with the run.
    records: ChangeableOnResume[Path] = Path("data/records")
    """Folder of train.tfrecord, validation.tfrecord and test.tfrecord, as prepare_data.py makes them. The default is
    made of the texts in data/ if it does not exist."""
    sequence_length: int = 128
    """Tokens of a row in the records, padding included; a prompt and its completion have this length at most."""
    layers: int = 2
    """Blocks of the transformer."""
    width: int = 128
    """Length of the vectors between the blocks."""
    heads: int = 4
    """Attention heads of each block."""
    dropout: float = 0.0
    """Rate of dropout after each attention and each feed-forward layer."""
    weight_decay: float = 0.1
    """Decay of all weights but the scales of normalizations."""
    temperature: ChangeableOnResume[float] = 0.5
    """Completions are drawn from softmax(logits / temperature); 0 takes the likeliest token each time."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 10
    global_batch_size: int = 16
    learning_rate: float = 3e-3
    global_clipnorm: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequence_length", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.width % (2 * self.heads):
            rule = "must be a multiple of twice --heads, because rotary positions turn pairs of numbers"
            raise BadInput(
                f"--width {self.width} {rule}: pass --width {2 * self.heads * -(-self.width // (2 * self.heads))}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise BadInput(f"--dropout {self.dropout} must be at least 0 and less than 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise BadInput(f"--temperature {self.temperature} must be at least 0")


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
