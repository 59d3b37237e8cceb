"""Makes record files of pairs of sentences, with the fields that tf-models' own files have.

    python prepare_data.py --pairs FOLDER --records OTHER_FOLDER
    python prepare_data.py --help

A pair becomes [CLS] sentence1 [SEP] sentence2 [SEP] in WordPiece tokens, without the last tokens of the longer sentence
if it is too long, and padded.
"""

import csv
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.command_line import program
from engine.errors import BadInput
from engine.files import new_folder

COLUMNS = ("label", "sentence1", "sentence2")
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAIRS = "pairs.sha256"  # In the folder of records: of which pairs they are made.

Pair = tuple[int, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Makes record files of pairs of sentences, for --records of train.py."""

    pairs: Path = Path("data")
    """Folder of .tsv files: train, validation and test to train. The first row names label, sentence1 and sentence2."""
    records: Path = Path("data/records")
    """The folder to make: a .tfrecord file for each .tsv file, and the vocabulary as vocab.txt."""
    sequence_length: int = 128
    """Tokens of a pair, padding included."""
    vocabulary: Path | None = None
    """A vocab.txt of BERT's form, one token a line. Without it, one is made of the sentences of train.tsv."""
    vocabulary_size: int = 1200
    """Most tokens of a vocabulary that is made."""
    cased: bool = False
    """Tell capitals from small letters, and letters with accents from those without."""
    preset: str | None = None
    """Take the tokenizer of a preset of keras-hub (from the network), or of a folder that save_to_preset wrote."""

    def __post_init__(self) -> None:
        if self.sequence_length < 5:
            raise BadInput(f"--sequence-length {self.sequence_length} must be at least 5: three marks and two tokens")
        if self.vocabulary_size < 100:
            raise BadInput(f"--vocabulary-size {self.vocabulary_size} must be at least 100, to hold all letters")
        if self.preset and self.vocabulary:
            raise BadInput(f"--preset {self.preset} has its own vocabulary: leave out --vocabulary {self.vocabulary}")


def make_records(arguments: Arguments) -> None:
    """Makes the folder of record files, complete or not at all. Several processes may make the same at once.

    Raises:
        BadInput: an argument or a row of the pairs cannot be used.
        CannotWrite: the folder cannot be made.
    """
    pairs = {path.stem: read_pairs(path) for path in sorted(arguments.pairs.glob("*.tsv"))}
    if not pairs:
        raise BadInput(f"--pairs {arguments.pairs} holds no .tsv file: give a folder of them")
    if "train" not in pairs and not (arguments.vocabulary or arguments.preset):
        raise BadInput(
            f"--pairs {arguments.pairs} holds no train.tsv to make a vocabulary of: give one, or --vocabulary"
        )
    made_of, tokenizer = hash_of(arguments.pairs), create_tokenizer(arguments, pairs.get("train", []))
    with new_folder(arguments.records) as folder:
        for name, each in pairs.items():
            write_records(folder / f"{name}.tfrecord", each, tokenizer, arguments.sequence_length)
        lines = "".join(f"{token}\n" for token in tokenizer.get_vocabulary())
        (folder / "vocab.txt").write_text(lines, encoding="utf-8")
        (folder / PAIRS).write_text(f"{made_of}  {arguments.pairs}", encoding="utf-8")


def hash_of(pairs: Path) -> str:
    """Returns a fingerprint of the .tsv files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(pairs.glob("*.tsv")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def check_pairs(records: Path, pairs: Path) -> None:
    """Raises BadInput if the records are made of the pairs in this folder, and these are others now."""
    made_of = (records / PAIRS).read_text(encoding="utf-8") if (records / PAIRS).exists() else ""
    if made_of.endswith(f"  {pairs}") and not made_of.startswith(hash_of(pairs)):
        raise BadInput(f"{records} is made of other pairs than {pairs} contains now: remove it, and it is made again")


def read_pairs(path: Path) -> list[Pair]:
    """Returns the pairs of a TSV file. Raises BadInput for the first row that cannot be used."""
    pairs = []
    try:
        path.name.encode()
        with path.open(encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            names = next(rows, [])
            if missing := [name for name in COLUMNS if name not in names]:
                raise BadInput(f"{path}, row 1 names no column {missing[0]!r}: let it name {', '.join(COLUMNS)}")
            for number, row in enumerate(rows, start=2):
                if len(row) != len(names):
                    raise BadInput(f"{path}, row {number} has {len(row)} columns, not {len(names)} as row 1: fix it")
                label, first, second = (row[names.index(name)].strip() for name in COLUMNS)
                if not (label.isascii() and label.isdecimal() and len(label) < 10):
                    raise BadInput(f"{path}, row {number} has the label {label!r}: give a whole number from 0 on")
                if not (first and second):
                    raise BadInput(f"{path}, row {number} has an empty sentence: fill it in, or leave the row out")
                pairs.append((int(label), first, second))
    except (OSError, UnicodeError, csv.Error) as problem:
        raise BadInput(f"{path} cannot be read ({problem}): give a TSV file in UTF-8, with such a name") from problem
    if not pairs:
        raise BadInput(f"{path} holds no pairs: give at least one")
    return pairs


def create_tokenizer(arguments: Arguments, pairs: Sequence[Pair]):
    """Returns a keras_hub BertTokenizer: the preset's, that of the vocabulary file, or one made of the pairs."""
    import keras_hub
    import tensorflow as tf

    if arguments.preset:
        return load_preset(keras_hub.models.BertTokenizer, arguments.preset)
    forms = {"lowercase": not arguments.cased, "strip_accents": not arguments.cased}
    if arguments.vocabulary:
        try:
            return keras_hub.models.BertTokenizer(str(arguments.vocabulary), **forms)
        except (OSError, ValueError) as problem:
            reason = str(problem).splitlines()[0]
            raise BadInput(
                f"--vocabulary {arguments.vocabulary} cannot be used ({reason}): give a vocab.txt of BERT's form"
            ) from problem
    sentences = tf.data.Dataset.from_tensor_slices([sentence for _, *both in pairs for sentence in both])
    vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
        sentences, arguments.vocabulary_size, reserved_tokens=MARKS, **forms
    )
    return keras_hub.models.BertTokenizer(vocabulary, **forms)


