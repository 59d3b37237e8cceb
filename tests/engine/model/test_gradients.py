"""What lies between the tape and the weights, where replicas and micro-batches could disagree."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas, updating
from small import linear_model

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model import gradients
from engine.model.build import build_optimizers
from engine.model.gradients import apply_gradients, replica_step
from engine.model.optimizers import prepare_optimizer
from engine.model.variables import model_variables
from engine.tracing import operations_of

# --- Replicas ---------------------------------------------------------------------------------------------------------


def values_on_replicas(variable: tf.Variable) -> list[np.ndarray]:
    return [value.numpy() for value in train.strategy.experimental_local_results(variable)]


def take_steps(count: int) -> None:
    for stack, first, taken in train.batches["train"].iterator().take(count):
        train.run_steps["train"](stack, first, taken)


def test_overflow_on_the_last_replica_skips_the_step_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    overflows, compute_loss = tf.Variable(False), task.compute_loss

    def overflowing(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        replica = tf.distribute.get_replica_context()
        planted = tf.logical_and(overflows, tf.equal(replica.replica_id_in_sync_group, 1))
        return tf.where(planted, np.inf, 1.0) * loss, per_example_loss

    monkeypatch.setattr(task, "compute_loss", overflowing)
    monkeypatch.setattr(task, "create_model", linear_model)
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    train.build(Config(simulated_devices=2, precision="mixed_float16"))
    before = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    scale = task.optimizer.dynamic_scale.numpy()
    overflows.assign(True)
    take_steps(1)
    assert values_on_replicas(task.optimizer.dynamic_scale.value) == [scale / 2] * 2
    assert task.optimizer.iterations.numpy() == 0
    for name, variable in model_variables(task.model).items():
        for value in values_on_replicas(variable):
            np.testing.assert_array_equal(value, before[name])
    overflows.assign(False)
    take_steps(3)
    assert task.optimizer.iterations.numpy() == 3
    assert task.optimizer.dynamic_scale.numpy() == scale / 2
    for name, variable in model_variables(task.model).items():
        np.testing.assert_array_equal(*values_on_replicas(variable), err_msg=name)
        assert (variable.numpy() != before[name]).any()


def test_gradients_cross_replicas_once_and_are_not_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    strategy = create_strategy(Config(simulated_devices=2))
    batch_reduce_to = strategy.extended.batch_reduce_to

    def counted(*arguments):
        sums.append(arguments)
        return batch_reduce_to(*arguments)

    monkeypatch.setattr(strategy.extended, "batch_reduce_to", counted)
    monkeypatch.setattr(task, "create_model", linear_model)
    train.build(Config(simulated_devices=2, micro_batches=2, ema_decay=0.9, global_clipnorm=1.0))
    bundles = [each for each in operations_of(train.run_steps["train"].graph()) if each.type == "IdentityN"]
    assert len(sums) == 1
    assert not bundles, "With gradients in one IdentityN, Grappler loses that an update follows the reads before it."


def test_variable_that_the_loss_does_not_use_stays_with_several_optimizers() -> None:
    class WithUnusedScale(keras.layers.Dense):
        def build(self, shape: tuple[int, ...]) -> None:
            super().build(shape)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    others = {".*kernel": keras.optimizers.SGD(0.1)}
    with create_strategy(Config(simulated_devices=2)).scope():
        model = keras.Sequential([keras.Input((2,)), WithUnusedScale(3)])
        optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.2), others))
        optimizer = build_optimizers(optimizer, model, "mixed_float16")

    train_step = updating(optimizer, model.trainable_variables, lambda features: tf.reduce_sum(model(features)))
    before = model.get_weights()
    settings = Config(global_clipnorm=1.0, micro_batches=2)
    on_replicas(2, replica_step(train_step, settings))((np.ones((8, 2), "float32"),))
    after = zip([each.name for each in model.variables], before, model.get_weights(), strict=True)
    assert {name: (one != other).any() for name, one, other in after} == {"kernel": True, "bias": True, "scale": False}


# --- Micro-batches ----------------------------------------------------------------------------------------------------


class Linear:
    """A step of least squares: gradient descent with rate 1 on sum(weight * features)."""

    def __init__(self) -> None:
        self.weight = keras.Variable([[0.0], [0.0]])
        self.unused = keras.Variable([0.0])
        self.optimizer = keras.optimizers.SGD(1.0)
        self.optimizer.build([self.weight, self.unused])
        self.seen: list[list[float]] = []

    def train_step(self, batch):
        features, _, _ = batch
        if tf.executing_eagerly():
            self.seen.append(features.numpy().ravel().tolist())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(features @ self.weight.value) + tf.reduce_sum(features)
            if loss <= -100.0:  # AutoGraph converts it, though it leaves the engine's own functions as they are.
                loss = tf.constant(0.0)
        apply_gradients(self.optimizer, tape, loss, [self.weight, self.unused])
        return loss


# Of 6 the graph takes all but the first and the last in a loop.
@pytest.mark.parametrize(("count", "jit", "compiled"), [(3, False, False), (6, True, True)])
def test_micro_batches_update_once_with_the_sum(count: int, jit: bool, compiled: bool) -> None:
    linear = Linear()
    step = replica_step(linear.train_step, Config(micro_batches=count, jit=jit))
    features = tf.reshape(tf.range(12.0), [6, 2])
    loss = (tf.function(step) if compiled else step)((features, features, features))
    assert loss == 66.0
    assert linear.weight.numpy().ravel().tolist() == [-(0 + 2 + 4 + 6 + 8 + 10), -(1 + 3 + 5 + 7 + 9 + 11)]
    assert linear.unused.numpy() == [0.0]
    assert linear.optimizer.iterations.numpy() == 1
    if not compiled:
        assert linear.seen == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def weights_after_a_step(replicas: int, dropout: float, **normalization: Any) -> list[np.ndarray]:
    """Returns the weights after a step of 4 micro-batches, of a model with BatchNormalization and dropout."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with create_strategy(Config(simulated_devices=replicas)).scope():
        hidden = [
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(**normalization),
            keras.layers.Dropout(dropout),
        ]
        model = keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(1)])
        optimizer = prepare_optimizer(keras.optimizers.SGD(0.1), "float32")
        optimizer.build(model.trainable_variables)

    def loss_of(features: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(model(features, training=True) - 1.0)) / 24

    train_step = updating(optimizer, model.trainable_variables, loss_of)
    features = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
    # Each micro-batch has the same examples on any number of replicas.
    on_replicas(replicas, replica_step(train_step, Config(micro_batches=4)))([features])
    return model.get_weights()


