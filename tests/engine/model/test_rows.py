"""Embedding tables by row: the numbers of an update of every row, at the cost of the rows that a step looks up."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas, updating

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput, user_errors_named
from engine.model import rows
from engine.model.gradients import apply_gradients, replica_step
from engine.model.optimizers import prepare_optimizer
from engine.tracing import operations_of

ROWS, WIDTH, BATCH, IDS = 300, 4, 8, 4
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    # The first sum is small, so that a row's slices that are squared one by one show.
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-6),
    "SGD, clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.01),
    "Adagrad, clipvalue": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.002),
    "SGD, weight decay": lambda: keras.optimizers.SGD(0.5, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def by_row() -> None:
    keras.layers.Embedding.call = rows.look_up


def batches(count: int, dtype: str = "int64") -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids, of which many repeat in and between examples and one is the last row, and labels; half of the rows rest."""
    random = np.random.default_rng(1)
    ids = [np.minimum(random.zipf(1.3, (BATCH, IDS)), ROWS // 2) for _ in range(count)]
    for each in ids:
        each[-1, -1] = ROWS - 1
    return [(each.astype(dtype), random.standard_normal(BATCH).astype("float32")) for each in ids]


def create_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(ROWS, WIDTH), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((IDS,), dtype="int64"), *layers])
    model.layers[0].embeddings.assign(np.random.default_rng(0).normal(size=(ROWS, WIDTH)))
    return model


def ones() -> keras.Variable:
    return keras.Variable(np.ones((ROWS, WIDTH)), name="table")


def assert_same(values: list[np.ndarray], expected: list[np.ndarray], rtol: float = 1e-5, atol: float = 2e-6) -> None:
    for value, each in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, each, rtol=rtol, atol=atol)


def loss_of(model: keras.Model, ids: Any, labels: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(model(ids)[:, 0], "float32") - labels)) / BATCH


