"""What TensorFlow prints while it starts: information is hidden, and nothing else, even if it crashes."""

import os
import subprocess
import sys

import pytest

from rendering import PROJECT

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
LINES = """I0000 00:00:1 2 port.cc:153] oneDNN custom operations are on.
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
E0000 00:00:1 2 util.cc:131] oneDNN supports DT_BOOL only on platforms with AVX-512. Falling back
E0000 00:00:1 2 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (303)
W0000 00:00:1 2 port.cc:1] a warning
E0000 00:00:1 2 port.cc:1] an error
Illegal instruction: IIII
"""
SHOWN = "".join(LINES.splitlines(keepends=True)[4:])


def stderr_of(ending: str) -> str:
    program = f"""
import os
import engine
os.write(2, {LINES.encode()!r})
{ending}
os.write(2, b"I0000 of later")
"""
    environment = {name: value for name, value in os.environ.items() if name != LEVEL}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, cwd=PROJECT, env=environment, stderr=subprocess.PIPE, text=True)
    return done.stderr


@pytest.mark.parametrize("ending", ["pass", "os.abort()"])
def test_only_information_is_hidden_while_tensorflow_starts(ending: str) -> None:
    assert stderr_of(ending) == SHOWN
