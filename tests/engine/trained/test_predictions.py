"""predict.py: predictions of a run's best weights, in this process and in files."""

import csv
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import predict
import task
from config import Config
from engine.data.element_spec import encode
from engine.errors import BadInput
from engine.trained.loading import load_trained
from engine.trained.predictions import Predictor, _as_tensors, _batches, write_predictions


@pytest.fixture(scope="module")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """The features and the labels of the test examples."""
    features, labels = zip(*task.load_examples("test").as_numpy_iterator(), strict=True)
    return np.stack(features), np.stack(labels)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs predict.py with arguments; returns its one line on stderr."""

    def refuse(*arguments: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            predict.main([str(each) for each in arguments])
        assert ending.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    return refuse


def test_predictions_are_those_of_the_test(run_dir: Path, held_out: Any, tmp_path: Path, capsys) -> None:
    features, labels = held_out
    # What is not a number is said, and written too.
    np.save(tmp_path / "test.npy", np.concatenate([features, np.full((2, 8, 8, 1), np.nan, "float32")]))
    predict.main([str(run_dir), str(tmp_path / "test.npy"), "--output", str(tmp_path / "p.csv"), "--batch-size", "100"])
    told = f"'probabilities' is not finite for 2 examples, example {len(labels)} first"
    assert told in capsys.readouterr().out
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        *rows, _, _ = csv.DictReader(file)
    assert [row["example"] for row in rows] == [str(number) for number in range(len(labels))]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    right = [int(row["label"]) == label for row, label in zip(rows, labels, strict=True)]
    assert np.mean(right) == pytest.approx(result["test/accuracy"], abs=1e-7)
    probabilities = np.array([[float(row[f"probabilities/{number}"]) for number in range(10)] for row in rows])
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    assert loss == pytest.approx(result["test/loss"], rel=1e-5)

    found = predict.load(run_dir)(features, batch_size=7)
    assert set(found) == {"label", "probabilities"}
    np.testing.assert_allclose(found["probabilities"], probabilities, rtol=1e-4, atol=1e-7)


def test_each_predictor_has_the_settings_of_its_run(
    run_dir: Path, copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, held_out: Any
) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        return features / 16.0 + float(task.config.seed), labels

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    images = held_out[0][:5]
    predictors = [predict.load(path) for path in (run_dir, copied(seed=9))]
    for predictor, seed in zip(predictors, (3, 9), strict=True):
        expected = tf.nn.softmax(predictor.model(images / 16.0 + seed))
        np.testing.assert_allclose(predictor(images)["probabilities"], expected, rtol=1e-5)


def test_texts_and_files_of_any_size_are_named_in_the_first_column(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        both = tf.image.resize(tf.concat([features, labels], axis=-1), (8, 8)) / 16.0
        return both[..., :1], both[..., 1:]

    def predict_step(features: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"text": tf.strings.as_string(features[:, 0, 0, 0] * 16)}

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    monkeypatch.setattr(task, "predict_step", predict_step)
    predictor = predict.load(copied(example=["uint8[None, None, 1]", "uint8[None, None, 1]"]))
    images = [("row 1.png", np.full((8, 8, 1), 3, "uint8")), ("z.png", np.full((12, 8, 1), 9, "uint8"))]
    names, predictions = predictor.predict(images, 128)
    for name in ("p.csv", "p.npz"):
        write_predictions(tmp_path / name, names, predictions)
    assert (tmp_path / "p.csv").read_text(encoding="utf-8") == "example,text\nrow 1.png,3.000000\nz.png,9.000000\n"
    with np.load(tmp_path / "p.npz") as arrays:  # Without pickled objects, which np.load refuses.
        assert arrays["text"].tolist() == ["3.000000", "9.000000"]
        assert arrays["example"].tolist() == ["row 1.png", "z.png"]
    for names, written in (
        ((4, np.uint64(7)), [4, 7]),
        ((Path("a.png"), 7), ["a.png", "7"]),
        ((-1, 2**63 + 1), ["-1", "9223372036854775809"]),
    ):
        write_predictions(tmp_path / "p.npz", names, predictions)
        with np.load(tmp_path / "p.npz") as arrays:
            assert arrays["example"].tolist() == written


def test_labels_may_be_ragged_or_sparse_and_features_that_differ_in_length_only(
    copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, pairs = tf.ragged.constant([[3.0], [5.0, 1.0]]), tf.ragged.constant([[[1], [2, 3]], []])
    labels = {"pairs": pairs, "tags": tf.sparse.from_dense([[0, 1], [2, 0]]), "words": tf.ragged.constant([[1], []])}
    examples = tf.data.Dataset.from_tensor_slices((texts, labels, tf.ragged.constant([["a"], []])))

    def prepare_example(features: tf.Tensor, labels: dict[str, Any], texts: tf.Tensor) -> Any:
        labels = labels["words"], labels["pairs"].to_tensor(shape=(4, 4)), tf.sparse.to_dense(labels["tags"]), texts
        return tf.fill((8, 8, 1), tf.reduce_sum(features)), labels[1]

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    recorded = json.loads(json.dumps(encode(examples.element_spec)))
    kinds = {"pairs": "ragged int32[None, None]", "tags": "sparse int32[2]", "words": "int32[None]"}
    assert recorded == ["float32[None]", kinds, "string[None]"]
    predictor = predict.load(copied(example=recorded))
    _, predictions = predictor.predict(enumerate([[3.0], [5.0, 1.0]]), 2)
    images = np.stack([np.full((8, 8, 1), total, "float32") for total in (3, 6)])
    np.testing.assert_allclose(predictions["probabilities"], tf.nn.softmax(predictor.model(images)), rtol=1e-5)


@pytest.mark.parametrize("recorded", ["ragged float32[None, None]", "sparse float32[8, 8, 1]", "string[]"])
def test_examples_that_task_py_no_longer_takes_are_as_it_loads_them_now(
    recorded: str, copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, images = copied(example=[recorded, "int32[]"]), np.ones((3, 8, 8, 1), "float32")
    found = predict.load(path)(images)["probabilities"]
    np.testing.assert_allclose(found, predict.load(copied("as recorded"))(images)["probabilities"], rtol=1e-5)
    monkeypatch.setattr(task, "load_examples", lambda split: 1 / 0)  # The data is not on this machine.
    message = r"^task\.py:\d+ prepare_example: " if recorded == "string[]" else "^task.load_examples returns ragged or"
    with pytest.raises(BadInput, match=message):
        predict.load(path)


def test_example_that_cannot_be_prepared_is_named_and_nothing_is_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def prepare_example(features: tf.Tensor, labels: tf.Tensor) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(features), 17.0, "too bright")]):
            return features / 16.0, labels

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    images = np.zeros((9, 8, 8, 1), "float32")
    images[6] = 18
    np.save(tmp_path / "images.npy", images)
    output = tmp_path / "predictions.csv"
    output.write_text("earlier")
    line = refused(run_dir, tmp_path / "images.npy", "--output", output, "--batch-size", 4)
    assert line.startswith("ERROR: example 6: ")
    assert "too bright" in line
    assert line.endswith(" (its labels are placeholders)")
    assert output.read_text() == "earlier"


def test_outputs_that_no_file_can_contain_are_refused(run_dir: Path) -> None:
    trained, images = load_trained(task, Config(run_dir=run_dir)), np.ones((3, 8, 8, 1), "float32")
    mask = Predictor(dataclasses.replace(trained, outputs={"mask": tf.TensorSpec([None, 8, 8, 1])}))
    assert mask.choose_output(*predict.DEFAULT_OUTPUTS) == Path("predictions.npz")
    for shapes, problem in (
        ({"example": [None]}, "^task.predict_step returns 'example', which is a reserved name: rename it"),
        ({"allow_pickle": [None]}, "^task.predict_step returns 'allow_pickle', which is a reserved name: rename it"),
        ({"mask": [None, 8, 8, 1]}, r"^--output p.csv: 'mask' is of shape \(None, 8, 8, 1\): pass an .npz file"),
        ({"a": [None, 8], "a/0": [None]}, "^--output p.csv: 'a/0' may be a column of 'a' too: pass an .npz file"),
    ):
        outputs = {name: tf.TensorSpec(shape) for name, shape in shapes.items()}
        with pytest.raises(BadInput, match=problem):
            Predictor(dataclasses.replace(trained, outputs=outputs)).choose_output(Path("p.csv"))
    several = dataclasses.replace(trained.serve_examples, function=lambda _, first: {"a": tf.ones([1, first + 2])})
    with pytest.raises(BadInput, match=r"returned 'a' of several sizes \(\[\(2,\), \(3,\)"):
        Predictor(dataclasses.replace(trained, serve_examples=several))(images, batch_size=1)


def test_no_output_is_written_over_the_input_a_file_of_the_run_or_a_device(
    run_dir: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run_dir = tmp_path / "images", shutil.copytree(run_dir, tmp_path / "run")
    folder.mkdir()
    path, metrics = folder / "images.npz", run_dir / "metrics.csv"
    np.savez(path, np.zeros((2, 8, 8, 1), "float32"))
    (tmp_path / "link.csv").symlink_to(metrics)
    (tmp_path / "folder").symlink_to(folder)
    os.mkfifo(tmp_path / "device")
    for name, target in (("device.csv", "device"), ("folder.csv", "images"), ("nowhere.csv", "none/p.csv")):
        (tmp_path / name).symlink_to(tmp_path / target)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    for given, output, problem in (
        (path, tmp_path / "device.csv", "is not a regular file, or a link to one: pass another path"),
        (path, tmp_path / "folder.csv", "is not a regular file, or a link to one: pass another path"),
        (path, tmp_path / "nowhere.csv", f"cannot be written: {tmp_path / 'none'} does not exist: create it first"),
        (path, path, f"is INPUT {path}, or a file in it: pass another path"),
        (folder, tmp_path / "folder/new.csv", f"is INPUT {folder}, or a file in it"),
        (path, metrics, f"is a file in {run_dir}, and no file of a run is overwritten: remove it, or pass another"),
        (path, tmp_path / "link.csv", f"is a file in {run_dir}, and no file of a run is overwritten"),
    ):
        assert f"ERROR: --output {output} {problem}" in refused(run_dir, given, "--output", output)
    monkeypatch.chdir(folder)
    assert "--output predictions.csv is INPUT ., or a file in it" in refused(run_dir, ".")
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
    assert (tmp_path / "device").is_fifo()


def test_hook_that_reads_inputs_wrongly_is_named(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    path, predictor = tmp_path / "images.npy", predict.load(run_dir)
    path.write_bytes(b"no array")
    line = refused(run_dir, path)
    assert re.match(r"ERROR: task\.py:\d+ read_inputs: ValueError: .*pickle", line)
    assert line.endswith(f" (INPUT {path})")
    for returned, message in (
        (np.zeros((2, 8, 8, 1)), "task.read_inputs yields ndarray: yield pairs of a name and features"),
        (None, "task.read_inputs returned NoneType: yield pairs of a name and features"),
        ([("a", [[1], [1, 2]])], "features must be arrays: ValueError: "),
    ):
        with pytest.raises(BadInput, match=f"^{message}"):
            predictor.predict(returned, 128)
    monkeypatch.delattr(task, "read_inputs")
    assert "task.py has no function read_inputs(path): add one" in refused(run_dir, path)


IMAGE = tf.TensorSpec([None, 2, 3, 1], tf.uint8)
TEXT = tf.TensorSpec([None], tf.string)
MIXED = {"a": tf.TensorSpec([None, 2], tf.float32), "b": (TEXT, tf.TensorSpec([None], tf.bool))}
PIXELS = np.arange(30).reshape(5, 2, 3, 1)


def tensors(examples: Iterable[Any], spec: Any, size: int = 2) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the batches of examples as predict.py makes them, as arrays."""
    batches = [(names, _as_tensors(names, arrays, spec)) for names, arrays in _batches(examples, size)]
    return [(names, tf.nest.map_structure(lambda each: each.numpy(), features)) for names, features in batches]


