"""Signals after the stop of a peer, and to the processes that a hook forks."""

import importlib
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import Stopped, end_at_signals
from engine.run.signals import Signals, signals


def test_own_signal_after_the_stop_of_a_peer_does_not_end_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: Any = SimpleNamespace(names_where=lambda flag: ["worker 1"])
    monkeypatch.setattr(importlib.import_module("engine.run.signals"), "SECONDS_AS_ONE", 0.05)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    end_at_signals()  # As the program does.
    with (own := Signals()).listening():
        with pytest.raises(Stopped, match="stopped by a signal to worker 1"):
            own.check(workers)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # Nor does one that comes afterwards.
    for number, handler in before.items():
        signal.signal(number, handler)


def test_processes_that_a_hook_forks_do_not_listen() -> None:
    reading, writing = os.pipe()

    def fork() -> int:
        if process := os.fork():
            os.read(reading, 1)
            return process
        os.write(writing, b"1")
        time.sleep(60)
        os._exit(0)

    with signals.listening():
        first, second = fork(), fork()
        os.kill(first, signal.SIGTERM)  # As the end of a multiprocessing.Pool does.
        assert os.WTERMSIG(os.waitpid(first, 0)[1]) == signal.SIGTERM
        assert signals.signal is None
    # The listening has ended, though another one still runs.
    os.close(reading)
    os.close(writing)
    os.kill(second, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(second, 0)[1]) == signal.SIGTERM
