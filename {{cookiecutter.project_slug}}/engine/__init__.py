"""The part of the training program that is the same for every task. Nothing to edit here.

check/     python train.py --check
trained/   what a finished run gives: predictions, and files for other programs
run/       one run: how far it is, and what it keeps on disk
report/    what a run shows of itself: lines, tables, curves
cluster/   which processes and devices train together
data/      from examples to batches on every replica
model/     what a step uses and changes
settings   the engine's settings and the command line     errors    how a run ends that does not finish
console    output                                         messages  what an exception says, as one line
protocols  what the engine uses of task.py                retries      reads again after faults that pass
files      files that are written completely or not       versions  the code and the packages that a run depends on
tracing    what a traced function does                   quiet_start  hides TensorFlow's lines about itself
trials     an Optuna study that several programs share

check and trained import run; these three import cluster, data and model; run imports report, and report model. No other
subpackage imports another, and the files beside them import none. Nothing here imports train, task or config, which
hand over what the engine needs.
"""

import atexit
import gc
import time
from pathlib import Path

from engine.quiet_start import filter_stderr

PROJECT = Path(__file__).resolve().parents[1]
imported_at: float | None = time.monotonic()  # None once a run has started: engine/report/goodput.py.

# Before TensorFlow is imported.
filter_stderr()

# TensorFlow's import makes 600,000 objects and hardly any garbage. The first build excludes them from the search for
# garbage, which then is as frequent as usual.
WHILE_IMPORTING = 1_000_000
gc.set_threshold(WHILE_IMPORTING)
atexit.register(gc.freeze)
