"""What the hooks make is treated alike, whether Keras lists it, it is unlisted, or it is computed from variables."""

import gc
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, run, stop
from small import linear_model

import task
import train
from config import Config
from engine.cluster.workers import Workers
from engine.errors import BadInput
from engine.model.variables import Recorder, compile_averaging
from engine.run import RunDirectory
from engine.run.state import State
from engine.trained.loading import load_trained

FLAGS = (*ONE_REPLICA, "--epochs=1", "--limit-steps=4")


class Shifted(keras.layers.Layer):
    """Adds a variable that Keras does not list, which moves in training, and in evaluations too if `always`."""

    def __init__(self, start: float = 0.0, *, always: bool = False) -> None:
        super().__init__()
        self.start, self.always = start, always

    def build(self, shape: Any) -> None:
        self.shift = tf.Variable(self.start, trainable=False, name="shift")

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training or self.always:
            # In evaluations replicas then differ, as their examples do.
            self.shift.assign_add(0.25 + float(self.always) * tf.reduce_mean(tf.abs(inputs)))
        return inputs + self.shift


class Growing(keras.layers.Layer):
    """Has a variable whose size may change."""

    def build(self, shape: Any) -> None:
        self.growing = tf.Variable(tf.zeros([1]), shape=tf.TensorShape(None), trainable=False, name="growing")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))


def test_optimizer_that_copies_the_weights_copies_those_of_init_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    model = linear_model()
    model.layers[-1].kernel.assign(tf.ones([64, 10]))
    model.save_weights(tmp_path / "ones.weights.h5")
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.ScheduleFreeAdamW(1e-9))
    train.build(Config(simulated_devices=1, init_from=tmp_path / "ones.weights.h5"))
    stack, first, _ = next(train.batches["train"].iterator().take(1))
    train.run_steps["train"](stack, first, 1)
    np.testing.assert_allclose(task.model.layers[-1].kernel.numpy(), 1.0, rtol=1e-6)


@pytest.mark.usefixtures("plain")
def test_constants_that_a_layer_computes_are_those_of_the_restored_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def normalized(adapted: bool) -> keras.Model:
        layer = keras.layers.Normalization()
        if adapted:
            layer.adapt(np.linspace(3.0, 9.0, 640).reshape(10, 8, 8, 1))
        else:
            layer.build((None, 8, 8, 1))
        return keras.Sequential([keras.Input((8, 8, 1)), layer, keras.layers.Flatten(), keras.layers.Dense(10)])

    monkeypatch.setattr(task, "create_model", lambda: normalized(adapted=True))
    expected = run(tmp_path, *FLAGS)
    monkeypatch.setattr(task, "create_model", lambda: normalized(adapted=False))
    assert train.main([f"--run-dir={tmp_path}", "--evaluate-only"])["test/loss"] == expected["test/loss"]
    found = train.main([f"--run-dir={tmp_path / 'none'}", *FLAGS, f"--init-from={tmp_path}", "--evaluate-only"])
    assert found["test/loss"] == expected["test/loss"]
    trained = load_trained(task, Config(run_dir=tmp_path, limit_steps=4, epochs=1, global_batch_size=60))
    mean = trained.model.layers[0].mean
    np.testing.assert_array_equal(mean, trained.model.layers[0].adapt_mean.value[None, None, None])


def test_generators_of_networks_that_no_hook_returns_are_spread_over_the_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[keras.layers.Layer] = []

    def create_model() -> keras.Model:
        made[:] = [keras.layers.Dropout(0.5)]
        return linear_model()

    monkeypatch.setattr(task, "create_model", create_model)
    train.build(Config(simulated_devices=2))
    masks = train.strategy.run(lambda: made[0](tf.ones([64]), training=True))
    assert not np.array_equal(*(mask.numpy() for mask in train.strategy.experimental_local_results(masks)))


