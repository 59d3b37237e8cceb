"""Every test uses the hooks of task.py as they are, on a few of your examples.

All tests share one process with four simulated devices, and build the program on one, two or four of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config import Config

import pytest

import engine  # noqa: F401 - First: it hides TensorFlow's lines about itself.
import task
import train
from engine.cluster.strategy import create_strategy
from engine.command_line import read_settings
from engine.data.splits import each_dataset
from engine.errors import BadInput

# Values for your own settings without a default, as on the command line: ["--data-dir=/data/digits"].
ARGUMENTS: list[str] = []

# Three complete batches and a part of one to train on; evaluation splits that no batch size divides.
EXAMPLES = {"train": 27, "validation": 13, "test": 9}


@pytest.fixture(autouse=True, scope="session")
def four_devices(arguments: list[str]) -> None:
    """Simulates them before TensorFlow uses any: later it is too late."""
    create_strategy(read_settings(Config, [*arguments, "--strategy=mirrored", "--simulated-devices=4"]))


@pytest.fixture(autouse=True, scope="session")
def few_examples() -> Iterator[None]:
    """Shortens every dataset of task.load_examples."""
    load_examples = task.load_examples

    def load_few(split: str) -> Any:
        return each_dataset(load_examples(split), lambda examples: examples.take(EXAMPLES[split]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "load_examples", load_few)
        yield


@pytest.fixture(scope="session")
def arguments() -> list[str]:
    """The command line of a short run."""
    arguments = [*ARGUMENTS, "--epochs=2", "--global-batch-size=8"]
    try:
        read_settings(Config, arguments)
    except BadInput as problem:
        rule = "ARGUMENTS, in tests/conftest.py, must give every setting without a default"
        pytest.fail(f"{rule} ({problem})", pytrace=False)
    return arguments


@pytest.fixture(scope="module")
def built(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The program of that run, which the first tests of a module share: each trace of the steps takes a while."""
    train.build(read_settings(Config, [*arguments, f"--run-dir={tmp_path_factory.mktemp('built') / 'run'}"]))


@pytest.fixture
def settings(arguments: list[str], tmp_path: Path) -> Config:
    """The settings of that run."""
    return read_settings(Config, [*arguments, f"--run-dir={tmp_path / 'run'}"])
