"""Waiting for other processes."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Returns when the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Returns whether a process runs; one that has ended, and whose parent has not asked for it, does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
