"""TensorFlow's start in a cluster: it ends in time, and signals that come meanwhile are obeyed after it.

TensorFlow waits in it for the other processes without limit, even if one of them is gone. Until it returns, no thread
and no signal handler of Python can run. It also replaces the handler of SIGTERM.
"""

import concurrent.futures
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.cluster.environment import Cluster, find_cluster
from engine.cluster.rendezvous import kind_of_loss, lost
from engine.errors import SIGNALS, CountedLoss, PeerLost

PROJECT = Path(__file__).parents[2]
# The processes start together: calculated, 1,000 of them leave the rendezvous within about 10 s. TensorFlow needs a
# second, on a busy machine or with many GPUs perhaps 20.
MOST_SECONDS = 60.0
SECONDS_TO_WAIT = 0.05  # After which the main thread waits for signals.

Started = TypeVar("Started")


def start_tensorflow(cluster: Cluster, timeout: float, start: Callable[[], Started]) -> Started:
    """Sets TF_CONFIG, and returns what `start` returns.

    Ends the process as PeerLost does if that takes MOST_SECONDS, or `timeout` seconds if they are fewer. So do the
    others, and all can be started again.
    """
    os.environ["TF_CONFIG"] = cluster.tf_config()
    # Python code cannot run here, so another process prints the line and sends a signal. The C function _exit handles
    # it, whose argument, the number of the signal, becomes the exit code.
    c = ctypes.CDLL(None)
    for loss in (PeerLost, CountedLoss):
        c.signal(loss.exit_code, ctypes.cast(c._exit, ctypes.c_void_p))
    code = f"from {__name__} import end_late; end_late({os.getpid()}, {min(timeout, MOST_SECONDS)})"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}  # Nothing filters its output.
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, cwd=PROJECT, stdin=subprocess.PIPE, start_new_session=True):
        return _keeping_signals(start)  # Then stdin is closed, which ends the other process.


def end_late(process: int, seconds: float) -> None:
    """Ends a process after some seconds, and prints why; returns if stdin is closed before."""
    cluster = find_cluster(os.environ)
    if select.select([0], [], [], seconds)[0] or cluster is None:
        return
    gone = ", ".join(lost(cluster))
    print(
        f"ERROR: TensorFlow did not start on all of {', '.join(cluster.processes())} within {seconds:g} s "
        f"({gone or 'one of them hangs or is too slow'}): check its log, then start the same command, without --fresh, "
        "on all",
        file=sys.stderr,
        flush=True,
    )
    code = kind_of_loss(cluster, gone).exit_code
    os.kill(process, code if code < signal.NSIG else signal.SIGKILL)  # Only Linux has signals of these numbers.


def _keeping_signals(start: Callable[[], Started]) -> Started:
    """Returns what `start` returns; signals that come meanwhile are handled then."""
    if threading.current_thread() is not threading.main_thread():
        return start()  # Python handles signals in the main thread only.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    main_thread, over = threading.get_ident(), signal.SIGURG  # Where no thread waits for it, it is ignored.
    awaited = {*SIGNALS, over}

    def started() -> Started:
        try:
            time.sleep(SECONDS_TO_WAIT)
            return start()
        finally:
            signal.pthread_kill(main_thread, over)

    # Linux gives a signal to the main thread if that waits for it, otherwise to a thread that does not block it. NumPy
    # has such threads, and there TensorFlow's handler would swallow it. So the main thread waits while another one
    # starts TensorFlow.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        result = thread.submit(started)
        received = list(iter(lambda: signal.sigwait(awaited), over))
        for signal_, handler in handlers.items():
            signal.signal(signal_, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number in dict.fromkeys(received):
        signal.raise_signal(number)
    return result.result()
