"""What is special to a recommender: negatives of all replicas, the correction by frequency, and ranks among all."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from config import Config

import numpy as np
import pytest
import tensorflow as tf

import item_vectors
import task
import train
from catalog import read_catalog
from engine.errors import BadInput
from prepare_data import (
    ITEMS,
    RECALL,
    USERS,
    Arguments,
    World,
    check_records,
    draw_world,
    make_records,
    recalls,
    serialized,
)

SMALL = {"users": 200, "items": 100}


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few users and items."""
    folder = tmp_path_factory.mktemp("small") / "records"
    make_records(Arguments(records=folder, **SMALL))
    return folder


@pytest.fixture
def small(settings: Config, records: Path) -> Config:
    """Settings with few items, which are ranked in blocks of 7."""
    return dataclasses.replace(settings, records=records, items_at_once=7)


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all examples have items 1, 2 and 3, so that most batches contain an item several times."""
    prepare_example = task.prepare_example

    def with_few_items(record: tf.Tensor):
        features, labels = prepare_example(record)
        return features, {**labels, "item": labels["item"] % 3 + 1}

    monkeypatch.setattr(task, "prepare_example", with_few_items)


def set_random_weights() -> None:
    """Sets large random weights, whose scores differ much."""
    random = np.random.default_rng(1)
    for one in task.model.values():
        for variable in one.trainable_variables:
            variable.assign(random.normal(size=variable.shape, scale=0.3))


def global_batches(split: str) -> Iterator[tuple]:
    """Yields the global batches of a split as arrays."""
    for batch in train.batches[split].one_by_one():
        per_replica = [train.strategy.experimental_local_results(each) for each in tf.nest.flatten(batch)]
        yield tf.nest.pack_sequence_as(batch, [np.concatenate(each) for each in per_replica])


def run_all(split: str) -> list[float]:
    """Returns the loss of each batch; the metrics have counted them."""
    losses: list[float] = []
    steps = train.batches[split].steps_per_epoch
    for stack, first, count in train.batches[split].iterator().take(steps):
        losses += train.run_steps[split](stack, first, count).numpy().tolist()
        if len(losses) >= steps:
            break
    assert len(losses) == steps
    return losses


def all_vectors() -> np.ndarray:
    """Returns the vectors of all items from one call, float64 [items, vector_length]."""
    every = tf.range(1, task.catalog().items + 1)
    return task.item_vectors(every, training=False).numpy().astype(np.float64)


# --- Data -------------------------------------------------------------------------------------------------------------


def test_records_contain_users_with_their_columns_and_counts_are_those_of_training(
    small: Config, records: Path
) -> None:
    task.config = small
    users, items = ([json.loads(line) for line in (records / name).read_text().splitlines()] for name in (USERS, ITEMS))
    counts = {item["item_id"]: 0 for item in items}
    of_user = {user["user_id"]: user for user in users}
    for split, per_user in {"train": 10, "validation": 1, "test": 1}.items():
        seen = dict.fromkeys(of_user, 0)
        for record in tf.data.TFRecordDataset(str(records / f"{split}.tfrecord")).as_numpy_iterator():
            fields = tf.train.Example.FromString(record).features.feature
            texts = {name: each.bytes_list.value[0].decode() for name, each in fields.items() if name != "liked"}
            seen[texts["user_id"]] += 1
            assert {name: texts[name] for name in task.USER_COLUMNS} == of_user[texts["user_id"]]
            if split == "train":
                counts[texts["item_id"]] += 1
        assert set(seen.values()) == {per_user}
    assert counts == {item["item_id"]: item["count"] for item in items}
    frequency = np.exp(task.catalog().log_frequency.numpy()[1:])
    np.testing.assert_allclose(frequency, np.maximum([*counts.values()], 1) / 2000, rtol=1e-5)


def test_users_choose_as_the_distribution_says_and_no_ranking_is_better_than_its_own() -> None:
    world = draw_world(Arguments(users=3000, items=50, interactions_per_user=40))
    expected = (world.tastes.astype(np.float64) @ world.appeal).mean(axis=0)
    found = np.bincount(world.chosen.reshape(-1), minlength=50) / world.chosen.size
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(expected.max() / world.chosen.size))

    # The first user always chooses the second topic's items, the other one the first topic's; item 11 is the rest.
    appeal = np.eye(2, 12)[:, ::-1] * 0.9
    appeal[:, 0] = 0.1
    chosen = np.array([[0] * 3, [11] * 3])
    items = [{"count": count} for count in (0, *[1] * 10, 0)]
    world = World([], items, np.eye(2)[::-1], appeal, chosen, chosen)
    # Each user's best ten contain the choice; the ten most frequent items do not.
    assert recalls(world) == {"popularity_recall_at_10": 0.0, "ceiling_recall_at_10": 1.0}


def test_folder_says_which_recall_is_reachable(records: Path) -> None:
    found = json.loads((records / RECALL).read_text())
    assert 0.0 < found["popularity_recall_at_10"] < found["ceiling_recall_at_10"] < 1.0


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"users": 0}, "--users 0 must be at least 1"),
        ({"items": 10}, "--items 10 must be at least 11"),
        ({"interactions_per_user": 2}, "--interactions-per-user 2 must be at least 3"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
    ],
)
def test_numbers_that_cannot_be_used_are_named(argument: dict[str, int], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        Arguments(**argument)


def test_columns_become_numbers_and_lists_are_padded(tmp_path: Path) -> None:
    (tmp_path / USERS).write_text('{"user_id": "a"}\n{"user_id": "b"}\n')
    rows = [
        {"item_id": "x", "count": 3, "tags": ["new", "red"]},
        {"item_id": "y", "count": 0, "tags": []},
        {"item_id": "z", "count": 1, "tags": ["red"]},
    ]
    (tmp_path / ITEMS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_catalog(tmp_path, ("user_id",), ("tags",))
    assert found.columns["tags"].numpy().tolist() == [[0, 0], [1, 2], [0, 0], [2, 0]]
    assert found.sizes == {"user_id": 3, "item_id": 4, "tags": 3}
    assert found.tables["user_id"].lookup(tf.constant(["b", "a", "?", ""])).numpy().tolist() == [2, 1, 0, 0]
    np.testing.assert_allclose(np.exp(found.log_frequency[1:]), [0.75, 0.25, 0.25])
    with pytest.raises(BadInput, match=r"items.jsonl, line 1 has no 'color'"):
        read_catalog(tmp_path, ("user_id",), ("color",))
    for line, reason in (
        ("[]", "line 1 is not an object"),
        ('{"item_id": "x", "count": 1}\n{', "line 2 is not JSON"),
        ("", "is empty"),
        ('{"item_id": "x", "count": 1.5}', "line 1 has the count 1.5"),
        ('{"item_id": 3, "count": 1}', "line 1 has the item_id 3, which must be a text"),
        ('{"item_id": ["x", "y"], "count": 1}', r"line 1 has the item_id \['x', 'y'\], which must be a text"),
        ('{"item_id": "x", "count": 1}\n{"item_id": "x", "count": 1}', "several lines of one item_id"),
    ):
        (tmp_path / ITEMS).write_text(line)
        with pytest.raises(BadInput, match=reason):
            read_catalog(tmp_path, ("user_id",), ("item_id",))


def test_inputs_are_users_and_a_missing_column_is_unknown(small: Config, records: Path, tmp_path: Path) -> None:
    task.config, path = small, tmp_path / "users.jsonl"
    user = (records / USERS).read_text().splitlines()[7]
    path.write_text(f'{user}\n{{"user_id": "?"}}\n')
    (first, known), (second, unknown) = task.read_inputs(path)
    assert (first, second) == (1, 2)
    assert all(int(each[0]) > 0 for each in task.prepare_example(tf.constant(known))[0].values())
    assert all(int(each[0]) == 0 for each in task.prepare_example(tf.constant(unknown))[0].values())
    for line, reason in (
        ('{"user_id": 7}', "line 1 has the user_id 7, which must be a text: quote numbers"),
        ('{"user_id": ["a", "b"]}', "line 1 has the user_id .* which must be a text"),
        ('{"userid": "a"}', "line 1 has none of the columns user_id, "),
    ):
        path.write_text(line)
        with pytest.raises(BadInput, match=reason):
            list(task.read_inputs(path))


def test_records_that_no_table_knows_are_rejected(small: Config, records: Path, tmp_path: Path) -> None:
    """Otherwise these rows would keep their random start, and nothing would say so."""
    task.config, path = small, tmp_path / "train.tfrecord"
    tables = {name: task.catalog().tables[name] for name in task.USER_COLUMNS}
    user, pair = json.loads((records / USERS).read_text().splitlines()[0]), {"item_id": "item_00001", "liked": 1}
    name = list(task.USER_COLUMNS)[-1]
    for record, reason in (
        ({**user, **pair}, ""),
        ({**user, **pair, name: "another"}, f"none of the first 1 records of .* has a {name} of users.jsonl: write"),
        ({**{key: user[key] for key in user if key != name}, **pair}, f"none of the first 1 .* has a {name} of users"),
        (user, "contains other records .*: make it as docs/starter.md shows"),
    ):
        with tf.io.TFRecordWriter(str(path)) as file:
            file.write(serialized(record))
        with pytest.raises(BadInput, match=reason) if reason else contextlib.nullcontext():
            check_records(path, tables)
    path.write_bytes(b"damage" * 10)
    with pytest.raises(BadInput, match="damaged at record 0, counted from 0: restore it"):
        check_records(path, tables)


# --- Unknown ids ------------------------------------------------------------------------------------------------------


def test_unknown_user_has_the_vector_of_the_other_columns(small: Config) -> None:
    train.build(small)
    set_random_weights()
    user = {"country": "country_01", "age_group": "65+"}
    known, unknown, other = (
        task.prepare_example(tf.constant(serialized({"user_id": name, **user})))[0]
        for name in ("user_00003", "nobody", "nobody else")
    )
    vectors = [task.model["user"]({name: each[None] for name, each in row.items()}) for row in (known, unknown, other)]
    np.testing.assert_array_equal(vectors[1], vectors[2])
    # The difference is what the dense layer makes of the user's row.
    row = task.model["user"].get_layer("user_id_table").embeddings.numpy()[int(known["user_id"][0])]
    kernel = task.model["user"].get_layer("vector").kernel.numpy()[: len(row)]
    np.testing.assert_allclose(vectors[0] - vectors[1], (row @ kernel)[None], atol=1e-4)
    assert np.abs(row @ kernel).max() > 0.1


def test_unknown_item_and_a_number_outside_of_the_table_are_errors(small: Config) -> None:
    train.build(small)
    record = tf.constant(serialized({"user_id": "user_00003", "item_id": "nothing"}))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"items\.jsonl has no item_id"):
        task.prepare_example(record)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 101\)"):
        task.item_vectors(tf.constant([101]), training=False)


# --- Loss -------------------------------------------------------------------------------------------------------------


def numpy_losses(features: dict, labels: dict, sample_weights: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the losses of each example of a global batch, in double precision."""
    pairs = task.predict_pairs(features, tf.constant(labels["item"]), training=False)
    users, items, logits = (pairs[name].numpy().astype(np.float64) for name in ("user", "item", "liked"))
    frequency = np.exp(task.catalog().log_frequency.numpy().astype(np.float64))[labels["item"]]
    exponentials = np.exp(users @ items.T) / frequency
    found = []
    for place, item in enumerate(labels["item"]):
        negatives = [
            exponentials[place, other]
            for other, candidate in enumerate(labels["item"])
            if candidate != item and sample_weights[other] > 0
        ]
        found.append(-np.log(exponentials[place, place] / (exponentials[place, place] + sum(negatives))))
    signs = 2.0 * labels["liked"] - 1.0
    return {"retrieval": np.array(found), "ranking": np.log1p(np.exp(-signs * logits[:, 0]))}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.usefixtures("few_items")
