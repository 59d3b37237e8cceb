"""Removes TensorFlow's lines about itself from what its C++ code writes to stderr. Warnings and errors stay."""

import contextlib
import os
import subprocess
import sys

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Level 1 hides information, but TensorFlow 2.21 reads it too late for the lines that its libraries write while they are
# loaded. "(303)" means that there is no NVIDIA driver; `why_no_gpu` warns where a machine with GPUs lacks one.
# The line about DT_BOOL comes with the first graph of boolean operations and is not an error.
HIDDEN = (
    r"^I[0-9]{4} |^WARNING: All log messages before absl::InitializeLog|failed call to cuInit.*\(303\)"
    "|oneDNN supports DT_BOOL only"
)
_filters: list[subprocess.Popen[bytes]] = []  # Kept, because a collected Popen warns that its process still runs.


def filter_stderr() -> None:
    """Starts the filter, unless TF_CPP_MIN_LOG_LEVEL is 0. Call it before TensorFlow is imported."""
    if os.environ.setdefault(LEVEL, "1") == "0" or "tensorflow" in sys.modules:
        return
    with contextlib.suppress(OSError):  # Without grep or without a stderr the lines appear, which is harmless.
        # Python's own stderr does not pass through the filter, so that it still is a terminal.
        unfiltered = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        # A separate process, so that the last words of a TensorFlow that aborts are not lost.
        command = ["grep", "--line-buffered", "-v", "-E", HIDDEN]
        grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        _filters.append(grep)
        assert grep.stdin is not None
        with grep.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        if sys.stderr is sys.__stderr__:
            sys.stderr = unfiltered
