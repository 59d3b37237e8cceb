"""Makes record files of text packed into rows of one length.

    python prepare_data.py --texts FOLDER --records OTHER_FOLDER
    python prepare_data.py --help

A document becomes END, its bytes, END: tokens 0 to 255 are bytes, and END marks where documents start and end. A row
contains several documents, or a part of a long one. Each token of a row has its document's number in the row (0 is
padding), its position in the document, and a label: the token that follows it.
"""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine.command_line import program
from engine.errors import BadInput
from engine.files import new_folder

VOCABULARY_SIZE = 257
END = VOCABULARY_SIZE - 1
NO_LABEL = -1  # The label of padding, and of a prompt's tokens.
FIELDS = ("tokens", "documents", "positions", "labels")
OPEN_ROWS = 100  # A document goes into the first row with room among the newest rows.
TEXTS = "texts.sha256"  # In the folder of records: of which texts they are made.

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


def encode(text: str) -> list[int]:
    """Returns the tokens of a document or of a prompt, without END. `decode` in task.py is its inverse."""
    return list(text.encode())


def make_records(arguments: Arguments) -> None:
    """Makes the folder of record files, complete or not at all. Several processes may make the same at once.

    Raises:
        BadInput: an argument or a text cannot be used.
        CannotWrite: the folder cannot be made.
    """
    if not arguments.texts.is_dir():
        raise BadInput(f"--texts {arguments.texts} is not a folder: pass a folder of .txt files")
    paths = sorted(arguments.texts.glob("*.txt"))
    if not paths:
        raise BadInput(f"--texts {arguments.texts} contains no .txt file: pass a folder of them")
    documents = {path.stem: read_documents(path) for path in paths}
    texts = hash_of(arguments.texts)
    with new_folder(arguments.records) as folder:
        for name, each in documents.items():
            write_records(folder / f"{name}.tfrecord", pack(each, arguments.sequence_length))
        (folder / TEXTS).write_text(f"{texts}  {arguments.texts}", encoding="utf-8")


def hash_of(texts: Path) -> str:
    """Returns a fingerprint of the text files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(texts.glob("*.txt")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_documents(path: Path) -> list[str]:
    """Returns the documents of a text file. Raises BadInput if it cannot be used."""
    try:
        path.name.encode()
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as problem:
        raise BadInput(f"{path} cannot be read ({problem}): pass a text file in UTF-8, with such a name") from problem
    documents = [each.strip("\n").rstrip() for each in re.split(r"\n(?:[ \t]*\n)+", text) if each.strip()]
    if not documents:
        raise BadInput(f"{path} contains no text: remove it, or put text into it")
    return documents


def pack(documents: Iterable[str], length: int) -> Iterator[Row]:
    """Yields rows of `length` tokens, first fit.

    A document that is longer than a row continues in another one, as a document of its own that sees nothing of its
    start.
    """
    rows: list[Row] = []
    for document in documents:
        tokens = [END, *encode(document), END]
        for first in range(0, len(tokens) - 1, length):
            part = tokens[first : first + length + 1]  # The last token is only a label.
            fits = (row for row in rows if len(row["tokens"]) + len(part) - 1 <= length)
            row = next(fits, None)
            if row is None:
                row = {field: [] for field in FIELDS}
                rows.append(row)
            add_document(row, part[:-1], part[1:])
            if len(rows) > OPEN_ROWS:
                yield padded(rows.pop(0), length)
    yield from (padded(row, length) for row in rows)


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


def prompt_row(prompt: str, length: int) -> Row:
    """Returns a row whose only document is the start of one. Raises BadInput if no token is left to complete it."""
    row: Row = {field: [] for field in FIELDS}
    tokens = [END, *encode(prompt)]
    if len(tokens) >= length:
        rule = f"has {len(tokens) - 1} tokens, and --sequence-length {length} leaves room for {length - 2}"
        raise BadInput(f"the prompt {prompt[:20]}... {rule}: shorten it")
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


def check_texts(records: Path, texts: Path) -> None:
    """Raises BadInput if the records are made of the texts in this folder, and these are others now."""
    made_of = (records / TEXTS).read_text(encoding="utf-8") if (records / TEXTS).exists() else ""
    if made_of.endswith(f"  {texts}") and not made_of.startswith(hash_of(texts)):
        raise BadInput(f"{records} is made of other texts than {texts} contains now: remove it, and it is made again")


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
    with program(Arguments) as arguments:
        records = arguments.records
        if records.exists():
            raise BadInput(f"--records {records} exists already: remove it, or pass another folder")
        make_records(arguments)
        print(*summaries(records), sep="\n")
        flags = ["--records", str(records), "--sequence-length", str(arguments.sequence_length)]
        print(f"Made {records}, for: python train.py {shlex.join([*flags, '--run-dir', f'runs/{records.name}'])}")


if __name__ == "__main__":
    main()
