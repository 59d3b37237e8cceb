"""Your settings. Each one is a flag of train.py: python train.py --help."""

import dataclasses
from pathlib import Path

from engine.command_line import check_command_line
from engine.errors import BadInput
from engine.settings import ChangeableOnResume, InitOnly, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Fine-tunes BERT on pairs of sentences with a custom loop: the same results on one device and on many.

    A run directory that contains a checkpoint is resumed; a finished run is reported and not trained again.
    """

    # TODO(you): Add the settings of your task; each becomes a flag and is recorded with the run.
    records: ChangeableOnResume[Path] = Path("data/records")
    """Folder of train.tfrecord, validation.tfrecord and test.tfrecord, as prepare_data.py and tf-models make them. The
    default is made of the shipped pairs if it is not there."""
    sequence_length: int = 128
    """Tokens of a pair in the records, padding included."""
    vocabulary_size: int = 1200
    """Tokens that the encoder knows; BERT: 30522."""
    classes: int = 2
    """Number of labels, which count from 0."""
    preset: str | None = None
    """Take sizes and weights of the encoder from a preset of keras-hub, such as bert_base_en_uncased (from the
    network), or from a folder that save_to_preset wrote. Otherwise it has the next three settings' sizes."""
    encoder_weights: InitOnly[Path | None] = None
    """Start with the encoder's weights in this file: the .weights.h5 of a BertBackbone of the same sizes, or the prefix
    of a tf.train.Checkpoint(encoder=...) of one."""
    layers: int = 2
    """Layers of the encoder; BERT: 12."""
    width: int = 64
    """Length of the vectors in the encoder; BERT: 768."""
    heads: int = 4
    """Attention heads of each layer; BERT: 12."""
    dropout: float = 0.1
    """Rate of dropout, in the encoder and in front of the classifier."""
    weight_decay: float = 0.01
    """Decay of all weights but biases and the weights of normalizations."""

    # Any setting of engine/settings.py can get another default here.
    epochs: int = 8
    global_batch_size: int = 32
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sequence_length", "vocabulary_size", "classes", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.width % self.heads:
            raise BadInput(f"--width {self.width} must be a multiple of --heads {self.heads}")
        if self.preset and self.records == Config.records:
            raise BadInput(
                f"--preset {self.preset} needs --records of its tokens: make them with "
                f"python prepare_data.py --preset {self.preset} --records FOLDER"
            )


# Before TensorFlow is imported, which takes seconds: --help and wrong flags are answered at once.
check_command_line(Config)
