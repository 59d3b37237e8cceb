"""The recipes of docs/tables.md, taken from the page as they stand there, and compared with NumPy."""

import collections
import hashlib
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clusters
import keras
import numpy as np
import pytest
import tensorflow as tf

import config
import task
import train
from engine.check.check import check_task
from engine.errors import BadInput
from engine.model.rows import describe_tables
from engine.run.initial_weights import load_initial_weights
from pages import blocks, put, sections
from rendering import run as run_program

RECIPES = sections("tables.md")
WITH_CODE = [title for title, text in RECIPES.items() if "```python" in text]
DATA = "The data of these recipes"
RATE = 0.5
FLAGS = ("--epochs=1", "--global-batch-size=16", "--simulated-devices=1")

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
    """Returns the first batch of training, of one replica, as NumPy arrays."""
    (batch,) = itertools.islice(train.batches["train"].one_by_one(), 1)
    return tf.nest.map_structure(lambda part: part.numpy(), batch)


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
    """Takes a step on one replica and on two; compares the weights with those that NumPy computes."""
    build(**settings)
    features, labels, _ = first_batch()
    for replicas in (1, 2):
        build(replicas, **settings)
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


def test_blocks_are_short() -> None:
    for title in WITH_CODE:
        for block in blocks(RECIPES[title]):
            lines = [line for line in block.splitlines() if line]
            assert len(lines) <= 40, title
            assert max(map(len, lines)) <= 100, title


@pytest.mark.parametrize("replicas", [1, 2])
def test_table_is_updated_by_row_with_an_optimizer_of_its_own(replicas: int, apply: Apply) -> None:
    apply("Hashed ids")
    apply("Updates by row")
    build(replicas)
    features, labels, _ = first_batch() if replicas == 1 else (None, None, None)
    before = table("users"), *(each.numpy() for each in task.model.layers[-1].weights)
    take_steps(1)
    assert describe_tables(task.model) == "a step changes the rows that it looks up: users/embeddings (100,000 x 16)"
    changed = (table("users") != before[0]).any(axis=1)
    assert 1 < changed.sum() <= 16
    if features is not None:
        by_row, *_ = gradients(before[0][features], labels, *before[1:])
        summed = np.zeros_like(before[0], "float64")
        np.add.at(summed, features, by_row)
        np.testing.assert_allclose(
            table("users"), before[0] - 0.05 * summed / np.sqrt(0.1 + summed**2 + 1e-7), rtol=0, atol=2e-6
        )


@pytest.mark.long
@pytest.mark.parametrize("title", ["Updates by row", "Lists of ids"])
def test_recipe_passes_all_checks(title: str, apply: Apply, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"pad_to": (4, 16)} if title == "Lists of ids" else {}
    before = {
        "Updates by row": "Hashed ids",
        "A vocabulary that has grown": "A vocabulary",
    }
    for each in (*filter(None, [before.get(title)]), title):
        apply(each)
    if "vocabulary" in title:
        settings["users"] = make_vocabulary()
    capsys.readouterr()
    check_task(train, task, config.Config(run_dir=Path("runs/a"), **settings))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("checks passed."), "\n".join(lines)
    assert any("on one replica and on two" in line for line in lines)


# --- Hashed ids -------------------------------------------------------------------------------------------------------


def test_hashed_rows_are_trained_as_numpy_trains_them(apply: Apply) -> None:
    apply("Hashed ids")

    def expected(features: Any, labels: np.ndarray, rows: np.ndarray, *last: np.ndarray) -> tuple[np.ndarray, ...]:
        by_row, *others = gradients(rows[features], labels, *last)
        by_table = np.zeros(rows.shape)
        np.add.at(by_table, features, by_row)
        return by_table, *others

    assert_step_is("users", expected)
    build()
    assert set(first_batch()[0]) <= set(keras.layers.Hashing(task.BUCKETS)(users_of("train")).numpy())


def test_hashes_are_those_of_the_documentation() -> None:
    """TensorFlow's documentation of to_hash_bucket_fast, and Keras's of Hashing, give these numbers."""
    words = tf.constant(["A", "B", "C", "D", "E"])
    assert tf.strings.to_hash_bucket_fast(["Hello", "TensorFlow", "2.x"], 3).numpy().tolist() == [0, 2, 2]
    assert keras.layers.Hashing(3)(words).numpy().tolist() == [1, 0, 1, 1, 2]
    assert tf.strings.to_hash_bucket_fast(words, 3).numpy().tolist() == [1, 0, 1, 1, 2]
    assert keras.layers.Hashing(3, salt=[133, 137])(words).numpy().tolist() == [1, 2, 1, 0, 2]
    numbers = tf.constant([5, -7, 123_456_789_012], tf.int64)
    texts = tf.constant(["5", "-7", "123456789012"])
    np.testing.assert_array_equal(
        keras.layers.Hashing(1000)(numbers), tf.strings.to_hash_bucket_fast(texts, 1000).numpy()
    )


