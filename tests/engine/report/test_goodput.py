"""goodput.json over several starts, some of which are killed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.console import goodput_text
from engine.report import report as module
from engine.report.report import Goodput
from engine.run.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, as the test sets it."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


def train(progress: Progress, clock: SimpleNamespace, seconds: float, waited: float) -> None:
    clock.now += seconds
    progress.add("train", 10, seconds, waited)


def start(folder: Path, progress: Progress, clock: SimpleNamespace, seconds: float = 9.0) -> Goodput:
    began = clock.now
    made = Goodput(folder, progress.spent, began)
    clock.now += seconds
    progress.spend("starting", seconds)
    return made


def test_seconds_of_all_starts_are_added_up(tmp_path: Path, clock: SimpleNamespace) -> None:
    progress = Progress()
    first = start(tmp_path, progress, clock)
    train(progress, clock, 20.0, waited=5.0)
    clock.now += 2.0
    progress.spend("saving", 2.0)
    saved = json.dumps(progress.record())
    train(progress, clock, 7.0, waited=1.0)  # Done again by the second start, as what follows.
    clock.now += 4.0
    progress.add("validation", 3, 4.0, 0.0)
    clock.now += 3.0  # A hook.
    first.write(progress.spent, is_due=True)
    clock.now += 500.0  # It is killed, and nothing runs.

    # This one is killed before it saves anything.
    progress = Progress(**json.loads(saved))
    second = start(tmp_path, progress, clock)
    train(progress, clock, 6.0, waited=0.0)
    second.write(progress.spent, is_due=True)

    progress = Progress(**json.loads(saved))
    third = start(tmp_path, progress, clock)
    train(progress, clock, 8.0, waited=0.5)
    found = third.record(progress.spent)
    assert found["starts"] == 3
    expected = {"training": 15.0 + 7.5, "waiting": 5.5, "evaluating": 0.0, "repeated": 7.0 + 4.0 + 6.0}
    expected |= {"starting": 27.0, "saving": 2.0, "other": 3.0}
    assert found["seconds"] == pytest.approx(expected)
    assert found["fraction"] == pytest.approx(22.5 / sum(expected.values()), abs=1e-4)
    assert goodput_text(found).startswith("29 % of 77.0 s in 3 starts were training steps that count (starting 35 %, r")