def test_loss_has_the_negatives_of_all_replicas_without_hits_and_padding(replicas: int, small: Config) -> None:
    weights = {"ranking_weight": 0.5, "retrieval_weight": 2.0}
    # With this learning rate the model stays as it is.
    layout = {"simulated_devices": replicas, "keep_last_batch": True, "learning_rate": 1e-30}
    train.build(dataclasses.replace(small, **weights, **layout))
    set_random_weights()
    expected, has_padding = [], False
    for features, labels, sample_weights in global_batches("train"):
        losses = numpy_losses(features, labels, sample_weights)
        total = 2.0 * losses["retrieval"] + 0.5 * losses["ranking"]
        expected.append(np.sum(total * (sample_weights > 0)) / small.global_batch_size)
        has_padding |= bool((sample_weights == 0).any())
        assert len({*labels["item"]}) < len(labels["item"])
    assert has_padding
    np.testing.assert_allclose(run_all("train"), expected, rtol=1e-5)


def test_example_alone_in_its_batch_has_no_negatives(small: Config) -> None:
    train.build(small)
    users, weights = tf.ones([2, 4]), tf.constant([1.0, 0.0])
    scores = task.in_batch_scores(users, 2.0 * users, tf.constant([5, 9]), weights).numpy()
    frequency = float(task.catalog().log_frequency[5])
    assert scores[0, 0] == pytest.approx(8.0 - frequency, rel=1e-5)
    assert scores[0, 1] <= -1e9


