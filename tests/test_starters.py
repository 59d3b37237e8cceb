"""Each starter keeps the promises of all."""

import csv
import gzip
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from programs import Program

from rendering import STARTERS, Bake, rendered

# --- Image classification ---------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    """Writes an array of bytes in the format of MNIST's files, as Keras reads it."""
    header = np.array([0x0800 + array.ndim, *array.shape], ">i4").tobytes()
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


# Nothing answers there.
DOWNLOAD = """
import keras
from engine.exceptions import may_pass

try:
    keras.utils.get_file(origin="http://127.0.0.1:9/clothes")
except Exception as problem:
    print("may pass:", may_pass(problem))
"""


@pytest.mark.long
def test_fashion_mnist_is_taken_from_where_keras_keeps_it(
    default_bake: Bake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # So nothing is fetched.
    assert "may pass: True" in default_bake.run_code(DOWNLOAD)  # So load_examples is called again.
    folder = tmp_path / "datasets/fashion-mnist"
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 100), ("t10k", 30)):
        labels = random.integers(10, size=count)
        # Each class has a brightness of its own, so that it can be learnt.
        images = np.broadcast_to(25 * labels[:, None, None], (count, 28, 28))
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
    # A process of its own, because Keras looks at KERAS_HOME when it is imported.
    flags = ("--data=fashion_mnist", "--epochs=1", f"--run-dir={tmp_path / 'run'}", "--global-batch-size=20")
    done = default_bake.run(sys.executable, "train.py", *flags)
    assert "examples       train 90, validation 10, test 30" in done.stdout


# --- The promises -----------------------------------------------------------------------------------------------------

# Few epochs, small, and without the dropout that each replica draws for itself.
SHORT = {
    "image_classification": ("--epochs=2",),
    "text_pair_classification": ("--epochs=2", "--layers=1", "--width=32", "--dropout=0", "--learning-rate=1e-4"),
    "gan": ("--epochs=2",),
    "segmentation": ("--epochs=2",),
    "language_model": ("--epochs=2", "--layers=1", "--width=32"),
    # Among all test users, some have two items whose scores differ by rounding only, so one may be the tenth or not.
    "recommendation": ("--epochs=2", "--limit-steps=20", "--global-batch-size=256"),
}
# What goes in and what comes out, as NumPy arrays of the test examples: a program that saves them.
SAVE_EXAMPLES = """
import numpy as np
import task
from config import Config
from engine.command_line import settings_of_run
from pathlib import Path

task.config = settings_of_run(Config, Path("runs/two"))
examples = list(task.load_examples("test").as_numpy_iterator())
features, labels = (np.stack([example[part] for example in examples]) for part in (0, 1))
np.savez("examples.npz", features=features, labels=labels)
np.save("features.npy", features)
"""
# The same from the SavedModel, without the project.
SERVE = """
import numpy as np
import tensorflow as tf

source = sys.argv[1]
if source.endswith(".npy"):
    features = np.load(source)
else:
    features = [record.numpy() for record in tf.data.TFRecordDataset(source)]
served = tf.saved_model.load("runs/two/export/saved_model").signatures["serve_examples"]
(name,) = served.structured_input_signature[1]
outputs = served(**{name: tf.constant(features)})
np.savez("served.npz", **{name: output.numpy() for name, output in outputs.items()})
assert "task" not in sys.modules
"""
# How far the GAN's predicted images are from the real ones.
DISTANCE = """
import numpy as np
import tensorflow as tf
from distance import Distance

examples, made = np.load("examples.npz"), np.load("predictions.npz")["image"] * 2.0 - 1.0
classes, real = tf.one_hot(examples["features"], 10), examples["labels"] / 8.0 - 1.0
distance = Distance(classes=10, size=8 * 8)
distance.update_state(classes, real.astype("float32"), made, tf.ones([len(made)]))
print(float(distance.result()))
"""
# The loss of a language model's test tokens, from the model in a notebook.
TOKEN_LOSS = """
import numpy as np
import tensorflow as tf
import predict
import task

model, losses = predict.load("runs/two").model, []
for features, labels in map(task.prepare_example, tf.data.TFRecordDataset("data/records/test.tfrecord")):
    logits = model({name: each[None] for name, each in features.items()})[0]
    log_probabilities = tf.nn.log_softmax(tf.cast(logits, "float64")).numpy()
    losses += [-log_probabilities[place, label] for place, label in enumerate(labels) if label >= 0]
print(np.mean(losses))
"""
# The prompts of a text as records, for the SavedModel.
PROMPTS = """
from pathlib import Path
import tensorflow as tf
import predict
import task

predict.load("runs/two")
with tf.io.TFRecordWriter("prompts.tfrecord") as file:
    for _, record in task.read_inputs(Path("data/test.txt")):
        file.write(record)
"""
# The users of the test examples that a recommender was evaluated on, as inputs and as records, and what they chose.
CHOICES = """
import json
import tensorflow as tf

chosen = []
with open("users.jsonl", "w") as users, tf.io.TFRecordWriter("users.tfrecord") as file:
    for record in tf.data.TFRecordDataset("data/records/test.tfrecord").take(20 * 256).as_numpy_iterator():
        fields = tf.train.Example.FromString(record).features.feature
        row = {name: fields[name].bytes_list.value[0].decode() for name in ("user_id", "country", "age_group")}
        print(json.dumps(row), file=users)
        file.write(record)
        chosen.append(fields["item_id"].bytes_list.value[0].decode())
with open("chosen.json", "w") as file:
    json.dump(chosen, file)
"""
TIMES = ("seconds", "examples_per_second", "goodput")


