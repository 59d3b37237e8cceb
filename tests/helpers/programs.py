"""Programs of rendered projects as forks of a process that has imported TensorFlow.

The import takes as long as all else that a short program does. What depends on how a program starts is tested with
processes of their own: `subprocess.run([sys.executable, "train.py"])`.
"""

import atexit
import functools
import multiprocessing
import multiprocessing.context
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What every project imports, and nothing of a project.
IMPORTED = ["tensorflow", "keras", "h5py", "matplotlib.figure", "numpy", "rich.progress", "sklearn.datasets", "tyro"]


@functools.cache
def _server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _run(arguments: Sequence[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    """Turns this process into `python <arguments>` in a folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    is_module = arguments[0] == "-m"
    sys.argv = [*arguments[is_module:]]
    first = folder if is_module else (folder / sys.argv[0]).parent
    sys.path = [str(first), *(each for each in sys.path if each != str(Path(__file__).parent))]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - It ends as Python ends a program.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them.
        sys.stdout.flush()


class Program:
    """`python <arguments>` in a folder, with the methods of Popen that tests use. `out`, `err` get its output."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, out: Path, err: Path, environment: dict[str, str] | None = None
    ) -> None:
        environment = dict(os.environ) if environment is None else environment
        given = ([*map(str, arguments)], folder, environment, out, err)
        self._process = _server().Process(target=_run, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    arguments: Sequence[str], folder: Path, environment: dict[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python <arguments>` in a folder to its end."""
    with tempfile.TemporaryDirectory() as written:
        out, err = Path(written, "out"), Path(written, "err")
        program = Program(arguments, folder, out, err, environment)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        texts = (path.read_text(encoding="utf-8") if path.exists() else "" for path in (out, err))
        return subprocess.CompletedProcess(["python", *arguments], code, *texts)
