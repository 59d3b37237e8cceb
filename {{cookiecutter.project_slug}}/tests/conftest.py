"""Your safety net. Every test uses the hooks of task.py as they are, on a few of your examples.

All tests share one process with four simulated devices, and build the program on one, two or four of them.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

import task
from config import Config
from engine.cluster.strategy import create_strategy
from engine.settings import read_settings

# What your own settings without a default need, as on the command line: ["--data-dir=/data/digits"].
ARGUMENTS: list[str] = []

# First, because the first strategy of a process decides how many devices it has.
create_strategy(SimpleNamespace(strategy="mirrored", simulated_devices=4, all_reduce="auto", cluster_timeout=60.0))

# Three and a bit batches to train on; evaluation splits that no batch size divides.
EXAMPLES = {"train": 27, "validation": 13, "test": 9}


@pytest.fixture(autouse=True)
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens every split of task.load_examples."""
    load_examples = task.load_examples
    monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split).take(EXAMPLES[split]))


@pytest.fixture
def arguments() -> list[str]:
    """The command line of a run that takes a moment."""
    return [*ARGUMENTS, "--epochs=3", "--global-batch-size=8"]


@pytest.fixture
def settings(arguments: list[str], tmp_path: Path) -> Config:
    """Its settings."""
    try:
        return read_settings(Config, [*arguments, f"--run-dir={tmp_path / 'run'}"])
    except SystemExit:
        pytest.fail("ARGUMENTS, in tests/conftest.py, has to give every setting without a default", pytrace=False)
