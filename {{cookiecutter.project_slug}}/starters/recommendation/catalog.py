"""The items and the vocabularies of a folder of records, as tensors."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

from engine.errors import BadInput
from prepare_data import ITEMS, USERS, Values, read_rows


@dataclasses.dataclass(frozen=True)
class Catalog:
    """Items are numbered from 1 on, in the order of items.jsonl; 0 is unknown. So are the texts of each column."""

    tables: dict[str, tf.lookup.StaticHashTable]  # A user's column, or "item_id" -> text to number (int64).
    sizes: dict[str, int]  # Column -> texts in its vocabulary, and 1 for number 0.
    columns: dict[str, tf.Tensor]  # An item's column -> its numbers for each item, int32 [items + 1, longest list].
    item_ids: tf.Tensor  # string [items + 1]; the first one is "".
    log_frequency: tf.Tensor  # Logarithm of an item's part of the interactions in training, float32 [items + 1].

    @property
    def items(self) -> int:
        return len(self.item_ids) - 1


def catalog_files(records: Path, *, known_items: bool) -> list[Path]:
    """Returns the files of the catalog, where the place of a line is a row of a table, and of `read_known_items`."""
    return [records / name for name in (USERS, ITEMS, *["train.tfrecord"] * known_items)]


@functools.cache
def read_catalog(records: Path, user_columns: tuple[str, ...], item_columns: tuple[str, ...]) -> Catalog:
    """Returns the catalog of a folder that prepare_data.py made. Raises BadInput if it cannot be used."""
    users = [row for _, row in read_rows(records / USERS, texts=user_columns)]
    lists = [name for name in item_columns if name != "item_id"]
    items = []
    for place, row in read_rows(records / ITEMS, texts=("item_id",), lists=lists):
        if not isinstance(count := row.get("count"), int) or count < 0:
            raise BadInput(f"{place} has the count {count!r}, which must be an integer from 0 on: fix it")
        items.append(row)
    texts = {name: vocabulary(texts_of(row, name) for row in users) for name in user_columns}
    of_items = {name: vocabulary(texts_of(row, name) for row in items) for name in ("item_id", *lists)}
    if len(of_items["item_id"]) < len(items):
        raise BadInput(f"{records / ITEMS} has several lines of one item_id: keep one of them")
    counts = np.array([0, *(row["count"] for row in items)], np.float64)
    frequencies = np.maximum(counts, 1.0) / max(counts.sum(), 1.0)
    # Hooks call this while they are traced; without init_scope the tensors would belong to that graph.
    with tf.init_scope(), tf.device("CPU:0"):
        looked_up = {**texts, "item_id": of_items["item_id"]}
        return Catalog(
            tables={name: create_table(each) for name, each in looked_up.items()},
            sizes={name: len(each) + 1 for name, each in {**texts, **of_items}.items()},
            columns={name: tf.constant(numbers(items, name, of_items[name])) for name in item_columns},
            item_ids=tf.constant(["", *of_items["item_id"]]),
            log_frequency=tf.constant(np.log(frequencies), tf.float32),
        )


@functools.cache
def read_known_items(records: Path, user_columns: tuple[str, ...], item_columns: tuple[str, ...]) -> tf.Tensor:
    """Returns the items that each user has in training, int32 [users + 1, most of a user], padded with 0."""
    tables = read_catalog(records, user_columns, item_columns).tables
    fields = {name: tf.io.FixedLenFeature([], tf.string, "") for name in ("user_id", "item_id")}
    found = []
    with tf.init_scope(), tf.device("CPU:0"):
        for batch in tf.data.TFRecordDataset(str(records / "train.tfrecord")).batch(10_000):
            parsed = tf.io.parse_example(batch, fields)
            found.append(np.stack([tables[name].lookup(parsed[name]).numpy() for name in fields]))
        users, items = np.unique(np.concatenate(found, axis=1), axis=1)  # In the order of the users.
        counts = np.bincount(users, minlength=tables["user_id"].size().numpy() + 1)
        first = np.cumsum(counts) - counts
        known = np.zeros((len(counts), counts[1:].max(initial=1)), np.int32)
        of_known = users > 0
        known[users[of_known], (np.arange(len(users)) - first[users])[of_known]] = items[of_known]
        return tf.constant(known)


def texts_of(row: Values, column: str) -> list[str]:
    """Returns the texts of a row's column, which is one text or a list of them."""
    return row[column] if isinstance(row[column], list) else [row[column]]


def vocabulary(rows: Iterable[list[str]]) -> list[str]:
    """Returns the different texts of all rows, in the order in which they appear first."""
    return list(dict.fromkeys(text for row in rows for text in row))


def create_table(texts: list[str]) -> tf.lookup.StaticHashTable:
    """Returns a table from texts to 1, 2, ...; every other text becomes 0."""
    pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(texts), tf.range(1, len(texts) + 1, dtype=tf.int64))
    return tf.lookup.StaticHashTable(pairs, default_value=0)


def numbers(rows: list[Values], column: str, texts: list[str]) -> np.ndarray:
    """Returns a column's numbers (int32, [rows + 1, longest list]), padded with 0; the first row is of number 0."""
    places = {text: number for number, text in enumerate(texts, start=1)}
    lists = [[], *([places[text] for text in texts_of(row, column)] for row in rows)]
    found = np.zeros((len(lists), max(1, *map(len, lists))), np.int32)
    for row, each in zip(found, lists, strict=True):
        row[: len(each)] = each
    return found
