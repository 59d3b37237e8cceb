"""--init-from: weights from a run, from Keras's files and from TensorFlow's checkpoints."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, random_model, stop
from small import linear_model
from small_states import read_checkpoint

import task
import train
from config import Config
from engine.errors import BadInput
from engine.model.variables import model_variables
from engine.run.checkpoint_files import checkpoint_paths
from engine.run.initial_weights import load_initial_weights

FORMS = {
    "run directory": ".",
    "checkpoint": "the_best",
    ".weights.h5": "m.weights.h5",
    ".keras": "m.keras",
    "tf.train.Checkpoint of the model": "model",
    "tf.train.Checkpoint with the model": "object",
}
Trained = tuple[Path, dict[str, np.ndarray]]


def weights(model: keras.Model) -> dict[str, tf.Variable]:
    return {name: each for name, each in model_variables(model).items() if "seed_generator" not in name}


def new(*more: keras.layers.Layer) -> keras.Model:
    keras.utils.clear_session()  # The names count from the start.
    return random_model(*more)


@pytest.fixture(scope="module")
def trained(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run on two replicas with its best weights in all the FORMS beside, and the weights."""
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("trained") / "run")
    path = checkpoint_paths(folder / "best")[-1]
    (folder / FORMS["checkpoint"]).symlink_to(path)
    values, model = read_checkpoint(path)[0], new()
    for name, variable in weights(model).items():
        # Of statistics there is one for each replica; both are the same when they are saved.
        variable.assign(values[name] if values[name].shape == variable.shape else values[name][0])
    model.save_weights(folder / FORMS[".weights.h5"])
    model.save(folder / FORMS[".keras"])
    tf.train.Checkpoint(model).write(str(folder / "model"))
    tf.train.Checkpoint(model=model, step=tf.Variable(3)).write(str(folder / "object"))
    return folder, {name: variable.numpy() for name, variable in weights(model).items()}


@pytest.mark.usefixtures("same_model")
def test_initial_weights_are_those_of_the_file(trained: Trained) -> None:
    folder, expected = trained
    train.build(Config(simulated_devices=2, ema_decay=0.9, seed=5))
    before, seeds = (
        train.run.checkpoints.state.values(),
        [name for name in model_variables(task.model) if "seed_" in name],
    )
    assert len(seeds) == 1
    for form, name in FORMS.items():
        train.build(dataclasses.replace(train.config, init_from=folder / name))
        state = train.run.checkpoints.state
        assert train.run.objects.source.startswith("6 of the model's 6 variables from "), form
        for name, value in expected.items():
            for variable in train.strategy.experimental_local_results(model_variables(task.model)[name]):
                np.testing.assert_array_equal(variable.numpy(), value, err_msg=form)
        for name, average in train.run.objects.average.averages.items():
            np.testing.assert_array_equal(average.numpy(), expected[name], err_msg=form)
        for name in seeds:
            np.testing.assert_array_equal(state.values()[name], before[name], err_msg=form)


def test_weights_of_another_model_are_refused_unless_asked_for(trained: Trained) -> None:
    folder, expected = trained
    for form, name in FORMS.items():
        with pytest.raises(BadInput, match="--init-partial loads what matches"):
            load_initial_weights(folder / name, new(keras.layers.Dense(10, name="dense_2")), partial=False)
        model = new(keras.layers.Dense(10, name="dense_2"))
        initial = {name: variable.numpy() for name, variable in weights(model).items()}
        report = load_initial_weights(folder / name, model, partial=True)
        assert report.startswith("6 of the model's 8 variables from "), form
        assert report.endswith("; without model/sequential/dense_2/kernel, model/sequential/dense_2/bias")
        for name, variable in weights(model).items():
            np.testing.assert_array_equal(variable.numpy(), expected.get(name, initial[name]), err_msg=form)


def test_weights_left_over_are_refused_unless_asked_for(trained: Trained, tmp_path: Path) -> None:
    for form in ("run directory", ".weights.h5"):
        keras.utils.clear_session()
        model = linear_model()
        with pytest.raises(BadInput, match="4 in the file are unused: --init-partial"):
            load_initial_weights(trained[0] / FORMS[form], model, partial=False)
        assert "4 in the file are unused" in load_initial_weights(trained[0] / FORMS[form], model, partial=True)
    with pytest.raises(BadInput, match=f"^--init-from {tmp_path}/none contains no weights: it must be a run directory"):
        load_initial_weights(tmp_path / "none", model, partial=True)


@pytest.mark.parametrize("form", [".weights.h5", ".keras", "tf.train.Checkpoint of the model"])
def test_damaged_file_is_named_as_such(form: str, trained: Trained, tmp_path: Path) -> None:
    for file in trained[0].glob(f"{FORMS[form]}*"):
        shutil.copy(file, tmp_path)
    largest = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    half = len(content) // 2
    changed = bytes([*content[:half], content[half] ^ 1, *content[half + 1 :]])
    # HDF5 alone has no checksums of its numbers.
    for damaged in (content[:half], b"other " * 99, *([changed] if form != ".weights.h5" else [])):
        largest.write_bytes(damaged)
        problem = rf"^--init-from {tmp_path / FORMS[form]}: the file is damaged \(.*\): restore it from"
        with pytest.raises(BadInput, match=problem):
            load_initial_weights(tmp_path / FORMS[form], new(), partial=True)


def test_weights_are_cast_to_the_dtypes_of_the_model_and_nan_is_named(trained: Trained, tmp_path: Path) -> None:
    folder, expected = trained
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float64")
    model = random_model()
    load_initial_weights(folder, model, partial=False)
    for name, variable in weights(model).items():
        assert variable.dtype == tf.float64
        np.testing.assert_array_equal(variable.numpy(), expected[name])
    bias: Any = weights(model)["model/sequential/dense/bias"]
    for value in (np.full(10, np.nan), np.array([*range(9), np.nan])):
        bias.assign(value)
        model.save_weights(tmp_path / "nan.weights.h5")
        with pytest.raises(BadInput, match=r"contains NaN in model/sequential/dense/bias: pass weights from before"):
            load_initial_weights(tmp_path / "nan.weights.h5", model, partial=False)


@pytest.mark.usefixtures("same_model")
def test_run_begun_with_weights_resumes_its_own_state(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "trained", symlinks=True)
    flags = (*ONE_REPLICA, f"--init-from={folder}")
    stop(0, tmp_path / "next", *flags)
    assert f"6 of the model's 6 variables from {folder}/best/step-" in capsys.readouterr().out
    stored, _ = read_checkpoint(tmp_path / "next" / "checkpoints" / "step-00000000")
    for name, value in trained[1].items():
        np.testing.assert_array_equal(stored[name].reshape(value.shape), value)
    shutil.rmtree(folder)
    stop(0, tmp_path / "next", *flags)
    assert "resumed from step-00000000" in capsys.readouterr().out
