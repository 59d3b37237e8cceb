"""Makes record files of text packed into rows of one length.

    python prepare_data.py --texts FOLDER --records OTHER_FOLDER
    python prepare_data.py --help

A document becomes END, its bytes, END: tokens 0 to 255 are bytes, and END marks where documents start and end. A row
contains several documents, or a part of a long one. Each token of a row has its document's number in the row (0 is
padding), its position in the document, and a label: the token that follows it.
"""

import dataclasses
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tyro

from engine.errors import BadInput, CannotWrite, exit_codes

END = 256
VOCABULARY_SIZE = 257
NO_LABEL = -1  # The label of padding, and of a prompt's tokens.
FIELDS = ("tokens", "documents", "positions", "labels")
OPEN_ROWS = 100  # A document goes into the first row with room among the newest rows.

Row = dict[str, list[int]]  # The FIELDS, [sequence_length] each.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Makes record files of text packed into rows of one length, for --records of train.py."""

    texts: Path = Path("data")
    """Folder of .txt files in UTF-8: train, validation and test to train. Blank lines separate documents."""
    records: Path = Path("data/records")
    """The folder to make: a .tfrecord file for each .txt file."""
    sequence_length: int = 128
    """Tokens of a row, padding included."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise BadInput(f"--sequence-length {self.sequence_length} must be at least 2")


def make_records(arguments: Arguments) -> None:
    """Makes the folder of record files, complete or not at all. Several processes may make the same at once.

    Raises:
        BadInput: an argument or a text cannot be used.
        CannotWrite: the folder cannot be made.
    """
    paths = sorted(arguments.texts.glob("*.txt"))
    if not paths:
        raise BadInput(f"--texts {arguments.texts} contains no .txt file: pass a folder of them")
    documents = {path.stem: read_documents(path) for path in paths}
    records = arguments.records
    try:
        records.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{records.name}.", dir=records.parent) as beside:
            complete = Path(beside, "records")
            complete.mkdir()
            for name, each in documents.items():
                write_records(complete / f"{name}.tfrecord", pack(each, arguments.sequence_length))
            try:
                complete.rename(records)
            except OSError:
                if not records.is_dir():  # Otherwise another process was faster, and has made the same.
                    raise
    except OSError as problem:
        raise CannotWrite(f"{records} cannot be written ({problem})") from problem


def read_documents(path: Path) -> list[bytes]:
    """Returns the documents of a text file. Raises BadInput if it cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput(f"{path} cannot be read ({problem}): pass a text file in UTF-8") from problem
    documents = [each.strip().encode() for each in re.split(r"\n\s*\n", text) if each.strip()]
    if not documents:
        raise BadInput(f"{path} contains no text: remove it, or put text into it")
    return documents


def pack(documents: Iterable[bytes], length: int) -> list[Row]:
    """Returns rows of `length` tokens, first fit. A document that is longer than a row continues in another one."""
    rows: list[Row] = []
    for document in documents:
        tokens = [END, *document, END]
        for first in range(0, len(tokens) - 1, length):
            part = tokens[first : first + length + 1]  # The last token is only a label.
            fits = (row for row in rows[-OPEN_ROWS:] if len(row["tokens"]) + len(part) - 1 <= length)
            row = next(fits, None)
            if row is None:
                row = {field: [] for field in FIELDS}
                rows.append(row)
            add_document(row, part[:-1], part[1:])
    return [padded(row, length) for row in rows]


def add_document(row: Row, tokens: Sequence[int], labels: Sequence[int]) -> None:
    """Appends a document to a row."""
    number = max(row["documents"], default=0) + 1
    row["tokens"] += tokens
    row["documents"] += [number] * len(tokens)
    row["positions"] += range(len(tokens))
    row["labels"] += labels


def padded(row: Row, length: int) -> Row:
    """Returns a row of `length` tokens, whose padding belongs to document 0 and has no labels."""
    missing = length - len(row["tokens"])
    return {field: row[field] + [NO_LABEL if field == "labels" else 0] * missing for field in FIELDS}


def prompt_row(prompt: bytes, length: int) -> Row:
    """Returns a row whose only document is the start of one. Raises BadInput if no token is left to complete it."""
    if len(prompt) > length - 2:
        raise BadInput(f"the prompt {prompt[:20]!r}... has {len(prompt)} bytes: pass at most {length - 2}")
    row: Row = {field: [] for field in FIELDS}
    tokens = [END, *prompt]
    add_document(row, tokens, [NO_LABEL] * len(tokens))
    return padded(row, length)


def serialized(row: Row) -> bytes:
    """Returns a row as a tf.train.Example, with the FIELDS as lists of integers."""
    import tensorflow as tf

    example = tf.train.Example()
    for field in FIELDS:
        example.features.feature[field].int64_list.value.extend(row[field])
    return example.SerializeToString(deterministic=True)


def write_records(path: Path, rows: Iterable[Row]) -> None:
    """Writes a record for each row."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as file:
        for row in rows:
            file.write(serialized(row))


def check_records(path: Path, sequence_length: int) -> None:
    """Raises BadInput if the first record of a file does not fit --sequence-length of train.py."""
    import tensorflow as tf

    try:
        for record in tf.data.TFRecordDataset(str(path)).take(1):
            parsed = tf.io.parse_single_example(record, {field: tf.io.RaggedFeature(tf.int64) for field in FIELDS})
            found = {len(parsed[field]) for field in FIELDS}
            if found != {sequence_length}:
                raise BadInput(
                    f"--sequence-length {sequence_length} does not fit {path}, whose rows have {max(found)} tokens: "
                    "pass their length, or make other records with prepare_data.py"
                )
    except tf.errors.NotFoundError as problem:
        raise BadInput(f"--records {path.parent} has no {path.name}: make it with prepare_data.py") from problem
    except tf.errors.OpError as problem:
        reason = problem.message.splitlines()[0].split("}} ")[-1]
        raise BadInput(f"{path} contains no such records ({reason}): make it with prepare_data.py") from problem


def summaries(folder: Path) -> Iterator[str]:
    """Yields a line about each file of records."""
    import tensorflow as tf

    for path in sorted(folder.glob("*.tfrecord")):
        rows = tokens = size = 0
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            documents = tf.train.Example.FromString(record).features.feature["documents"].int64_list.value
            rows, tokens, size = rows + 1, tokens + sum(each > 0 for each in documents), size + len(documents)
        yield f"{path.stem}: {tokens:,} tokens in {rows:,} rows, {100 * (1 - tokens / size):.1f} % padding"


def main() -> None:
    """Makes the folder that the command line asks for."""
    with exit_codes():
        arguments = tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))
        records = arguments.records
        if records.exists():
            raise BadInput(f"--records {records} exists already: remove it, or pass another folder")
        make_records(arguments)
        print(*summaries(records), sep="\n")
        flags = f"--records {records} --sequence-length {arguments.sequence_length}"
        print(f"Made {records}, for: python train.py {flags}")


if __name__ == "__main__":
    main()