def test_micro_batches_in_a_loop_are_those_of_a_graph_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_in_a_loop(*arguments: Any) -> tf.Tensor:
        raise RuntimeError("merge_call")

    looped = weights_after_a_step(1, dropout=0.5)
    monkeypatch.setattr(gradients, "_take_in_loop", not_in_a_loop)
    for one, other in zip(looped, weights_after_a_step(1, dropout=0.5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_synchronized_batchnorm_agrees_over_replicas_in_micro_batches() -> None:
    # On two replicas they cannot be taken in a loop.
    one, two = (weights_after_a_step(replicas, dropout=0.0, synchronized=True) for replicas in (1, 2))
    for weight, other in zip(one, two, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def test_any_number_of_micro_batches_has_one_graph() -> None:
    def operations(count: int) -> int:
        step = replica_step(Linear().train_step, Config(micro_batches=count))
        features = tf.TensorSpec([32, 2])
        graph = tf.function(step).get_concrete_function((features, features, features)).graph
        return len(operations_of(graph))

    assert operations(4) == operations(32)


def test_each_micro_batch_waits_for_the_one_before_so_that_its_memory_is_free() -> None:
    step = replica_step(Linear().train_step, Config(micro_batches=3))
    graph = tf.function(step).get_concrete_function((tf.TensorSpec([6, 2]),) * 3).graph
    parts = [each for each in graph.get_operations() if each.type == "StridedSlice"]
    assert len(parts) == 3 * 3
    # Where a slice begins waits for the sums of the gradients, and for the loss.
    waiting = [{each.name for start in part.inputs for each in start.op.control_inputs} for part in parts]
    assert [len(each) for each in waiting] == [0] * 3 + [2] * 6, waiting


def test_loss_after_an_update_is_refused_in_micro_batches() -> None:
    def weights_after(count: int, *, losses_first: bool) -> list[float]:
        linear = Linear()

        def loss_of(features):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(features @ linear.weight.value)
            return tape, loss

        def train_step(batch):
            first = loss_of(batch[0])
            second = loss_of(batch[0]) if losses_first else None
            apply_gradients(linear.optimizer, *first, [linear.weight])
            second = second or loss_of(batch[0])
            apply_gradients(linear.optimizer, *second, [linear.weight])
            return first[1] + second[1]

        step = tf.function(replica_step(train_step, Config(micro_batches=count)), autograph=False)
        step((tf.ones([4, 2]),) * 3)
        return linear.weight.numpy().ravel().tolist()

    assert weights_after(1, losses_first=False) == weights_after(2, losses_first=True) == [-8.0, -8.0]
    with pytest.raises(BadInput, match=r"--micro-batches: task.train_step computes a loss after an update"):
        weights_after(2, losses_first=False)


def test_own_gradients_take_the_place_of_the_tape_s() -> None:
    linear = Linear()

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(batch[0] @ linear.weight.value)
        (gradient,) = tape.gradient(loss, [linear.weight])
        apply_gradients(linear.optimizer, tape, loss, [linear.weight], gradients=[2.0 * gradient])
        return loss

    replica_step(train_step, Config(micro_batches=3))((tf.ones([6, 2]),) * 3)
    assert linear.weight.numpy().ravel().tolist() == [-12.0, -12.0]


def test_jit_compiles_forward_and_backward_pass_and_not_the_update() -> None:
    def marked(jit: bool) -> list[tf.Operation]:
        step = tf.function(replica_step(Linear().train_step, Config(jit=jit)))
        graph = step.get_concrete_function((tf.TensorSpec([4, 2]),) * 3).graph
        return [each for each in graph.get_operations() if each.node_def.attr["_XlaCompile"].b]

    assert not marked(jit=False)
    products = [each.name.startswith("gradient_tape") for each in marked(jit=True) if each.type == "MatMul"]
    assert sorted(products) == [False, True]
    assert not any(each.type == "AssignSubVariableOp" for each in marked(jit=True))


# --- What is refused --------------------------------------------------------------------------------------------------


def test_update_by_other_means_is_refused_with_options_that_it_would_ignore() -> None:
    def step(settings: Config) -> tf.Tensor:
        return replica_step(lambda batch: tf.constant(0.0), settings)((tf.ones([2]),) * 3)

    assert step(Config()) == 0.0
    for option in ({"micro_batches": 2}, {"global_clipnorm": 1.0}, {"precision": "mixed_float16"}):
        with pytest.raises(BadInput, match=rf"--{next(iter(option)).replace('_', '-')}.* needs .*apply_gradients"):
            step(Config(**option))


def test_optimizer_that_does_it_itself_is_refused() -> None:
    for arguments, setting in (
        ({"gradient_accumulation_steps": 2}, "--micro-batches"),
        ({"use_ema": True}, "--ema-decay"),
        ({"loss_scale_factor": 8.0}, "--precision mixed_float16"),
    ):
        with pytest.raises(BadInput, match=f"task.create_optimizer returned .*{next(iter(arguments))}.*use {setting}"):
            prepare_optimizer(keras.optimizers.SGD(0.1, **arguments), "float32")
    with pytest.raises(BadInput, match="returned a LossScaleOptimizer"):
        prepare_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mixed_float16")
    inside = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(use_ema=True)})
    with pytest.raises(BadInput, match=r"an optimizer with use_ema=True, which is wrong on several replicas"):
        build_optimizers(keras.optimizers.MultiOptimizer(inside), linear_model(), "float32")


def test_step_without_a_gradient_is_refused() -> None:
    linear = Linear()
    for variables in ([], [linear.weight]):
        step = replica_step(updating(linear.optimizer, variables, tf.reduce_sum), Config())
        with pytest.raises(BadInput, match=r"^task.train_step gave apply_gradients a loss that .*: pass trainable"):
            step((tf.ones([4, 2]),))