@pytest.mark.parametrize("per_text", [1, 10, 100])
def test_fraction_that_collides_is_as_the_page_says(per_text: int) -> None:
    count, said = 20_000, re.findall(r"with (?:n = m it is|n = \d+ m|n = 100 m) (\d+) %", one_line("Hashed ids"))
    buckets = count * per_text
    ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(tf.range(count)), buckets).numpy()
    of_row = np.bincount(ids, minlength=buckets)[ids]
    found = (of_row > 1).mean()
    assert found == pytest.approx(1 - (1 - 1 / buckets) ** (count - 1), rel=0.05, abs=0.002)
    (percent,) = (int(each) for each, rows in zip(said, (1, 10, 100), strict=True) if rows == per_text)
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
    # The order of the examples does not matter.
    np.savez("data/train.npz", user=np.array(users_of("train")[::-1]))
    assert make_vocabulary() == name


def test_users_get_their_rows_and_the_export_has_the_vocabulary(apply: Apply, tmp_path: Path) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    path = Path(f"data/users-{name}.txt")
    users = path.read_text(encoding="utf-8").splitlines()
    result = train.main([*FLAGS, f"--users={name}", "--run-dir=runs/a", "--export"])
    assert result["test/accuracy"] > 0.2
    features, _, _ = first_batch()
    assert set(features) > {0}
    assert table("users").shape == (1 + len(users), 16)

    # Another program, without the project and the vocabulary, gives each user the predictions of its row.
    path.unlink()
    asked = [*users, "nobody", ""]
    program = f"""
import tensorflow as tf
served = tf.saved_model.load("runs/a/export/saved_model").signatures["serve_examples"]
count = len({asked!r})
asked = {{"user": tf.constant({asked!r}), "items": tf.fill([count], ""), "place": tf.zeros([count, 3], tf.int64)}}
print(*served(**asked)["probabilities"].numpy().ravel().tolist())
"""
    Path("serve.py").write_text(program, encoding="utf-8")
    done = run_program("python", "serve.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    served = np.reshape([float(word) for word in done.stdout.split()], (-1, 10))
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


@pytest.mark.long
def test_workers_agree_and_notice_another_vocabulary(apply: Apply, tmp_path: Path) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    found = [block for title in (DATA, "A vocabulary") for block in blocks(RECIPES[title])]
    of_task = [block for block in found if "class Config" not in block and "sys.argv" not in block]
    sgd = f"def create_optimizer(total_steps):\n    return keras.optimizers.SGD({RATE})\n"
    project = clusters.project_with(tmp_path, "\n\n".join(["", sgd, *of_task]))
    (of_config,) = (block for block in found if "class Config" in block)
    settings, end = (project / "config.py").read_text(encoding="utf-8").split("# Before")
    (project / "config.py").write_text(f"{settings}\n{of_config}\n# Before{end}", encoding="utf-8")
    shutil.copytree("data", project / "data")
    flags = ("--epochs=2", "--global-batch-size=16", f"--users={name}")
    for processes in (1, 2):
        clusters.train(project, tmp_path / f"run-{processes}", processes, *flags)
    one, two = (clusters.weights(tmp_path / f"run-{processes}", "model/.*") for processes in (1, 2))
    assert "model/users/embeddings" in one
    for path, value in one.items():
        np.testing.assert_allclose(two[path], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=path)

    # Each machine has its own disk, and the file of the second one has another order.
    shutil.copytree("data", project / "other/data")
    users = (project / f"data/users-{name}.txt").read_text(encoding="utf-8").split()
    (project / f"other/data/users-{name}.txt").write_text("\n".join([*users[::-1], ""]), encoding="utf-8")
    code, second = (project / "task.py").read_text(encoding="utf-8"), 'os.environ.get("TF_CONFIG", "")'
    code = code.replace('Path(f"data/users', 'Path(FOLDER, f"data/users')
    code += f"\n\nimport os\n\nFOLDER = 'other' if '\"index\": 1' in {second} else ''\n"
    (project / "task.py").write_text(code, encoding="utf-8")
    with clusters.workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'other'}", *flags) as both:
        assert both[1].wait(120) == 2
        assert f"--users {name}: data/users-{name}.txt has other content" in both[1].last_line().replace("other/", "")
        assert both[0].wait(120) != 0