def load_preset(kind: Any, preset: str, **options):
    """Returns a backbone or tokenizer of keras-hub from a preset. Raises BadInput if it cannot be loaded."""
    try:
        return kind.from_preset(preset, **options)
    except Exception as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__).rstrip(" .:")
        raise BadInput(
            f"--preset {preset} cannot be loaded ({reason}): give a preset of keras-hub, which needs the network, or a "
            "folder that save_to_preset wrote"
        ) from problem


def write_records(path: Path, pairs: Sequence[Pair], tokenizer, sequence_length: int) -> None:
    """Writes a tf.train.Example for each pair: label_ids (one number), and the fields of `pack`."""
    import tensorflow as tf

    first, second = (tokenizer([pair[place] for pair in pairs]) for place in (1, 2))
    with tf.io.TFRecordWriter(str(path)) as file:
        for (label, *_), one, other in zip(pairs, first, second, strict=True):
            example = tf.train.Example()
            for name, values in {"label_ids": [label], **pack(one, other, tokenizer, sequence_length)}.items():
                example.features.feature[name].int64_list.value.extend(values)
            file.write(example.SerializeToString(deterministic=True))


def pack(one: Sequence[int], other: Sequence[int], tokenizer, sequence_length: int) -> dict[str, list[int]]:
    """Returns input_ids, input_mask and segment_ids ([sequence_length] each) of two tokenized sentences."""
    one, other = list(one), list(other)
    while len(one) + len(other) > sequence_length - 3:
        (one if len(one) > len(other) else other).pop()
    first = [tokenizer.cls_token_id, *one, tokenizer.sep_token_id]
    second = [*other, tokenizer.sep_token_id]
    padding = [0] * (sequence_length - len(first) - len(second))
    return {
        "input_ids": [*first, *second, *(tokenizer.pad_token_id for _ in padding)],
        "input_mask": [1] * (len(first) + len(second)) + padding,
        "segment_ids": [0] * len(first) + [1] * len(second) + padding,
    }


def check_records(path: Path, *, sequence_length: int, vocabulary_size: int, classes: int) -> None:
    """Raises BadInput if the records in a file do not fit these settings of train.py."""
    import tensorflow as tf

    fields = {name: tf.io.RaggedFeature(tf.int64) for name in ("input_ids", "label_ids")}
    try:
        for records in tf.data.TFRecordDataset(str(path)).batch(1024):
            parsed = tf.io.parse_example(records, fields)
            tokens, labels = parsed["input_ids"], parsed["label_ids"]
            if other := set(tokens.row_lengths().numpy().tolist()) - {sequence_length}:
                raise BadInput(
                    f"--sequence-length {sequence_length} does not fit {path}, which holds {min(other)} tokens for a "
                    "pair: give the length of its pairs, or make other records with prepare_data.py"
                )
            for flag, size, found in (("vocabulary-size", vocabulary_size, tokens), ("classes", classes, labels)):
                if (largest := int(tf.reduce_max(found.values))) >= size:
                    raise BadInput(
                        f"--{flag} {size} does not fit {path}, which holds {largest}: give at least {largest + 1}"
                    )
    except tf.errors.NotFoundError as problem:
        raise BadInput(f"--records {path.parent} has no {path.name}: make it with prepare_data.py") from problem
    except tf.errors.OpError as problem:
        reason = problem.message.splitlines()[0].split("}} ")[-1]
        raise BadInput(f"{path} holds no such records ({reason}): make it with prepare_data.py") from problem


def main() -> None:
    """Makes the folder that the command line asks for."""
    with program(Arguments) as arguments:
        if arguments.records.exists():
            raise BadInput(f"--records {arguments.records} is there already: remove it, or give another folder")
        make_records(arguments)
        size = len((arguments.records / "vocab.txt").read_text(encoding="utf-8").splitlines())
        print(f"Made {arguments.records}, for: python train.py --records {arguments.records} --vocabulary-size {size}")


if __name__ == "__main__":
    main()
