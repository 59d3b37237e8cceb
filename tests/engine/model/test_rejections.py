"""Settings, run directories and hooks that cannot work end in one line and exit code 2, and leave nothing behind."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import on_replicas
from small import linear_model

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model import apply_gradients, gather_batch, replica_step
from engine.model.moments import moments_of_all

Refused = Callable[..., str]
LOAD_EXAMPLES, TRAIN_STEP = task.load_examples, task.train_step


def few(split: str) -> tf.data.Dataset:
    return LOAD_EXAMPLES(split).take(64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "load_examples", few)
    monkeypatch.setattr(task, "create_model", linear_model)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs train.main with the flags given; returns its one line, after making sure that nothing was written."""

    def refuse(*flags: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            train.main([f"--run-dir={tmp_path / 'run'}", *flags])
        assert ended.value.code == 2
        assert not list(tmp_path.iterdir())
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ERROR: ")
        return line

    return refuse


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--simulated-devices=9"], "--simulated-devices 9 is more than 5, with which TensorFlow has already started"),
        (["--micro-batches=33"], "--global-batch-size 32 is too small for 1 replica(s), in 33 micro-batches each: use"),
        (["--strategy=one_device", "--simulated-devices=2"], "--simulated-devices 2 is too high for --strategy one"),
        (["--strategy=mirrored"], "--strategy mirrored needs GPUs and this machine shows none"),
    ],
)
def test_bad_setting_is_refused(
    flags: list[str], reason: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"GPU": [], "CPU": tf.config.list_physical_devices("CPU")}
    monkeypatch.setattr(tf.config, "list_physical_devices", found.get)
    assert reason in refused(*flags)


def test_strategy_of_one_machine_in_a_cluster_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    assert "use --strategy multi_worker" in refused("--strategy=mirrored")
    for alone in ("--check", "--evaluate-continuously=9"):
        name = alone.removesuffix("=9")
        assert f"{name} is for one process, but TF_CONFIG describes a cluster" in refused(alone)


def square_loss(labels, predictions):
    """The rank trap: labels [share] against predictions [share, 1] give [share, share]."""
    return tf.square(tf.cast(labels, tf.float32) - predictions[:, :1])


STEPS_SEEN = tf.Variable(0, name="steps_seen")


def counting_step(batch):
    STEPS_SEEN.assign_add(1)
    return TRAIN_STEP(batch)


def model_with_a_table():
    task.losses_seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    return linear_model()


def inserting_step(batch):
    loss = TRAIN_STEP(batch)
    task.losses_seen.insert(tf.constant(1, tf.int64), loss)
    return loss


def model_in_float8() -> keras.Model:
    model = linear_model()
    model.quantize("float8")
    return model


def biases_decayed(total_steps: int) -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW()
    # "beta" is one of the usual names, and of no variable here; "bias" would leave out the biases.
    optimizer.exclude_from_weight_decay(var_names=["beta", "bias$"])
    return optimizer


class Noise(keras.layers.Layer):
    """Draws without a seed generator of its own."""

    def call(self, inputs, training=False):
        return inputs + keras.random.normal(tf.shape(inputs)) if training else inputs


BESIDE = tf.Variable(1.0, name="beside")


def training_another_variable(batch):
    features, labels, weights = batch
    with tf.GradientTape() as tape:
        loss, _ = task.compute_loss(labels, BESIDE * task.model(features), weights)
    apply_gradients(task.optimizer, tape, loss, [*task.model.trainable_variables, BESIDE])
    return loss


class Remembering(keras.metrics.Mean):
    """Keeps what it has seen in a list."""

    def update_state(self, values, sample_weight=None):
        self.seen = [*getattr(self, "seen", []), values]
        super().update_state(values, sample_weight)


