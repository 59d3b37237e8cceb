"""Runs of train.py in this process, which end, are stopped, or are killed."""

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from small import linear_model

import train
from engine.errors import Stopped
from engine.signals import Signals

# Of runs that tests share. Each epoch has 20 steps and 3 of its validation; there are validations after 8 and 16, too.
FLAGS = (
    *("--global-batch-size=60", "--simulated-devices=2", "--epochs=2", "--validate-every-steps=8"),
    *("--ema-decay=0.9", "--keep-checkpoints=5"),
)
ONE_REPLICA = ("--global-batch-size=60", "--simulated-devices=1")
TIMES = ("seconds", "examples_per_second", "goodput")


def random_model(*more: keras.layers.Layer) -> keras.Model:
    """Has dropout, and statistics of each replica's own."""
    return linear_model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), *more)


def run(run_dir: Path, *flags: str) -> dict[str, Any]:
    """Runs train.py to the end; returns its result without times."""
    result: Any = train.main([f"--run-dir={run_dir}", *flags])
    return {name: value for name, value in result.items() if name not in TIMES}


def rows(run_dir: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    """Returns the rows of a table without times."""
    with (run_dir / name).open(encoding="utf-8", newline="") as lines:
        return [{key: text for key, text in row.items() if key not in TIMES} for row in csv.DictReader(lines)]


@contextlib.contextmanager
def interrupted(chunks: int, problem: type[Exception]) -> Iterator[None]:
    """Raises `problem` where a run would look for a signal after so many chunks of steps."""
    left = iter(range(chunks))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise problem("by a test")

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Signals, "check", check)
        yield


def kill(chunks: int, run_dir: Path, *flags: str) -> None:
    """Runs train.py, which saves nothing more after so many chunks of steps."""
    with interrupted(chunks, InterruptedError), pytest.raises(InterruptedError):
        run(run_dir, *flags)


def stop(chunks: int, run_dir: Path, *flags: str) -> None:
    """Runs train.py, which is stopped as by a signal after so many chunks of steps."""
    with interrupted(chunks, Stopped), pytest.raises(SystemExit) as ended:
        run(run_dir, *flags)
    assert ended.value.code == 42
