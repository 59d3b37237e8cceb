"""The part of the training program that is the same for every task. Nothing to edit here: see README.md.

check/        python train.py --check
trained/      what a finished run gives: predictions, and files for other programs
run/          one run: how far it is, and what it keeps on disk
report/       what a run shows of itself: lines, tables, curves
cluster/      which processes and devices train together
data/         from examples to batches on every replica
model/        what a step uses and changes

settings      the engine's settings and their rules
command_line  from flags, and the settings of a recorded run, to settings
errors        how a program ends that does not finish, and what an exception says, as one line
files         files that are written completely or not at all, JSON, and attempts again after faults that pass
machine       the code, the packages and the memory that a run depends on
console       output
signals       SIGTERM and Ctrl-C
tracing       what a traced function does
trials        an Optuna study that several programs share

check and trained import run; these three import cluster, data and model; run imports report, and report model. No other
subpackage imports another, and the files beside them import none. Nothing here imports train, task or config, which
hand over what the engine needs.

The terms that code, messages and pages use:

    split            train, validation or test
    dataset          the examples of a split; validation and test may have several, each with a name
    pass             once through a dataset; an epoch trains on one pass, or for --steps-per-epoch steps
    global batch     the examples of a step on all replicas; each replica gets a per-replica batch of equal size
    micro-batch      a part of a per-replica batch, whose gradients are added to those of the others
    stack            several batches in one tensor: [batches, per_replica_batch_size, ...] on each replica
    execution        a call of the compiled function, which takes several steps on the batches of a stack
    segment, window  record files are read in segments at once; a window is what is shuffled together of a segment
    element spec     shape and dtype of the tensors of an example or a batch
    replica          a copy of the model on a device; all replicas take each step together
    process, worker  a program of a cluster; a worker is a process that trains, and has one or more replicas
    shard            the part of each global batch that a worker reads
    mirrored         a variable that is equal on all replicas; otherwise it is per-replica
    checkpoint       the state of a run and its position; best/ has only the weights with the best --monitor
    rendezvous       the wait for all processes at start-up
"""

import atexit
import contextlib
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
imported_at: float | None = time.monotonic()  # None once a run has started: engine/report/report.py.

os.environ["KERAS_BACKEND"] = "tensorflow"  # Whatever the shell or ~/.keras/keras.json says.

# TensorFlow's lines about itself are removed from what its C++ code writes to stderr; warnings and errors stay. Level 1
# hides information, but TensorFlow 2.21 reads it too late for the lines that its libraries write while they are loaded.
# "(303)" means that there is no NVIDIA driver; `why_no_gpu` warns where a machine with GPUs lacks one. The line
# about DT_BOOL comes with the first graph of boolean operations and is not an error.
HIDDEN = (
    r"^I[0-9]{4} |^WARNING: All log messages before absl::InitializeLog|failed call to cuInit.*\(303\)"
    "|oneDNN supports DT_BOOL only"
)
if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1") != "0" and "tensorflow" not in sys.modules:
    with contextlib.suppress(OSError):  # Without grep or without a stderr the lines appear, which is harmless.
        # Python's own stderr does not pass through the filter, so that it still is a terminal.
        unfiltered = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        # A separate process, so that the last words of a TensorFlow that aborts are not lost.
        command = ["grep", "--line-buffered", "-v", "-E", HIDDEN]
        grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        assert grep.stdin is not None
        with grep.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        if sys.stderr is sys.__stderr__:
            sys.stderr = unfiltered

# TensorFlow's import makes 600,000 objects and hardly any garbage, so garbage is not searched for while it runs.
# engine/model/__init__.py, which is imported after it, excludes these objects from the search from then on.
gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
