"""--export: the contents of its files, what is skipped, and what is rejected."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import until
from small import linear_model, small_model

import task
import train
from config import Config
from engine.errors import BadInput
from engine.run.signals import signals
from engine.settings import InitOnly
from engine.trained.export import _are_close, export
from engine.trained.export_folder import replaced
from engine.trained.loading import load_trained
from rendering import run

SHORT = ("--epochs=1", "--global-batch-size=60", "--simulated-devices=1")
IMAGES = np.random.default_rng(1).uniform(0, 16, (7, 8, 8, 1)).astype("float32")


def serving(path: Path, endpoint: str, **features: Any) -> dict[str, np.ndarray]:
    """Returns the outputs of an endpoint, loaded anew."""
    signature = tf.saved_model.load(str(path / "export/saved_model")).signatures[endpoint]
    return {name: value.numpy() for name, value in signature(**features).items()}


def no_examples(split: str) -> tf.data.Dataset:
    raise FileNotFoundError("the data is not on this machine")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs on two replicas, with a moving average, that was exported."""
    path = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", small_model)
        flags = ("--epochs=2", "--global-batch-size=60", "--simulated-devices=2", "--ema-decay=0.9")
        train.main([f"--run-dir={path}", *flags, "--export"])
    return path


def newest(run_dir: Path, folder: str) -> dict[str, np.ndarray]:
    """Returns the values of a run's newest checkpoint, as TensorFlow reads them."""
    reader = tf.train.load_checkpoint(str(max((run_dir / folder).iterdir()) / "state"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_exported_weights_are_the_moving_average(run_dir: Path) -> None:
    assert json.loads((run_dir / "result.json").read_text(encoding="utf-8"))["best_epoch"] == 2
    values = newest(run_dir, "checkpoints")
    model = keras.models.load_model(run_dir / "export/model.keras")
    assert len(model.trainable_variables) == 6
    for variable in model.trainable_variables:
        average, trained = (values[f"{kind}model/sequential/{variable.path}"] for kind in ("average/", ""))
        np.testing.assert_array_equal(variable.numpy(), average.astype("float32"))
        assert not np.array_equal(average, trained)
    by_weights = small_model()
    by_weights.load_weights(run_dir / "export/model.weights.h5")
    expected = tf.nn.softmax(model(IMAGES / 16.0))
    np.testing.assert_allclose(tf.nn.softmax(by_weights(IMAGES / 16.0)), expected, rtol=1e-6)
    found = serving(run_dir, "serve", features=tf.constant(IMAGES / 16.0))
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)
    for endpoint, features in (("serve_examples", IMAGES), ("serving_default", IMAGES / 16.0)):
        found = serving(run_dir, endpoint, features=tf.constant(features))
        np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)
        np.testing.assert_array_equal(found["label"], np.argmax(expected, axis=-1))
    assert serving(run_dir, "serve_examples", features=tf.constant(IMAGES[:1]))["label"].shape == (1,)


def test_after_training_the_task_has_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", small_model)
    # At such a rate the second epoch is worse.
    train.main([f"--run-dir={tmp_path}", *SHORT, "--epochs=3", "--learning-rate=0.4"])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["best_epoch"] < 3
    values = newest(tmp_path, "best")
    for variable in task.model.variables:
        np.testing.assert_array_equal(variable.numpy(), values[f"model/{variable.path}"])
    assert not np.array_equal(
        task.model.variables[0].numpy(), newest(tmp_path, "checkpoints")[f"model/{task.model.variables[0].path}"]
    )