@pytest.fixture(scope="module", params=STARTERS)
def starter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Bake]:
    """A rendered starter, which has trained a little on two replicas, in runs/two."""
    project = rendered(tmp_path_factory.mktemp(request.param) / "rendered", starter=request.param)
    project.run("python", "train.py", "--simulated-devices=2", "--run-dir=runs/two", *SHORT[request.param])
    return request.param, project


def rows(project: Bake, run_dir: str) -> list[dict[str, float]]:
    lines = project.read(f"{run_dir}/metrics.csv").splitlines()
    return [{name: float(text) for name, text in row.items() if name not in TIMES} for row in csv.DictReader(lines)]


def weights(project: Bake, run_dir: str) -> dict[str, np.ndarray]:
    """Returns the weights of all models at the end of a run, without the states of random numbers."""
    newest = max((project.folder / run_dir / "checkpoints").iterdir())
    reader = tf.train.load_checkpoint(str(newest / "state"))
    kinds = ("model/", "generator/", "discriminator/", "user/", "item/", "ranking/")
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(kinds) and "seed" not in name]
    assert names
    return {name: reader.get_tensor(name) for name in names}


@pytest.mark.long
@pytest.mark.parametrize("name", STARTERS[1:])  # Those of the first one run unrendered, in every make test.
def test_starter_passes_its_own_tests_and_check(name: str, bake: Callable[..., Bake]) -> None:
    project = bake(starter=name)
    smaller = [each for each in SHORT[name] if each.startswith(("--layers", "--width"))]
    project.replace("tests/conftest.py", "ARGUMENTS: list[str] = []", f"ARGUMENTS: list[str] = {smaller}")
    # --check compares the replicas, too, and the test below stops and resumes a run.
    options = ("-q", "-p", "no:cacheprovider", "-k", "not agree", "--ignore=tests/test_resume.py")
    project.run("python", "-m", "pytest", *options)
    project.run("python", "train.py", "--check", *smaller)


