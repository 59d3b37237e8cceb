"""Which program a run is of: the project's files that are imported, and the versions of what they build on."""

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def versions() -> dict[str, str]:
    """Returns the versions that the numbers of a run may depend on."""
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def shared_facts(folder: Path) -> dict[str, Any]:
    """Returns what has to be the same in all processes of a cluster: the code, and the versions."""
    # Releases of one Python differ in nothing that training depends on.
    return {"code": code_sha256(folder), **versions(), "python": ".".join(platform.python_version_tuple()[:2])}


def code_sha256(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of the project that has been imported, by its path inside the project's folder.

    What is imported later, inside a hook, is not among them yet. What is installed, in an environment inside the folder
    too, is not the project's.
    """
    root = os.path.realpath(folder)
    environments = [os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix)]
    environments = [prefix for prefix in environments if prefix.startswith(os.path.join(root, ""))]
    found = {}
    for module in list(sys.modules.values()):
        try:
            # Not getattr, which would load what is to be loaded on its first use.
            file = object.__getattribute__(module, "__dict__").get("__file__")
        except AttributeError:
            continue
        if not isinstance(file, str) or "site-packages" in file or "dist-packages" in file:
            continue
        path = os.path.join(os.path.realpath(os.path.dirname(file)), os.path.basename(file))
        if path.startswith(os.path.join(root, "")) and not path.startswith(tuple(environments)):
            name = Path(path).relative_to(root).as_posix()
            if sha256 := _sha256(Path(path)):
                found[name] = sha256
    return dict(sorted(found.items()))


def changes_since(recorded: dict[str, Any], folder: Path) -> list[str]:
    """Returns what is not as it was when a run wrote `recorded`, its config.json.

    The files are compared as they are on disk, so those too that will be imported later.
    """
    changes = []
    code, earlier = recorded.get("code_sha256"), recorded.get("versions")
    for name, sha256 in code.items() if isinstance(code, dict) else ():
        now = _sha256(folder / name)
        if now != sha256:
            changes.append(f"{name} {'has changed' if now else 'is gone'}")
    now = versions()
    for name, version in earlier.items() if isinstance(earlier, dict) else ():
        if name in now and now[name] != version:
            changes.append(f"{name} {version} has become {now[name]}")
    return changes


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
