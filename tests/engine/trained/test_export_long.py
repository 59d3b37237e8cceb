"""--export of several models, and of a format that Keras writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from config import Config
from engine.errors import BadInput
from engine.trained.export import export

IMAGES = np.random.default_rng(1).uniform(0, 16, (7, 8, 8, 1)).astype("float32")


@keras.saving.register_keras_serializable()
class Unsaved(keras.layers.Dense):
    """A layer whose weights are in no file of Keras."""

    def save_own_variables(self, store: dict[str, Any]) -> None:
        pass

    def load_own_variables(self, store: dict[str, Any]) -> None:
        pass


@pytest.mark.long
def test_each_of_several_models_has_files_and_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create_model(kind: type[keras.layers.Dense] = keras.layers.Dense) -> dict[str, keras.Model]:
        scale = keras.layers.Lambda(lambda inputs: inputs / 2.0)
        encoder = keras.Sequential([keras.Input((8, 8, 1)), scale, keras.layers.Flatten(), keras.layers.Dense(4)])
        return {"encoder": encoder, "head": keras.Sequential([keras.Input((4,)), kind(10, name="last")])}

    def create_optimizer(total_steps: int) -> dict[str, keras.optimizers.Optimizer]:
        return {name: keras.optimizers.SGD() for name in ("encoder", "head")}

    def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"scores": task.model["head"](task.model["encoder"](features, training=False), training=False)}

    def step(batch: Any) -> tf.Tensor:
        task.metrics["validation"]["loss"].update_state([1.0])
        return tf.reduce_sum(predict_step(batch[0])["scores"]) * 0.0

    hooks = {"create_model": create_model, "create_optimizer": create_optimizer, "predict_step": predict_step}
    for name, hook in {**hooks, "train_step": step, "evaluation_step": lambda split, batch: step(batch)}.items():
        monkeypatch.setattr(task, name, hook)
    flags = ("--epochs=1", "--global-batch-size=600", "--simulated-devices=1")
    train.main([f"--run-dir={tmp_path / 'run'}", *flags, "--export"])
    printed, folder = capsys.readouterr().out, tmp_path / "run/export"
    assert "encoder.keras       for keras.models.load_model(..., safe_mode=False)\n" in printed
    assert "head.keras          for keras.models.load_model\n" in printed
    names = {each.name for each in folder.iterdir()}
    assert names == {"encoder.keras", "head.keras", "encoder.weights.h5", "head.weights.h5", "saved_model"}
    head = keras.models.load_model(folder / "head.keras")
    encoder = keras.models.load_model(folder / "encoder.keras", safe_mode=False)
    found = tf.saved_model.load(str(folder / "saved_model")).signatures["serve"](features=IMAGES)["scores"]
    np.testing.assert_allclose(found, head(encoder(IMAGES)), rtol=1e-5)

    # Weights that no prediction uses are compared too.
    monkeypatch.setattr(task, "create_model", lambda: create_model(Unsaved))
    monkeypatch.setattr(task, "predict_step", lambda features: {"code": task.model["encoder"](features)})
    with pytest.raises(BadInput, match=r"--export: head\.keras, once loaded, has other weights than the model"):
        export(task, Config(run_dir=tmp_path / "run"))


@pytest.mark.long
def test_format_of_keras_is_written_and_its_failure_leaves_the_other_files(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Config(run_dir=copied(), export=True, export_format="litert")
    folder = settings.run_dir / "export"
    export(task, settings)
    interpreter = tf.lite.Interpreter(str(folder / "model.tflite"))
    (given,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(given["index"], IMAGES.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], IMAGES / 16)
    interpreter.invoke()
    (found,) = (interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details())
    np.testing.assert_allclose(found, keras.models.load_model(folder / "model.keras")(IMAGES / 16), atol=1e-5)

    def no_conversion(model: keras.Model, file: Path, **options: Any) -> None:
        file.write_text("half of it")
        raise ValueError("no such operation")

    monkeypatch.setattr(keras.Model, "export", no_conversion)
    line = r"^--export-format litert failed \(ValueError: no such operation\); the other files are written$"
    with pytest.raises(BadInput, match=line):
        export(task, settings)
    assert {each.name for each in folder.iterdir()} == {"model.keras", "model.weights.h5", "saved_model"}
