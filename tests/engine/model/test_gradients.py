"""What lies between the tape and the weights, where replicas could disagree."""

import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine.errors import BadInput
from engine.model.gradients import in_micro_batches, prepare_optimizer
from engine.model.objects import model_variables
from rendering import run

HELPERS = Path(__file__).parents[2] / "helpers"


def values_on_replicas(variable: tf.Variable) -> list[np.ndarray]:
    return [value.numpy() for value in train.strategy.experimental_local_results(variable)]


def take_steps(count: int) -> None:
    train.batches["train"].feed(train.strategy).run(train.run_steps["train"], count)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_overflow_on_the_last_replica_skips_the_step_on_all(replicas: int, overflow_on_the_last: tf.Variable) -> None:
    overflow_on_the_last.assign(True)
    train.build(Config(simulated_devices=replicas, precision="mixed_float16"))
    assert task.model.layers[1].compute_dtype == "float16"
    before = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    scale = task.optimizer.dynamic_scale.numpy()

    take_steps(1)
    for halved in values_on_replicas(task.optimizer.dynamic_scale.value):
        assert halved == scale / 2
    for name, variable in model_variables(task.model).items():
        for value in values_on_replicas(variable):
            np.testing.assert_array_equal(value, before[name])
    assert task.optimizer.iterations.numpy() == 0

    overflow_on_the_last.assign(False)
    take_steps(3)
    assert task.optimizer.dynamic_scale.numpy() == scale / 2
    assert task.optimizer.iterations.numpy() == 3
    for name, variable in model_variables(task.model).items():
        values = values_on_replicas(variable)
        assert np.isfinite(values[0]).all()
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0], err_msg=name)
    assert not np.array_equal(task.model.trainable_variables[0].numpy(), next(iter(before.values())))


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_clipped_update_has_the_norm_of_the_limit(
    replicas: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a loss scale the gradients are that much larger, and so is the limit.
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(1.0))
    train.build(Config(simulated_devices=replicas, precision=precision, clip_norm=0.05))
    before = [variable.numpy() for variable in task.model.trainable_variables]
    take_steps(1)
    if precision == "mixed_float16":
        while task.optimizer.iterations.numpy() == 0:  # The scale begins so high that it overflows.
            take_steps(1)
    changes = [variable.numpy() - b for variable, b in zip(task.model.trainable_variables, before, strict=True)]
    assert np.sqrt(sum((change**2).sum() for change in changes)) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "sums"),
    [({}, 1), ({"micro_batches": 2}, 1), ({"ema_decay": 0.9}, 1), ({"clip_norm": 1.0}, 2)],
    ids=["plain", "micro-batches", "average", "clipping"],
)
def test_gradients_cross_replicas_once_unless_they_are_clipped(
    settings: dict, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keras sums once, in apply_gradients.
    traced = []
    all_reduce = tf.distribute.ReplicaContext.all_reduce

    def counted(self, *arguments, **options):
        traced.append(self.replica_id_in_sync_group)
        return all_reduce(self, *arguments, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counted)
    train.build(Config(simulated_devices=2, **settings))
    take_steps(1)
    assert len(traced) == 2 * sums


def test_outputs_of_micro_batches_come_in_the_order_of_the_batch() -> None:
    seen = []

    def loss_and_gradients(batch):
        features, _, _ = batch
        seen.append(features.numpy().ravel().tolist())
        return tf.reduce_sum(features), [features[:1], None], {"twice": 2 * features, "flat": features[:, 0]}

    features = tf.reshape(tf.range(12.0), [6, 2])
    loss, gradients, outputs = in_micro_batches(loss_and_gradients, (features, features, features), count=3)
    assert seen == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert loss == 66.0
    assert gradients[0].numpy().tolist() == [[0 + 2 + 4, 1 + 3 + 5]]
    assert gradients[1] is None
    np.testing.assert_array_equal(outputs["twice"], 2 * features)
    np.testing.assert_array_equal(outputs["flat"], features[:, 0])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_loss_may_branch_on_a_tensor(count: int, jit: bool) -> None:
    """AutoGraph converts it, though it leaves the engine's own functions as they are."""

    def loss_and_gradients(batch):
        features, _, _ = batch
        loss = tf.reduce_sum(features)
        if loss <= 5.0:  # The first micro-batch of two, {1, 3}, is.
            loss = tf.constant(0.0)
        return loss, [], features

    features = tf.constant([[1.0], [2.0], [3.0], [4.0]])
    steps = tf.function(lambda batch: in_micro_batches(loss_and_gradients, batch, count=count, jit=jit))
    loss, _, _ = steps((features, features, features))
    assert loss == {1: 10.0, 2: 6.0}[count]


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"clipnorm": 1.0}, "--clip-norm"),
        ({"global_clipnorm": 1.0}, "--clip-norm"),
        ({"clipvalue": 1.0}, "--clip-norm"),
        ({"gradient_accumulation_steps": 2}, "--micro-batches"),
        ({"use_ema": True}, "--ema-decay"),
        ({"loss_scale_factor": 8.0}, "--precision mixed_float16"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_optimizer_that_does_it_itself_is_refused(arguments: dict, setting: str) -> None:
    with pytest.raises(BadInput, match=f"task.create_optimizer returned .*{next(iter(arguments))}.*use {setting}"):
        prepare_optimizer(keras.optimizers.SGD(0.1, **arguments), "float32")


def test_loss_scale_of_the_user_is_refused() -> None:
    with pytest.raises(BadInput, match="returned a LossScaleOptimizer"):
        prepare_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mixed_float16")


@pytest.fixture
def overflow_on_the_last(monkeypatch: pytest.MonkeyPatch) -> tf.Variable:
    """A switch: while it is on, the last replica's loss is infinite."""
    switch = tf.Variable(False)
    compute_loss = task.compute_loss

    def overflowing(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        replica = tf.distribute.get_replica_context()
        planted = tf.logical_and(switch, tf.equal(replica.replica_id_in_sync_group, replica.num_replicas_in_sync - 1))
        return tf.where(planted, np.inf, 1.0) * loss, per_example_loss

    monkeypatch.setattr(task, "compute_loss", overflowing)
    return switch


@pytest.fixture
def final_loss() -> Callable[..., float]:
    """Trains the shipped task for some epochs; returns the last validation loss."""

    def train_with(epochs: int, **settings) -> float:
        train.build(Config(epochs=epochs, **settings))
        for epoch in range(epochs):
            train.train_epoch(epoch)
        return train.validate()["validation/loss"]

    return train_with


@pytest.mark.long
def test_float16_ends_where_float32_does_though_a_step_overflowed(overflow_on_the_last: tf.Variable) -> None:
    found = {}
    for precision in ("float32", "mixed_float16"):
        train.build(Config(epochs=10, precision=precision, simulated_devices=2))
        train.train_epoch(0)
        if precision == "mixed_float16":
            scale = task.optimizer.dynamic_scale.numpy()
            overflow_on_the_last.assign(True)
            take_steps(1)
            overflow_on_the_last.assign(False)
            assert task.optimizer.dynamic_scale.numpy() == scale / 2
            for metric in task.metrics["train"].values():
                metric.reset_state()
        for epoch in range(1, 10):
            results = train.train_epoch(epoch)
        found[precision] = {**results, **train.validate()}
    for name in ("train/loss", "validation/loss"):
        assert found["mixed_float16"][name] == pytest.approx(found["float32"][name], rel=0.01)


def test_bfloat16_trains(final_loss: Callable[..., float]) -> None:
    assert final_loss(4, precision="mixed_bfloat16", simulated_devices=2) < 1.2 * final_loss(4)


@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {"micro_batches": 2}], ids=["clipping", "micro-batches"])
def test_none_gradient_is_left_out(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithSpare(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = keras.layers.Dense(10), keras.layers.Dense(3)

        def build(self, shape):
            self.used.build((None, 64))
            self.spare.build((None, 4))

        def call(self, features):
            return self.used(tf.reshape(features, [-1, 64]))

    monkeypatch.setattr(task, "create_model", WithSpare)
    train.build(Config(simulated_devices=2, **settings))
    before = task.model.spare.kernel.numpy(), task.model.used.kernel.numpy()
    take_steps(2)
    np.testing.assert_array_equal(task.model.spare.kernel.numpy(), before[0])
    assert not np.array_equal(task.model.used.kernel.numpy(), before[1])


def test_embedding_gradients_become_whole_tensors_because_adam_gets_slices_wrong() -> None:
    """If this goes red, Keras has mended it, and large embeddings need not become whole tensors any more."""

    def embedding_after_three_steps(whole: bool) -> np.ndarray:
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(5, 3)
        embedding.build(None)
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(embedding.trainable_variables)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(embedding(tf.constant([[0, 1, 1, 2], [3, 1, 4, 4]])) - 1.0))
            (gradient,) = tape.gradient(loss, embedding.trainable_variables)
            assert isinstance(gradient, tf.IndexedSlices)
            gradient = tf.convert_to_tensor(gradient) if whole else gradient
            optimizer.apply_gradients([(gradient, embedding.embeddings)])
        return embedding.embeddings.numpy()

    difference = np.abs(embedding_after_three_steps(True) - embedding_after_three_steps(False)).max(axis=1)
    # Only the tokens that occur more than once are wrong.
    assert (difference[[1, 4]] > 0.01).all(), difference
    assert (difference[[0, 2, 3]] < 1e-6).all(), difference


@pytest.mark.long
def test_micro_batches_take_less_memory_for_the_same_loss() -> None:
    found = {}
    for micro_batches in ("1", "4"):
        done = run("python", HELPERS / "peak_memory.py", micro_batches, folder=HELPERS)
        assert done.returncode == 0, done.stderr
        found[micro_batches] = json.loads(done.stdout.splitlines()[-1])
    assert found["4"]["loss"] == pytest.approx(found["1"]["loss"], rel=1e-6)
    assert found["4"]["mebibytes"] < 0.5 * found["1"]["mebibytes"]  # Measured: 311 and 67.
