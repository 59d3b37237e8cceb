"""TensorFlow's start: code that lets no other Python code run, as TensorFlow's does, in a process of its own."""

import signal
import socket
import subprocess
import sys

from processes import is_alive, until

from rendering import PROJECT

# PyDLL keeps Python's lock while C code runs. As TensorFlow does, that code takes SIGTERM for itself.
PROGRAM = """
import ctypes, os, sys, threading, time
from engine.cluster.environment import Cluster
from engine.cluster.peers import start_tensorflow
from engine.errors import end_at_signals

end_at_signals()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # Could get the signals, as NumPy's threads could.
c, ignore = ctypes.PyDLL(None), 1

def start():
    for child in open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read().split():
        if "end_late" in open(f"/proc/{{child}}/cmdline").read():
            print(child, end=" ", flush=True)
    c.signal({number}, ignore)
    print("starts", flush=True)
    c.sleep({sleep})
    return "in time"

cluster = Cluster("TF_CONFIG", {{"worker": ["127.0.0.1:{port}", "127.0.0.1:{other}"]}}, "worker", 0)
print(start_tensorflow(cluster, {seconds}, start), flush=True)
time.sleep(1)
print("not reached by a signal")
"""


def starting(sleep: float, seconds: float, other: int = 1) -> subprocess.Popen[str]:
    program = PROGRAM.format(sleep=sleep, seconds=seconds, number=int(signal.SIGTERM), port=2, other=other)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=pipe, stderr=pipe, text=True)


def test_start_that_takes_too_long_ends_the_process_and_names_who_is_gone() -> None:
    late = "ERROR: TensorFlow did not start on all of worker 0, worker 1 within 0.5 s "
    process = starting(60, 0.5)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out.split()[-1]) == (43, "starts")
    assert err.splitlines()[-1].startswith(f"{late}(worker 1 (127.0.0.1:1) is gone): check its log")
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = starting(60, 0.5, other=server.getsockname()[1])
        server.accept()[0].send(b"\0")  # A process that hangs answers, too.
        _, err = process.communicate(timeout=50)
    assert process.returncode == 44  # Otherwise nobody's end would be counted.
    assert err.splitlines()[-1].startswith(f"{late}(one of them hangs or is too slow): check its log")


def test_process_that_prints_the_line_ends_with_the_one_that_starts() -> None:
    process = starting(60, 40)
    child = int(process.stdout.readline().split()[0])
    assert is_alive(child)
    process.kill()
    until(lambda: not is_alive(child), seconds=20)
    process.communicate()


def test_signal_during_the_start_is_obeyed_after_it_and_nothing_is_left_behind() -> None:
    process = starting(2, 30)
    child, _ = process.stdout.readline().split()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out) == (42, "")
    assert err.startswith("stopped by SIGTERM")
    until(lambda: not is_alive(int(child)), seconds=20)
