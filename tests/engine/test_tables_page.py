"""The recipes of docs/tables.md, taken from the page as they stand there, and compared with NumPy."""

import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import config
import task
import train
from engine.errors import BadInput
from engine.model.rows import describe_tables
from engine.run.initial_weights import load_initial_weights
from pages import blocks, put, sections
from rendering import run as run_program

RECIPES = sections("tables.md")
WITH_CODE = [title for title, text in RECIPES.items() if "```python" in text]
DATA = "The data of these recipes"
RATE = 0.5
FLAGS = ("--epochs=1", "--global-batch-size=16", "--simulated-devices=1", "--limit-steps=4")

Apply = Callable[..., None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts the blocks of a recipe into the modules that they are for, in a folder that contains its data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number, split in enumerate(("train", "validation", "test")):
        write_examples(split, number)
    # Its updates are in proportion to the gradient, so a gradient that is too large is not hidden.
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(RATE))

    def apply(title: str, *numbers: int) -> None:
        found = blocks(RECIPES[title])
        for block in [found[number] for number in numbers] if numbers else found:
            if "sys.argv" in block:
                (tmp_path / "make_vocabulary.py").write_text(block, encoding="utf-8")
            else:
                put(block, config if "class Config" in block else task, monkeypatch, tmp_path)
        monkeypatch.setattr(train, "Config", config.Config)

    apply(DATA)
    return apply


def write_examples(split: str, seed: int, users: int = 40, count: int = 160) -> None:
    """Writes examples in which a user's number decides the class; few users occur often."""
    random = np.random.default_rng(seed)
    numbers = np.minimum(random.geometric(0.08, count), users)
    items = [" ".join(f"i{item}" for item in random.integers(0, 30, random.integers(0, 9))) for _ in range(count)]
    np.savez(
        f"data/{split}.npz",
        user=np.array([f"ü{number}" for number in numbers]),
        items=np.array(items),
        place=np.stack([random.integers(0, size, count) for size in (7, 24, 500)], axis=1),
        label=numbers % 10,
    )


def build(replicas: int = 1, **settings: Any) -> None:
    train.build(config.Config(global_batch_size=16, simulated_devices=replicas, **settings))


def first_batch() -> Any:
    """Returns the first batch of training, of all replicas, as NumPy arrays."""
    batch = next(train.batches["train"].one_by_one())
    local = train.strategy.experimental_local_results
    return tf.nest.map_structure(lambda part: np.concatenate([each.numpy() for each in local(part)]), batch)


def take_steps(count: int) -> None:
    for stack, first, number in train.batches["train"].iterator().take(count):
        train.run_steps["train"](stack, first, number)


def table(name: str) -> np.ndarray:
    return task.model.get_layer(name).embeddings.numpy()


