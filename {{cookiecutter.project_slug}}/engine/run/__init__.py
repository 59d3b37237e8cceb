"""One run: how it begins, how far it is, and what it keeps on disk.

run              which steps come next, what is due between them, what is best, when it ends
start            resumes, or begins with other weights, or with new ones
chunks           how many steps one call of a compiled function runs
progress         counts and scores
state            the variables by name, and their values
checkpoints      saves and restores the state
initial_weights  --init-from
directory        the run's directory: whether it can be used
summary          what a run is: config.json, and the lines at its start
signals          SIGTERM and Ctrl-C
profile          --profile
program          what the evaluation and --check use of train.py
evaluation       --evaluate-only, --evaluate-continuously
"""

from engine.run.directory import RunDirectory
from engine.run.evaluation import evaluate, evaluate_continuously
from engine.run.run import Run
from engine.run.signals import signals
from engine.run.start import begin_run, lock_and_find_result

__all__ = [
    "Run",
    "RunDirectory",
    "begin_run",
    "evaluate",
    "evaluate_continuously",
    "lock_and_find_result",
    "signals",
]
