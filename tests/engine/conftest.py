"""Tests of the generated project's own modules, unrendered, in one process with five simulated devices."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

import task
from config import Config
from engine.cluster.strategy import create_strategy
from engine.report import report

create_strategy(Config(strategy="mirrored", simulated_devices=5))

REPORT = Path(__file__).parent / "report"


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws curves in the tests of the report only, and reads the digits once; both take a good part of a short run."""
    if REPORT not in request.path.parents:
        monkeypatch.setattr(report.Report, "draw_curves", lambda report: None)
    if hasattr(task, "load_digits"):
        monkeypatch.setattr(task, "load_digits", digits)


@pytest.fixture(autouse=True)
def settings_of_keras() -> Iterator[None]:
    """Resets what a build sets for the whole process, because other tests of the process use Keras alone."""
    yield
    keras.config.set_dtype_policy("float32")
    tf.config.run_functions_eagerly(False)


@functools.cache
def digits(**options: bool) -> tuple:
    from sklearn.datasets import load_digits

    return load_digits(**options)
