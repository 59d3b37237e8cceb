"""--jit auto compiles where it can, and never by itself on a CPU."""

import keras
import pytest
import tensorflow as tf

import task
import train
from config import Config, read_settings
from engine import xla
from engine.xla import has_gpus, resolve_jit


class Python(keras.layers.Layer):
    """What XLA cannot compile."""

    def call(self, inputs):
        return tf.ensure_shape(tf.py_function(lambda x: 2.0 * x, [inputs], tf.float32), inputs.shape)


def model_with(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers, keras.layers.Dense(10)])


def resolved(setting: bool | str = "auto") -> bool:
    return resolve_jit(setting, task, train.strategy, train.batches["train"].element_spec)


@pytest.mark.parametrize("replicas", [1, 2])
def test_cpus_compile_only_when_asked_to(replicas: int) -> None:
    train.build(Config(simulated_devices=replicas))
    assert not has_gpus(train.strategy)
    assert task.config.jit is False
    train.build(Config(simulated_devices=replicas, jit=True))
    assert task.config.jit is True


@pytest.mark.parametrize("replicas", [1, 2])
def test_gpus_compile_what_can_be_compiled(replicas: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(xla, "has_gpus", lambda _: True)
    train.build(Config(simulated_devices=replicas, jit=False))
    before = [variable.numpy() for variable in task.model.variables]
    assert resolved()
    assert not resolved(False)
    # It is only compiled.
    for variable, value in zip(task.model.variables, before, strict=True):
        assert (variable.numpy() == value).all()

    monkeypatch.setattr(task, "create_model", lambda: model_with(Python()))
    train.build(Config(simulated_devices=replicas, jit="auto"))
    assert task.config.jit is False
    assert "--jit auto: trained without XLA, which cannot compile this model" in capsys.readouterr().out

    normalized = keras.layers.BatchNormalization
    monkeypatch.setattr(task, "create_model", lambda: model_with(normalized(synchronized=True)))
    train.build(Config(simulated_devices=replicas, jit="auto"))
    assert task.config.jit is (replicas == 1)


def test_flag_alone_is_true_and_what_was_asked_for_is_kept() -> None:
    assert read_settings(["--jit"]).jit is True
    assert read_settings(["--jit", "--epochs", "3"]).jit is True
    assert read_settings(["--jit", "False"]).jit is False
    assert read_settings([]).jit == "auto"
    train.build(Config())
    assert train.config.jit == "auto"
