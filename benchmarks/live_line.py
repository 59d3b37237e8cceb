"""What the live line of a terminal costs: steps/s of the MLP with it and without, alternated, under a real pty.

    python benchmarks/live_line.py [--rounds 25]

A round takes two seconds. Under another load single rounds differ by a fifth, so compare medians.
"""

import argparse
import os
import pty
import statistics
import subprocess
import tempfile
import time

import step_cost  # It builds the benchmark's MLP in train.py.

import train
from engine.console import console

os.environ["TERM"] = "xterm-256color"
results = os.fdopen(os.dup(1), "w")
terminal, own_end = pty.openpty()
# The terminal's other end, which reads what is drawn.
reader = subprocess.Popen(["cat"], stdin=terminal, stdout=subprocess.DEVNULL)
os.dup2(own_end, 1)
console.is_interactive = True  # It was looked up when it was imported.
step_cost.STEPS = 8_000


def steps_per_second() -> float:
    started = time.perf_counter()
    train.train_epoch(train.run.epoch)
    seconds = time.perf_counter() - started
    train.run.progress.end_epoch()
    return step_cost.STEPS / seconds


options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--rounds", type=int, default=25)
rounds = options.parse_args().rounds
with tempfile.TemporaryDirectory() as folder:
    step_cost.build(1, folder)
    assert train.run.live.is_drawn, "no terminal"
    steps_per_second()  # It compiles, and finds how many steps a second has.
    found = {"with": [], "without": []}
    for number in range(rounds):
        for name in sorted(found, reverse=bool(number % 2)):
            train.run.live.is_drawn = name == "with"
            found[name].append(steps_per_second())
        print(" ".join(f"{name} {speeds[-1]:,.0f}" for name, speeds in found.items()), file=results, flush=True)
medians = {name: statistics.median(speeds) for name, speeds in found.items()}
ratio = medians["with"] / medians["without"]
shown = ", ".join(f"{name} {median:,.0f}" for name, median in medians.items())
print(f"steps/s, medians: {shown}; with/without {ratio:.3f}", file=results, flush=True)
reader.kill()
