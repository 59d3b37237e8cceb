"""The recipes of docs/tables.md, taken from the page as they stand there, and compared with NumPy."""

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
from pages import blocks, put, sections, untested
from rendering import run as run_program

RECIPES = sections("tables.md")
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
    assert not untested(RECIPES, __file__)


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


# --- Vocabularies -----------------------------------------------------------------------------------------------------


def make_vocabulary(*files: str) -> list[str]:
    """Runs make_vocabulary.py; returns the lines of the first file, which it makes."""
    done = run_program("python", "make_vocabulary.py", *files, folder=Path.cwd())
    assert done.stdout.split()[-1] == files[0], done.stderr
    return Path(files[0]).read_text(encoding="utf-8").splitlines()


def users_of(split: str) -> list[str]:
    return np.load(f"data/{split}.npz")["user"].tolist()


def test_vocabulary_has_the_frequent_users_in_an_order_of_their_own(apply: Apply) -> None:
    apply("A vocabulary")
    found = make_vocabulary("data/users.txt")
    users = users_of("train")
    names, counts = np.unique(users, return_counts=True)
    frequent = names[counts >= 5].tolist()
    assert 5 < len(frequent) < len(names) - 5
    assert found == sorted(frequent, key=lambda user: (-users.count(user), user))
    # The order of the examples does not matter.
    np.savez("data/train.npz", user=np.array(users[::-1]))
    assert make_vocabulary("data/users.txt") == found


@pytest.mark.long
def test_grown_table_starts_with_the_old_rows(apply: Apply, capsys: pytest.CaptureFixture[str]) -> None:
    apply("A vocabulary")
    old_users = make_vocabulary("data/users.txt")
    train.main([*FLAGS, "--run-dir=runs/old"])
    old = {each.path: each.numpy() for each in task.model.variables}
    file = Path("data/users.txt")
    content = file.read_bytes()
    file.write_text("\n".join([*old_users[::-1], ""]), encoding="utf-8")
    with pytest.raises(SystemExit):
        train.main(["--run-dir=runs/old", "--evaluate-only"])
    assert "used other files of task.data_files (users.txt has changed)" in capsys.readouterr().err
    file.write_bytes(content)

    apply("A vocabulary that has grown")
    # The most frequent user has left, and there are ten new ones, as frequent as the others.
    arrays = dict(np.load("data/train.npz"))
    stays = arrays["user"] != old_users[0]
    arrays = {key: each[stays] for key, each in arrays.items()}
    numbers = np.arange(len(arrays["user"]))
    arrays["user"] = np.where(numbers % 2, arrays["user"], np.char.add("new", (numbers // 2 % 10).astype(str)))
    np.savez("data/train.npz", **arrays)
    users, count = make_vocabulary("data/users-2.txt", "data/users.txt"), 1 + len(old_users)
    assert users[: len(old_users)] == old_users
    assert len(users) == len(old_users) + 10

    build(2, users=Path("data/users-2.txt"), init_from=Path("runs/old"), init_partial=True)
    load_initial_weights(Path("runs/old"), task.model, partial=True)
    initial = table("users")
    np.testing.assert_array_equal(initial[:count], old["users/embeddings"])
    assert len({tuple(row) for row in initial[count:]}) == 10
    for each in task.model.layers[-1].weights:
        np.testing.assert_array_equal(each.numpy(), old[each.path])

    flags = ["--limit-steps=10", "--users=data/users-2.txt", "--run-dir=runs/grown", "--init-from=runs/old"]
    train.main([*FLAGS, *flags, "--init-partial"])
    assert "2 of the model's 3 variables from runs/old/best" in capsys.readouterr().out
    # SGD changes the rows of the users that occur, and no others.
    moved = set(np.flatnonzero((table("users") != initial).any(axis=1)))
    assert set(range(count, count + 10)) <= moved
    assert moved <= {1 + users.index(user) if user in users else 0 for user in arrays["user"].tolist()}


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


# --- Ids outside of the table -----------------------------------------------------------------------------------------


def test_id_outside_of_its_column_is_named_or_reads_the_first_row(apply: Apply) -> None:
    apply("Several tables in one")
    arrays = dict(np.load("data/train.npz"))
    arrays["place"][50, 2] = 500
    np.savez("data/train.npz", **arrays)
    apply("Ids outside of the table", 0)
    rule = r"example 50, counted from 0.*place must be at least 0 and less than \[7, 24, 500\]: fix .*\[.*500\b.*\]"
    with pytest.raises(BadInput, match=rule):
        build()
        list(train.batches["train"].iterator().take(10))
    apply("Ids outside of the table", 1)
    place = tf.constant([[6, 23, 499], [7, 24, 500], [-1, -5, 3]])
    ids = np.stack([task.prepare_example({"place": each}, tf.constant(0))[0].numpy() for each in place])
    assert ids.tolist() == [[6, 30, 530], [0, 7, 31], [0, 7, 34]]
