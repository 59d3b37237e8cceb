"""Each starter keeps the promises of all."""

import csv
import re
import shlex
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from clusters import weights
from programs import Program

from rendering import STARTERS, Bake, rendered

# Few steps of small models, without the dropout that each replica draws for itself.
EPOCHS = ("--epochs=2", "--steps-per-epoch=15")
SMALL = {
    "text_pair_classification": ("--layers=1", "--width=32", "--dropout=0", "--learning-rate=1e-4"),
    "language_model": ("--layers=1", "--width=32"),
    # Among all test users, some have two items whose scores differ by rounding only, so one may be the tenth or not.
    "recommendation": ("--limit-steps=15", "--global-batch-size=256"),
}
WEIGHTS = "(model|generator|discriminator|user|item|ranking)/(?!.*seed).*"
TIMES = ("seconds", "examples_per_second", "goodput")


@pytest.fixture(scope="module", params=STARTERS)
def starter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bake, list[str]]:
    """A rendered starter, which has trained a little on two replicas, in runs/two; and the flags of short runs."""
    project = rendered(tmp_path_factory.mktemp(request.param) / "rendered", starter=request.param)
    flags = ["train.py", *EPOCHS, *SMALL.get(request.param, ())]
    if request.param == "recommendation":
        project.run("python", "prepare_data.py", "--users=2000", "--items=300")
    project.run("python", *flags, "--simulated-devices=2", "--run-dir=runs/two")
    return project, flags


def rows(project: Bake, run_dir: str) -> list[dict[str, float]]:
    lines = project.read(f"{run_dir}/metrics.csv").splitlines()
    return [{name: float(text) for name, text in row.items() if name not in TIMES} for row in csv.DictReader(lines)]


@pytest.mark.long
@pytest.mark.parametrize("name", STARTERS[1:])  # Those of the first one run unrendered, in every make test.
def test_starter_passes_its_own_tests_and_check(name: str, bake: Callable[..., Bake]) -> None:
    project = bake(starter=name)
    smaller = [each for each in SMALL.get(name, ()) if each.startswith(("--layers", "--width"))]
    project.replace("tests/conftest.py", "ARGUMENTS: list[str] = []", f"ARGUMENTS: list[str] = {smaller}")
    # --check compares the replicas, too, and the test below stops and resumes a run.
    options = ("-q", "-p", "no:cacheprovider", "-k", "not agree", "--ignore=tests/test_resume.py")
    project.run("python", "-m", "pytest", *options)
    project.run("python", "train.py", "--check", *smaller)


@pytest.mark.long
def test_starter_gives_the_same_numbers_on_one_replica_and_after_a_kill(starter: tuple[Bake, list[str]]) -> None:
    project, flags = starter
    project.run("python", *flags, "--run-dir=runs/one")
    for one, two in zip(rows(project, "runs/one"), rows(project, "runs/two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    one, two = (weights(project.folder / run_dir, WEIGHTS) for run_dir in ("runs/one", "runs/two"))
    assert one.keys() == two.keys()
    for variable, value in one.items():
        # Rounding alone moves the bias of attention's keys, which changes no output.
        largest = max(0.1, np.abs(value).max())
        np.testing.assert_allclose(two[variable], value, atol=2e-4 * largest, rtol=0, err_msg=variable)

    command = [*flags, "--simulated-devices=2", "--run-dir=runs/killed"]
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


# Saves the test examples.
SAVE_EXAMPLES = """
import numpy as np
import task
from config import Config

task.config = Config()
features, labels = map(np.stack, zip(*task.load_examples("test").as_numpy_iterator()))
np.save("features.npy", features)
np.save("labels.npy", labels)
"""


@pytest.mark.long
def test_starter_is_exported_and_predicts_what_was_evaluated(starter: tuple[Bake, list[str]]) -> None:
    project, _ = starter
    exported = project.run("python", "train.py", "--export", "--run-dir=runs/two")
    assert "serve_examples" in exported.stdout
    # As the page says.
    commands = re.findall(r"python (?:-c|predict\.py) [^\n`]+", project.read("docs/starter.md"))
    assert commands
    for command in commands:
        _, *words = shlex.split(command.replace("runs/default", "runs/two"))
        if words[0] == "-c":
            project.run_code(*words[1:])
        else:
            project.run("python", *words)
    # Where each example has a right answer, as many are right as in the evaluation.
    if "test/accuracy" not in (result := project.result("runs/two")):
        return
    source = project.folder / "data/records/test.tfrecord"
    if source.exists():
        lines = project.read("data/test.tsv").splitlines()[1:]
        labels = np.array([int(line.split("\t")[0]) for line in lines])
    else:
        project.run_code(SAVE_EXAMPLES)
        source, labels = "features.npy", np.load(project.folder / "labels.npy")
    project.run("python", "predict.py", "runs/two", source, "--output=predictions.npz")
    predicted = np.load(project.folder / "predictions.npz")
    found = predicted["mask" if "mask" in predicted else "label"]
    # One of 92,160 pixels may be another one: the two programs round a tie differently.
    assert np.mean(found == labels) == pytest.approx(result["test/accuracy"], rel=1e-4)


# Keras's function would download them.
FASHION_MNIST = """
import keras, numpy as np
import task
from config import Config

train, test = (np.zeros((count, 28, 28), "uint8") for count in (100, 30))
keras.datasets.fashion_mnist.load_data = lambda: ((train, np.arange(100) % 10), (test, np.arange(30) % 10))
task.config = Config(data="fashion_mnist")
print([len(task.load_examples(split)) for split in ("train", "validation", "test")], task.create_model().input_shape)
"""


@pytest.mark.long
def test_image_classification_takes_fashion_mnist(default_bake: Bake) -> None:
    assert default_bake.run_code(FASHION_MNIST) == "[90, 10, 30] (None, 28, 28, 1)\n"