def test_finished_run_is_exported_with_its_own_settings_and_not_trained(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task, "create_model", small_model)
    path = shutil.copytree(run_dir, tmp_path / "run")
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file() and "export" not in each.parts}
    (path / "export/model.tflite").write_text("")
    (path / ".export.part").mkdir()  # As a killed process leaves it.
    monkeypatch.setattr(task, "load_examples", no_examples)
    train.main([f"--run-dir={path}", "--export"])
    assert "Finished already after 2 epochs" in capsys.readouterr().out
    names = {each.name for each in (path / "export").iterdir()}
    assert names == {"model.keras", "model.weights.h5", "saved_model"}
    assert not list(path.glob(".export*"))
    assert {each: each.read_bytes() for each in before} == before
    for refused, rule in (
        (("--export", "--check"), "--export cannot be combined with --check, --evaluate-only"),
        (("--export-format=onnx",), "--export-format onnx needs --export"),
        (("--export", "--seed=3"), "contains a run with other settings (--seed 0 there and 3 now)"),
    ):
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={path}", *refused])
        assert ending.value.code == 2
        assert rule in capsys.readouterr().err


@pytest.mark.long
def test_run_that_is_not_finished_is_trained_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task, "create_model", small_model)
    flags = [f"--run-dir={tmp_path / 'run'}", *SHORT, "--global-batch-size=600", "--epochs=3", "--patience=1"]
    with monkeypatch.context() as patching:
        patching.setattr(train.Run, "end_epoch", lambda run, _: run.save() and sys.exit(7))
        with pytest.raises(SystemExit):
            train.main(flags)
    train.main([f"--run-dir={tmp_path / 'run'}", "--export"])
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert result["epochs"] > 1
    assert (tmp_path / "run/export/saved_model").is_dir()
    train.main([f"--run-dir={tmp_path / 'run'}", "--export"])  # Its own --patience counts too.
    assert "Finished already" in capsys.readouterr().out


def test_export_that_a_server_still_reads_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NFS keeps a file that is open on another machine under a name of its own, so its directory cannot be removed.
    rmdir, held = os.rmdir, True

    def rmdir_of_nfs(path, *arguments, **options) -> None:
        if held:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rmdir(path, *arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_of_nfs)
    for number in range(4):
        held = number < 3
        with replaced(tmp_path / "export", ["model"]) as folder:
            (folder / "model.keras").write_text(str(number))
        assert (tmp_path / "export" / "model.keras").read_text() == str(number)
    assert os.listdir(tmp_path) == ["export"]