one_mean = functools.cache(keras.metrics.Mean)
FAULTY_HOOKS = {
    "variable beside the models": (
        {"train_step": training_another_variable},
        "task.train_step gave apply_gradients beside:0, a tf.Variable: pass Keras's variables of the models",
    ),
    "variable of the module": (
        {"train_step": counting_step},
        "task.train_step changes the variable steps_seen:0, which no checkpoint contains",
    ),
    "growing table": (
        {"create_model": model_with_a_table, "train_step": inserting_step},
        "a lookup table, which no checkpoint contains: LookupTableInsertV2 (test_rejections.py:",
    ),
    "mean loss object": (
        {"create_loss_objects": lambda: {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}},
        "task.create_loss_objects returned 'label' with reduction='sum_over_batch_size'",
    ),
    "rank trap": (
        {"create_loss_objects": lambda: {"label": square_loss}},
        "compute_loss: ValueError: Shape must be rank 1 but is rank 2",
    ),
    "no model": ({"create_model": lambda: None}, "task.create_model returned None as 'model'"),
    "model in float8": (
        {"create_model": model_in_float8},
        "which training in float8 makes, and which is wrong on several replicas: train in 16 or 32 bits",
    ),
    "metric with a list": (
        {
            "create_metrics": lambda split: {
                "loss": Remembering(),
                "accuracy": keras.metrics.SparseCategoricalAccuracy(),
            }
        },
        "task.create_metrics('train') returned 'loss', which keeps tensors in 'seen': keep them in variables",
    ),
    "metrics of all splits": (
        {"create_metrics": lambda split: {"loss": one_mean()}},
        "task.create_metrics('validation') returned 'loss', which it also returned for 'train': make new metrics",
    ),
    "no metrics": (
        {"create_metrics": lambda split: {}},
        "--monitor validation/loss is not a result of task.create_metrics for the datasets of task.load_examples: use",
    ),
    "list of losses": ({"create_loss_objects": list}, "task.create_loss_objects returned []: return a dict"),
    "no evaluation step": ({"evaluation_step": None}, "task.py has no function evaluation_step"),
    "stray optimizer": (
        {"create_optimizer": lambda total_steps: {"critic": keras.optimizers.SGD()}},
        "task.create_optimizer returned an optimizer 'critic'",
    ),
    "decay of biases": (
        {"create_optimizer": biases_decayed},
        "exclude_from_weight_decay(var_names=['bias$']) excludes nothing",
    ),
}


def test_other_dtype_of_keras_is_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_loss_objects() -> dict[str, keras.losses.Loss]:
        keras.config.set_floatx("float64")
        return {}

    monkeypatch.setattr(task, "create_loss_objects", create_loss_objects)
    try:
        for _ in ("a hook sets it", "it is set at the start"):
            assert refused().startswith("ERROR: keras.config.floatx() is float64, and the engine computes in float32")
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("fault", FAULTY_HOOKS)
def test_faulty_hook_is_named(fault: str, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, reason = FAULTY_HOOKS[fault]
    for name, hook in hooks.items():
        monkeypatch.setattr(task, name, hook)
    assert reason in refused("--epochs=1")


def test_unseeded_keras_random_is_refused_on_two_replicas(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", lambda: linear_model(Noise()))
    assert "draws from keras.random without a seed" in refused("--simulated-devices=2")


def test_divergence_ends_with_its_step_and_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverging_step(batch):
        return TRAIN_STEP(batch) + tf.where(tf.equal(task.optimizer.iterations, 5), float("inf"), 0.0)

    monkeypatch.setattr(task, "load_examples", lambda split: LOAD_EXAMPLES(split).take(96))
    monkeypatch.setattr(task, "train_step", diverging_step)
    with pytest.raises(SystemExit) as ended:
        train.main([f"--run-dir={tmp_path}", "--epochs=3"])
    assert ended.value.code == 3
    assert "ERROR: the loss of train step 2 of epoch 2 is inf" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "result.json").exists()


class LossInTraining(keras.layers.Layer):
    def call(self, inputs, training=False):
        if training:
            self.add_loss(tf.reduce_mean(inputs))
        return inputs


def test_padding_that_would_count_is_refused() -> None:
    keras.layers.BatchNormalization._moments = moments_of_all

    def take(
        layer: keras.layers.Layer, replicas: int = 2, *, gathers: bool = False, training: bool = True, **settings: Any
    ) -> None:
        with create_strategy(Config(simulated_devices=replicas)).scope():
            model = keras.Sequential([keras.Input((3,)), layer])

        def train_step(batch: Any) -> tf.Tensor:
            if gathers:
                gather_batch(batch[0])
            return tf.reduce_sum(model(batch[0], training=training))

        step = replica_step(train_step, Config(**{"global_batch_size": 33, **settings}), model)
        on_replicas(replicas, step)([np.ones((20, 3), "float32")])

    normalization = functools.partial(keras.layers.BatchNormalization, name="a")
    own_loss, plain = keras.layers.ActivityRegularization(0.1, name="b"), keras.layers.Activation("relu")
    uneven = r"--global-batch-size 33 cannot be shared equally by 2 replica\(s\), and"
    for layer, gathers, what in (
        (normalization(synchronized=True), False, "the layer a normalizes the batch"),
        (own_loss, False, "the layer b adds a loss of its own"),
        (LossInTraining(name="c"), False, "the layer c adds a loss of its own"),
        (plain, True, "task.train_step calls engine.model.gather_batch"),
    ):
        with pytest.raises(BadInput, match=f"^{uneven} {what}, which would count the padding: use 32 or 34$"):
            take(layer, gathers=gathers)
    with pytest.raises(
        BadInput, match=r"33 cannot be shared equally by 1 replica\(s\) in 5 micro-batches .* 30 or 35$"
    ):
        take(normalization(), 1, micro_batches=5)
    take(normalization(trainable=False))
    take(normalization(), training=False)
    take(normalization(synchronized=True), gathers=True, global_batch_size=32)
