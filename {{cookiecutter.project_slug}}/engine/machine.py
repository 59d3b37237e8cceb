"""What a program runs on: the code of the project, files of the task, versions of packages, memory of the machine."""

import contextlib
import inspect
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine import PROJECT
from engine.errors import BadInput, first_line
from engine.files import file_sha256, until_read


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


def data_files_sha256(data_files: Callable[[], Any]) -> dict[str, str]:
    """Returns the SHA-256 of each file that task.data_files returns, by its name: its folder may change.

    The hashes of files with one name are joined. Raises BadInput, naming the file, if one cannot be read.
    """

    def hashed() -> dict[str, str]:
        hashes: dict[str, list[str]] = {}
        for path in map(Path, data_files()):
            hashes.setdefault(path.name, []).append(file_sha256(path))
        return {name: " ".join(sorted(of_name)) for name, of_name in hashes.items()}

    try:
        return until_read(hashed, "task.data_files", obeys_signals=True)
    except (OSError, TypeError) as problem:
        raise BadInput(f"task.data_files: {first_line(problem)}: return a list of files that can be read") from problem


def changed_files(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a text for each file whose SHA-256 has changed; files that are new are not compared."""
    different = [name for name, sha256 in then.items() if now.get(name) != sha256]
    return [f"{name} {'has changed' if name in now else 'is gone'}" for name in different]


def changes_since(recorded: dict[str, Any]) -> list[str]:
    """Returns the changes since a run wrote `recorded`, its config.json. Compares the files on disk."""
    code = recorded.get("code_sha256", {})
    changes = changed_files(code, {name: file_sha256(PROJECT / name) for name in code if (PROJECT / name).exists()})
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
