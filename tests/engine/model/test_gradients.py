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
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model.averages import follow
from engine.model.build import build_optimizers
from engine.model.gradients import apply_gradients, in_micro_batches
from engine.model.optimizers import prepare_optimizer
from engine.model.variables import model_variables
from engine.tracing import operations_of
from rendering import run

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model() -> keras.Model:
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])

    monkeypatch.setattr(task, "create_model", create_model)


def values_on_replicas(variable: tf.Variable) -> list[np.ndarray]:
    return [value.numpy() for value in train.strategy.experimental_local_results(variable)]


def take_steps(count: int) -> None:
    for stack, first, taken in train.batches["train"].iterator().take(count):
        train.run_steps["train"](stack, first, taken)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_variable_that_the_loss_does_not_use_stays_with_several_optimizers(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithUnusedScale(keras.layers.Dense):
        def build(self, shape: tuple[int, ...]) -> None:
            super().build(shape)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
        others = {".*kernel": keras.optimizers.SGD(0.1)}
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.2), others))

    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), WithUnusedScale(10, dtype="float32")]
    monkeypatch.setattr(task, "create_model", lambda: keras.Sequential(layers))
    monkeypatch.setattr(task, "create_optimizer", create_optimizer)
    train.build(Config(simulated_devices=2, global_batch_size=32, precision=precision))
    before = {variable.path: variable.numpy() for variable in task.model.trainable_variables}
    take_steps(2)
    after = {variable.path: variable.numpy() for variable in task.model.trainable_variables}
    assert [path.rsplit("/")[-1] for path in after if (after[path] == before[path]).all()] == ["scale"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("replicas", [1, 3])
def test_overflow_on_the_last_replica_skips_the_step_on_all(replicas: int, overflow_on_the_last: tf.Variable) -> None:
    overflow_on_the_last.assign(True)
    train.build(Config(simulated_devices=replicas, global_batch_size=30, precision="mixed_float16"))
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


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("replicas", "precision"), [(1, "float32"), (3, "float32"), (3, "mixed_float16")])
def test_clipped_update_has_the_norm_of_the_limit(
    replicas: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a loss scale the gradients are that much larger, and so is the limit.
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(1.0))
    train.build(Config(simulated_devices=replicas, global_batch_size=30, precision=precision, global_clipnorm=0.05))
    before = [variable.numpy() for variable in task.model.trainable_variables]
    take_steps(1)
    if precision == "mixed_float16":
        while task.optimizer.iterations.numpy() == 0:  # The scale begins so high that it overflows.
            take_steps(1)
    changes = [variable.numpy() - b for variable, b in zip(task.model.trainable_variables, before, strict=True)]
    assert np.sqrt(sum((change**2).sum() for change in changes)) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "settings",
    [{"micro_batches": 2, "ema_decay": 0.9}, {"global_clipnorm": 1.0}, {"precision": "mixed_float16"}],
    ids=str,
)
def test_gradients_cross_replicas_once(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    strategy = create_strategy(Config(simulated_devices=2))
    batch_reduce_to = strategy.extended.batch_reduce_to

    def counted(*arguments):
        sums.append(arguments)
        return batch_reduce_to(*arguments)

    monkeypatch.setattr(strategy.extended, "batch_reduce_to", counted)
    train.build(Config(simulated_devices=2, **settings))
    train.graph("train")
    assert len(sums) == 1


@pytest.mark.usefixtures("small")
def test_nothing_in_a_step_bundles_the_gradients() -> None:
    train.build(Config(simulated_devices=2))
    bundles = [each for each in operations_of(train.graph("train")) if each.type == "IdentityN"]
    assert not bundles, "With gradients in one IdentityN, Grappler loses that an update follows the reads before it."


METRICS = {"loss": keras.metrics.Mean, "norm": keras.metrics.Sum}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "settings", [{"global_clipnorm": 1e9}, {"global_clipnorm": 0.05}, {"precision": "mixed_float16"}], ids=str
)
def test_norm_is_that_of_the_summed_gradients(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # Gradient descent with rate 1 moves the weights by the gradient, so the norm can be seen from outside.
    monkeypatch.setattr(task, "create_metrics", lambda split: {name: kind() for name, kind in METRICS.items()})
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(1.0))
    monkeypatch.setattr(task, "train_step", step_with_norm)
    norms = []
    for replicas, micro_batches in ((1, 1), (3, 1), (3, 2)):
        config = Config(simulated_devices=replicas, global_batch_size=30, micro_batches=micro_batches, **settings)
        train.build(config)
        before = [variable.numpy() for variable in task.model.trainable_variables]
        take_steps(1)
        changes = [variable.numpy() - b for variable, b in zip(task.model.trainable_variables, before, strict=True)]
        moved = np.sqrt(sum((change**2).sum() for change in changes))
        # Each replica adds the same one.
        norms.append(float(task.metrics["train"]["norm"].result()) / replicas)
        if settings.get("global_clipnorm") == 0.05:
            assert moved == pytest.approx(0.05, rel=1e-3) != norms[-1]
        else:
            assert norms[-1] == pytest.approx(moved, rel=1e-2 if "precision" in settings else 1e-4)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2 if "precision" in settings else 1e-5)


