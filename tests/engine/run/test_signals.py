"""Signals to a peer, and to the processes that a hook forks."""

import subprocess
import sys

from rendering import PROJECT, run


def test_own_signal_after_the_stop_of_a_peer_does_not_end_the_save() -> None:
    program = """
import os, signal, time
from engine.errors import Stopped, end_at_signals
from engine.run.signals import Signals

class Workers:
    def names_where(self, flag):
        return ["worker 1"]

end_at_signals()
with (signals := Signals()).listening():
    try:
        signals.check(Workers())
    except Stopped as stopped:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        print(stopped)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run("python", "-c", program, folder=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "stopped by a signal to worker 1" in done.stdout


POOL = """
import multiprocessing
from engine.run.signals import signals

with signals.listening():
    with multiprocessing.get_context("fork").Pool(2) as pool:  # Its end sends SIGTERM to its processes.
        assert pool.map(abs, [-1, 2]) == [1, 2]
    left = multiprocessing.get_context("fork").Pool(1)
    assert signals.signal is None
print("ended")
left.terminate()
"""


def test_processes_that_a_hook_forks_do_not_listen() -> None:
    command = [sys.executable, "-c", POOL]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
