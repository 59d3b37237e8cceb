"""The commands and blocks of docs/inference.md, run on a small run; TensorFlow takes the place of its server."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from small import linear_model
from tensorflow.core.protobuf import saved_model_pb2

import task
import train
from pages import blocks, put, sections
from rendering import run

SECTIONS = sections("inference.md")
IMAGES = np.random.default_rng(1).uniform(0, 16, (7, 8, 8, 1)).astype("float32")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs/default, which was exported."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(task, "create_model", linear_model)
        flags = ("--epochs=1", "--limit-steps=2", "--simulated-devices=1", "--export")
        train.main([f"--run-dir={folder / 'runs/default'}", *flags])
    return folder


@pytest.fixture
def here(exported: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, which is the current one."""
    monkeypatch.chdir(exported)
    monkeypatch.setattr(task, "create_model", linear_model)
    return exported


def outputs_of(title: str) -> dict[str, np.ndarray]:
    (block,) = blocks(SECTIONS[title])
    names = {"examples": IMAGES}
    exec(block, names)  # noqa: S102
    return {name: np.asarray(output) for name, output in names["outputs"].items()}


def test_blocks_give_the_same_outputs(here: Path) -> None:
    by_predictor, by_endpoint = map(outputs_of, ("Predictions in a notebook", "The SavedModel"))
    assert by_predictor.keys() == by_endpoint.keys() == {"label", "probabilities"}
    for name, output in by_predictor.items():
        np.testing.assert_allclose(by_endpoint[name], output, rtol=1e-5, atol=1e-6)


def test_request_is_answered_from_the_numbered_folder(here: Path) -> None:
    copy, _, request = re.findall(r"(?ms)^```\n(.*?)^```", SECTIONS["TensorFlow Serving"])
    write, send = request.splitlines()
    done = run("bash", "-ec", copy + write, folder=here)
    assert done.returncode == 0, done.stderr
    sent = json.loads(Path("request.json").read_text(encoding="utf-8"))
    assert "-d @request.json" in send
    (folder,) = Path("serving").iterdir()
    assert send.endswith(f"/v1/models/{folder.name}:predict")
    signatures = tf.saved_model.load(str(folder / "1")).signatures
    assert set(signatures) == {"serve", "serve_examples", "serving_default"}
    (name,) = signatures[sent["signature_name"]].structured_input_signature[1]
    answer = signatures[sent["signature_name"]](**{name: tf.constant(sent["instances"])})
    # One example of zeros, as the page says of its answer.
    example = re.search(r'"predictions": \[\{(.*?)\}', SECTIONS["TensorFlow Serving"])[1]
    assert {key: len(value) for key, value in answer.items()} == dict.fromkeys(re.findall(r'"(\w+)":', example), 1)
    # A server answers requests of signatures of this method only.
    (graph,) = saved_model_pb2.SavedModel.FromString((folder / "1/saved_model.pb").read_bytes()).meta_graphs
    assert {graph.signature_def[each].method_name for each in signatures} == {"tensorflow/serving/predict"}
    listed = set(re.findall(r"(?m)^\| `([\w.]+)/?` \| ", SECTIONS["Files"]))
    assert {path.name for path in Path("runs/default/export").iterdir()} == listed


def test_random_predictions_follow_from_the_example_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(SECTIONS["Random predictions"])
    put(block, task, monkeypatch, tmp_path)
    seen: list[np.ndarray] = []

    def model(features: tf.Tensor, training: bool) -> tf.Tensor:
        seen.append(features.numpy())
        return features[:, 0, :, 0]

    monkeypatch.setattr(task, "model", model, raising=False)
    images = IMAGES[:3] / 16.0
    for batch in (images, images[::-1], images[1:2]):
        task.predict_step(tf.constant(batch))
    first, reversed_, alone = seen
    np.testing.assert_array_equal(first, reversed_[::-1])
    np.testing.assert_array_equal(first[1:2], alone)
    noise = (first - images) / 0.1
    assert 0.7 < noise.std() < 1.3
    assert not np.allclose(noise[0], noise[1])
