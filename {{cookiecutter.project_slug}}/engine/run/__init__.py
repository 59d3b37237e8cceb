"""One run: how it starts, how far it has come, and what it keeps on disk.

run               which steps come next, what is due between them, which weights are best, and when it ends
endings           what is saved when a signal or an error ends it
passes            the steps of a pass, cut into executions
start             resumes a run, or starts one with other weights or with new ones
agreement         what must be the same in all processes before they train
summary           the lines at the start, and config.json
progress          counts and scores
state             the variables by name, and their values
traces            what the traced steps change
checkpoints       saves and restores the state
checkpoint_files  the files of one checkpoint
writer            writes in order, in a thread with --async-checkpoints
initial_weights   --init-from
directory         the run's directory, which one program at a time may use
signals           SIGTERM and Ctrl-C
evaluation        --evaluate-only, --evaluate-continuously; the parts of train.py that they and --check use
"""

from engine.run.directory import RunDirectory
from engine.run.endings import saving_on_exit
from engine.run.evaluation import evaluate, evaluate_continuously
from engine.run.initial_weights import initialize
from engine.run.run import Run
from engine.run.signals import signals
from engine.run.start import lock_and_find_result, restore, write_first_files

__all__ = [
    "Run",
    "RunDirectory",
    "evaluate",
    "evaluate_continuously",
    "initialize",
    "lock_and_find_result",
    "restore",
    "saving_on_exit",
    "signals",
    "write_first_files",
]
