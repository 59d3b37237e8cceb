"""--export: the contents of its files, what is skipped, and what is rejected."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small import linear_model, small_model

import task
import train
from config import Config
from engine.errors import BadInput
from engine.run.endpoints import predict_endpoint
from engine.trained.export import _are_close, _compare, _write_models, _write_saved_model, export
from engine.trained.loading import load_trained
from engine.trained.predictions import Predictor

FILES = {"model.keras", "saved_model"}
IMAGES = np.random.default_rng(1).uniform(0, 16, (7, 8, 8, 1)).astype("float32")


def no_examples(split: str) -> tf.data.Dataset:
    raise FileNotFoundError("the data is not on this machine")


@pytest.fixture(scope="module")
def exported(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, exported without its data; tests leave it as it is."""
    path = shutil.copytree(run_dir, tmp_path_factory.mktemp("exported") / "run")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", small_model)
        patching.setattr(task, "load_examples", no_examples)
        train.main([f"--run-dir={path}", "--export"])
    return path


def values_in(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns the values of a checkpoint, as TensorFlow reads them."""
    reader = tf.train.load_checkpoint(str(checkpoint / "state"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_exported_weights_are_the_moving_average(trained: Any, exported: Path) -> None:
    values = values_in(exported / "checkpoints/step-00000020")  # Of the first epoch, which was the best.
    for path, weights in trained.weights.items():  # After the training the task has the best ones, too.
        best = values_in(max((exported / "best").iterdir()))[f"model/{path}"]  # Statistics have a row for each replica.
        np.testing.assert_array_equal(weights, best if best.shape == weights.shape else best[0])
    model = keras.models.load_model(exported / "export/model.keras")
    assert len(model.trainable_variables) == 6
    for variable in model.trainable_variables:
        average, trained = (values[f"{kind}model/sequential/{variable.path}"] for kind in ("average/", ""))
        np.testing.assert_array_equal(variable.numpy(), average.astype("float32"))
        assert not np.array_equal(average, trained)
    by_weights = small_model()
    by_weights.load_weights(exported / "export/model.keras")
    for found, expected in zip(by_weights.weights, model.weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
    expected = tf.nn.softmax(model(IMAGES / 16.0))
    endpoints = tf.saved_model.load(str(exported / "export/saved_model")).signatures
    for name, features in (("serve_examples", IMAGES), ("serve", IMAGES / 16.0), ("serving_default", IMAGES / 16.0)):
        found = endpoints[name](features=tf.constant(features))
        np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)
        np.testing.assert_array_equal(found["label"], np.argmax(expected, axis=-1))
    assert endpoints["serve_examples"](features=tf.constant(IMAGES[:1]))["label"].shape == (1,)


def test_finished_run_is_exported_with_its_own_settings_and_not_trained(
    run_dir: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {each.name for each in (exported / "export").iterdir()} == FILES
    assert not list(exported.glob(".export*"))
    for each in run_dir.rglob("*"):
        assert each.is_dir() or (exported / each.relative_to(run_dir)).read_bytes() == each.read_bytes()
    for refused, rule in (
        (("--export", "--check"), "--export cannot be combined with --check, --evaluate-only"),
        (("--export", "--seed=4"), "contains a run with other settings (--seed 3 there and 4 now)"),
    ):
        with pytest.raises(SystemExit) as ending:
            train.main([f"--run-dir={run_dir}", *refused])
        assert ending.value.code == 2
        assert rule in capsys.readouterr().err


@pytest.mark.long
def test_vocabularies_travel_with_the_export(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bird", "cat", "dog"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    by_file = tf.lookup.TextFileInitializer(str(tmp_path / "words.txt"), tf.string, line, tf.int64, number)
    vocabulary = tf.lookup.StaticVocabularyTable(by_file, num_oov_buckets=2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, [0.5, 1.5, 2.5]), -1.0)
    layer = keras.layers.StringLookup(vocabulary=words)
    scale = tf.Variable([3.0])  # As a global variable of task.py would be.

    def prepare_example(features: dict[str, tf.Tensor], labels: tf.Tensor) -> Any:
        word = features["the word"]
        found = [vocabulary.lookup(word), table.lookup(word), layer(word), features["count"][0]]
        numbers = tf.stack([tf.cast(each, tf.float32) for each in found]) * scale[0]
        return tf.reshape(tf.pad(numbers, [[0, 60]]), (8, 8, 1)), labels

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    run_dir = copied(example=[{"count": "float32[1]", "the word": "string[]"}, "int32[]"])
    trained = load_trained(task, Config(run_dir=run_dir))
    assert str(trained.serve_examples) == "count float32[None, 1], the_word string[None]"
    _write_saved_model(tmp_path / "saved_model", task, trained)
    moved = shutil.move(tmp_path / "saved_model", tmp_path / "elsewhere")
    (tmp_path / "words.txt").unlink()
    places = [0, 1, 2, *(int(vocabulary.lookup(tf.constant("fish"))) for _ in range(2))]
    assert places[3] in (3, 4)
    numbers = np.stack([places, [0.5, 1.5, 2.5, -1, -1], [1, 2, 3, 0, 0], np.arange(5)], axis=1) * 3.0
    images = np.pad(numbers.astype("float32"), [(0, 0), (0, 60)]).reshape(5, 8, 8, 1)
    expected = trained.serve.function(images)["probabilities"]
    given = {"the_word": tf.constant([*words, "fish", "fish"]), "count": np.arange(5, dtype="float32")[:, None]}
    found = tf.saved_model.load(str(moved)).signatures["serve_examples"](**given)["probabilities"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_records_are_compared_where_the_data_is_and_what_only_labels_need_is_not_run(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [tf.io.serialize_tensor(image).numpy() for image in IMAGES]
    copied(example=["string[]", "string[]"])

    def load_examples(split: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((records, ["3"] * 7))

    def prepare_example(features: tf.Tensor, labels: tf.Tensor, **more: Any) -> Any:
        image = tf.ensure_shape(tf.io.parse_tensor(features, tf.float32), (8, 8, 1))
        return image, tf.strings.to_number(labels, tf.int32)  # Of "" it fails.

    monkeypatch.setattr(task, "load_examples", load_examples)
    monkeypatch.setattr(task, "prepare_example", prepare_example)
    trained = load_trained(task, Config(run_dir=tmp_path / "run"))
    found, expected = trained.serve_examples.function(tf.constant(records)), trained.serve.function(IMAGES)
    np.testing.assert_allclose(found["probabilities"], expected["probabilities"], rtol=1e-5)
    facts = _write_saved_model(tmp_path / "saved_model", task, trained)
    assert facts["serve_examples"] == "endpoint of saved_model: features string[None]"
    monkeypatch.setattr(task, "load_examples", no_examples)
    note = _compare("serve_examples", trained.serve_examples, trained.serve_examples.by_name, task, trained)
    assert note.startswith("; not compared, because examples of the data, if there are any, and made-up ones fail (")


def test_random_hook_draws_as_the_evaluation_does_for_any_batch_size(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, seed: tf.Tensor) -> Any:
        return features / 16 + tf.random.stateless_normal((8, 8, 1), seed), labels

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    settings = Config(run_dir=run_dir, simulated_devices=1, global_batch_size=60, seed=3)
    trained = load_trained(task, settings)
    images = np.stack([features for features, _ in task.load_examples("test").take(60).as_numpy_iterator()])
    found = Predictor(trained)(images, batch_size=7)
    train.build(settings)
    tested = next(train.batches["test"].one_by_one())
    np.testing.assert_allclose(found["probabilities"], trained.serve.function(tested[0])["probabilities"], rtol=1e-4)


@keras.saving.register_keras_serializable()
class Forgetful(keras.layers.Layer):
    """A layer that is another one when it is loaded."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs * self.factor

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


def test_what_no_file_can_contain_is_left_out_with_the_reason(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        features = tf.numpy_function(lambda each: each / np.float32(16), [features], tf.float32)
        return tf.ensure_shape(features, (8, 8, 1)), labels

    def load_model(*_: Any, **options: Any) -> keras.Model:
        raise FileNotFoundError("vocabulary.txt")  # Of a user's layer. It is not the disk that is full.

    monkeypatch.setattr(keras.models, "load_model", load_model)
    monkeypatch.setattr(task, "prepare_example", prepare_example)
    trained = load_trained(task, Config(run_dir=run_dir))
    facts = _write_models(tmp_path, task, trained) | _write_saved_model(tmp_path / "saved_model", task, trained)
    assert facts["model.keras"].startswith("skipped: Keras cannot save and load this model (FileNotFoundError: vocab")
    skipped = "skipped: no file can contain the Python function of PyFunc (test_export.py:"
    assert facts["serve_examples"].startswith(skipped)
    assert [each.name for each in tmp_path.iterdir()] == ["saved_model"]
    assert set(tf.saved_model.load(str(tmp_path / "saved_model")).signatures) == {"serve", "serving_default"}
    # In this project they can be predicted.
    found, expected = trained.serve_examples.function(IMAGES), tf.nn.softmax(trained.model(IMAGES / 16))
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)


def test_model_that_keras_loads_as_another_one_is_exported_by_tensorflow_only(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "create_model", lambda: small_model(Forgetful(2.0)))
    trained = load_trained(task, Config(run_dir=exported))
    facts = _write_models(tmp_path, task, trained)
    reason = "the file, once loaded, returns another 'probabilities' than the model"
    assert facts["model.keras"].startswith(f"skipped: Keras cannot save and load this model ({reason}): layers of your")
    assert task.model is trained.model
    assert not list(tmp_path.iterdir())
    # The same outputs do not show that a weight that only training uses is another one.
    monkeypatch.setattr(keras.models, "load_model", lambda *_, **options: keras.models.clone_model(trained.model))
    reason = "the file, once loaded, has other weights than the model"
    assert f"({reason}): layers of" in _write_models(tmp_path, task, trained)["model.keras"]


def test_saved_model_that_returns_something_else_is_an_error_and_leaves_the_earlier_export(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = {each: each.read_bytes() for each in (exported / "export").rglob("*") if each.is_file()}
    other = tf.saved_model.load(str(exported / "export/saved_model"))
    monkeypatch.setattr(tf.saved_model, "load", lambda path: other)
    monkeypatch.setattr(task, "create_model", lambda: small_model(Forgetful(2.0)))
    with pytest.raises(BadInput, match=r"^--export: serve, once loaded, returns another 'probabilities' than"):
        export(task, Config(run_dir=exported))
    assert {each: each.read_bytes() for each in (exported / "export").rglob("*") if each.is_file()} == earlier
    assert not list(exported.glob(".export*"))


def test_adapters_of_lora_are_merged_into_the_kernel_of_keras_s_file(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_trained(task, Config(run_dir=run_dir))
    layer = trained.model.layers[-1]
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 10)))
    trained = dataclasses.replace(trained, serve=predict_endpoint(task, trained.serve.spec), serve_examples=None)
    facts = _write_models(tmp_path, task, trained) | _write_saved_model(tmp_path / "saved_model", task, trained)
    assert facts["model.keras"] == "for keras.models.load_model, load_weights and --init-from"
    assert facts["serve"] == "endpoint of saved_model: features float32[None, 8, 8, 1]"
    expected = trained.model(IMAGES)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not loaded.layers[-1].lora_kernel_b.numpy().any()
    np.testing.assert_allclose(loaded(IMAGES), expected, rtol=1e-4, atol=1e-4)
    served = tf.saved_model.load(str(tmp_path / "saved_model")).signatures["serve"](features=tf.constant(IMAGES))
    np.testing.assert_allclose(served["probabilities"], tf.nn.softmax(expected), rtol=1e-4, atol=1e-6)