@pytest.mark.long
def test_starter_gives_the_same_numbers_on_one_replica_and_after_a_kill(starter: tuple[str, Bake]) -> None:
    name, project = starter
    project.run("python", "train.py", "--run-dir=runs/one", *SHORT[name])
    for one, two in zip(rows(project, "runs/one"), rows(project, "runs/two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    one, two = (weights(project, run_dir) for run_dir in ("runs/one", "runs/two"))
    assert one.keys() == two.keys()
    for variable, value in one.items():
        # Rounding alone moves the bias of attention's keys, which changes no output.
        largest = max(0.1, np.abs(value).max())
        np.testing.assert_allclose(two[variable], value, atol=2e-4 * largest, rtol=0, err_msg=variable)

    command = ["train.py", "--simulated-devices=2", "--run-dir=runs/killed", *SHORT[name]]
    command += ["--checkpoint-every-steps=3", "--steps-per-execution=3"]
    log = project.folder.with_name("killed.log")
    killed = Program(command, project.folder, log, log)
    checkpoints = project.folder / "runs/killed/checkpoints"
    while killed.poll() is None and len(list(checkpoints.glob("step-*"))) < 3:
        time.sleep(0.05)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    resumed = project.run("python", *command).stdout
    assert "starts         resumed from step-" in resumed
    assert project.result("runs/killed")["weights_sha256"] == project.result("runs/two")["weights_sha256"]
    assert rows(project, "runs/killed") == rows(project, "runs/two")


@pytest.mark.long
def test_starter_is_exported_and_predicts_what_was_evaluated(starter: tuple[str, Bake]) -> None:
    name, project = starter
    exported = project.run("python", "train.py", "--export", "--run-dir=runs/two")
    assert "serve_examples" in exported.stdout
    project.run_code(SAVE_EXAMPLES)
    source = {"text_pair_classification": "data/records/test.tfrecord", "language_model": "data/test.txt"}
    if name == "recommendation":
        source[name] = "users.jsonl"
        project.run_code(CHOICES)
    project.run("python", "predict.py", "runs/two", source.get(name, "features.npy"), "--output=predictions.npz")
    predicted = dict(np.load(project.folder / "predictions.npz"))
    examples = np.load(project.folder / "examples.npz", allow_pickle=True)
    result = project.result("runs/two")
    if name == "gan":
        assert predicted["image"].shape == (len(examples["labels"]), 8, 8, 1)
        found = float(project.run_code(DISTANCE))
        assert found == pytest.approx(result["test/distance"], rel=1e-4)
    elif name == "language_model":
        found = float(project.run_code(TOKEN_LOSS))
        assert found == pytest.approx(result["test/loss"], rel=1e-5)
        project.run_code(PROMPTS)
    elif name == "recommendation":
        chosen = np.array(json.loads(project.read("chosen.json")))
        found = np.mean((predicted["items"] == chosen[:, None]).any(axis=1))
        assert found == pytest.approx(result["test/recall_at_10"], rel=1e-5)
        assert found > 0.01
    else:
        labels = examples["labels"]
        if name == "text_pair_classification":
            lines = project.read("data/test.tsv").splitlines()[1:]
            labels = np.array([int(line.split("\t")[0]) for line in lines])
        found = predicted["mask" if name == "segmentation" else "label"]
        # One of 92,160 pixels may be another one: the two programs round a tie differently.
        assert np.mean(found == labels) == pytest.approx(result["test/accuracy"], rel=1e-4)
    commands = re.findall(r"python (?:-c|predict\.py) [^\n`]+", project.read("docs/starter.md"))
    assert commands
    for command in commands:
        _, *words = shlex.split(command.replace("runs/default", "runs/two"))
        if words[0] == "-c":
            project.run_code(*words[1:])
        else:
            project.run("python", *words)
    # TensorFlow alone says the same, given the same examples.
    made = {"language_model": "prompts.tfrecord", "recommendation": "users.tfrecord"}
    records = made.get(name, source.get(name, "features.npy"))
    project.run_code(SERVE, records)
    for output, array in np.load(project.folder / "served.npz", allow_pickle=True).items():
        if output == "completion":
            assert [text.decode(errors="replace") for text in array] == predicted[output].tolist()
            continue
        if output == "items":  # Another size of the batch may round scores that are nearly equal the other way.
            assert np.mean(array.astype(str) == predicted[output]) > 0.999
            continue
        np.testing.assert_allclose(array, predicted[output], rtol=1e-4, atol=1e-5, err_msg=output)