def test_integers_are_looked_up_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("70\n5\n", encoding="utf-8")
    lookup = keras.layers.IntegerLookup(vocabulary=str(tmp_path / "numbers.txt"))
    assert lookup(tf.constant([5, 70, 1, -1, 0], tf.int64)).numpy().tolist() == [2, 1, 0, 0, 0]
    lookup = keras.layers.IntegerLookup(vocabulary=str(tmp_path / "numbers.txt"), num_oov_indices=8)
    ids = lookup(tf.range(1000, 1100, dtype=tf.int64)).numpy()
    assert set(ids) == set(range(8))
    assert lookup(tf.constant([70, 5], tf.int64)).numpy().tolist() == [8, 9]


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

    flags = [*FLAGS, f"--users={name}", "--run-dir=runs/grown", "--init-from=runs/old"]
    with pytest.raises(SystemExit, match="2"):
        train.main(flags)
    assert "without model/users/embeddings; 1 in the file are unused: --init-partial" in capsys.readouterr().err
    for replicas in (2, 1):
        build(replicas, users=name, init_from=Path("runs/old"), init_partial=True)
        np.testing.assert_array_equal(table("users")[: 1 + len(old_users)], old["users/embeddings"])
    initial = table("users")
    load_initial_weights(Path("runs/old"), task.model, partial=True)
    np.testing.assert_array_equal(table("users"), initial)
    count = 1 + len(old_users)
    assert len({tuple(row) for row in initial[count:]}) == 10
    for each in task.model.layers[-1].weights:
        np.testing.assert_array_equal(each.numpy(), old[each.path])

    capsys.readouterr()
    train.main([*flags, "--init-partial"])
    assert "2 of the model's 3 variables from runs/old/best" in capsys.readouterr().out
    # SGD changes the rows of the users that occur, and no others.
    moved = (table("users") != initial).any(axis=1)
    expected = {1 + users.index(user) if user in users else 0 for user in arrays["user"].tolist()}
    assert not moved[1]
    assert moved[count:].all()
    assert set(np.flatnonzero(moved)) <= expected
    train.main([f"--users={name}", "--run-dir=runs/grown", "--simulated-devices=1", "--evaluate-only"])


def test_optimizer_of_a_grown_table_starts_over(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("A vocabulary")
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.Adam(0.01))
    old = make_vocabulary()
    train.main([*FLAGS, f"--users={old}", "--run-dir=runs/old"])
    assert any(np.any(each.numpy()) for each in task.optimizer.variables if "momentum" in each.path)
    apply("A vocabulary that has grown")
    build(users=old, init_from=Path("runs/old"))
    load_initial_weights(Path("runs/old"), task.model, partial=True)
    assert int(task.optimizer.iterations.numpy()) == 0
    assert not any(np.any(each.numpy()) for each in task.optimizer.variables if "learning_rate" not in each.path)


# --- Several tables, several ids --------------------------------------------------------------------------------------


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


def test_lists_can_be_padded_by_the_hook(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("Lists of ids")
    (line,) = re.findall(r"`ids = (tf\.ensure_shape.*)`", RECIPES["Lists of ids"])
    prepare = task.prepare_example

    def padded(features: Any, labels: tf.Tensor) -> Any:
        ids, labels = prepare(features, labels)
        return eval(line, {"tf": tf, "LONGEST": task.LONGEST, "ids": ids}), labels

    monkeypatch.setattr(task, "prepare_example", padded)
    build()
    ids = first_batch()[0]
    assert ids.shape == (16, 16)
    names = collections.Counter(len(each.split()) for each in np.load("data/train.npz")["items"].tolist())
    assert set((ids != 0).sum(axis=1).tolist()) <= names.keys()
    assert (ids != 0).any()


# --- Ids outside of the table -----------------------------------------------------------------------------------------


def wrong_place(column: int, value: int) -> None:
    arrays = dict(np.load("data/train.npz"))
    arrays["place"][50, column] = value
    np.savez("data/train.npz", **arrays)


@pytest.mark.parametrize(("column", "value"), [(0, 7), (1, -1), (2, 500)])
def test_id_outside_of_its_column_is_named(
    column: int, value: int, apply: Apply, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Several tables in one")
    apply("Ids outside of the table", 0)
    wrong_place(column, value)
    with pytest.raises(SystemExit, match="2"):
        train.main([*FLAGS, "--run-dir=runs/a"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR: ")]
    assert "example 50, counted from 0" in line
    assert re.search(rf"place must be at least 0 and less than \[7, 24, 500\]: fix .* it is\] \[.*{value}\b.*\]", line)


def test_unknown_id_reads_the_first_row_of_its_column(apply: Apply) -> None:
    apply("Several tables in one")
    apply("Ids outside of the table", 1)
    place = tf.constant([[6, 23, 499], [7, 24, 500], [-1, -5, 3]])
    ids = np.stack([task.prepare_example({"place": each}, tf.constant(0))[0].numpy() for each in place])
    assert ids.tolist() == [[6, 30, 530], [0, 7, 31], [0, 7, 34]]
    wrong_place(2, 500)
    build()
    assert train.batches["train"].element_spec[0].shape == (16, 3)


def test_negative_id_reads_the_last_row_of_keras() -> None:
    embedding = keras.layers.Embedding(5, 2)
    rows = embedding(tf.constant([-1, 4])).numpy()
    np.testing.assert_array_equal(rows[0], rows[1])


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


def test_hash_in_the_name_is_of_the_content(apply: Apply) -> None:
    apply("A vocabulary")
    name = make_vocabulary()
    assert hashlib.sha256(Path(f"data/users-{name}.txt").read_bytes()).hexdigest().startswith(name)
