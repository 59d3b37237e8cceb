"""What a program runs on: the code of the project, the versions of packages, and the memory of the machine."""

import contextlib
import inspect
import os
import platform
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine import PROJECT
from engine.files import file_sha256


def versions() -> dict[str, str]:
    """Returns the versions by name."""
    packages = {package.__name__: package.__version__ for package in (tf, keras, np)}
    return {**packages, "python": platform.python_version()}


def code_sha256() -> dict[str, str]:
    """Returns the SHA-256 of each imported file of the project, by its path; not of files that a hook imports later."""
    prefixes = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    environments = [prefix for prefix in prefixes if prefix.is_relative_to(PROJECT)]
    sha256_by_path = {}
    for module in list(sys.modules.values()):
        # getattr would load a module that is loaded lazily.
        file = inspect.getattr_static(module, "__file__", None)
        if isinstance(file, str) and "site-packages" not in file and "dist-packages" not in file:
            path = Path(os.path.realpath(os.path.dirname(file)), os.path.basename(file))
            if path.is_relative_to(PROJECT) and not any(map(path.is_relative_to, environments)) and path.exists():
                sha256_by_path[path.relative_to(PROJECT).as_posix()] = file_sha256(path)
    return dict(sorted(sha256_by_path.items()))


def changes_since(recorded: dict[str, Any]) -> list[str]:
    """Returns the changes since a run wrote `recorded`, its config.json. Compares the files on disk."""
    changes = []
    for name, sha256 in recorded.get("code_sha256", {}).items():
        if not (PROJECT / name).exists():
            changes.append(f"{name} is gone")
        elif file_sha256(PROJECT / name) != sha256:
            changes.append(f"{name} has changed")
    earlier = recorded.get("versions", {})
    for name, now in versions().items():
        if earlier.get(name, now) != now:
            changes.append(f"{name} {earlier[name]} has become {now}")
    return changes


def memory_of_machine() -> int | None:
    """Returns the bytes of memory that this machine has, or the container if it has less; None on Windows."""
    if not hasattr(os, "sysconf"):
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return memory
