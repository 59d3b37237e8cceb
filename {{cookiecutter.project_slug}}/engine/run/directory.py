"""The directory of a run: whether it can be used, by one program at a time."""

import contextlib
import errno
import functools
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import filelock

from engine.cluster.launcher import START_ID
from engine.console import console
from engine.errors import BadInput, Stopped, Unavailable, may_pass
from engine.machine import changes_since
from engine.run.checkpoint_files import checkpoint_paths
from engine.settings import CONFIG, Settings, read_config
from engine.signals import signals

RESULT = "result.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
SECONDS_OF_LEASE = 120.0  # A server of NFS keeps the locks of a dead machine for about 90 s.


class Directory:
    """The directory of a run. As a context manager it keeps other programs out, from `lock` or `open` to its end."""

    def __init__(self, settings: Settings) -> None:
        """Changes nothing; the directory need not exist."""
        self.path, self.settings = settings.run_dir, settings
        # The fallback is a file that a killed run leaves behind, which another machine would respect for ever.
        self._lock = filelock.FileLock(self.path / ".lock", fallback_to_soft=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # The system releases it in any case.
            self._lock.release(force=True)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json as the program found it; {} without that file."""
        return read_config(self.path) or {}

    @functools.cached_property
    def is_fresh(self) -> bool:
        """Whether --fresh moves the run aside: not if a restart finds the run that this launch has made."""
        if not self.settings.fresh or not os.environ.get(START_ID):
            return self.settings.fresh
        try:
            return self.config.get("start_id") != os.environ[START_ID]
        except Unavailable:  # It may be the run that this launch has made.
            raise
        except BadInput:
            return True

    def starts_new(self) -> bool:
        """Returns whether a run starts without a checkpoint."""
        return self.is_fresh or not checkpoint_paths(self.path / CHECKPOINTS)

    def check_same_run(self) -> None:
        """Raises BadInput if the directory contains a run with other settings. Changes nothing.

        Prints a line if the code or versions have changed: only the author knows whether it is still the same task.
        """
        if not self._exists():
            return
        settings = self.settings
        for path in (self.path / CHECKPOINTS, self.path / BEST):
            if not path.is_dir() and (path.is_symlink() or path.exists()):
                raise BadInput(f"{path} is neither a directory nor a link to one: restore it, or start a new run")
        if differences := ", ".join(settings.differences(self.config["settings"])):
            remedy = "use the run's" if settings.evaluates else "use the same ones, another --run-dir, or --fresh"
            raise BadInput(f"--run-dir {self.path} contains a run with other settings ({differences}): {remedy}")
        if changes := ", ".join(changes_since(self.config)):
            use = "the present ones are used" if settings.evaluates else "further steps use the present ones"
            console.print(f"Since the run in {self.path} started, {changes}; {use}")

    def lock(self) -> None:
        """Keeps other programs out of the directory, if it exists. Raises BadInput if it cannot be used."""
        if self._exists():
            self._acquire()

    def open(self) -> None:
        """Makes the directory; with --fresh, moves an existing run to the first free name of run.1, run.2, ..."""
        with self._usable():
            if self.is_fresh and self._exists():
                self._move_aside()
            self.path.mkdir(parents=True, exist_ok=True)
        self._acquire()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if may_pass(problem):
                raise Unavailable(f"--run-dir {self.path} cannot be used now ({problem.strerror}): try again") from None
            raise BadInput(f"--run-dir {self.path} cannot be used ({problem.strerror}): use another one") from None

    def _exists(self) -> bool:
        """Returns whether the directory contains a run. Raises BadInput if the directory cannot be used for a run."""
        with self._usable():
            try:
                names = [file.name for file in self.path.iterdir()]
            except FileNotFoundError:
                return False
        # A run that was killed before it wrote config.json may have left hidden files.
        if CONFIG not in names and not all(name.startswith(".") for name in names):
            raise BadInput(f"--run-dir {self.path} is not empty and contains no run ({CONFIG} is missing): use another")
        return CONFIG in names

    def _acquire(self) -> None:
        with self._usable():
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                self._wait_for_lock()
            except OSError as problem:
                if problem.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                console.print(f"{self.path} is on a file system without locks: let only one run use it")

    def _wait_for_lock(self) -> None:
        """Waits for the lock if the run was last started on another machine, which may be dead."""
        in_use = f"--run-dir {self.path} is in use by another run"
        start = (self.config.get("starts") or [{}])[-1]
        if start.get("machine", machine()) == machine():
            raise BadInput(f"{in_use}: wait, or use another one") from None
        in_use += f", last started on {start.get('host')}"
        console.print(f"{in_use}; if that machine is dead, the lock goes: waiting for {SECONDS_OF_LEASE:g} s")
        end = time.monotonic() + SECONDS_OF_LEASE
        while time.monotonic() < end and not signals.signal:
            with contextlib.suppress(filelock.Timeout):
                self._lock.acquire(timeout=1)
                return
        if signals.signal:
            raise Stopped(f"stopped by {signals.signal}") from None
        raise Unavailable(f"{in_use}: end that run, or use another directory") from None

    def _move_aside(self) -> None:
        if Path.cwd().is_relative_to(self.path.resolve()):
            raise BadInput(f"--fresh cannot move --run-dir {self.path}, the current folder: start it elsewhere")
        path = self.path.absolute()  # If it is a link, the link is moved.
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        self._lock.release(force=True)
        path.rename(aside)
        (aside / ".lock").unlink(missing_ok=True)
        console.print(f"Moved the run in {self.path} to {aside.name}")


def machine() -> str:
    """Returns a name of this machine, which it has until it is started again; containers may share a host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()
