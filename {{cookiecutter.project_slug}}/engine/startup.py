"""Hides the lines about itself that TensorFlow writes to stderr at its start. Warnings and errors stay.

TF_CPP_MIN_LOG_LEVEL=1 hides INFO lines, but TensorFlow 2.21 reads it too late for those that its libraries write while
they are loaded. So they are taken out of stderr on their way. TF_CPP_MIN_LOG_LEVEL=0 brings all of them back.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# INFO lines, and what precedes them. "failed call to cuInit ... (303)" says that there is no NVIDIA driver; where there
# are GPUs without one, `nvidia.why_no_gpu` has the warning.
HIDDEN = r"^I[0-9]{4} |^WARNING: All log messages before absl::InitializeLog|failed call to cuInit.*\(303\)"
SECONDS_TO_END = 5.0


@contextlib.contextmanager
def start_up_lines_hidden() -> Iterator[None]:
    """Takes the start-up lines out of what is written to stderr inside, by C++ too."""
    grep = None
    if os.environ.get(LEVEL) != "0":
        with contextlib.suppress(OSError):  # There is no grep, or no stderr: the lines are harmless.
            # Another process, so that the last words of a TensorFlow that aborts here are not lost.
            command = ["grep", "--line-buffered", "-v", "-E", HIDDEN]
            grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
    if not grep:
        yield
        return
    kept = os.dup(2)
    os.dup2(grep.stdin.fileno(), 2)
    try:
        yield
    finally:
        if sys.stderr:
            sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        grep.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            grep.wait(SECONDS_TO_END)


class _FirstImport(importlib.abc.MetaPathFinder):
    """Hides the lines while TensorFlow is imported, whoever does it first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                with start_up_lines_hidden():
                    execute(module)

            spec.loader.exec_module = exec_module
        return spec


def hide_start_up_lines() -> None:
    """Has TensorFlow hide its INFO lines, unless the user has set TF_CPP_MIN_LOG_LEVEL. Call it before its import."""
    if os.environ.setdefault(LEVEL, "1") != "0" and "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _FirstImport())
