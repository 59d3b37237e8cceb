"""How many steps one execution runs."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from config import Config
from engine.run import passes
from engine.run.passes import Executions


def executions(
    from_chief: Callable[[Callable[[], int]], int] = lambda length: length(), count: int = 1, **settings: Any
) -> Executions:
    """Returns those of a process whose own numbers are the chief's, unless `from_chief` says otherwise."""
    workers = SimpleNamespace(from_chief=from_chief, is_chief=True, count=count)
    return Executions(Config(**settings), workers)


@pytest.mark.parametrize(
    ("workers", "all_reduce", "waits", "told"),
    [
        (1, "", True, ""),
        (2, "", True, "worker 1 has waited 0.01 s for examples of 'train', and the other processes wait for it"),
        (2, "", False, "No step has ended for 0.01 s on worker 1. Another process may wait for its examples"),
        (1, "nccl", False, "If NCCL hangs, set NCCL_DEBUG=INFO to see where"),
    ],
)
def test_steps_that_wait_for_long_are_reported(
    workers: int, all_reduce: str, waits: bool, told: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(passes, "SECONDS_WITHOUT_AN_END", 0.01)
    names = ["worker 0", "worker 1"][:workers]
    cluster = SimpleNamespace(names=names, count=workers, index=workers - 1, is_chief=True)
    with Executions(Config(), cluster, all_reduce).watched("train", SimpleNamespace(is_waiting=waits)):
        time.sleep(0.3)
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == bool(told)


def lengths(ran: Executions, split: str, calls: int, seconds_of_step: float) -> list[int]:
    """Returns how many steps each of `calls` executions ran, if the first one took 10 seconds more, to compile."""
    counts = []
    for call in range(calls):
        count = ran.length(split, left=10**6, step=0)
        ran.took(split, count, count * seconds_of_step + (0 if call else 10))
        counts.append(count)
    return counts


def test_automatic_length_doubles_to_a_second_s_worth() -> None:
    for seconds_of_step, expected in ((0.0001, [1, 1, 2, 4, 8, 16, 32]), (0.18, [1, 1, 2, 4, 5, 5, 5]), (3, [1] * 7)):
        ran = executions(steps_per_execution="auto")
        assert lengths(ran, "train", 7, seconds_of_step) == expected
        # Each split has its own.
        assert lengths(ran, "validation", 7, 0.1) == [1, 1, 2, 4, 8, 10, 10]


def test_automatic_length_of_several_workers_is_of_five_seconds() -> None:
    ran = executions(count=2, steps_per_execution="auto")
    assert lengths(ran, "train", 7, 0.25) == [1, 1, 2, 4, 8, 16, 20]


def test_given_length_stays_and_a_shorter_execution_does_not_change_another() -> None:
    ran = executions(steps_per_execution=7)
    assert lengths(ran, "train", 2, 0.001) == [7, 7]
    assert ran.length("train", left=2, step=0) == 2
    ran = executions(steps_per_execution="auto")
    lengths(ran, "train", 4, 0.0001)
    ran.took("train", 2, 100)
    assert ran.length("train", left=100, step=0) == 8


def test_length_is_the_chief_s_on_every_worker() -> None:
    ran = executions(lambda value: 3, steps_per_execution="auto")
    assert ran.length("train", left=100, step=0) == 1
    ran.took("train", 1, 0.001)
    assert ran.length("train", left=100, step=0) == 3
