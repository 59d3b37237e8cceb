"""What TensorFlow prints while it starts."""

import os
import subprocess
import sys

from rendering import PROJECT

LINES = """I0000 00:00:1 2 port.cc:153] oneDNN custom operations are on.
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
E0000 00:00:1 2 util.cc:131] oneDNN supports DT_BOOL only on platforms with AVX-512. Falling back
E0000 00:00:1 2 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (303)
W0000 00:00:1 2 port.cc:1] a warning
E0000 00:00:1 2 port.cc:1] an error
Illegal instruction: IIII
"""
SHOWN = "".join(LINES.splitlines(keepends=True)[4:])


def test_only_information_is_hidden_while_tensorflow_starts_even_if_it_crashes() -> None:
    print_backend = "print(os.environ['KERAS_BACKEND'], flush=True)"
    program = f"import os, engine; {print_backend}; os.write(2, {LINES.encode()!r}); os.abort()"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment["KERAS_BACKEND"] = "jax"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("tensorflow\n", SHOWN)
