"""The memory of this machine."""

import contextlib
import os
from pathlib import Path


def memory_of_machine() -> int | None:
    """Returns the bytes of memory that this machine has, or the container if it has less; None on Windows."""
    if not hasattr(os, "sysconf"):
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return memory
