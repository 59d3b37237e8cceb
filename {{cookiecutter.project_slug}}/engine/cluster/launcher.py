"""python launch.py: a local cluster of processes that run train.py together, kept running. Needs no TensorFlow."""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from engine.cluster.nvidia import VISIBLE, visible_gpus
from engine.errors import BadInput, Diverged, Stopped

PROGRAM = Path(__file__).parents[2] / "train.py"

# Exit codes of train.py that another start does not fix: bad input, and a loss that is not finite.
FINAL_CODES = (BadInput.exit_code, Diverged.exit_code)
# The others follow a process that has decided to end: they know the same. They do not follow one that died.
SECONDS_TO_FOLLOW = 60.0
SECONDS_BETWEEN_CHECKS = 0.2


class Task:
    """One process of the cluster."""

    def __init__(
        self, job: str, index: int, cluster: dict[str, list[str]], arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.job = job
        self.name = f"{job} {index}" if job != "chief" else job
        self._command = [sys.executable, "-u", str(PROGRAM), *arguments]
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        self._environment = {**os.environ, **environment, "TF_CONFIG": config}

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal goes to the launcher only, which passes it on.
            start_new_session=True,
            preexec_fn=_end_with_launcher,  # noqa: PLW1509 - There is one thread.
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self._line = b""

    def show(self) -> bytes | None:
        """Prints what the process has written, line by line under its name.

        Returns what it read: None if there is nothing now, b"" if there will be nothing any more.
        """
        try:
            data = os.read(self.process.stdout.fileno(), 2**16)
        except BlockingIOError:
            return None
        *lines, self._line = (self._line + data).split(b"\n")
        if not data and self._line:
            lines, self._line = [self._line], b""
        for line in lines:
            print_line(self.name, line.decode(errors="replace"))
        return data

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Ends the process, and what it has started, at once; shows what it has written last."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while self.show():
            pass
        self.process.stdout.close()


def print_line(name: str, text: str) -> None:
    with contextlib.suppress(OSError, UnicodeError):  # Nobody reads it any more, or the console has no such letters.
        print(f"[{name}] {text}", flush=True)


def _end_with_launcher() -> None:
    """Has Linux end this child when the launcher is gone, however it went; elsewhere it has to be ended by hand."""
    if _prctl:
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != _LAUNCHER:
            os._exit(1)


_LAUNCHER = os.getpid()
# Loaded before any fork.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Launcher:
    """Runs the cluster, again if need be, and knows which signal has come to the launcher itself."""

    def __init__(
        self, workers: int, servers: int, max_restarts: int, arguments: Sequence[str], shares: list[list[str]]
    ) -> None:
        """`shares` are the GPUs of each worker; none on a machine that has none."""
        self._jobs = {"chief": 1, "worker": workers, "ps": servers} if servers else {"worker": workers}
        self._shares = shares
        self._restarts_left = max_restarts
        self._arguments = ["--strategy=parameter_server", *arguments] if servers else list(arguments)
        self._selector = selectors.DefaultSelector()
        # One for all lives, so that --fresh, in the first of them, does not move the run aside in the next.
        os.environ.setdefault("TRAINING_START_ID", uuid.uuid4().hex)
        self._signal: int | None = None
        self._tasks: list[Task] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Returns the exit code of the cluster: of the process that ended it."""
        while True:
            code = self._run_once()
            if code == 0 or code in FINAL_CODES or self._signal or not self._may_restart(f"ended with {code}"):
                return code

    def _may_restart(self, why: str) -> bool:
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        print_line("launcher", f"{why}: starting again, {self._restarts_left} restarts left")
        return True

    def _pass_on(self, number: int, _: object) -> None:
        self._signal = number
        # Beside a chief the others only serve it, and end with it.
        for task in [task for task in self._tasks if task.job == "chief"] or self._tasks:
            task.send(number)

    def _run_once(self) -> int:
        addresses = iter(_free_addresses(sum(self._jobs.values())))
        cluster = {job: [next(addresses) for _ in range(number)] for job, number in self._jobs.items()}
        self._tasks = []
        try:
            for job, number in self._jobs.items():
                for index in range(number):
                    task = Task(job, index, cluster, self._arguments, self._visible_gpus(job, index))
                    self._start(task)
                    self._tasks.append(task)
            if self._signal:  # It came while they were started.
                self._pass_on(self._signal, None)
            return self._wait()
        finally:
            for task in self._tasks:
                self._end(task)

    def _visible_gpus(self, job: str, index: int) -> dict[str, str]:
        """Returns the variable that lets a process see its GPUs only: a worker its share, any other one none."""
        if not self._shares:
            return {}
        return {VISIBLE: (",".join(self._shares[index]) if job == "worker" else "") or "-1"}

    def _start(self, task: Task) -> None:
        task.start()
        self._selector.register(task.process.stdout, selectors.EVENT_READ, task)

    def _end(self, task: Task) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(task.process.stdout)
        task.end()

    def _wait(self) -> int:
        """Shows what the processes write until the cluster has ended; returns its exit code."""
        ending: int | None = None  # The exit code of the first that ended, if the others are to follow it.
        deadline = float("inf")
        running = list(self._tasks)
        while running:
            for key, _ in self._selector.select(timeout=SECONDS_BETWEEN_CHECKS):
                if key.data.show() == b"":
                    self._selector.unregister(key.fileobj)
            for task in [task for task in running if task.process.poll() is not None]:
                running.remove(task)
                code = task.process.returncode
                if code < 0:
                    death = f"{task.name} was ended by {signal.Signals(-code).name}"
                    if self._replaces(task, death, running):
                        continue
                    print_line("launcher", death)
                    return ending or 128 - code
                if task.job == "chief":
                    return code
                if code not in (0, Stopped.exit_code, *FINAL_CODES):
                    print_line("launcher", f"{task.name} ended with exit code {code}")
                    return ending or code
                if ending in (None, 0):
                    ending, deadline = code, time.monotonic() + SECONDS_TO_FOLLOW
            if time.monotonic() > deadline:
                names = ", ".join(task.name for task in running)
                print_line("launcher", f"{names} did not end within {SECONDS_TO_FOLLOW:g} s of the others")
                return ending or 1
        return ending or 0

    def _replaces(self, task: Task, death: str, running: list[Task]) -> bool:
        """Starts a worker again that was killed beside a chief, or leaves its work to the others; returns whether."""
        if "chief" not in self._jobs or task.job != "worker" or self._signal:
            return False
        if self._may_restart(death):
            self._end(task)
            self._start(task)
            running.append(task)
            return True
        if any(other.job == "worker" for other in running):
            print_line("launcher", f"{death}: the others go on")
            return True
        return False


def _free_addresses(number: int) -> list[str]:
    """Returns addresses of this machine at which nothing listens."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]


# --- The command line -------------------------------------------------------------------------------------------------


def main(description: str) -> int:
    """Runs the cluster that the command line asks for; returns its exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="processes that train")
    parser.add_argument("--parameter-servers", type=int, default=0, help="processes that hold the weights")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often to start again what a death has ended")
    parser.add_argument("arguments", nargs="*", help="after --: the arguments of train.py")
    options, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"{unknown[0]} is not the launcher's: what goes to train.py comes after --")
    for flag, least in (("--workers", 1), ("--parameter-servers", 0), ("--max-restarts", 0)):
        if (value := getattr(options, flag[2:].replace("-", "_"))) < least:
            parser.error(f"{flag} {value} has to be {least} or more")
    shares: list[list[str]] = []
    if gpus := visible_gpus(os.environ):
        # Hidden from all processes with simulated devices, so that none takes memory of a GPU.
        gpus = [] if _simulates_devices(options.arguments) else gpus
        if len(gpus) % options.workers:
            fitting = [str(number) for number in range(1, len(gpus) + 1) if len(gpus) % number == 0]
            parser.error(
                f"--workers {options.workers} cannot share {len(gpus)} GPU(s) ({', '.join(gpus)}) equally: use "
                f"{' or '.join(fitting)} worker(s), or choose the GPUs with {VISIBLE}; {VISIBLE}=-1 leaves them all out"
            )
        size = len(gpus) // options.workers
        shares = [gpus[index * size : (index + 1) * size] for index in range(options.workers)]
    launcher = Launcher(options.workers, options.parameter_servers, options.max_restarts, options.arguments, shares)
    return launcher.run()


def _simulates_devices(arguments: Sequence[str]) -> bool:
    """Returns whether --simulated-devices among the arguments of train.py asks for any."""
    given = "0"
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == "--simulated-devices":
            given = value or following
    return given != "0"
