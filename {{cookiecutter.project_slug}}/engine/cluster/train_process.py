"""train.py as a process that another program starts, follows by its run's files, and stops. Needs no TensorFlow."""

import csv
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.cluster.launcher import SECONDS_TO_FOLLOW, start_program
from engine.cluster.nvidia import VISIBLE
from engine.files import read_json


class TrainProcess:
    """A run in a process of its own. On Linux it is killed when this process ends for any reason."""

    def __init__(self, arguments: Sequence[str], run_dir: Path, gpus: Sequence[str] = ()) -> None:
        """Starts it. `gpus` are the only ones that it sees, by their names in CUDA_VISIBLE_DEVICES; none: all.

        Its output is appended to a file beside `run_dir`, whose name ends in .log.
        """
        self._run_dir, self._log = run_dir, run_dir.with_name(f"{run_dir.name}.log")
        with self._log.open("ab") as log:
            environment = {VISIBLE: ",".join(gpus)} if gpus else {}
            self._popen = start_program([*arguments, f"--run-dir={run_dir}"], environment, log.fileno())

    def exit_code(self) -> int | None:
        """Returns the exit code, a signal as a negative number; None while it runs."""
        return self._popen.poll()

    def scores(self, column: str) -> dict[int, float]:
        """Returns the values of a column of metrics.csv by their epochs, which are counted from 1."""
        path = self._run_dir / "metrics.csv"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # The last row may be incomplete.
        return {int(row["epoch"]): float(row[column]) for row in rows if row.get(column)}

    def result(self) -> dict[str, Any]:
        """Returns the contents of result.json, {} if the run has not finished. Raises BadInput if it is damaged."""
        return read_json(self._run_dir / "result.json") or {}

    def error(self) -> str:
        """Returns why it has failed: the signal that killed it, or else the last line of the output.

        In that line RUN_DIR stands for the run's directory.
        """
        if (code := self.exit_code() or 0) < 0:
            return f"ended by {signal.Signals(-code).name}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit code {self.exit_code()}")
        return last.replace(str(self._run_dir), "RUN_DIR")

    def terminate(self) -> None:
        """Sends SIGTERM, by which it saves its state and ends."""
        self._popen.terminate()

    def stop(self) -> int:
        """Has it save its state and end; returns the exit code."""
        self.terminate()
        try:
            return self._popen.wait(SECONDS_TO_FOLLOW)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()


def stop_all(processes: Sequence[TrainProcess]) -> None:
    """Has all of them save their state at the same time; returns when they have ended."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.stop()
