"""A signal to a peer."""

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
