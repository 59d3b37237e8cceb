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
errors        how a program ends that does not finish: its line and its exit code
messages      what an exception says, as one line
retries       reads and writes again after faults that pass
files         files that are written completely or not at all, and JSON
machine       the code, the packages and the memory that a run depends on
console       output
tracing       what a traced function does
protocols     what the engine uses of task.py
trials        an Optuna study that several programs share
quiet_start   hides TensorFlow's lines about itself

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
import gc
import time
from pathlib import Path

from engine.quiet_start import filter_stderr

PROJECT = Path(__file__).resolve().parents[1]
imported_at: float | None = time.monotonic()  # None once a run has started: engine/report/report.py.

# Before TensorFlow is imported.
filter_stderr()

# TensorFlow's import makes 600,000 objects and hardly any garbage, so garbage is not searched for while it runs.
# engine/model/__init__.py, which is imported after it, excludes these objects from the search from then on.
gc.set_threshold(1_000_000)
atexit.register(gc.freeze)
