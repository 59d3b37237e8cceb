"""How many steps one execution runs."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from config import Config
from engine.run import passes
from engine.run.passes import Executions, Pass
from engine.run.progress import Progress


def executions(
    from_chief: Callable[[Callable[[], int]], int] = lambda length: length(),
    count: int = 1,
    clock: tf.Variable | None = None,
    **settings: Any,
) -> Executions:
    """Returns those of a process whose own numbers are the chief's, unless `from_chief` says otherwise."""
    workers = SimpleNamespace(from_chief=from_chief, is_chief=True, check_all_do=lambda *_: [0.0] * count, count=count)
    return Executions(Config(**settings), workers, clock=clock)


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


def test_executions_of_training_end_at_multiples() -> None:
    ran = executions(steps_per_execution=20, checkpoint_every_steps=30, validate_every_steps=12)
    ends = [0]
    while ends[-1] < 60:
        ends.append(ends[-1] + ran.length("train", left=100, step=ends[-1]))
    assert ends == [0, 12, 24, 30, 36, 48, 60]
    assert ran.length("validation", left=100, step=11) == 20


def test_length_is_the_chief_s_on_every_worker() -> None:
    ran = executions(lambda value: 3, steps_per_execution="auto")
    assert ran.length("train", left=100, step=0) == 1
    ran.took("train", 1, 0.001)
    assert ran.length("train", left=100, step=0) == 3


def test_workers_exchange_how_long_they_have_waited() -> None:
    sent: list[float] = []
    clock = tf.Variable(0.0, dtype=tf.float64)
    ran = executions(count=2, clock=clock, steps_per_execution=2)
    ran.workers.check_all_do = lambda _, number: sent.append(number) or np.array([number, 0.0])
    iterator = SimpleNamespace(
        seconds_waited=0.0, plan=lambda count: [count], take=lambda count: iter([(None, 0, count)])
    )
    batches: Any = SimpleNamespace(name="train", split="train", steps_per_epoch=6, global_batch_size=2)
    batches.iterator, batches.examples_in = lambda *_, **__: iterator, lambda *_: 4
    steps = Pass(batches, 0, Progress(), ran)
    for _ in range(3):
        clock.assign_add(10.0)  # An evaluation waits too.
        list(steps.next_execution())
        clock.assign_add(0.25)
        steps.record([np.ones(2)])
    # The first execution does not count, because it compiles.
    assert sent == [0.0, 0.0, 0.25]
    waited, seconds = ran.waiting
    assert waited.tolist() == [0.25, 0.0]
    assert seconds > 0