def test_variable_that_keras_does_not_list_is_exported_by_tensorflow_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_examples = task.load_examples
    monkeypatch.setattr(task, "create_model", lambda: linear_model(Hidden()))
    monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.1))
    monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split) if split == "train" else None)
    settings = Config(run_dir=tmp_path / "run", simulated_devices=1)
    flags = ("--epochs=1", "--global-batch-size=600", "--simulated-devices=1", "--monitor=train/loss")
    train.main([f"--run-dir={settings.run_dir}", *flags])
    export(task, settings)
    printed = capsys.readouterr().out
    assert "Keras's files   skipped: they cannot contain Variable#2, made without add_weight" in printed
    assert [each.name for each in (settings.run_dir / "export").iterdir()] == ["saved_model"]
    assert float(task.model.layers[-1].steps[-1]) == 102.0
    monkeypatch.setattr(task, "create_model", lambda: linear_model(Hidden(3)))
    with pytest.raises(BadInput, match=r"1 variables differ: hidden/model/Variable#3 absent there and float32\[\] now"):
        load_trained(task, settings)


def test_ties_of_classes_may_differ_and_numbers_by_rounding_only() -> None:
    classes, scores = tf.range(4000), tf.linspace(-8.0, 4.0, 100)
    for count, error, is_close in ((4, 7e-5, True), (5, 9e-5, False)):
        assert _are_close(classes, tf.where(classes < count, 7777, classes), 1e-5) == is_close
        assert _are_close(scores, scores + error, 1e-5) == is_close


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_run_that_cannot_be_loaded_is_refused_in_one_line(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied()

    def refusal() -> str:
        with pytest.raises(BadInput) as ending:
            trained = load_trained(task, Config(run_dir=path))
            _compare("serve", trained.serve, trained.serve.by_name, task, trained)
        return str(ending.value)

    with monkeypatch.context() as patching:
        patching.setattr(task, "create_model", lambda: small_model(without_last=True))
        assert "belongs to another model or optimizer (2 variables differ: model/sequential/dense_1/bias" in refusal()
    for predict_step, problem in (
        (
            lambda features: {"mean": tf.reduce_mean(features)},
            "returned 'mean' as SymbolicTensor of shape () for n examples: return a tensor [n, ...], a",
        ),
        (
            lambda features: {"twice": tf.repeat(features, 2, axis=0)},
            "'twice' as EagerTensor of shape (6, 8, 8, 1) for 3 examples: r",
        ),
        (lambda features: {"sparse": tf.sparse.from_dense(features)}, "'sparse' as SparseTensor of shape "),
        (None, "task.py has no function predict_step"),
    ):
        with monkeypatch.context() as patching:
            patching.setattr(task, "predict_step", predict_step)
            assert problem in refusal()
    with monkeypatch.context() as patching:
        patching.setattr(task, "prepare_example", lambda features, labels: (tf.squeeze(features), labels))
        assert "returns features of float32[None, 8, 8], and the run in" in refusal()

    (data,) = max((path / "best").iterdir()).glob("state.data*")
    data.write_bytes(data.read_bytes()[:-10])
    assert "is damaged" in refusal()
    for folder in ("best", "checkpoints"):
        shutil.rmtree(path / folder)
    assert "is empty: train first" in refusal()