def test_link_in_place_of_the_export_is_followed_and_leftovers_are_replaced(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", small_model)
    path, elsewhere = shutil.copytree(run_dir, tmp_path / "run"), tmp_path / "elsewhere"
    shutil.move(path / "export", elsewhere)
    (path / "export").symlink_to(elsewhere)
    (tmp_path / ".elsewhere.part").write_text("a file")
    (tmp_path / ".elsewhere.earlier").symlink_to(path)
    for _ in range(2):
        export(task, Config(run_dir=path))
        assert (path / "export").is_symlink()
        assert {each.name for each in elsewhere.iterdir()} == {"model.keras", "model.weights.h5", "saved_model"}
        assert {each.name for each in tmp_path.iterdir()} == {"run", "elsewhere"}
    assert (path / "result.json").exists()


def test_export_with_files_of_another_origin_is_refused(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", small_model)
    path = shutil.copytree(run_dir, tmp_path / "run")
    for name in ("notes.txt", "other.keras", "saved_model/assets.extra", "saved_model/variables/notes"):
        foreign = path / "export" / name
        foreign.write_text("mine")
        with pytest.raises(BadInput, match=rf"^--export: {foreign} is not of an export, .*: move it elsewhere$"):
            export(task, Config(run_dir=path))
        assert foreign.read_text() == "mine"
        foreign.unlink()
    shutil.rmtree(path / "export")
    (path / "export").write_text("mine")
    with pytest.raises(BadInput, match=rf"^--export: {path / 'export'} is not of an export"):
        export(task, Config(run_dir=path))
    assert (path / "export").read_text() == "mine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithEncoder(Config):
    encoder_weights: InitOnly[Path | None] = None


def test_files_that_only_the_start_needed_may_be_gone(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_model() -> keras.Model:
        model = small_model()
        if task.config.encoder_weights:
            model.load_weights(task.config.encoder_weights)
        return model

    monkeypatch.setattr(task, "create_model", create_model)
    path, gone = shutil.copytree(run_dir, tmp_path / "run"), tmp_path / "gone.weights.h5"
    export(task, WithEncoder(run_dir=path, encoder_weights=gone, init_from=gone, init_partial=True, seed=3))
    assert (task.config.encoder_weights, task.config.init_from, task.config.seed) == (None, None, 3)


def test_signal_while_a_run_finishes_ends_it_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_model", linear_model)
    finish = train.Run.finish

    def finish_and_interrupt(*arguments: Any) -> Any:
        result = finish(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: signals.signal)
        return result

    flags = [f"--run-dir={tmp_path}", *SHORT, "--global-batch-size=600", "--export"]
    with monkeypatch.context() as patching, pytest.raises(SystemExit) as ending:
        patching.setattr(train.Run, "finish", finish_and_interrupt)
        train.main(flags)
    assert ending.value.code == 42
    assert (tmp_path / "result.json").exists()
    assert not (tmp_path / "export").exists()
    train.main(flags)
    assert (tmp_path / "export/saved_model").is_dir()


# --- Other hooks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., str]:
    """Exports the task with other hooks, trained by a step or two, or the run above; returns what was printed of it."""

    def train_and_export(*flags: str, trained: bool = False, **hooks: Any) -> str:
        model = small_model if trained else linear_model
        for name, hook in {"create_model": model, **hooks}.items():
            monkeypatch.setattr(task, name, hook)
        if trained and not (tmp_path / "run").exists():
            shutil.copytree(run_dir, tmp_path / "run")
        settings = () if trained else (*SHORT, "--global-batch-size=600")
        train.main([f"--run-dir={tmp_path / 'run'}", *settings, "--export", *flags])
        return capsys.readouterr().out.split("Exported to ")[1]

    return train_and_export


WORDS = ["bird", "cat", "dog"]
IN_ANOTHER_PROCESS = """
import sys
sys.modules["keras"] = sys.modules["task"] = sys.modules["engine"] = None  # What imports them fails.
import numpy as np
import tensorflow as tf
signature = tf.saved_model.load(sys.argv[1]).signatures["serve_examples"]
given = dict(np.load(sys.argv[2]))
given = {name: tf.constant(each.tolist() if each.dtype.kind == "U" else each) for name, each in given.items()}
found = signature(**given)
np.savez(sys.argv[3], **found)
"""


def test_vocabularies_travel_with_the_export(
    exported: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    by_file = tf.lookup.TextFileInitializer(
        str(tmp_path / "words.txt"),
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    vocabulary = tf.lookup.StaticVocabularyTable(by_file, num_oov_buckets=2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, [0.5, 1.5, 2.5]), -1.0)
    layer = keras.layers.StringLookup(vocabulary=WORDS)
    normalization = keras.layers.Normalization(mean=2.0, variance=4.0)
    normalization.build((1,))  # Else its first call makes tensors of the graph that it is in.
    scale = tf.Variable([3.0])  # As a global variable of task.py would be.

    def load_examples(split: str) -> tf.data.Dataset:
        features = {"the word": [*WORDS, "fish"] * 300, "count": [[1.0], [2.0], [3.0], [4.0]] * 300}
        return tf.data.Dataset.from_tensor_slices((features, [0, 1, 2, 0] * 300))

    def prepare_example(features: dict[str, tf.Tensor], labels: tf.Tensor) -> Any:
        word = features["the word"]
        found = [vocabulary.lookup(word), table.lookup(word), layer(word), normalization(features["count"])[0]]
        return tf.stack([tf.cast(each, tf.float32) for each in found]) * scale[0], labels

    def create_model() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])

    printed = exported(load_examples=load_examples, prepare_example=prepare_example, create_model=create_model)
    assert "serve_examples    endpoint of saved_model: count float32[None, 1], the_word string[None]" in printed
    # The examples can be stacked as they are, and the model knows what the tables say.
    features = {"the_word": np.array([*WORDS, "fish", "fish"]), "count": np.arange(5, dtype="float32")[:, None]}
    np.savez(tmp_path / "given.npz", **features)
    moved = shutil.move(tmp_path / "run/export", tmp_path / "elsewhere")
    (tmp_path / "words.txt").unlink()
    arguments = [moved / "saved_model", tmp_path / "given.npz", tmp_path / "found.npz"]
    done = run(sys.executable, "-c", IN_ANOTHER_PROCESS, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    model = keras.models.load_model(moved / "model.keras")
    places = [0, 1, 2, *(int(vocabulary.lookup(tf.constant("fish"))) for _ in range(2))]
    assert places[3] in (3, 4)
    numbers = np.stack([places, [0.5, 1.5, 2.5, -1, -1], [1, 2, 3, 0, 0], (np.arange(5) - 2.0) / 2.0], axis=1) * 3.0
    expected = tf.nn.softmax(model(numbers.astype("float32")))
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")["probabilities"], expected, rtol=1e-5)


def test_python_code_of_a_hook_leaves_its_endpoint_out(exported: Callable[..., str], tmp_path: Path) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        features = tf.numpy_function(lambda each: each / np.float32(16), [features], tf.float32)
        return tf.ensure_shape(features, (8, 8, 1)), labels

    printed = exported(trained=True, prepare_example=prepare_example)
    assert "serve_examples    skipped: no file can contain the Python function of PyFunc (test_export.py:" in printed
    assert set(tf.saved_model.load(str(tmp_path / "run/export/saved_model")).signatures) == {"serve", "serving_default"}
    # In this project they can be predicted.
    trained = load_trained(task, Config(run_dir=tmp_path / "run"))
    found = trained.serve_examples.function(IMAGES)["probabilities"]
    np.testing.assert_allclose(
        found, serving(tmp_path / "run", "serve", features=IMAGES / 16)["probabilities"], rtol=1e-5
    )


@pytest.mark.parametrize(
    "one_by_one", [False, pytest.param(True, marks=pytest.mark.long)], ids=["in one go", "one by one"]
)
def test_what_only_labels_need_is_not_run(one_by_one: bool, exported: Callable[..., str], tmp_path: Path) -> None:
    def load_examples(split: str) -> tf.data.Dataset:
        examples = (IMAGES.repeat(100, axis=0), ["3"] * 700)
        return tf.data.Dataset.from_tensor_slices(examples)

    def prepare_example(features: tf.Tensor, labels: tf.Tensor, **more: Any) -> Any:
        return features / 16, tf.strings.to_number(labels, tf.int32)  # Of "" it fails.

    def with_seed(features: tf.Tensor, labels: tf.Tensor, *, seed: tf.Tensor) -> Any:
        return prepare_example(features, labels)

    printed = exported(load_examples=load_examples, prepare_example=with_seed if one_by_one else prepare_example)
    assert "serve_examples    endpoint of saved_model: features" in printed
    assert "not compared" not in printed
    found = serving(tmp_path / "run", "serve_examples", features=IMAGES)["probabilities"]
    np.testing.assert_allclose(
        found, serving(tmp_path / "run", "serve", features=IMAGES / 16)["probabilities"], rtol=1e-5
    )


def test_records_are_compared_where_the_data_is(
    exported: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [tf.io.serialize_tensor(image).numpy() for image in IMAGES]

    def load_examples(split: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((records * 100, [0] * 700))

    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        return tf.ensure_shape(tf.io.parse_tensor(features, tf.float32), (8, 8, 1)), labels

    printed = exported(load_examples=load_examples, prepare_example=prepare_example)
    assert "serve_examples    endpoint of saved_model: features string[None]" in printed
    assert "not compared" not in printed
    found = serving(tmp_path / "run", "serve_examples", features=tf.constant(records))["label"]
    np.testing.assert_array_equal(found, serving(tmp_path / "run", "serve", features=IMAGES)["label"])
    monkeypatch.setattr(task, "load_examples", no_examples)
    train.main([f"--run-dir={tmp_path / 'run'}", "--export"])
    assert (
        "features string[None]; not compared, because examples of the data, if there are any, and made-up ones fail ("
        in capsys.readouterr().out
    )


@pytest.mark.long
def test_random_hook_draws_as_the_evaluation_does(exported: Callable[..., str], tmp_path: Path) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, seed: tf.Tensor) -> Any:
        # Made-up features are at most 1.
        with tf.control_dependencies([tf.debugging.assert_greater(tf.reduce_max(features), 5.0)]):
            return features / 16 + tf.random.stateless_normal((8, 8, 1), seed), labels

    assert "not compared" not in exported(prepare_example=prepare_example)
    tested = next(train.batches["test"].one_by_one())
    images = np.stack([features for features, _ in task.load_examples("test").as_numpy_iterator()])
    expected = serving(tmp_path / "run", "serve", features=tested[0])["probabilities"][: len(images)]
    found = serving(tmp_path / "run", "serve_examples", features=images[: len(expected)])["probabilities"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@keras.saving.register_keras_serializable()
class Unnamed(keras.layers.Layer):
    """A layer that Keras can save, and not load."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        raise FileNotFoundError("vocabulary.txt")  # It is not the disk that is full.

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * self.factor


@keras.saving.register_keras_serializable()
class Forgetful(Unnamed):
    """A layer that is another one when it is loaded."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls()


class Hidden(keras.layers.Layer):
    """A layer with variables that Keras does not list, which training changes. The prediction uses the last one."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        options = {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA, "trainable": False}
        self.steps = [tf.Variable(100.0 * number, **options) for number in range(count)]

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            for each in self.steps:
                each.assign_add(1.0)
        return inputs * self.steps[-1]


def test_model_that_keras_cannot_load_is_left_out_with_the_reason(exported: Callable[..., str], tmp_path: Path) -> None:
    printed = exported(trained=True, create_model=lambda: small_model(Unnamed(2.0)))
    assert "model.keras       skipped: Keras cannot save and load this model (FileNotFoundError: vocab" in printed
    assert {each.name for each in (tmp_path / "run/export").iterdir()} == {"model.weights.h5", "saved_model"}
    trained = load_trained(task, Config(run_dir=tmp_path / "run"))
    expected = tf.nn.softmax(trained.model(IMAGES / 16))
    np.testing.assert_allclose(
        serving(tmp_path / "run", "serve", features=IMAGES / 16)["probabilities"], expected, rtol=1e-5
    )


def test_file_that_is_another_model_is_an_error_and_leaves_the_earlier_export(
    exported: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(trained=True)
    earlier = {each: each.read_bytes() for each in (tmp_path / "run/export").rglob("*") if each.is_file()}
    with pytest.raises(SystemExit) as ending:
        exported(trained=True, create_model=lambda: small_model(Forgetful(2.0)))
    assert ending.value.code == 2
    assert (
        "ERROR: --export: model.keras, once loaded, returns another 'probabilities' than the model: keep"
        in capsys.readouterr().err
    )
    assert {each: each.read_bytes() for each in earlier} == earlier
    assert not list((tmp_path / "run").glob(".export*"))


def test_variable_that_keras_does_not_list_is_exported_by_tensorflow_only(
    exported: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation_step = task.evaluation_step

    def with_all(split: str, batch: Any) -> tf.Tensor:
        return evaluation_step(split, batch) + 0.0 * tf.add_n(task.model.layers[-1].steps)

    printed = exported(create_model=lambda: linear_model(Hidden()), evaluation_step=with_all)
    assert "Keras's files   skipped: they cannot contain Variable#1, made without add_weight" in printed
    assert [each.name for each in (tmp_path / "run/export").iterdir()] == ["saved_model"]
    trained = load_trained(task, Config(run_dir=tmp_path / "run"))
    assert [float(each) for each in trained.model.layers[-1].steps] == [2.0, 102.0]
    np.testing.assert_allclose(
        serving(tmp_path / "run", "serve", features=IMAGES)["probabilities"],
        trained.serve.function(IMAGES)["probabilities"],
        rtol=1e-5,
    )
    monkeypatch.setattr(task, "create_model", lambda: linear_model(Hidden(3)))
    with pytest.raises(BadInput, match=r"does not contain hidden/Variable#2, a variable of task\.predict_step: use"):
        load_trained(task, Config(run_dir=tmp_path / "run"))


@keras.saving.register_keras_serializable()
class Unsaved(keras.layers.Dense):
    """A layer whose weights are in no file of Keras."""

    def save_own_variables(self, store: dict[str, Any]) -> None:
        pass

    def load_own_variables(self, store: dict[str, Any]) -> None:
        pass


@pytest.fixture
def two_models(exported: Callable[..., str]) -> Callable[..., str]:
    """Exports a task of two models, of which the predictions may use one only."""

    def export_both(head: keras.layers.Layer, *, use_head: bool) -> str:
        def create_model() -> dict[str, keras.Model]:
            scale = keras.layers.Lambda(lambda inputs: inputs / 2.0)
            encoder = keras.Sequential([keras.Input((8, 8, 1)), scale, keras.layers.Flatten(), keras.layers.Dense(4)])
            return {"encoder": encoder, "head": keras.Sequential([keras.Input((4,)), head])}

        def create_optimizer(total_steps: int) -> dict[str, keras.optimizers.Optimizer]:
            return {name: keras.optimizers.SGD() for name in ("encoder", "head")}

        def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
            code = task.model["encoder"](features, training=False)
            return {"scores": task.model["head"](code, training=False) if use_head else code}

        def step(batch: Any) -> tf.Tensor:
            task.metrics["validation"]["loss"].update_state([1.0])
            return tf.reduce_sum(predict_step(batch[0])["scores"]) * 0.0

        steps = {"train_step": step, "evaluation_step": lambda split, batch: step(batch)}
        return exported(
            create_model=create_model, create_optimizer=create_optimizer, predict_step=predict_step, **steps
        )

    return export_both


@pytest.mark.long
def test_each_of_several_models_has_files(two_models: Callable[..., str], tmp_path: Path) -> None:
    printed = two_models(keras.layers.Dense(10), use_head=True)
    assert "encoder.keras       for keras.models.load_model(..., safe_mode=False)\n" in printed
    assert "head.keras          for keras.models.load_model\n" in printed
    folder = tmp_path / "run/export"
    names = {each.name for each in folder.iterdir()}
    assert names == {"encoder.keras", "head.keras", "encoder.weights.h5", "head.weights.h5", "saved_model"}
    head = keras.models.load_model(folder / "head.keras")
    encoder = keras.models.load_model(folder / "encoder.keras", safe_mode=False)
    expected = head(encoder(IMAGES))
    np.testing.assert_allclose(serving(tmp_path / "run", "serve", features=IMAGES)["scores"], expected, rtol=1e-5)


def test_ties_of_classes_may_differ_and_numbers_by_rounding_only() -> None:
    classes, scores = tf.range(4000), tf.linspace(-8.0, 4.0, 100)
    for count, is_close in ((4, True), (5, False)):
        assert _are_close(classes, tf.where(classes < count, 7777, classes), 1e-5) == is_close
    for error, is_close in ((7e-5, True), (9e-5, False)):
        assert _are_close(scores, scores + error, 1e-5) == is_close
    assert not _are_close(scores, tf.cast(scores, tf.float64), 1e-5)


@pytest.mark.long
def test_weights_that_no_prediction_uses_are_compared_too(two_models: Callable[..., str], capsys) -> None:
    with pytest.raises(SystemExit):
        two_models(Unsaved(10), use_head=False)
    assert "ERROR: --export: head.keras, once loaded, has other weights than the model" in capsys.readouterr().err


@pytest.mark.long
def test_format_of_keras_is_written_and_its_failure_leaves_the_other_files(
    exported: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = exported("--export-format=litert", trained=True)
    assert "model.tflite" in printed
    interpreter = tf.lite.Interpreter(str(tmp_path / "run/export/model.tflite"))
    (given,) = interpreter.get_input_details()
    interpreter.resize_tensor_input(given["index"], IMAGES.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], IMAGES / 16)
    interpreter.invoke()
    (found,) = (interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details())
    model_files = tmp_path / "run/export"
    model = keras.models.load_model(model_files / "model.keras")
    np.testing.assert_allclose(found, model(IMAGES / 16), atol=1e-5)

    def no_conversion(model: keras.Model, file: Path, **options: Any) -> None:
        file.write_text("half of it")
        raise ValueError("no such operation")

    monkeypatch.setattr(keras.Model, "export", no_conversion)
    with pytest.raises(SystemExit) as ending:
        exported("--export-format=litert", trained=True)
    assert ending.value.code == 2
    line = "ERROR: --export-format litert failed (ValueError: no such operation); the other files are written\n"
    assert capsys.readouterr().err.endswith(line)
    assert {each.name for each in model_files.iterdir()} == {"model.keras", "model.weights.h5", "saved_model"}


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_run_that_cannot_be_loaded_is_refused_in_one_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", small_model)

    def refusal() -> str:
        with pytest.raises(BadInput) as ending:
            export(task, Config(run_dir=tmp_path / "run"))
        return str(ending.value)

    path = shutil.copytree(run_dir, tmp_path / "run")
    monkeypatch.setattr(task, "create_model", lambda: small_model(without_last=True))
    assert "is of another model (2 variables differ: model/sequential/dense_1/bias float32[10] there" in refusal()
    monkeypatch.setattr(task, "create_model", small_model)
    with monkeypatch.context() as patching:
        patching.setattr(task, "predict_step", lambda features: tf.reduce_mean(task.model(features)))
        assert "task.predict_step returned" in refusal()
        patching.setattr(task, "predict_step", lambda features: {"mean": tf.reduce_mean(task.model(features))})
        assert "task.predict_step returned 'mean' of shape (): return [n, ...], a row per example" in refusal()
        patching.setattr(task, "predict_step", lambda features: {"twice": tf.repeat(task.model(features), 2, axis=0)})
        assert "returned 'twice' of shape (6, 10) for 3 examples: return [n, ...], a row per example" in refusal()
        patching.setattr(task, "predict_step", lambda features: {"sparse": tf.sparse.from_dense(features)})
        assert "task.predict_step returned 'sparse' as SparseTensor: return a tensor [n, ...]" in refusal()
        patching.delattr(task, "predict_step")
        assert "task.py has no function predict_step" in refusal()
        patching.undo()
    with monkeypatch.context() as patching:
        patching.setattr(task, "prepare_example", lambda features, labels: (tf.squeeze(features), labels))
        assert "returns features of float32[None, 8, 8], and the run in" in refusal()

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    without = {name: value for name, value in config.items() if name != "example"}
    (path / "config.json").write_text(json.dumps(without), encoding="utf-8")
    assert "config.json does not describe an example: restore it" in refusal()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    (data,) = max((path / "best").iterdir()).glob("state.data*")
    data.write_bytes(data.read_bytes()[:-10])
    assert "is damaged" in refusal()
    shutil.rmtree(path / "best")
    assert "is damaged" in refusal()
    shutil.rmtree(path / "checkpoints")
    assert "is empty: train first" in refusal()
