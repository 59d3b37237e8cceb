"""Takes an epoch's steps on two replicas again and again from the same weights; prints the SHA-256 of each outcome.

python repeated_steps.py TIMES, in the folder of a project. Equal outcomes are printed once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import task
import train
from config import Config
from engine.command_line import read_settings
from engine.model.variables import model_variables
from engine.run.state import weights_sha256

train.build(read_settings(Config, ["--simulated-devices=2"]))
state, batches = train.run.checkpoints.state, train.batches["train"]
before = state.values()
stacks = list(batches.iterator().take(batches.steps_per_pass))
found = set()
for _ in range(int(sys.argv[1])):
    state.assign(before)
    for stack, first, count in stacks:
        train.run_steps["train"](stack, first, count)
    found.add(weights_sha256(model_variables(task.model)))
print(*sorted(found))