def trained_by_keras(kind: str, steps: int) -> list[np.ndarray]:
    """Plain Keras on one device, with the gradient as a tensor of all rows and the table read as one tensor."""
    model, optimizer = create_model(), OPTIMIZERS[kind]()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(ids: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, ids, labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = zip(map(tf.convert_to_tensor, gradients), model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)

    for ids, labels in batches(steps):
        step(tf.constant(ids), tf.constant(labels))
    return [each.numpy() for each in [*model.trainable_variables, *optimizer.variables]]


def trained(
    kind: str | Callable[[], keras.optimizers.Optimizer],
    steps: int,
    replicas: int = 1,
    dtype: str = "int64",
    lazy_rows: tuple[str, ...] = (),
    **settings: Any,
) -> tuple[list[np.ndarray], str]:
    """Trains by the engine; returns all values, and how the table was updated."""
    config = Config(simulated_devices=replicas, **settings)
    strategy = create_strategy(config)
    with strategy.scope():
        model = create_model()
        optimizer = OPTIMIZERS[kind]() if isinstance(kind, str) else kind()
        optimizer = prepare_optimizer(optimizer, config.precision)
        optimizer.build(model.trainable_variables)
        rows.choose_lazy_rows(model, lazy_rows)

    train_step = updating(optimizer, model.trainable_variables, lambda ids, labels, _: loss_of(model, ids, labels))
    step = replica_step(train_step, config)

    def step_alone(batch: Any) -> None:  # Like Keras's: a graph that returns its loss is rounded in another way.
        step(batch)

    take = on_replicas(replicas, step_alone)
    for ids, labels in batches(steps, dtype):
        take((ids, labels, np.ones(BATCH, "float32")))
    variables = [*model.trainable_variables, *optimizer.variables]
    for each in variables:
        for local in strategy.experimental_local_results(each.value):
            assert (local.numpy() == each.numpy()).all(), f"{each.path} differs between replicas"
    return [each.numpy() for each in variables], model.trainable_variables[0].updated


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_update_by_row_is_bit_equal_to_one_of_every_row(kind: str) -> None:
    expected = trained_by_keras(kind, steps=50)
    values, updated = trained(kind, steps=50)
    assert updated.startswith("the rows that it looks up")
    # Fewer squares are added up for a norm, so it may be rounded otherwise.
    assert_same(values, expected, rtol=1e-5 if "norm" in kind else 0, atol=0)


@pytest.mark.parametrize(("kind", "replicas", "micro_batches"), [("Adagrad", 4, 1), ("SGD, clipnorm", 2, 4)])
def test_update_by_row_is_the_same_in_any_parts(kind: str, replicas: int, micro_batches: int) -> None:
    expected = trained_by_keras(kind, steps=10)
    values, updated = trained(kind, 10, replicas, micro_batches=micro_batches, dtype="int32")
    assert updated == "the rows that it looks up"
    assert_same(values, expected)


@pytest.mark.parametrize("settings", [{"global_clipnorm": 0.05, "jit": True}, {"precision": "mixed_float16"}], ids=str)
def test_options_give_the_numbers_of_an_update_of_every_row(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.config.set_dtype_policy(settings.get("precision", "float32"))
    values, updated = trained("Adagrad", 5, 2, **settings)
    assert updated == "the rows that it looks up"
    monkeypatch.setattr(rows, "changes_used_rows_only", lambda optimizer: False)
    expected, updated = trained("Adagrad", 5, 2, **settings)
    assert updated.startswith("every row")
    assert_same(values, expected)


def test_optimizer_that_is_called_directly_updates_every_row() -> None:
    """Slices that Keras's own call gets have rows that occur several times, and Adam would be lazy."""
    indices, values = [1, 1, 2], np.arange(1.0, 13).reshape(3, 4).astype("float32")
    dense = np.zeros((ROWS, WIDTH), "float32")
    np.add.at(dense, indices, values)
    with create_strategy(Config(simulated_devices=2)).scope():
        table, optimizer = ones(), prepare_optimizer(keras.optimizers.Adam(0.1), "float32")
        optimizer.build([table])

    def step(batch: Any) -> None:
        slices = tf.IndexedSlices(batch[0][0] * values / 2, indices, [ROWS, WIDTH])
        optimizer.apply_gradients([(slices, table)])

    take, plain_table, plain = on_replicas(2, step), ones(), keras.optimizers.Adam(0.1)
    for size in (1.0, -0.5, 2.0):
        take([np.full(2, size, "float32")])
        plain.apply_gradients([(tf.constant(size * dense), plain_table)])
    np.testing.assert_allclose(table.numpy(), plain_table.numpy(), rtol=1e-5)


def test_changes_are_added_so_that_workers_of_parameter_servers_lose_none() -> None:
    table = tf.Variable(np.ones((ROWS, WIDTH), "float32"))
    workers = [rows.Rows(table, tf.constant([3])) for _ in range(2)]
    for each in workers:
        tf.convert_to_tensor(each)  # Both read the row before one of them changes it.
    for each in workers:
        each.assign_sub(tf.fill([1, WIDTH], 0.25))
    assert table[3].numpy().tolist() == [0.5] * WIDTH
    twice = rows.Rows(table, tf.constant([4]))
    for _ in range(2):
        twice.assign_sub(tf.fill([1, WIDTH], 0.25))
    assert table[4].numpy().tolist() == [0.5] * WIDTH


def test_all_rows_are_changed_if_a_step_looks_up_more_ids_than_rows() -> None:
    table, optimizer = ones(), keras.optimizers.SGD(0.1)
    slices = tf.IndexedSlices(tf.ones([40, WIDTH]), tf.range(40))  # Some of a step's own have no shape.
    assert isinstance(rows.slices_or_dense(optimizer, table, slices, 7), tf.IndexedSlices)
    assert isinstance(rows.slices_or_dense(optimizer, table, slices, 8), tf.Tensor)
    assert table.updated == "every row, because a step looks up 320 ids"


def test_step_reads_and_writes_no_complete_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGE", ROWS)
    build(monkeypatch, lambda: keras.layers.Embedding(ROWS, WIDTH), simulated_devices=2)
    complete = {
        operation.type
        for operation in operations_of(train.run_steps["train"].graph())
        for output in operation.outputs
        if output.shape.rank == 2 and output.shape[0] == ROWS
    }
    assert not complete
    train.run.trace(train.run_steps)
    way = f"changes the rows that it looks up: sequential/embedding/embeddings ({ROWS} x {WIDTH})"
    assert way in rows.describe_tables(task.model)


def build(
    monkeypatch: pytest.MonkeyPatch, create_table: Callable[[], keras.layers.Layer], last_id: int = ROWS - 1, **settings
) -> None:
    """Builds train.py with a task of ids."""
    ids = np.random.default_rng(0).integers(0, ROWS, (64, IDS))
    ids[63, 1] = last_id

    def create_model() -> keras.Model:
        layers = [create_table(), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((IDS,), dtype="int64"), *layers])

    def load_examples(split: str) -> tf.data.Dataset | None:
        return tf.data.Dataset.from_tensor_slices((ids, np.zeros(64, "int32"))) if split == "train" else None

    monkeypatch.setattr(task, "load_examples", load_examples)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features, labels))
    monkeypatch.setattr(task, "create_model", create_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.Adagrad(0.1))
    train.build(Config(global_batch_size=8, monitor="train/loss", **settings))


# --- Optimizers that change every row ---------------------------------------------------------------------------------


def test_ftrl_and_momentum_change_every_row_unless_lazy() -> None:
    """Their formulas move rows without a gradient too, so they may not be updated by row of themselves."""
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Ftrl(0.1)):
        assert trained(lambda optimizer=optimizer: optimizer, steps=1)[1].startswith("every row, because")


