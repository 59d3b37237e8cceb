"""One run: how it starts, how far it has come, and what it keeps on disk.

training          which steps come next, what is due between them, which weights are best, and when it ends
passes            the steps of a pass, cut into executions
start             the run's directory when it trains: its result, its first files, what is saved when it ends early
resume            continues from the newest checkpoint, also with other data or learning rates
agreement         what must be the same in all processes before they train
summary           the lines at the start, and config.json
progress          counts and scores
state             the variables by name, and their values
checkpoints       saves and restores the state
checkpoint_files  the files of one checkpoint
initial_weights   --init-from
directory         the run's directory, which one program at a time may use
endpoints         predictions as functions that a SavedModel can contain
evaluation        --evaluate-only, --evaluate-continuously; the parts of train.py that they and --check use
"""

from engine.run.evaluation import evaluate
from engine.run.initial_weights import initialize
from engine.run.start import RunDirectory, documented_exits
from engine.run.training import Run

__all__ = ["Run", "RunDirectory", "documented_exits", "evaluate", "initialize"]