@pytest.mark.usefixtures("small")
def test_norm_is_nan_where_nothing_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_metrics", lambda split: {name: kind() for name, kind in METRICS.items()})
    monkeypatch.setattr(task, "train_step", step_with_norm)
    train.build(Config(simulated_devices=2, global_batch_size=30))
    take_steps(1)
    assert np.isnan(float(task.metrics["train"]["norm"].result()))


def step_with_norm(batch):
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        loss, _ = task.compute_loss(labels, task.model(features, training=True), weights)
    norm = apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables)
    task.metrics["train"]["norm"].update_state(norm)
    return loss


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("count", [1, 3, 6])  # Of 6 the graph takes all but the first and the last in a loop.
def test_micro_batches_update_once_with_the_sum(count: int, jit: bool, compiled: bool) -> None:
    linear = Linear()
    step = in_micro_batches(linear.train_step, Config(micro_batches=count, jit=jit))
    features = tf.reshape(tf.range(12.0), [6, 2])
    loss = (tf.function(step) if compiled else step)((features, features, features))
    assert loss == 66.0
    assert linear.weight.numpy().ravel().tolist() == [-(0 + 2 + 4 + 6 + 8 + 10), -(1 + 3 + 5 + 7 + 9 + 11)]
    assert linear.optimizer.iterations.numpy() == 1
    if count == 3 and not compiled:
        assert linear.seen == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_any_number_of_micro_batches_has_one_graph() -> None:
    def operations(count: int) -> int:
        step = in_micro_batches(Linear().train_step, Config(micro_batches=count))
        features = tf.TensorSpec([32, 2])
        graph = tf.function(step).get_concrete_function((features, features, features)).graph
        return len(operations_of(graph))

    assert operations(4) == operations(32)


@pytest.mark.parametrize("order", ["losses, updates", "loss, update, loss, update"])
@pytest.mark.parametrize("count", [1, 2])
def test_loss_after_an_update_is_refused_in_micro_batches(count: int, order: str) -> None:
    linear = Linear()

    def loss_of(features):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(features @ linear.weight.value)
        return tape, loss

    def train_step(batch):
        first = loss_of(batch[0])
        second = loss_of(batch[0]) if order == "losses, updates" else None
        apply_gradients(linear.optimizer, *first, [linear.weight])
        second = second or loss_of(batch[0])
        apply_gradients(linear.optimizer, *second, [linear.weight])
        return first[1] + second[1]

    step = tf.function(in_micro_batches(train_step, Config(micro_batches=count)), autograph=False)
    features = tf.ones([4, 2])
    if count == 2 and order != "losses, updates":
        with pytest.raises(BadInput, match=r"--micro-batches: task.train_step computes a loss after an update"):
            step((features, features, features))
        return
    step((features, features, features))
    assert linear.weight.numpy().ravel().tolist() == [-8.0, -8.0]


