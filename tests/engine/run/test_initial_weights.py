"""--init-from: weights from a run, from Keras's files and from TensorFlow's checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import small_model

import task
import train
from config import Config
from engine.errors import BadInput
from engine.model.variables import model_variables
from engine.run import initial_weights
from engine.run.initial_weights import load_initial_weights
from engine.run.start import initialize

SHORT = ("--global-batch-size=60", "--simulated-devices=1")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)


def run(run_dir: Path, *flags: str) -> dict[str, Any]:
    """Runs train.py with flags; returns the result."""
    train.main([f"--run-dir={run_dir}", *SHORT, *flags])
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


FORMS = {
    "run directory": ".",
    "checkpoint": "checkpoints/step-00000020",
    ".weights.h5": "m.weights.h5",
    ".keras": "m.keras",
    "tf.train.Checkpoint of the model": "model",
    "tf.train.Checkpoint with the model": "object",
}


def weights() -> dict[str, np.ndarray]:
    return {name: v.numpy() for name, v in model_variables(task.model).items() if "seed_generator" not in name}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run of one epoch on two replicas, with its weights in all the FORMS beside, and the weights."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", small_model)
        run(folder, "--epochs=1", "--simulated-devices=2")
    task.model.save_weights(folder / FORMS[".weights.h5"])
    task.model.save(folder / FORMS[".keras"])
    tf.train.Checkpoint(task.model).write(str(folder / "model"))
    tf.train.Checkpoint(model=task.model, step=tf.Variable(3)).write(str(folder / "object"))
    return folder, weights()


@pytest.mark.parametrize("form", FORMS)
def test_initial_weights_are_those_of_the_file(form: str, trained: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, expected = trained
    path = folder / FORMS[form]
    for replicas in (1, 2):
        train.build(Config(simulated_devices=replicas, init_from=path, ema_decay=0.9, seed=5))
        seeds = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
        report = initialize(train.run)
        assert report.startswith("8 of the model's 8 variables from ")
        for name, value in expected.items():
            for variable in train.strategy.experimental_local_results(model_variables(task.model)[name]):
                np.testing.assert_array_equal(variable.numpy(), value)
        for name, average in train.run.objects.average.averages.items():
            np.testing.assert_array_equal(average.numpy(), expected[name])
        for name, variable in model_variables(task.model).items():
            if "seed_generator" in name:
                np.testing.assert_array_equal(variable.numpy(), seeds[name])


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_model_are_refused_unless_asked_for(
    form: str, trained: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = trained
    path = folder / FORMS[form]
    monkeypatch.setattr(task, "create_model", lambda: small_model(keras.layers.Dense(10, name="dense_2")))
    train.build(Config(simulated_devices=2))
    initial = weights()
    with pytest.raises(BadInput, match="--init-partial loads what matches"):
        load_initial_weights(path, task.model, partial=False)

    train.build(Config(simulated_devices=2))
    report = load_initial_weights(path, task.model, partial=True)
    assert report.startswith("8 of the model's 10 variables from ")
    assert report.endswith("; without model/sequential/dense_2/kernel, model/sequential/dense_2/bias")
    for name, value in weights().items():
        np.testing.assert_array_equal(value, expected.get(name, initial[name]))


@pytest.mark.parametrize("form", ["run directory", ".weights.h5"])
def test_weights_left_over_are_refused_unless_asked_for(form: str, trained: tuple[Path, dict[str, np.ndarray]]) -> None:
    path = trained[0] / FORMS[form]
    keras.utils.clear_session()
    model = small_model(without_last=True)
    with pytest.raises(BadInput, match="2 in the file are unused: --init-partial"):
        load_initial_weights(path, model, partial=False)
    assert "2 in the file are unused" in load_initial_weights(path, model, partial=True)


def test_what_holds_no_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing"
    for flags, reason in (
        ((f"--init-from={nothing}",), f"--init-from {nothing} contains no weights: it must be a run directory"),
        (("--init-partial",), "--init-partial needs --init-from"),
    ):
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={tmp_path / 'run'}", *SHORT, *flags])
        assert ending.value.code == 2
        assert capsys.readouterr().err.startswith(f"ERROR: {reason}")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("form", [".weights.h5", ".keras", "tf.train.Checkpoint of the model"])
def test_damaged_file_is_named_as_such(
    form: str, partial: bool, trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    name = FORMS[form]
    path = tmp_path / name
    for file in trained[0].glob(f"{name}*"):
        shutil.copy(file, tmp_path)
    largest = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    half = len(content) // 2
    changed = bytes([*content[:half], content[half] ^ 1, *content[half + 1 :]])
    keras.utils.clear_session()
    # HDF5 alone has no checksums of its numbers.
    for damaged in (b"", content[:half], b"other " * 99, *([changed] if form != ".weights.h5" else [])):
        largest.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"^--init-from {path}: the file is damaged \(.*\): restore it from"):
            load_initial_weights(path, small_model(), partial=partial)


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


@pytest.mark.parametrize("form", ["run directory", ".weights.h5", ".keras", "tf.train.Checkpoint of the model"])
def test_weights_that_are_nan_are_named(form: str, trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "run")
    path = folder / FORMS[form]
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
        values = {name: variable.numpy() for name, variable in model_variables(model).items()}
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(initial_weights, "read_checkpoint", lambda path, values=values: (Stored(values), {}))
            with pytest.raises(
                BadInput, match=r"contains NaN in model/sequential/dense/bias: pass weights from before"
            ):
                load_initial_weights(path, model, partial=False)


def test_run_begun_with_weights_resumes_its_own_state(
    trained: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys
) -> None:
    shutil.copytree(trained[0], tmp_path / "trained")
    before = json.loads((tmp_path / "trained" / "result.json").read_text(encoding="utf-8"))
    # At such a learning rate the weights stay where they begin; the moving averages of the normalization do not.
    flags = (f"--init-from={tmp_path / 'trained'}", "--learning-rate=1e-12")
    first = run(tmp_path / "next", "--epochs=1", *flags)
    out = capsys.readouterr().out
    assert f"8 of the model's 8 variables from {tmp_path}/trained/best/step-00000020" in out
    kernel = "model/sequential/dense/kernel"
    np.testing.assert_allclose(weights()[kernel], trained[1][kernel], atol=1e-9)
    assert first["test/loss"] == pytest.approx(before["test/loss"], rel=0.2)
    shutil.rmtree(tmp_path / "trained")
    second = run(tmp_path / "next", "--epochs=2", *flags)
    assert "resumed from step-00000020" in capsys.readouterr().out
    assert second["epochs"] == 2
