"""Makes record files of made-up users who choose items, with a known structure, so that a model can be judged.

    python prepare_data.py --records FOLDER
    python prepare_data.py --help

Each user is interested in some topics, which the country and the age group partly determine. A user chooses item i with
the probability popularity(i) * affinity(user, i) / sum, where the affinity is a sum over topics. The popularity follows
Zipf's law. Of each user's choices, one is for validation and one for test. A user may choose an item several times.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.command_line import program
from engine.errors import BadInput
from engine.files import new_folder

USERS, ITEMS, RECALL = "users.jsonl", "items.jsonl", "recall.json"  # Beside the record files.
LABEL = "liked"
K = 10  # The 10 of recall@10.
RECORDS_CHECKED = 1000
MAKE = "make it as docs/starter.md shows"
USERS_AT_ONCE = 1024

TOPICS = 32
COUNTRIES = 12
AGE_GROUPS = ("18-24", "25-34", "35-44", "45-54", "55-64", "65+")
TAGS = 128
MOST_TAGS = 5
ZIPF_EXPONENT = 0.7

Values = dict[str, Any]  # A text, a list of texts or a number for each column.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Makes record files of users who choose items, for --records of train.py."""

    records: Path = Path("data/records")
    """The folder to make."""
    users: int = 50_000
    """Number of users."""
    items: int = 20_000
    """Number of items."""
    interactions_per_user: int = 12
    """Choices of each user: one is for validation, one for test, and the others are for training."""
    seed: int = 0
    """Determines everything that is drawn."""

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("items", K + 1), ("interactions_per_user", 3), ("seed", 0)):
            if (value := getattr(self, name)) < least:
                remedy = f"pass --{name.replace('_', '-')} {least} or more"
                raise BadInput(f"--{name.replace('_', '-')} {value} must be at least {least}: {remedy}")


@dataclasses.dataclass(frozen=True)
class World:
    """What is drawn: users, items, their tastes, and who chose and liked what."""

    users: list[Values]
    items: list[Values]
    tastes: np.ndarray  # How much of each topic a user wants; a row sums to 1. float32 [users, topics].
    appeal: np.ndarray  # Probability of an item in a topic; a row sums to 1. float32 [topics, items].
    chosen: np.ndarray  # Places of items, int64 [users, interactions]. The last two are for validation and test.
    liked: np.ndarray  # 0 or 1, int64 [users, interactions].