@pytest.mark.parametrize(
    "option", [{"micro_batches": 2}, {"global_clipnorm": 1.0}, {"precision": "mixed_float16"}], ids=str
)
def test_update_by_other_means_is_refused_with_options_that_it_would_ignore(option: dict) -> None:
    def step(settings: Config) -> tf.Tensor:
        return in_micro_batches(lambda batch: tf.constant(0.0), settings)((tf.ones([2]),) * 3)

    with pytest.raises(BadInput, match=rf"--{next(iter(option)).replace('_', '-')}.* needs .*apply_gradients"):
        step(Config(**option))
    assert step(Config()) == 0.0


def test_jit_compiles_forward_and_backward_pass_and_not_the_update() -> None:
    for jit in (False, True):
        linear = Linear()
        step = tf.function(in_micro_batches(linear.train_step, Config(jit=jit)))
        graph = step.get_concrete_function((tf.TensorSpec([4, 2]),) * 3).graph
        marked = {each.type for each in graph.get_operations() if _is_marked(each)}
        assert ("MatMul" in marked) == jit
        backward = [
            each for each in graph.get_operations() if each.name.startswith("gradient_tape") and each.type == "MatMul"
        ]
        assert backward
        assert all(_is_marked(each) == jit for each in backward)
        assert "AssignSubVariableOp" not in marked


def _is_marked(operation: tf.Operation) -> bool:
    try:
        return operation.get_attr("_XlaCompile")
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"gradient_accumulation_steps": 2}, "--micro-batches"),
        ({"use_ema": True}, "--ema-decay"),
        ({"loss_scale_factor": 8.0}, "--precision mixed_float16"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_optimizer_that_does_it_itself_is_refused(arguments: dict, setting: str) -> None:
    with pytest.raises(BadInput, match=f"task.create_optimizer returned .*{next(iter(arguments))}.*use {setting}"):
        prepare_optimizer(keras.optimizers.SGD(0.1, **arguments), "float32")


# --- The optimizer's own clipping, and variables of several dtypes ----------------------------------------------------

FEATURES = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
LABELS = np.random.default_rng(1).normal(size=(24, 3)).astype("float32") * np.linspace(0.1, 9.0, 24)[:, None]
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "no clipping": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.AdamW(0.1, epsilon=0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.AdamW(0.1, epsilon=0.1, clipvalue=0.2),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, global_clipnorm=0.3), {".*bias": keras.optimizers.AdamW(0.1, clipvalue=0.2)}
        )
    ),
}


def two_layers(dtype: str) -> keras.Model:
    """Returns a model of two dense layers, the first of them with this dtype."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, dtype=dtype, name="first"), keras.layers.Dense(3, name="second")]
    return keras.Sequential([keras.Input((4,)), *layers])


def loss_of(model: keras.Model, features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the part of the batch's loss that these examples have."""
    return tf.reduce_sum(tf.square(model(features, training=True) - tf.cast(labels, tf.float32))) / len(FEATURES)


def by_keras(optimizer: keras.optimizers.Optimizer, dtype: str) -> list[np.ndarray]:
    """Returns the weights after some steps of the complete batch on one device, without the engine."""
    model = two_layers(dtype)
    optimizer.build(model.trainable_variables)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(model, FEATURES, LABELS)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
    return model.get_weights()