@pytest.mark.usefixtures("plain")
def test_unlisted_variables_are_initial_weights_too_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", lambda: linear_model(Shifted()))
    run(tmp_path / "first", *FLAGS)
    expected = train.main([f"--run-dir={tmp_path / 'first'}", "--evaluate-only"])
    assert float(task.model.layers[-1].shift) == 1.0
    found = train.main([f"--run-dir={tmp_path / 'no'}", *FLAGS, f"--init-from={tmp_path / 'first'}", "--evaluate-only"])
    assert found == expected
    assert train.run.objects.source.startswith("3 of the model's 3 variables from ")

    # A file of Keras cannot contain it, which is said.
    task.model.save_weights(tmp_path / "listed.weights.h5")
    train.build(Config(run_dir=tmp_path / "no", init_from=tmp_path / "listed.weights.h5"))
    assert train.run.objects.source.startswith("2 of the model's 3 variables from ")
    assert train.run.objects.source.endswith("; without hidden/model/sequential/shifted/shift")
    assert float(task.model.layers[-1].shift) == 0.0


@pytest.mark.usefixtures("plain")
def test_evaluation_leaves_all_variables_but_those_of_metrics_as_it_found_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_model() -> keras.Model:
        recurrent = keras.layers.GRU(4, stateful=True, unroll=True)
        layers = [keras.layers.Reshape((2, 32)), recurrent, Shifted(always=True), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input(batch_shape=(60, 8, 8, 1)), *layers])

    monkeypatch.setattr(task, "create_model", create_model)
    once = run(tmp_path / "once", *FLAGS, "--validate-every-steps=4")
    often = run(tmp_path / "often", *FLAGS, "--validate-every-steps=1")
    assert often["weights_sha256"] == once["weights_sha256"]
    assert float(task.model.layers[-2].shift) > 0.0


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("flags", [(), ("--eager",)])
def test_stop_within_an_evaluation_gives_back_what_it_has_changed_and_averaged(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_model() -> keras.Model:
        return keras.Sequential([keras.Input((8, 8, 1)), Shifted(always=True), *linear_model().layers])

    monkeypatch.setattr(task, "create_model", create_model)
    flags = (*flags, *FLAGS, "--ema-decay=0.5", "--steps-per-execution=1", "--simulated-devices=2")
    flags = (*flags, "--validate-every-steps=2")
    whole = run(tmp_path / "whole", *flags)
    stop(4, tmp_path / "stopped", *flags)
    assert train.run.progress.steps_of_pass == {"train": 2, "validation": 0}
    assert run(tmp_path / "stopped", *flags) == whole


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("replicas", [1, 2])
def test_variables_that_are_infinite_at_the_start_may_stay_so(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Masked(keras.layers.Layer):
        """Has a running minimum, which starts at infinity, and a mask of -inf: listed and trainable, or unlisted."""

        def build(self, shape: Any) -> None:
            self.minimum = tf.Variable(np.inf, trainable=False, name="minimum")
            self.mask = self.add_weight(shape=(10,), initializer=keras.initializers.Constant(-np.inf), name="mask")
            self.unlisted_mask = tf.Variable([-np.inf] * 2, trainable=False, name="unlisted_mask")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            hidden = tf.stop_gradient(tf.where(tf.range(10) > 7, self.mask, 0.0))
            return tf.where(tf.range(10) > 7, -1e9, inputs + tf.exp(hidden) + tf.exp(self.unlisted_mask[0]))

    monkeypatch.setattr(task, "create_model", lambda: keras.Sequential([*linear_model().layers, Masked()]))
    flags = ("--global-batch-size=60", f"--simulated-devices={replicas}", "--epochs=1", "--limit-steps=4")
    result = run(tmp_path, *flags, "--ema-decay=0.9")
    assert np.isfinite(result["best_validation/loss"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_mean_over_the_replicas_leaves_equal_values_as_they_are(dtype: str) -> None:
    values = np.random.default_rng(0).normal(100.0, 1.0, 1000).astype(dtype)
    train.build(Config(simulated_devices=3, global_batch_size=33))
    with train.strategy.scope():
        equal, different = tf.Variable(values), tf.Variable(tf.zeros([2], dtype))
    for part, value in zip(train.strategy.experimental_local_results(different), (1000.0, 1001.0, 1008.0), strict=True):
        part.assign(tf.fill([2], tf.cast(value, dtype)))
    compile_averaging(train.strategy, [equal, different])()
    for part in train.strategy.experimental_local_results(equal):
        np.testing.assert_array_equal(part.numpy(), values)
    np.testing.assert_array_equal(different.numpy(), [1003.0, 1003.0])


def test_names_of_unlisted_variables_depend_on_what_was_made_not_on_garbage() -> None:
    recorder, kept = Recorder(), []
    with recorder.recording():
        for number in range(3):
            kept.append(tf.Variable(float(number)))
        circle: list[Any] = [tf.Variable(3.0)]
        circle.append(circle)
        listed = tf.Variable(4.0, name="listed")
    gc.disable()
    try:
        del kept[1], circle
        names = recorder.unlisted([listed], "model")
    finally:
        gc.enable()
    # A network that a hook has deleted is gone, although it refers to itself.
    assert {name: float(variable) for name, variable in names.items()} == {
        "hidden/model/Variable": 0.0,
        "hidden/model/Variable#3": 2.0,
    }


@pytest.mark.usefixtures("plain")
def test_every_checkpoint_has_all_variables_and_the_best_weights_those_of_no_optimizer_or_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tf.Variable] = []

    def making(hook: Any, name: str) -> Any:
        def create(*arguments: Any, **options: Any) -> Any:
            kept.append(tf.Variable(1.0, name=name))
            return hook(*arguments, **options)

        return create

    for hook in ("create_model", "create_loss_objects", "create_optimizer", "create_metrics"):
        monkeypatch.setattr(task, hook, making(getattr(task, hook), hook))
    train.build(Config(run_dir=tmp_path, simulated_devices=1, limit_steps=1))
    RunDirectory(train.config, train.strategy).restore(train.run)
    state, best = (
        {name for name in each.state.values() if name.startswith("hidden/")}
        for each in (train.run.checkpoints, train.run.best)
    )
    assert best == {"hidden/model/create_model", "hidden/loss/create_loss_objects"}
    metrics = {f"hidden/metrics/create_metrics{number}" for number in ("", "#2", "#3")}
    assert state == best | metrics | {"hidden/optimizer/create_optimizer"}


def test_values_of_replicas_stay_when_a_layer_makes_again_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(keras.layers.Layer):
        """Keeps twice its weight in Python when it is loaded."""

        def build(self, shape: Any) -> None:
            self.own = self.add_weight(shape=(), trainable=False, name="own")

        def load_own_variables(self, store: Any) -> None:
            super().load_own_variables(store)
            self.twice = 2.0 * float(self.own.numpy())

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return inputs + self.own

    class Derived(Doubled):
        """Inherits how it is loaded."""

    monkeypatch.setattr(task, "create_model", lambda: linear_model(Derived()))
    train.build(Config(simulated_devices=2))
    layer = task.model.layers[-1]
    parts = train.strategy.experimental_local_results(layer.own.value)
    for part, value in zip(parts, (1.0, 3.0), strict=True):
        part.assign(value)
    train.objects.finalize_layers()
    assert [float(part) for part in parts] == [1.0, 3.0]
    assert layer.twice == 2.0


def test_weights_whose_names_may_belong_to_others_differ() -> None:
    strategy = tf.distribute.get_strategy()
    state = State(strategy, Workers(strategy), {}, {"hidden/model/x": tf.Variable(0.0)})
    one = (tf.float32, (1,))
    assert not state.differences({"hidden/model/x": one, "hidden/model/y": one, "hidden/loss/x": one})
    (difference,) = state.differences({"hidden/model/x": one, "hidden/model/x#2": one})
    assert difference == "hidden/model/x#2 float32[1] there and absent now"


@pytest.mark.parametrize(
    ("create_model", "message"),
    [
        (lambda: {"metrics": linear_model()}, "returned a model 'metrics': call it otherwise"),
        (lambda: linear_model(Growing()), r"the variable hidden/model/.*/growing has the shape <unknown>"),
    ],
)
def test_variables_that_no_checkpoint_could_hold_are_rejected(
    create_model: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", create_model)
    with pytest.raises(BadInput, match=message):
        train.build(Config(simulated_devices=1))
