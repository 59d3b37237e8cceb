"""Commands that need root, where the tests run as root or sudo asks for no password (as on GitHub's runner)."""

import functools
import os
import shutil
import subprocess


@functools.cache
def prefix() -> list[str] | None:
    """Returns what to put before a command that needs root: [] as root, sudo where it works, else None."""
    if os.geteuid() == 0:
        return []
    sudo = ["sudo", "--non-interactive"]
    if shutil.which("sudo") and subprocess.run([*sudo, "true"], check=False, capture_output=True).returncode == 0:
        return sudo
    return None


def works(*command: str) -> bool:
    """Returns whether a command that needs root can be run, and succeeds."""
    if prefix() is None:
        return False
    return subprocess.run([*prefix(), *command], check=False, capture_output=True).returncode == 0


def run(*command: str) -> None:
    subprocess.run([*prefix(), *command], check=True)


def end(process: subprocess.Popen, seconds: float = 10) -> None:
    """Ends a process that was started with `prefix`. sudo passes SIGTERM on, but takes it from root only."""
    for name in ("TERM", "KILL"):
        if process.poll() is None:
            subprocess.run([*prefix(), "kill", f"-{name}", str(process.pid)], check=False)
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                continue