def test_examples_become_batches_of_one_shape_and_of_the_run_s_dtypes() -> None:
    batches = tensors(enumerate(PIXELS), IMAGE)
    assert [names for names, _ in batches] == [(0, 1), (2, 3), (4,)]
    features = np.concatenate([features for _, features in batches])
    np.testing.assert_array_equal(features, PIXELS)
    assert features.dtype == np.uint8
    ((_, features),) = tensors([(7, {"b": ("é", 1), "a": [1, 2.5]}), (8, {"a": [0, 1e-50], "b": ("", False)})], MIXED)
    np.testing.assert_array_equal(features["a"], np.array([[1, 2.5], [0, 0]], "float32"))
    assert [each.decode() for each in features["b"][0]] == ["é", ""]
    assert features["b"][1].tolist() == [True, False]
    records = [b"a\0", tf.constant(b"\xff\0\0")]  # Their ends are kept.
    assert tensors(enumerate(records), TEXT)[0][1].tolist() == [b"a\0", b"\xff\0\0"]


UNFITTING = [
    (enumerate(PIXELS[:, 0]), IMAGE, "example 0: features is int64[3, 1] and must be uint8[2, 3, 1], as in"),
    (enumerate(PIXELS * 9), IMAGE, "example 4: features has a value that does not fit into uint8"),
    ([("p", "1")], tf.TensorSpec([None], tf.int32), "example p: features is <U1[] and must be int32[], as"),
    (enumerate(PIXELS + 0j), IMAGE, "example 0: features is complex128[2, 3, 1] and must be uint8[2, 3, 1]"),
    ([("p", {"a": [1, 2]})], MIXED, "example p has the features a and must have a, b/0, b/1"),
]