def by_engine(
    create: Callable[[], keras.optimizers.Optimizer],
    dtype: str,
    replicas: int,
    precision: str = "float32",
    updates_itself: bool = False,
    steps: int = 3,
    **settings,
) -> list[np.ndarray]:
    """Returns the weights after the same steps on replicas; of a step that `updates_itself` calls Keras alone."""
    strategy = create_strategy(Config(strategy="mirrored", simulated_devices=replicas))
    with strategy.scope():
        model = two_layers(dtype)
        # A hook may return the same optimizer twice.
        optimizer = build_optimizers(prepare_optimizer(create(), "float32"), model, precision)

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch[0], batch[1])
        if updates_itself:
            optimizer.apply_gradients(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
        else:
            apply_gradients(optimizer, tape, loss, model.trainable_variables)
        return loss

    step = in_micro_batches(train_step, Config(**settings))

    def values(array: np.ndarray):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array[context.replica_id_in_sync_group :: replicas])
        )

    run_step = tf.function(lambda *batch: strategy.run(step, (batch,)), autograph=False)
    for _ in range(steps):
        run_step(values(FEATURES), values(LABELS))
    return model.get_weights()


def assert_same(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


WAYS = {
    "2 replicas": {"replicas": 2},
    "4 replicas, 2 micro-batches": {"replicas": 4, "micro_batches": 2},
    "3 replicas, a loss scale": {"replicas": 3, "precision": "mixed_float16"},
    "1 replica, a limit that does not bind": {"replicas": 1, "global_clipnorm": 1e9},
    "2 replicas, Keras's own update": {"replicas": 2, "updates_itself": True},
}


@pytest.mark.parametrize(
    ("kind", "way"), [(kind, way) for kind in OPTIMIZERS for way in WAYS if kind == "several" or way == "2 replicas"]
)
def test_clipping_by_the_optimizer_is_that_of_keras_on_one_device(kind: str, way: str) -> None:
    expected = by_keras(OPTIMIZERS[kind](), "float32")
    assert_same(by_engine(OPTIMIZERS[kind], "float32", **WAYS[way]), expected, 1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance", "way"),
    [
        *(("clipnorm", "float64", 1e-6, way) for way in list(WAYS)[:4]),
        ("no clipping", "float64", 1e-6, "4 replicas, 2 micro-batches"),
        ("no clipping", "bfloat16", 0.05, "4 replicas, 2 micro-batches"),
    ],
)
def test_variables_of_several_dtypes_train_as_in_keras(kind: str, dtype: str, tolerance: float, way: str) -> None:
    expected = by_keras(OPTIMIZERS[kind](), dtype)
    found = by_engine(OPTIMIZERS[kind], dtype, **WAYS[way])
    assert [each.dtype.name for each in found] == [dtype, dtype, "float32", "float32"]
    assert_same([each.astype("float64") for each in found], [each.astype("float64") for each in expected], tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_global_clipnorm_comes_before_the_clipping_of_the_optimizer(dtype: str) -> None:
    model = two_layers(dtype)
    with tf.GradientTape() as tape:
        loss = loss_of(model, FEATURES, LABELS)
    gradients = [each.numpy().astype("float64") for each in tape.gradient(loss, model.weights)]
    norm = np.sqrt(sum((each**2).sum() for each in gradients))
    assert norm > 2.0
    before = model.get_weights()
    expected = [b - np.clip(each / norm * 2.0, -0.1, 0.1) for b, each in zip(before, gradients, strict=True)]
    for precision in ("float32", "mixed_float16"):
        way = {"replicas": 2, "precision": precision, "global_clipnorm": 2.0, "steps": 1}
        found = by_engine(lambda: keras.optimizers.SGD(1.0, clipvalue=0.1), dtype, **way)
        assert_same(found, expected, 1e-6)


@pytest.mark.parametrize(("none_is_trainable", "problem"), [(True, "no variables, so nothing"), (False, "a loss that")])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_step_without_a_gradient_is_refused(none_is_trainable: bool, problem: str, micro_batches: int) -> None:
    linear = Linear()

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(batch[0])
        apply_gradients(linear.optimizer, tape, loss, [] if none_is_trainable else [linear.weight])
        return loss

    step = tf.function(in_micro_batches(train_step, Config(micro_batches=micro_batches)), autograph=False)
    with pytest.raises(BadInput, match=f"^task.train_step gave apply_gradients {problem}.*: pass trainable variables"):
        step((tf.ones([4, 2]),))


def test_norm_is_that_of_the_gradients_when_the_loss_scale_grows() -> None:
    variable = keras.Variable([1.0, 1.0, 1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), dynamic_growth_steps=2)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value)
        return apply_gradients(optimizer, tape, loss, [variable])

    before = float(optimizer.dynamic_scale.numpy())
    assert [float(step()) for _ in range(4)] == pytest.approx([3**0.5] * 4)
    assert float(optimizer.dynamic_scale.numpy()) == 4 * before


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


@pytest.mark.long
@pytest.mark.usefixtures("small")
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


@pytest.mark.usefixtures("small")
def test_bfloat16_trains() -> None:
    losses = []
    for precision in ("float32", "mixed_bfloat16"):
        train.build(Config(epochs=2, simulated_devices=2, precision=precision))
        losses += [train.train_epoch(epoch)["train/loss"] for epoch in range(2)]
    assert losses[3] != losses[1] == pytest.approx(losses[3], rel=0.02)
    assert losses[3] < 0.97 * losses[2]


def test_none_gradient_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
    train.build(Config(simulated_devices=2, global_clipnorm=1.0, micro_batches=2))
    before = task.model.spare.kernel.numpy(), task.model.used.kernel.numpy()
    take_steps(2)
    np.testing.assert_array_equal(task.model.spare.kernel.numpy(), before[0])
    assert not np.array_equal(task.model.used.kernel.numpy(), before[1])


def test_keras_squares_the_slices_of_a_row_one_by_one() -> None:
    """If this fails, Keras has fixed it, and `sum_by_row` is needed for the norms only."""

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


@pytest.mark.parametrize("count", [1, 3])
def test_own_gradients_take_the_place_of_the_tape_s(count: int) -> None:
    linear = Linear()

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(batch[0] @ linear.weight.value)
        (gradient,) = tape.gradient(loss, [linear.weight])
        apply_gradients(linear.optimizer, tape, loss, [linear.weight], gradients=[2.0 * gradient])
        return loss

    features = tf.ones([6, 2])
    in_micro_batches(train_step, Config(micro_batches=count))((features, features, features))
    assert linear.weight.numpy().ravel().tolist() == [-12.0, -12.0]


# --- A network that follows another -----------------------------------------------------------------------------------


def normalized(width: int = 3) -> keras.Model:
    layers = [keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    return keras.Sequential([keras.Input((2,)), *layers])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_follower_moves_once_after_the_update(replicas: int, micro_batches: int, compiled: bool) -> None:
    strategy = create_strategy(Config(simulated_devices=replicas))
    with strategy.scope():
        model, follower = normalized(), normalized()
        optimizer = prepare_optimizer(keras.optimizers.SGD(0.1), "float32")
        optimizer.build(model.trainable_variables)
    before = [each.numpy() for each in follower.variables]

    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch[0]))
        apply_gradients(optimizer, tape, loss, model.trainable_variables)
        follow(follower, model, decay=0.75)
        return loss

    step, features = in_micro_batches(train_step, Config(micro_batches=micro_batches)), tf.ones([4, 2])

    def take() -> tf.Tensor:
        return strategy.run(step, ((features, features, features),))

    with strategy.scope():
        (tf.function(take) if compiled else take)()
    for variable, start, goal in zip(follower.variables, before, model.variables, strict=True):
        moved = start if "seed" in variable.path else 0.75 * start + 0.25 * goal.numpy()
        for value in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(value.numpy(), moved, rtol=1e-6)
    assert not np.array_equal(follower.variables[0].numpy(), before[0])


def test_follower_of_another_shape_is_refused() -> None:
    with pytest.raises(BadInput, match="a follower whose variables have other shapes than those of the model: make"):
        follow(normalized(4), normalized(), 0.9)