def gradients(inputs: np.ndarray, labels: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the gradients of the mean cross-entropy by the inputs of the last layer, its kernel and its bias."""
    logits = inputs.astype("float64") @ kernel + bias
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    by_logits = (exponents / exponents.sum(axis=1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    return by_logits @ kernel.T, inputs.T @ by_logits, by_logits.sum(axis=0)


def assert_step_is(name: str, expected: Callable[..., tuple[np.ndarray, ...]], **settings: Any) -> None:
    """Takes a step on two replicas; compares the weights with those that NumPy computes."""
    build(2, **settings)
    features, labels, _ = first_batch()
    before = table(name), *(each.numpy() for each in task.model.layers[-1].weights)
    wanted = [old - RATE * each for old, each in zip(before, expected(features, labels, *before), strict=True)]
    take_steps(1)
    assert np.abs(before[0] - wanted[0]).max() > 1e-4
    for found, value in zip((table(name), *task.model.layers[-1].get_weights()), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=2e-6)


def test_every_recipe_is_run() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert len(WITH_CODE) == 8
    assert not [title for title in WITH_CODE if f'"{title}"' not in tested]


# --- Hashed ids -------------------------------------------------------------------------------------------------------


def test_table_is_updated_by_row_with_an_optimizer_of_its_own(apply: Apply) -> None:
    apply("Hashed ids")
    apply("Updates by row")
    build(2)
    features, labels, _ = first_batch()
    assert set(features) <= set(keras.layers.Hashing(task.BUCKETS)(users_of("train")).numpy())
    before = table("users"), *(each.numpy() for each in task.model.layers[-1].weights)
    take_steps(1)
    assert describe_tables(task.model) == "a step changes the rows that it looks up: users/embeddings (100,000 x 16)"
    assert 1 < (table("users") != before[0]).any(axis=1).sum() <= 16
    by_row, *_ = gradients(before[0][features], labels, *before[1:])
    summed = np.zeros_like(before[0], "float64")
    np.add.at(summed, features, by_row)
    expected = before[0] - 0.05 * summed / np.sqrt(0.1 + summed**2 + 1e-7)
    np.testing.assert_allclose(table("users"), expected, rtol=0, atol=2e-6)


def test_fraction_that_collides_is_as_the_page_says() -> None:
    count, said = 20_000, re.findall(r"with (?:n = m it is|n = \d+ m|n = 100 m) (\d+) %", one_line("Hashed ids"))
    for per_text, percent in zip((1, 10, 100), map(int, said), strict=True):
        buckets = count * per_text
        ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.range(count)), buckets).numpy()
        found = (np.bincount(ids, minlength=buckets)[ids] > 1).mean()
        assert found == pytest.approx(1 - (1 - 1 / buckets) ** (count - 1), rel=0.05, abs=0.002)
        assert 100 * found == pytest.approx(percent, abs=0.8)


def one_line(title: str) -> str:
    return " ".join(RECIPES[title].split()).replace("With n = m", "with n = m")


# --- Vocabularies -----------------------------------------------------------------------------------------------------


def make_vocabulary(*arguments: str) -> str:
    """Runs make_vocabulary.py; returns the hash that it prints."""
    done = run_program("python", "make_vocabulary.py", *arguments, folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def users_of(split: str) -> list[str]:
    return np.load(f"data/{split}.npz")["user"].tolist()


def test_vocabulary_has_the_frequent_users_in_an_order_of_their_own(apply: Apply) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    users = Path(f"data/users-{name}.txt").read_text(encoding="utf-8").splitlines()
    names, counts = np.unique(users_of("train"), return_counts=True)
    assert set(users) == set(names[counts >= 5])
    assert 5 < len(users) < len(names) - 5
    of_users = [users_of("train").count(user) for user in users]
    assert of_users == sorted(of_users, reverse=True)
    ties = [pair for pair in itertools.pairwise(zip(of_users, users, strict=True)) if pair[0][0] == pair[1][0]]
    assert ties
    assert all(one[1] < other[1] for one, other in ties)
    assert hashlib.sha256(Path(f"data/users-{name}.txt").read_bytes()).hexdigest().startswith(name)
    # The order of the examples does not matter.
    np.savez("data/train.npz", user=np.array(users_of("train")[::-1]))
    assert make_vocabulary() == name


@pytest.mark.long
def test_users_get_their_rows_and_the_export_has_the_vocabulary(apply: Apply) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    path = Path(f"data/users-{name}.txt")
    users = path.read_text(encoding="utf-8").splitlines()
    result = train.main([*FLAGS, "--limit-steps=10", f"--users={name}", "--run-dir=runs/a", "--export"])
    assert result["test/accuracy"] > 0.2
    assert table("users").shape == (1 + len(users), 16)

    # Without the vocabulary, it gives each user the predictions of its row.
    path.unlink()
    asked = [*users, "nobody", ""]
    served = tf.saved_model.load("runs/a/export/saved_model").signatures["serve_examples"]
    others = {"items": tf.fill([len(asked)], ""), "place": tf.zeros([len(asked), 3], tf.int64)}
    served = served(user=tf.constant(asked), **others)["probabilities"].numpy()
    rows = table("users")[[*range(1, 1 + len(users)), 0, 0]]
    kernel, bias = task.model.layers[-1].get_weights()
    logits = rows @ kernel + bias
    np.testing.assert_allclose(served, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), rtol=1e-4)
    assert len({tuple(row) for row in served.round(6)}) > 5


def test_other_content_of_the_vocabulary_is_rejected(apply: Apply) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    path = Path(f"data/users-{name}.txt")
    path.write_text("\n".join([*path.read_text(encoding="utf-8").split()[::-1], ""]), encoding="utf-8")
    task.create_lookup.cache_clear()
    with pytest.raises(
        BadInput, match=rf"RuntimeError: --users {name}: data/users-{name}.txt has other content: .* backup$"
    ):
        build(users=name)


def test_keras_and_tensorflow_number_ids_as_the_page_says(tmp_path: Path) -> None:
    words = tf.constant(["A", "B", "C", "D", "E"])  # As in the documentation of Hashing.
    assert tf.strings.to_hash_bucket_fast(words, 3).numpy().tolist() == [1, 0, 1, 1, 2]
    assert keras.layers.Hashing(3)(words).numpy().tolist() == [1, 0, 1, 1, 2]
    of_texts = tf.strings.to_hash_bucket_fast(["5", "-7"], 1000)
    np.testing.assert_array_equal(keras.layers.Hashing(1000)(tf.constant([5, -7], tf.int64)), of_texts)
    (tmp_path / "numbers.txt").write_text("70\n5\n", encoding="utf-8")
    lookup = keras.layers.IntegerLookup(vocabulary=str(tmp_path / "numbers.txt"))
    assert lookup(tf.constant([5, 70, 1, -1, 0], tf.int64)).numpy().tolist() == [2, 1, 0, 0, 0]
    lookup = keras.layers.IntegerLookup(vocabulary=str(tmp_path / "numbers.txt"), num_oov_indices=8)
    assert set(lookup(tf.range(1000, 1100, dtype=tf.int64)).numpy()) == set(range(8))
    assert lookup(tf.constant([70, 5], tf.int64)).numpy().tolist() == [8, 9]
    rows = keras.layers.Embedding(5, 2)(tf.constant([-1, 4])).numpy()
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.long
def test_grown_table_starts_with_the_old_rows(apply: Apply, capsys: pytest.CaptureFixture[str]) -> None:
    apply("A vocabulary")
    old_name = make_vocabulary()
    train.main([*FLAGS, f"--users={old_name}", "--run-dir=runs/old"])
    old_users = Path(f"data/users-{old_name}.txt").read_text(encoding="utf-8").splitlines()
    old = {each.path: each.numpy() for each in task.model.variables}

    apply("A vocabulary that has grown")
    # The most frequent user has left, and there are ten new ones, as frequent as the others.
    arrays = dict(np.load("data/train.npz"))
    stays = arrays["user"] != old_users[0]
    arrays = {key: each[stays] for key, each in arrays.items()}
    numbers = np.arange(len(arrays["user"]))
    arrays["user"] = np.where(numbers % 2, arrays["user"], np.char.add("new", (numbers // 2 % 10).astype(str)))
    np.savez("data/train.npz", **arrays)
    name = make_vocabulary(old_name)
    users = Path(f"data/users-{name}.txt").read_text(encoding="utf-8").splitlines()
    assert users[: len(old_users)] == old_users
    assert len(users) == len(old_users) + 10

    flags = [*FLAGS, "--limit-steps=10", f"--users={name}", "--run-dir=runs/grown", "--init-from=runs/old"]
    with pytest.raises(SystemExit, match="2"):
        train.main(flags)
    assert "without model/users/embeddings; 1 in the file are unused: --init-partial" in capsys.readouterr().err
    build(2, users=name, init_from=Path("runs/old"), init_partial=True)
    np.testing.assert_array_equal(table("users")[: 1 + len(old_users)], old["users/embeddings"])
    initial = table("users")
    load_initial_weights(Path("runs/old"), task.model, partial=True)
    np.testing.assert_array_equal(table("users"), initial)
    count = 1 + len(old_users)
    assert len({tuple(row) for row in initial[count:]}) == 10
    for each in task.model.layers[-1].weights:
        np.testing.assert_array_equal(each.numpy(), old[each.path])

    train.main([*flags, "--init-partial"])
    assert "2 of the model's 3 variables from runs/old/best" in capsys.readouterr().out
    # SGD changes the rows of the users that occur, and no others.
    moved = (table("users") != initial).any(axis=1)
    expected = {1 + users.index(user) if user in users else 0 for user in arrays["user"].tolist()}
    assert not moved[1]
    assert moved[count:].all()
    assert set(np.flatnonzero(moved)) <= expected


# --- Several tables, several ids --------------------------------------------------------------------------------------


@pytest.mark.long
def test_tables_in_one_are_trained_as_several_tables(apply: Apply) -> None:
    apply("Several tables in one")

    def expected(features: Any, labels: np.ndarray, rows: np.ndarray, *last: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of a table for each column, which are joined at the end."""
        ids = features - np.array([0, 7, 31])
        tables = np.split(rows, [7, 31])
        assert [len(each) for each in tables] == [7, 24, 500]
        inputs = np.concatenate([each[ids[:, column]] for column, each in enumerate(tables)], axis=1)
        by_input, *others = gradients(inputs, labels, *last)
        by_tables = [np.zeros(each.shape) for each in tables]
        for column, by_row in enumerate(np.split(by_input, 3, axis=1)):
            np.add.at(by_tables[column], ids[:, column], by_row)
        return np.concatenate(by_tables), *others

    assert_step_is("places", expected)
    for column, rows in enumerate(np.split(table("places"), [7, 31])):
        np.testing.assert_array_equal(task.read_rows(task.model, column), rows)
    build()
    places = np.load("data/train.npz")["place"]
    assert set(map(tuple, first_batch()[0] - [0, 7, 31])) <= set(map(tuple, places))


def test_padding_has_no_part_in_the_mean_of_a_list(apply: Apply) -> None:
    apply("Lists of ids")

    def expected(features: Any, labels: np.ndarray, rows: np.ndarray, *last: np.ndarray) -> tuple[np.ndarray, ...]:
        lists = [ids[ids != 0] for ids in features]
        lengths = {len(ids) for ids in lists}
        assert min(lengths) == 0
        assert 4 < max(lengths) < features.shape[1]
        inputs = np.array([rows[ids].mean(axis=0) if len(ids) else np.zeros(16) for ids in lists])
        by_input, *others = gradients(inputs, labels, *last)
        by_table = np.zeros(rows.shape)
        for ids, each in zip(lists, by_input, strict=True):
            np.add.at(by_table, ids, each / max(len(ids), 1))
        assert not by_table[0].any()
        return by_table, *others

    assert_step_is("items", expected, pad_to=(4, 16))
    ids = tf.constant([[5, 9, 0, 0], [0, 0, 0, 0]], tf.int64)
    rows, (kernel, bias) = table("items"), task.model.layers[-1].get_weights()
    found = task.model(ids).numpy()
    np.testing.assert_allclose(found[0], (rows[5] + rows[9]) / 2 @ kernel + bias, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found[1], bias)
    assert found[1].any()
    pooled = keras.layers.GlobalAveragePooling1D()(tf.ones([2, 4, 3]), mask=ids != 0).numpy()
    assert np.isnan(pooled).any(axis=1).tolist() == [False, True]
    # The other way to pad, in the text of the page.
    (line,) = re.findall(r"`ids = (tf\.ensure_shape.*)`", RECIPES["Lists of ids"])
    names = {"tf": tf, "LONGEST": task.LONGEST, "ids": ids[0, :2]}
    assert eval(line, names).numpy().tolist() == [5, 9, *[0] * (task.LONGEST - 2)]


@pytest.mark.long
def test_lists_are_exported(apply: Apply) -> None:
    apply("Lists of ids")
    train.main([*FLAGS, "--pad-to", "4", "16", "--run-dir=runs/a", "--export"])
    ids = tf.constant([[5, 9, 0, 0, 0], [0, 0, 0, 0, 0]], tf.int64)
    loaded = keras.models.load_model("runs/a/export/model.keras", compile=False)
    np.testing.assert_allclose(loaded(ids), task.model(ids), rtol=1e-6)
    served = tf.saved_model.load("runs/a/export/saved_model").signatures["serve_examples"]
    asked = {"user": tf.fill([2], ""), "items": tf.constant(["i3 i4", ""]), "place": tf.zeros([2, 3], tf.int64)}
    probabilities = served(**asked)["probabilities"].numpy()
    bias = task.model.layers[-1].get_weights()[1]
    np.testing.assert_allclose(probabilities[1], np.exp(bias) / np.exp(bias).sum(), rtol=1e-5)
    assert np.abs(probabilities[0] - probabilities[1]).max() > 1e-4


# --- Ids outside of the table -----------------------------------------------------------------------------------------


def wrong_place(column: int, value: int) -> None:
    arrays = dict(np.load("data/train.npz"))
    arrays["place"][50, column] = value
    np.savez("data/train.npz", **arrays)


def test_id_outside_of_its_column_is_named(apply: Apply) -> None:
    apply("Several tables in one")
    apply("Ids outside of the table", 0)
    for column, value in ((1, -1), (2, 500)):
        wrong_place(column, value)
        with pytest.raises(BadInput, match="example 50, counted from 0") as rejected:
            build()
            list(train.batches["train"].iterator().take(10))
        rule = r"place must be at least 0 and less than \[7, 24, 500\]: fix .* it is\] "
        assert re.search(rf"{rule}\[.*{value}\b.*\]", str(rejected.value))


def test_unknown_id_reads_the_first_row_of_its_column(apply: Apply) -> None:
    apply("Several tables in one")
    apply("Ids outside of the table", 1)
    place = tf.constant([[6, 23, 499], [7, 24, 500], [-1, -5, 3]])
    ids = np.stack([task.prepare_example({"place": each}, tf.constant(0))[0].numpy() for each in place])
    assert ids.tolist() == [[6, 30, 530], [0, 7, 31], [0, 7, 34]]
    wrong_place(2, 500)
    build()
    assert train.batches["train"].element_spec[0].shape == (16, 3)


@pytest.mark.long
def test_id_outside_of_the_table_is_named_as_the_page_says(
    apply: Apply, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Hashed ids")
    prepare = task.prepare_example
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (prepare(features, labels)[0] + 33, labels))
    monkeypatch.setattr(task, "BUCKETS", 33)
    with pytest.raises(SystemExit, match="2"):
        train.main([*FLAGS, "--run-dir=runs/a"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR: ")]
    said = "an id is outside of the table users/embeddings, whose ids are 0 to 32: fix task.prepare_example; it is] ["
    assert said in line
    assert said in one_line("Ids outside of the table")
