"""train.py as a process that another program starts: one of a local cluster, or a trial. Imports no TensorFlow."""

import argparse
import contextlib
import csv
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine import PROJECT
from engine.cluster.environment import VISIBLE, Cluster, visible_gpus
from engine.errors import BadInput, CountedLoss, Diverged, PeerLost, Stopped

PROGRAM = PROJECT / "train.py"
# An environment variable that whatever restarts a stopped program sets to the same value for all restarts.
START_ID = "TRAINING_START_ID"
LOST_CODES = (PeerLost.exit_code, CountedLoss.exit_code)  # Another process is the cause.
FINAL_CODES = (BadInput.exit_code, Diverged.exit_code)  # Exit codes of train.py that a restart does not fix.
MOST = 1000  # Processes of one machine, or restarts.
# When one process ends by decision, the others do so too, but the first may have to write gigabytes before. When one
# dies, they do not.
SECONDS_TO_FOLLOW = 300.0
SECONDS_OF_THE_CAUSE = 20.0  # After a process has lost another one, that one ends within this time, or is frozen.
SECONDS_BETWEEN_CHECKS = 0.2
LONGEST_LINE = 1000
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # Loaded before any fork.


def start_program(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Starts train.py, which writes to the file descriptor `output`, and ends with this process on Linux."""
    return subprocess.Popen(
        [sys.executable, "-u", str(PROGRAM), *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal goes to this process only, which passes it on.
        start_new_session=True,
        # PR_SET_PDEATHSIG. A second thread, if there is one, only waits for signals.
        preexec_fn=_prctl and functools.partial(_prctl, 1, signal.SIGKILL),  # noqa: PLW1509
    )


class TrainProcess:
    """A run in a process of its own."""

    def __init__(self, arguments: Sequence[str], run_dir: Path, gpus: Sequence[str]) -> None:
        """Starts it. `gpus` are the only ones that it sees, by their names in CUDA_VISIBLE_DEVICES; none: all."""
        self.run_dir, self._log = run_dir, run_dir.with_name(f"{run_dir.name}.log")
        with self._log.open("ab") as log:
            self._start = log.tell()  # Earlier starts have written before.
            environment = {VISIBLE: ",".join(gpus)} if gpus else {}
            self.popen = start_program([*arguments, f"--run-dir={run_dir}"], environment, log.fileno())

    def scores(self, column: str) -> dict[int, float]:
        """Returns the values of a column of metrics.csv by epoch, from 1. Raises BadInput if the file is damaged."""
        path = self.run_dir / "metrics.csv"
        text = path.read_bytes() if path.exists() else b""
        try:
            # The last row may be incomplete.
            rows = csv.DictReader(text[: text.rfind(b"\n") + 1].decode().splitlines())
            return {int(row["epoch"]): float(row[column]) for row in rows if row.get(column)}
        except (ValueError, LookupError, TypeError, csv.Error):
            raise BadInput(f"{path} is damaged: restore it, or remove {self.run_dir} to start its run over") from None

    def error(self) -> str:
        """Returns the signal that killed it, or else the last line of its output, with RUN_DIR for its directory.

        After the traceback of an unexpected error, the line starts with "unexpected ".
        """
        if (code := self.popen.returncode) < 0:
            return f"ended by {signal.Signals(-code).name}"
        output = self._log.read_bytes()[self._start :].decode(errors="replace")
        last = next((line for line in reversed(output.split("\n")) if line.strip()), f"exit code {code}")
        is_unexpected = "Traceback (most recent call last)" in output and not last.startswith("ERROR: ")
        last = last.replace(str(self.run_dir), "RUN_DIR").removeprefix("ERROR: ")[:LONGEST_LINE]
        return "unexpected " * is_unexpected + last


def stop_all(processes: Sequence[TrainProcess]) -> None:
    """Has all of them save their state at the same time; returns when they have ended."""
    for process in processes:
        process.popen.terminate()
    for process in processes:
        try:
            process.popen.wait(SECONDS_TO_FOLLOW)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


class Process:
    """One process of the cluster. It can be started again after its end."""

    def __init__(self, cluster: Cluster, arguments: list[str], environment: dict[str, str]) -> None:
        self.job, self.index, self.name = cluster.job, cluster.index, cluster.name
        self._arguments, self._environment = arguments, {**environment, "TF_CONFIG": cluster.tf_config()}

    def start(self) -> None:
        self.popen = start_program(self._arguments, self._environment, subprocess.PIPE)
        assert self.popen.stdout is not None
        self._output, self._line = self.popen.stdout, b""
        os.set_blocking(self._output.fileno(), False)

    def death(self) -> str:
        """Returns how it has ended, for messages."""
        code = self.popen.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"

    def show(self, end: bytes = b"") -> None:
        """Prints the lines that it has completed, under its name."""
        *lines, self._line = (self._line + (self._output.read() or b"") + end).split(b"\n")
        for line in lines:
            print_line(self.name, line.decode(errors="replace"))

    def end(self) -> None:
        """Ends the process and its children at once; shows its last output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.show()
        self.show(end=b"\n" if self._line else b"")
        self._output.close()


def print_line(name: str, text: str) -> None:
    with contextlib.suppress(OSError, UnicodeError):  # Nobody reads it any more, or the console lacks a letter.
        print(f"[{name}] {text}", flush=True)


class Launcher:
    """Runs the cluster, restarts it if necessary, and passes on the signals that the launcher gets."""

    def __init__(self, options: argparse.Namespace, jobs: dict[str, int], visible: list[str]) -> None:
        """`visible` is each worker's CUDA_VISIBLE_DEVICES; it is empty on a machine without GPUs."""
        self._jobs, self._arguments, self._visible = jobs, options.arguments, visible
        self._restarts_left, self._min_workers = options.max_restarts, options.min_workers
        self._lost: Process | None = None  # The process because of which a start failed.
        os.environ.setdefault(START_ID, uuid.uuid4().hex)  # So --fresh moves only an older run aside.
        self._signal: int | None = None
        self._processes: list[Process] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Returns the exit code of the process that ended the cluster."""
        first_number = self._jobs["worker"]
        while True:
            code, number = self._run_once(), self._jobs["worker"]
            # A batch that is rejected on fewer workers may be taken by even fewer.
            is_rejected = code == BadInput.exit_code and number < first_number
            if code == 0 or (code in FINAL_CODES and not is_rejected) or self._signal:
                return code
            if not is_rejected and self._may_restart(f"ended with {code}"):
                continue
            if number <= self._min_workers:
                return code
            # Without the worker that failed, or the last one if all say that another one did.
            lost = self._lost or self._processes[-1]
            self._jobs = {**self._jobs, "worker": number - 1}
            if self._visible:  # Its GPUs may be the cause.
                del self._visible[lost.index]
            why = f"{number} workers ended with {code}" if is_rejected else f"{lost.name} is lost"
            print_line("launcher", f"{why}: resuming with {number - 1} worker(s)")

    def _may_restart(self, why: str) -> bool:
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        print_line("launcher", f"{why}: restarting (restarts left: {self._restarts_left})")
        return True

    def _pass_on(self, number: int, _: object) -> None:
        self._signal = number
        # Beside a chief the others only serve it, and end with it.
        for process in [process for process in self._processes if process.job == "chief"] or self._processes:
            process.popen.send_signal(number)

    def _run_once(self) -> int:
        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(sum(self._jobs.values()))]
        ports = iter([server.getsockname()[1] for server in free])
        addresses = {job: [f"127.0.0.1:{next(ports)}" for _ in range(number)] for job, number in self._jobs.items()}
        for server in free:
            server.close()
        self._processes, self._lost = [], None
        try:
            for job, number in self._jobs.items():
                for index in range(number):
                    # Only workers use GPUs, and each sees only its own.
                    visible = {VISIBLE: self._visible[index] if job == "worker" else "-1"} if self._visible else {}
                    process = Process(Cluster("launch.py", addresses, job, index), self._arguments, visible)
                    process.start()
                    self._processes.append(process)
            if self._signal:  # It came while the processes were started.
                self._pass_on(self._signal, None)
            return self._wait()
        finally:
            for process in self._processes:
                process.end()

    def _wait(self) -> int:
        """Shows the processes' output until the cluster has ended; returns its exit code."""
        # The exit code of the cause or the first to end, and how soon after it the others must have ended.
        ending, deadline, seconds = 0, float("inf"), 0.0
        running = list(self._processes)
        while running:
            time.sleep(SECONDS_BETWEEN_CHECKS)
            for process in self._processes:
                process.show()
            for process in [process for process in running if process.popen.poll() is not None]:
                running.remove(process)
                if self._replaces(process, running):
                    continue
                code = process.popen.returncode
                if code < 0:  # Python had not started when it got the signal of the launcher, or it was killed.
                    code = Stopped.exit_code if self._signal == -code else 128 - code
                is_cause = code not in (0, *LOST_CODES) and not self._lost
                if is_cause:
                    self._lost = process
                if is_cause or not ending:
                    seconds = SECONDS_OF_THE_CAUSE if code in LOST_CODES else SECONDS_TO_FOLLOW
                    ending, deadline = code, time.monotonic() + seconds
                    # Stopped by a signal of its own before the rendezvous, where the others would wait for it.
                    if code == Stopped.exit_code and not self._signal:
                        for waiting in running:
                            waiting.popen.terminate()
                if code not in (0, Stopped.exit_code, *LOST_CODES, *FINAL_CODES):
                    print_line("launcher", process.death())
                    return ending
                if process.job == "chief":
                    return code
            if time.monotonic() > deadline:
                self._lost, names = running[0], ", ".join(process.name for process in running)
                print_line("launcher", f"{names} did not end within {seconds:g} s of the others")
                return ending or 1
        return ending

    def _replaces(self, process: Process, running: list[Process]) -> bool:
        """Restarts a worker that has ended beside a chief, or leaves its work to the others; returns whether."""
        if "chief" not in self._jobs or process.job != "worker" or self._signal:
            return False
        if self._may_restart(process.death()):
            process.end()
            process.start()
            running.append(process)
            return True
        if any(process.job == "worker" for process in running):
            print_line("launcher", f"{process.death()}: the others continue")
            return True
        return False


def main(description: str) -> int:
    """Runs the cluster that the command line asks for; returns its exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="processes that train")
    parser.add_argument("--parameter-servers", type=int, default=0, help="processes that keep the weights")
    parser.add_argument("--max-restarts", type=int, default=0, help="restarts after a process has died or was stopped")
    parser.add_argument("--min-workers", type=int, help="without restarts left, continue with as few; default: all")
    parser.add_argument("arguments", nargs="*", help="after --: the arguments of train.py")
    options = parser.parse_args()
    for name, least in (("workers", 1), ("parameter_servers", 0), ("max_restarts", 0)):
        if not least <= (value := getattr(options, name)) <= MOST:
            parser.error(f"--{name.replace('_', '-')} {value} must be from {least} to {MOST}")
    workers, gpus, jobs = options.workers, visible_gpus(os.environ), {"worker": options.workers}
    if options.min_workers and options.parameter_servers:
        parser.error("--min-workers cannot be combined with --parameter-servers, whose chief continues by itself")
    options.min_workers = options.min_workers or workers
    if not 1 <= options.min_workers <= workers:
        parser.error(f"--min-workers {options.min_workers} must be from 1 to the number of --workers")
    if options.parameter_servers:
        jobs = {"chief": 1, **jobs, "ps": options.parameter_servers}
        options.arguments.insert(0, "--strategy=parameter_server")
    shares = [gpus[len(gpus) * index // workers : len(gpus) * (index + 1) // workers] for index in range(workers)]
    visible = [",".join(share) or "-1" for share in shares] if gpus else []
    return Launcher(options, jobs, visible).run()
