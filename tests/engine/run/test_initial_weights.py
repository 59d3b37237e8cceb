"""--init-from: weights from a run, from Keras's files and from TensorFlow's checkpoints."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, run, stop
from small import small_model

import task
import train
from config import Config
from engine.errors import BadInput
from engine.model.variables import model_variables
from engine.run import initial_weights
from engine.run.checkpoint_files import read_checkpoint
from engine.run.initial_weights import load_initial_weights
from engine.run.start import initialize

FORMS = {
    "run directory": ".",
    "checkpoint": "checkpoints/step-00000020",
    ".weights.h5": "m.weights.h5",
    ".keras": "m.keras",
    "tf.train.Checkpoint of the model": "model",
    "tf.train.Checkpoint with the model": "object",
}


@pytest.fixture(autouse=True)
def small(linear: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)


def weights() -> dict[str, np.ndarray]:
    return {name: v.numpy() for name, v in model_variables(task.model).items() if "seed_generator" not in name}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run of one epoch on two replicas, with its weights in all the FORMS beside, and the weights."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", small_model)
        patching.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.05))
        run(folder, *ONE_REPLICA, "--epochs=1", "--simulated-devices=2")
    task.model.save_weights(folder / FORMS[".weights.h5"])
    task.model.save(folder / FORMS[".keras"])
    tf.train.Checkpoint(task.model).write(str(folder / "model"))
    tf.train.Checkpoint(model=task.model, step=tf.Variable(3)).write(str(folder / "object"))
    return folder, weights()


def test_initial_weights_are_those_of_the_file(trained: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, expected = trained
    train.build(Config(simulated_devices=2, ema_decay=0.9, seed=5))
    state = train.run.checkpoints.state
    new, seeds = state.values(), [name for name in model_variables(task.model) if "seed_generator" in name]
    assert len(seeds) == 1
    for form, name in FORMS.items():
        state.assign(new)
        train.run.settings = dataclasses.replace(train.config, init_from=folder / name)
        assert initialize(train.run).startswith("8 of the model's 8 variables from "), form
        for name, value in expected.items():
            for variable in train.strategy.experimental_local_results(model_variables(task.model)[name]):
                np.testing.assert_array_equal(variable.numpy(), value, err_msg=form)
        for name, average in train.run.objects.average.averages.items():
            np.testing.assert_array_equal(average.numpy(), expected[name], err_msg=form)
        for name in seeds:
            np.testing.assert_array_equal(state.values()[name], new[name], err_msg=form)


def test_weights_of_another_model_are_refused_unless_asked_for(
    trained: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = trained
    monkeypatch.setattr(task, "create_model", lambda: small_model(keras.layers.Dense(10, name="dense_2")))
    train.build(Config(simulated_devices=2))
    new, initial = train.run.checkpoints.state.values(), weights()
    for form, name in FORMS.items():
        train.run.checkpoints.state.assign(new)
        with pytest.raises(BadInput, match="--init-partial loads what matches"):
            load_initial_weights(folder / name, task.model, partial=False)
        train.run.checkpoints.state.assign(new)
        report = load_initial_weights(folder / name, task.model, partial=True)
        assert report.startswith("8 of the model's 10 variables from "), form
        assert report.endswith("; without model/sequential/dense_2/kernel, model/sequential/dense_2/bias")
        for name, value in weights().items():
            np.testing.assert_array_equal(value, expected.get(name, initial[name]), err_msg=form)


@pytest.mark.parametrize("form", ["run directory", ".weights.h5"])
def test_weights_left_over_are_refused_unless_asked_for(form: str, trained: tuple[Path, dict[str, np.ndarray]]) -> None:
    path = trained[0] / FORMS[form]
    keras.utils.clear_session()
    model = small_model(without_last=True)
    with pytest.raises(BadInput, match="2 in the file are unused: --init-partial"):
        load_initial_weights(path, model, partial=False)
    assert "2 in the file are unused" in load_initial_weights(path, model, partial=True)


def test_what_holds_no_weights_is_refused(tmp_path: Path, ended: Callable[..., tuple[int, str]]) -> None:
    nothing = tmp_path / "nothing"
    code, line = ended(tmp_path / "run", *ONE_REPLICA, f"--init-from={nothing}")
    reason = f"ERROR: --init-from {nothing} contains no weights: it must be a run directory"
    assert (code, line.startswith(reason)) == (2, True), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", [".weights.h5", ".keras", "tf.train.Checkpoint of the model"])
def test_damaged_file_is_named_as_such(form: str, trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    name = FORMS[form]
    path = tmp_path / name
    for file in trained[0].glob(f"{name}*"):
        shutil.copy(file, tmp_path)
    largest = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    half = len(content) // 2
    changed = bytes([*content[:half], content[half] ^ 1, *content[half + 1 :]])
    keras.utils.clear_session()
    model = small_model()
    # HDF5 alone has no checksums of its numbers.
    for damaged in (b"", content[:half], b"other " * 99, *([changed] if form != ".weights.h5" else [])):
        largest.write_bytes(damaged)
        for partial in (False, True):
            with pytest.raises(BadInput, match=rf"^--init-from {path}: the file is damaged \(.*\): restore it from"):
                load_initial_weights(path, model, partial=partial)


def test_weights_are_cast_to_the_dtypes_of_the_model(trained: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, expected = trained
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float64")
    model = small_model()
    load_initial_weights(folder / FORMS["run directory"], model, partial=False)
    for name, variable in model_variables(model).items():
        if name in expected:
            assert variable.dtype == tf.float64
            np.testing.assert_array_equal(variable.numpy(), expected[name])


class Stored(dict):
    """Values in place of those in a checkpoint, of which no run would write these."""

    def read(self, names: list[str]) -> dict[str, tf.Tensor]:
        return {name: tf.constant(self[name]) for name in names}


def test_weights_that_are_nan_are_named(
    trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "run")
    keras.utils.clear_session()
    model = small_model()
    model.load_weights(trained[0] / FORMS[".weights.h5"])
    bias = model.variables[1]
    assert bias.path.endswith("dense/bias")
    for value in (np.full(8, np.nan), np.array([*range(7), np.nan])):
        bias.assign(value)
        model.save_weights(folder / FORMS[".weights.h5"])
        model.save(folder / FORMS[".keras"])
        tf.train.Checkpoint(model).write(str(folder / "model"))
        values = Stored({name: variable.numpy() for name, variable in model_variables(model).items()})
        monkeypatch.setattr(initial_weights, "read_checkpoint", lambda path, values=values: (values, {}))
        for form in ("run directory", ".weights.h5", ".keras", "tf.train.Checkpoint of the model"):
            rule = r"contains NaN in model/sequential/dense/bias: pass weights from before"
            with pytest.raises(BadInput, match=rule):
                load_initial_weights(folder / FORMS[form], model, partial=False)


def test_run_begun_with_weights_resumes_its_own_state(
    trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "trained")
    flags = (*ONE_REPLICA, f"--init-from={folder}")
    stop(0, tmp_path / "next", *flags)
    assert f"8 of the model's 8 variables from {folder}/best/step-00000020" in capsys.readouterr().out
    stored, _ = read_checkpoint(tmp_path / "next" / "checkpoints" / "step-00000000")
    for name, value in trained[1].items():
        np.testing.assert_array_equal(stored[name], value)
    shutil.rmtree(folder)
    stop(0, tmp_path / "next", *flags)
    assert "resumed from step-00000000" in capsys.readouterr().out