def draw_world(arguments: Arguments) -> World:
    """Draws users, items and interactions."""
    random = np.random.default_rng(arguments.seed)
    count = arguments.users
    countries, ages = random.integers(COUNTRIES, size=count), random.integers(len(AGE_GROUPS), size=count)
    by_country = random.normal(size=(COUNTRIES, TOPICS))
    by_age = random.normal(size=(len(AGE_GROUPS), TOPICS))
    wants = softmax(2.5 * (by_country[countries] + by_age[ages]) + 3.0 * random.normal(size=(count, TOPICS)))

    count = arguments.items
    topics = random.integers(TOPICS, size=(count, 2))  # The main topic of an item, and a second one.
    affinity = np.full((TOPICS, count), 0.005)
    affinity[topics[:, 1], range(count)] = 0.2
    affinity[topics[:, 0], range(count)] = 1.0
    affinity *= np.exp(0.7 * random.normal(size=affinity.shape))
    popularity = random.permutation(np.arange(1.0, count + 1)) ** -ZIPF_EXPONENT
    appeal = popularity * affinity
    topic_share = appeal.sum(axis=1)
    appeal /= topic_share[:, None]

    categories = np.where(random.random(count) < 0.9, topics[:, 0], random.integers(TOPICS, size=count))
    # Each topic has its own tags; a tag belongs to the second topic as often as to the first.
    of_topic = TAGS // TOPICS
    tags = topics[range(count), :][:, random.integers(2, size=MOST_TAGS)] * of_topic
    tags = tags + random.integers(of_topic, size=tags.shape)
    tag_counts = random.integers(MOST_TAGS + 1, size=count)

    # A mixture of topics: first the topic is drawn, then an item of it. The weights of the topics contain their shares,
    # so that the result is popularity * affinity, divided by the sum over items.
    tastes = wants * topic_share
    tastes /= tastes.sum(axis=1, keepdims=True)
    chosen = draw_items(random, tastes, appeal, arguments.interactions_per_user)
    users_of = np.repeat(np.arange(arguments.users), arguments.interactions_per_user)
    fit = np.einsum("nt,tn->n", wants[users_of], affinity[:, chosen.reshape(-1)]).reshape(chosen.shape)
    scale = np.log(fit)
    probability = 1.0 / (1.0 + np.exp(-2.5 * (scale - np.median(scale))))
    liked = (random.random(chosen.shape) < probability).astype(np.int64)

    trained_on = np.bincount(chosen[:, :-2].reshape(-1), minlength=arguments.items)
    return World(
        users=[
            {"user_id": f"user_{place:05d}", "country": f"country_{country:02d}", "age_group": AGE_GROUPS[age]}
            for place, (country, age) in enumerate(zip(countries.tolist(), ages.tolist(), strict=True))
        ],
        items=[
            {
                "item_id": f"item_{place:05d}",
                "category": f"category_{category:02d}",
                "tags": [f"tag_{tag:03d}" for tag in sorted({*row[:length]})],
                "count": times,
            }
            for place, (category, row, length, times) in enumerate(
                zip(categories.tolist(), tags.tolist(), tag_counts.tolist(), trained_on.tolist(), strict=True)
            )
        ],
        tastes=tastes.astype(np.float32),
        appeal=appeal.astype(np.float32),
        chosen=chosen,
        liked=liked,
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def draw_items(random: np.random.Generator, tastes: np.ndarray, appeal: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` items of each user (int64, [users, count])."""
    topic = (random.random((len(tastes), count, 1)) > np.cumsum(tastes, axis=1)[:, None, :-1]).sum(axis=-1)
    chosen = np.empty(topic.shape, np.int64)
    for each, probabilities in enumerate(appeal):
        places = topic == each
        sums = np.cumsum(probabilities)
        chosen[places] = np.searchsorted(sums, random.random(places.sum()) * sums[-1], side="right")
    return chosen


def recalls(world: World) -> dict[str, float]:
    """Returns the recall@10 of the test items by two rankings, which know nothing of validation and test.

    "popularity" gives everybody the items that are most frequent in training. "ceiling" gives each user the items that
    the user chooses with the largest probability, the best that any model can do on average.
    """
    target = world.chosen[:, -1]
    frequent = np.argsort([-item["count"] for item in world.items], kind="stable")[:K]
    found = 0
    for first in range(0, len(target), USERS_AT_ONCE):
        part = slice(first, first + USERS_AT_ONCE)
        probabilities = world.tastes[part] @ world.appeal
        own = np.take_along_axis(probabilities, target[part, None], axis=1)
        found += int(np.sum(np.sum(probabilities > own, axis=1) < K))
    return {
        "popularity_recall_at_10": float(np.isin(target, frequent).mean()),
        "ceiling_recall_at_10": found / len(target),
    }


def serialized(values: Values) -> bytes:
    """Returns a tf.train.Example with a list for each column: of texts, or of integers."""
    import tensorflow as tf

    example = tf.train.Example()
    for name, value in values.items():
        several = value if isinstance(value, list) else [value]
        if all(isinstance(each, int) for each in several):
            example.features.feature[name].int64_list.value.extend(several)
        else:
            example.features.feature[name].bytes_list.value.extend(each.encode() for each in several)
    return example.SerializeToString(deterministic=True)


def interactions(world: World, random: np.random.Generator) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yields a split and its records: the columns of a user, item_id and liked."""
    users = [serialized(user) for user in world.users]
    # Protocol buffers that follow each other are read as one message with the fields of both.
    items = [[serialized({"item_id": item["item_id"], LABEL: liked}) for liked in (0, 1)] for item in world.items]
    for split, places in {"train": slice(-2), "validation": slice(-2, -1), "test": slice(-1, None)}.items():
        chosen, liked = world.chosen[:, places], world.liked[:, places]
        columns = [np.repeat(np.arange(len(users)), chosen.shape[1]), chosen.reshape(-1), liked.reshape(-1)]
        order = random.permutation(chosen.size)
        rows = zip(*(column[order].tolist() for column in columns), strict=True)
        yield split, (users[user] + items[item][label] for user, item, label in rows)


def make_records(arguments: Arguments) -> dict[str, float]:
    """Makes the folder, complete or not at all, and returns `recalls`. Several processes may make the same at once.

    It contains users.jsonl and items.jsonl with a row for each, a .tfrecord file for each split, and recall.json. An
    item's "count" is the number of its interactions in training. Raises CannotWrite.
    """
    import tensorflow as tf

    world = draw_world(arguments)
    found = recalls(world)
    with new_folder(arguments.records) as folder:
        for name, rows in ((USERS, world.users), (ITEMS, world.items)):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for split, lines in interactions(world, np.random.default_rng([arguments.seed, 1])):
            with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord")) as file:
                for line in lines:
                    file.write(line)
        (folder / RECALL).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def read_rows(path: Path, texts: Sequence[str] = (), lists: Sequence[str] = ()) -> Iterator[tuple[str, Values]]:
    """Yields the place and the content of each line of users.jsonl or items.jsonl.

    Raises BadInput if a line is not an object, or lacks a text in a column of `texts`, or a text or a list of texts in
    one of `lists`.
    """
    place = ""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"{path}, line {number}"
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise BadInput(f"{place} is not an object: give a JSON object on each line")
                check_texts(row, place, texts, lists)
                yield place, row
    except FileNotFoundError as problem:
        raise BadInput(f"--records {path.parent} has no {path.name}: {MAKE}") from problem
    except json.JSONDecodeError as problem:
        raise BadInput(f"{place} is not JSON ({problem.msg}): give a JSON object on each line") from problem
    except (OSError, UnicodeError) as problem:
        raise BadInput(f"{path} cannot be read ({problem}): restore it from a backup") from problem
    if not place:
        raise BadInput(f"{path} is empty: {MAKE}")


def check_texts(row: Values, place: str, texts: Sequence[str], lists: Sequence[str] = ()) -> None:
    """Raises BadInput unless a row has a text in each column of `texts`, and a text or a list of them in `lists`."""
    for name in (*texts, *lists):
        if name not in row:
            raise BadInput(f"{place} has no {name!r}: add it, or remove the column from task.py")
        several = row[name] if name in lists and isinstance(row[name], list) else [row[name]]
        if not all(isinstance(each, str) for each in several):
            kind = "a text or a list of texts" if name in lists else "a text"
            raise BadInput(f"{place} has the {name} {row[name]!r}, which must be {kind}: quote numbers")


def check_records(path: Path, tables: dict[str, Any]) -> None:
    """Raises BadInput if the first records of a file are not users' choices of items.

    `tables` look up the texts of the users' columns. If all are unknown, their vectors would stay untrained.
    """
    import tensorflow as tf

    text = {name: tf.io.FixedLenFeature([], tf.string, "") for name in tables}
    fields = {"item_id": tf.io.FixedLenFeature([], tf.string), LABEL: tf.io.FixedLenFeature([], tf.int64)}
    records = list(read_first(path))
    try:
        parsed = tf.io.parse_example(records, {**text, **fields})
    except tf.errors.OpError as problem:
        reason = problem.message.splitlines()[0].split("}} ")[-1]
        raise BadInput(f"{path} contains other records ({reason}): {MAKE}") from problem
    for name, table in tables.items():
        if not tf.reduce_any(table.lookup(parsed[name]) > 0):
            fact = f"none of the first {len(records):,} records of {path} has a {name} of {USERS}"
            raise BadInput(f"{fact}: write the user's columns into each record, with the texts of {USERS}")


def read_first(path: Path) -> Iterator[bytes]:
    """Yields the first records of a file. Raises BadInput if it has none, or they cannot be read."""
    import tensorflow as tf

    number = 0
    try:
        for record in tf.data.TFRecordDataset(str(path)).take(RECORDS_CHECKED).as_numpy_iterator():
            yield record
            number += 1
    except tf.errors.NotFoundError as problem:
        raise BadInput(f"--records {path.parent} has no {path.name}: {MAKE}") from problem
    except tf.errors.DataLossError as problem:
        raise BadInput(f"{path} is damaged at record {number}, counted from 0: restore it from a backup") from problem
    if not number:
        raise BadInput(f"{path} is empty: {MAKE}")


def main() -> None:
    """Makes the folder that the command line asks for."""
    with program(Arguments) as arguments:
        records = arguments.records
        if records.exists():
            raise BadInput(f"--records {records} exists already: remove it, or pass another folder")
        for name, value in make_records(arguments).items():
            print(f"{name}: {value:.4f}")
        flags = ["--records", str(records), "--run-dir", f"runs/{records.name}"]
        print(f"Made {records}, for: python train.py {shlex.join(flags)}")


if __name__ == "__main__":
    main()