def test_example_that_does_not_fit_the_run_is_named() -> None:
    for examples, spec, message in UNFITTING:
        with pytest.raises(BadInput, match=f"^{re.escape(message)}"):
            tensors(examples, spec)


def test_mistakes_are_one_line(run_dir: Path, tmp_path: Path, refused: Any) -> None:
    path, empty = tmp_path / "images.npy", tmp_path / "empty.npy"
    np.save(path, np.zeros((2, 8, 8)))
    np.save(empty, np.zeros((0, 8, 8, 1)))
    for arguments, message in (
        ((tmp_path, path), f"{tmp_path} contains no run (config.json is missing): pass the directory of a run"),
        ((run_dir, tmp_path / "none"), f"INPUT {tmp_path / 'none'} does not exist or cannot be read: pass"),
        ((run_dir, tmp_path / ("n" * 256)), f"INPUT contains a name of more than 255 bytes ({'n' * 20}...): shorten"),
        ((run_dir, path, "--output", f"{'n' * 252}.csv"), "--output contains a name of more than 255 bytes (nnnn"),
        ((run_dir, path, "--output", tmp_path / "p.txt"), "must end in .csv or .npz"),
        ((run_dir, path, "--batch-size", 0), "--batch-size 0 must be at least 1"),
        ((run_dir, empty), f"there are no examples to predict in INPUT {empty}"),
        ((run_dir, path), "example 0: features is float64[8, 8] and must be float32[8, 8, 1], as in"),
    ):
        assert message in refused(*arguments)
    predictor = predict.load(run_dir)
    for examples, problem in (
        (np.zeros((0, 8, 8, 1)), "there are no examples to predict in the features"),
        ({"a": [1], "b": []}, "the same number"),
    ):
        with pytest.raises(BadInput, match=problem):
            predictor(examples)