# --- Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_recall_ndcg_and_loss_are_numpys_over_all_items(replicas: int, small: Config) -> None:
    train.build(dataclasses.replace(small, simulated_devices=replicas))
    set_random_weights()
    recall, gain, losses, ranks = [], [], [], []
    every = all_vectors()
    for features, labels, weights in global_batches("validation"):
        users = task.model["user"](features).numpy().astype(np.float64)
        for user, item, weight in zip(users, labels["item"], weights, strict=True):
            if weight > 0:
                scores = every @ user
                losses.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[item - 1])
                order = np.argsort(-scores).tolist()
                ranks.append(rank := order.index(item - 1))
                recall.append(rank < 10)
                gain.append(1.0 / np.log2(2 + rank) if rank < 10 else 0.0)
    assert len(recall) == 13
    assert len({*ranks}) > 5
    run_all("validation")
    expected = {"recall_at_10": recall, "ndcg_at_10": gain, "retrieval_loss": losses}
    results = {name: float(task.metrics["validation"][name].result()) for name in expected}
    assert results == pytest.approx({name: np.mean(values) for name, values in expected.items()}, rel=1e-5)


def test_new_items_only_removes_the_items_of_training(small: Config, records: Path) -> None:
    train.build(dataclasses.replace(small, new_items_only=True))
    set_random_weights()
    every, known = all_vectors(), {}
    for record in tf.data.TFRecordDataset(str(records / "train.tfrecord")).as_numpy_iterator():
        features, labels = task.prepare_example(tf.constant(record))
        known.setdefault(int(features["user_id"][0]), set()).add(int(labels["item"]))
    were_removed = 0
    for features, labels, weights in global_batches("validation"):
        users = task.model["user"](features)
        own = tf.constant(labels["item"])
        loss, ranks = task.compare_with_all(
            users, task.item_vectors(own, training=False), own, tf.constant(features["user_id"])
        )
        for place in np.flatnonzero(weights > 0):
            item, has = labels["item"][place], known[int(features["user_id"][place, 0])]
            scores = every @ users[place].numpy().astype(np.float64)
            rest = [each for each in range(1, 101) if each == item or each not in has]
            own_score = scores[item - 1]
            assert int(ranks[place]) == sum(scores[each - 1] >= own_score for each in rest if each != item)
            expected = np.log(np.exp(scores[np.array(rest) - 1] - own_score).sum())
            assert float(loss[place]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
            were_removed += 100 - len(rest)
        best = task.predict_step(features)["items"].numpy().astype(str)
        for row, user in zip(best, features["user_id"][:, 0], strict=True):
            assert not {f"item_{each - 1:05d}" for each in known.get(int(user), ())} & {*row}
    assert were_removed > 20


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_equal_scores_and_nan_find_nothing(value: float, small: Config) -> None:
    train.build(small)
    for variable in task.model["item"].trainable_variables:
        variable.assign(tf.fill(variable.shape, value))
    items = tf.constant([1, 50, 100])
    vectors = task.item_vectors(items, training=False)
    _, ranks = task.compare_with_all(tf.ones_like(vectors), vectors, items, tf.ones([3, 1], tf.int32))
    assert ranks.numpy().tolist() == [99] * 3


def test_best_items_are_numpys_and_have_texts_as_ids(small: Config) -> None:
    train.build(small)
    set_random_weights()
    features, _, _ = next(global_batches("test"))
    outputs = {name: each.numpy() for name, each in task.predict_step(features).items()}
    scores = outputs["user_vector"].astype(np.float64) @ all_vectors().T
    order = np.argsort(-scores, axis=1)[:, : small.best]
    assert outputs["items"].astype(str).tolist() == [[f"item_{each:05d}" for each in row] for row in order]
    np.testing.assert_allclose(outputs["scores"], np.take_along_axis(scores, order, axis=1), rtol=1e-4, atol=1e-5)
    pair = {"user": outputs["user_vector"], "item": all_vectors()[order[:, 3]].astype(np.float32)}
    np.testing.assert_allclose(outputs["liked"][:, 3], tf.sigmoid(task.model["ranking"](pair))[:, 0], rtol=1e-4)


def test_vectors_of_all_items_are_written_unless_the_items_have_another_order(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "vectors.npz"
    records = Path(shutil.copytree(records, tmp_path / "records"))
    flags = ["--epochs=1", "--limit-steps=1", "--global-batch-size=8", f"--records={records}"]
    train.main([*flags, f"--run-dir={run_dir}", "--items-at-once=7"])
    expected = all_vectors()
    item_vectors.main([str(run_dir), str(path)])
    written = np.load(path)
    assert written["item_ids"].tolist() == [f"item_{each:05d}" for each in range(100)]
    np.testing.assert_allclose(written["vectors"], expected, rtol=1e-5, atol=1e-6)
    lines = (records / ITEMS).read_text().splitlines(keepends=True)
    (records / ITEMS).write_text("".join(lines[::-1]))
    with pytest.raises(SystemExit, match="2"):
        item_vectors.main([str(run_dir), str(tmp_path / "others.npz")])
    assert "used other files of task.data_files (items.jsonl has changed): restore" in capsys.readouterr().err
    assert not (tmp_path / "others.npz").exists()
