"""The other processes of the cluster: which of them are lost, and how this process ends then."""

import concurrent.futures
import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from engine import PROJECT
from engine.cluster.environment import Cluster, find_cluster, host_and_port
from engine.errors import DIFFERENT_CALLS, SIGNALS, BadInput, CountedLoss, PeerLost, is_broken_connection

GONE, FROZEN = "is gone", "does not answer, perhaps because it is frozen"
NOT_TOGETHER = (
    "the workers no longer do the same{}: a condition in train.py or a hook (a clock, a file, the environment) differs "
    "between them; decide it together, by `if run.on_any_worker(condition):`"
)
SECONDS_UNTIL_GONE = 5.0  # A process that is ending may be silent, or keep its port, for a moment.
SECONDS_BETWEEN_LOOKS = 0.2
# The processes start together: calculated, 1,000 of them leave the rendezvous within about 10 s. TensorFlow needs a
# second, on a busy machine or with many GPUs perhaps 20.
MOST_SECONDS_TO_START = 60.0

Started = TypeVar("Started")


def lost(cluster: Cluster, names: Collection[str] = ()) -> dict[str, str]:
    """Returns which of the other processes are lost, by their names: GONE or FROZEN. Looks at `names`, or all."""
    states, addresses = {}, cluster.others()
    for name in names or addresses:
        try:
            with socket.create_connection(host_and_port(addresses[name]), timeout=2.0) as connection:
                # A gRPC server speaks first. The system also accepts connections for a stopped process. A process that
                # was started again waits in the rendezvous, where it sends JSON.
                if connection.recv(1) in (b"", b"{"):
                    states[name] = GONE
        except TimeoutError:
            states[name] = FROZEN
        except OSError:
            states[name] = GONE
    return states


def describe(cluster: Cluster, states: dict[str, str]) -> str:
    """Returns "worker 1 (ADDRESS) is gone, ..."."""
    addresses = cluster.processes()
    return ", ".join(f"{name} ({addresses[name]}) {state}" for name, state in states.items())


def loss(cluster: Cluster, states: dict[str, str], text: str) -> PeerLost:
    """Returns the error with which this process ends, because others are lost, as `lost` returns them.

    The end of a process that is gone is counted. One that does not answer may never end, and if none is known, one of
    them hangs: then the first of the others is counted. It may be gone by now, because it ended for the same reason.
    """
    unanswered = [name for name, state in states.items() if state != GONE]
    first = next(name for name in cluster.processes() if name not in unanswered)
    is_counted = first == cluster.name and (unanswered or not states)
    return CountedLoss(text) if is_counted else PeerLost(text)


def did_not_join(cluster: Cluster, names: list[str], timeout: float) -> PeerLost:
    """Returns the error with which this process ends, because others have not joined within `timeout` seconds."""
    states = dict.fromkeys(names, "did not join")
    late = f"{describe(cluster, states)} within {timeout:g} s (--cluster-timeout)"
    return loss(cluster, states, f"{late}: check its log, and that {cluster.name} can reach that address")


@contextlib.contextmanager
def peers_named() -> Iterator[None]:
    """Turns TensorFlow's errors about other processes into one line.

    A broken connection becomes PeerLost, which names the process that is gone; different calls become BadInput.
    """
    import tensorflow as tf  # Imported here, because `end_late` needs to start fast.

    try:
        yield
    except tf.errors.OpError as problem:
        text, cluster = str(problem), find_cluster(os.environ)
        if DIFFERENT_CALLS.search(text):
            raise BadInput(NOT_TOGETHER.format("")) from problem
        # What the others get when a step fails on one worker may have the class of that failure.
        if cluster is None or not (is_broken_connection(problem) or "Collective ops is abort" in text):
            raise
        deadline = time.monotonic() + SECONDS_UNTIL_GONE
        while set((states := lost(cluster)).values()) != {GONE} and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if not states:
            states = dict.fromkeys(_accused(text, cluster), "does not answer, or failed")
        if not states and "Collective ops is aborted" not in text:
            raise
        missing = describe(cluster, states) or "another worker does not answer, or failed"
        frozen = "; or this process was frozen for 10 s or more" if GONE in states.values() else ""
        line = (
            f"{missing}{frozen}: check its log, then start the same command, without --fresh, on all; everything saved "
            "is intact"
        )
        raise loss(cluster, states, line) from problem


def _accused(message: str, cluster: Cluster) -> list[str]:
    """Returns the other processes that TensorFlow's message names."""
    names = [f"{job} {index}" for job, index in re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", message)]
    if "CoordinationService" in message:  # The first worker runs it.
        names.append(next(iter(cluster.processes())))
    return [name for name in dict.fromkeys(names) if name in cluster.others()]


def start_tensorflow(cluster: Cluster, timeout: float, start: Callable[[], Started]) -> Started:
    """Sets TF_CONFIG, and returns what `start` returns; signals that come meanwhile are obeyed then.

    TensorFlow waits in `start` for the others without limit, even if one of them is gone. This ends the process as
    PeerLost does if that takes MOST_SECONDS_TO_START, or `timeout` seconds if they are fewer. So do the others, and all
    can be started again.
    """
    os.environ["TF_CONFIG"] = cluster.tf_config()
    # No thread and no signal handler of Python can run here, so another process prints the line and sends a signal. The
    # C function _exit handles it, whose argument, the number of the signal, becomes the exit code.
    c = ctypes.CDLL(None)
    for kind in (PeerLost, CountedLoss):
        c.signal(kind.exit_code, ctypes.cast(c._exit, ctypes.c_void_p))
    code = f"from {__name__} import end_late; end_late({os.getpid()}, {min(timeout, MOST_SECONDS_TO_START)})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, start_new_session=True):
        return _keeping_signals(start)  # Then stdin is closed, which ends the other process.


def end_late(process: int, seconds: float) -> None:
    """Ends a process after some seconds, and prints why; returns if stdin is closed before."""
    cluster = find_cluster(os.environ)
    if select.select([0], [], [], seconds)[0] or cluster is None:
        return
    states = lost(cluster)
    line = (
        f"TensorFlow did not start on all of {', '.join(cluster.processes())} within {seconds:g} s "
        f"({describe(cluster, states) or 'one of them hangs or is too slow'}): check its log, then start the same "
        "command, without --fresh, on all"
    )
    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    code = loss(cluster, states, line).exit_code
    os.kill(process, code if code < signal.NSIG else signal.SIGKILL)  # Only Linux has signals of these numbers.


def _keeping_signals(start: Callable[[], Started]) -> Started:
    if threading.current_thread() is not threading.main_thread():
        return start()  # Python handles signals in the main thread only.
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    main_thread, over = threading.get_ident(), signal.SIGURG  # Where no thread waits for it, it is ignored.
    awaited = {*SIGNALS, over}

    # TensorFlow replaces the handler of SIGTERM by its own, which would swallow it. Linux gives a signal to the main
    # thread if that waits for it, otherwise to a thread that does not block it, such as those of NumPy. So the main
    # thread waits while another one starts TensorFlow.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # It first sleeps until the main thread waits.
    with concurrent.futures.ThreadPoolExecutor(1, initializer=time.sleep, initargs=(0.05,)) as thread:
        result = thread.submit(start)
        result.add_done_callback(lambda _: signal.pthread_kill(main_thread, over))
        received = list(iter(lambda: signal.sigwait(awaited), over))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for signal_ in dict.fromkeys(received):
        signal.raise_signal(signal_)
    return result.result()