@pytest.mark.parametrize("kind", rows.BY_ELEMENT)
def test_lazy_rows_change_only_where_they_occur_and_there_by_the_same_formula(kind: str) -> None:
    def built() -> tuple[keras.Variable, keras.optimizers.Optimizer, list[keras.Variable]]:
        table = ones()
        options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
        optimizer = getattr(keras.optimizers, kind)(0.1, weight_decay=0.0 if kind == "AdamW" else None, **options)
        optimizer.build([table])
        return table, optimizer, [table, *optimizer.variables]

    (table, optimizer, variables), (plain_table, plain, plain_variables) = built(), built()
    prepare_optimizer(optimizer, "float32")
    table.has_lazy_rows = True
    random = np.random.default_rng(0)
    for ids, _ in batches(3):
        ids = ids.ravel()
        slices = tf.IndexedSlices(random.normal(size=(len(ids), WIDTH)).astype("float32"), ids, [ROWS, WIDTH])
        apply_gradients(optimizer, tf.GradientTape(), tf.constant(0.0), [table], gradients=[slices])
        # Keras changes every row, and then the rows that do not occur get their values back.
        before = [each.numpy() for each in plain_variables]
        plain.apply_gradients([(tf.convert_to_tensor(slices), plain_table)])
        for variable, old in zip(plain_variables, before, strict=True):
            if variable.shape == (ROWS, WIDTH):
                variable.assign(np.where(np.isin(np.arange(ROWS), ids)[:, None], variable.numpy(), old))
    assert table.updated == "the rows that it looks up"
    assert_same([each.numpy() for each in variables], [each.numpy() for each in plain_variables])


def test_lazy_rows_are_the_same_on_two_replicas() -> None:
    one, two = (trained(keras.optimizers.Adam, 5, replicas, lazy_rows=("embeddings",)) for replicas in (1, 2))
    start = create_model().trainable_variables[0].numpy()
    assert (two[0][0] == start).all(axis=1).sum() > ROWS // 2
    assert two[1] == "the rows that it looks up"
    assert_same(two[0], one[0])


class OwnFormula(keras.optimizers.Adam):
    def update_step(self, gradient: tf.Tensor, variable: Any, learning_rate: tf.Tensor) -> None:
        super().update_step(gradient - tf.reduce_mean(gradient, axis=0), variable, learning_rate)


def test_lazy_rows_that_cannot_be_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_with_all(model: keras.Model, ids: Any, labels: Any) -> tf.Tensor:
        return tf.reduce_sum(model(ids)) + tf.reduce_sum(model.trainable_variables[0] ** 2)

    with pytest.raises(BadInput, match="--lazy-rows nobody is in the name of no table: the tables are "):
        trained(keras.optimizers.Adam, 1, lazy_rows=("nobody",))
    with pytest.raises(BadInput, match=r"but OwnFormula does not update row by row .use Adadelta, "):
        trained(OwnFormula, 1, lazy_rows=("embeddings",))
    monkeypatch.setitem(globals(), "loss_of", loss_with_all)
    with pytest.raises(BadInput, match=r"--lazy-rows names .*/embeddings, but its gradient has every row"):
        trained(keras.optimizers.Adam, 1, lazy_rows=("embeddings",))


# --- The layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixed_bfloat16", "LoRA", "int8"])
def test_embedding_returns_what_keras_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [
        tf.constant([[1, 2, 0], [2, 299, -1]], tf.int64),
        tf.constant([[1, 2], [255, 0]], tf.uint8),
        tf.ragged.constant([[1, 2], [3]]),
    ]
    layer = keras.layers.Embedding(ROWS, WIDTH, mask_zero=kind == "int8", dtype=kind if "float" in kind else None)
    layer.build()
    if kind == "LoRA":
        layer.enable_lora(2)
        layer.lora_embeddings_b.assign(np.ones((2, WIDTH)))
    if kind == "int8":
        layer.quantize("int8")
    found: list[Any] = [layer(each) for each in several]
    monkeypatch.setattr(keras.layers.Embedding, "call", rows.KERAS_CALL)
    for each, result in zip(several, found, strict=True):
        expected: Any = layer(each)
        assert (type(result), result.dtype) == (type(expected), expected.dtype)
        pairs = zip(tf.nest.flatten(result, True), tf.nest.flatten(expected, True), strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(tf.cast(one, "float32"), tf.cast(other, "float32"))


@pytest.mark.parametrize(
    ("replicas", "wrong", "jit"), [(2, ROWS, True), pytest.param(1, -1, False, marks=pytest.mark.long)]
)
def test_id_outside_of_the_table_is_named(
    replicas: int, wrong: int, jit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, lambda: keras.layers.Embedding(ROWS, WIDTH), wrong, simulated_devices=replicas, jit=jit)
    line = rf"an id is outside of the table sequential/embedding/embeddings, whose ids are 0 to 299: .* \[{wrong}\]"
    with pytest.raises(BadInput, match=line), user_errors_named():
        for stack, first, count in train.batches["train"].iterator().take(8):
            train.run_steps["train"](stack, first, count)
