"""What a position costs: seconds until the first batch is there, at the start of an epoch and at 90 % of it.

    python benchmarks/resume_cost.py [--examples 1000000] [--rounds 3]

It is measured for examples that are kept in memory, and for the same ones streamed, as larger sets are; each round in
turns, medians. A resumed run waits so long more than a new one, besides reading its checkpoint.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))

import numpy as np
import tensorflow as tf

from config import Config
from engine.data import examples, load_splits

BATCH_SIZE = 64


def seconds_to_first_batch(count: int, position: float, *, in_memory: bool) -> float:
    """Returns how long the batch at `position` (0 to 1) of an epoch of `count` examples takes to come."""
    examples.BYTES_IN_MEMORY = 2**29 if in_memory else 0
    features = np.zeros((count, 8), np.float32)
    task = SimpleNamespace(
        load_examples=lambda _: tf.data.Dataset.from_tensor_slices((features, np.zeros(count, np.int32))),
        prepare_example=lambda features, labels: (features, labels),
    )
    config = Config(global_batch_size=BATCH_SIZE, shuffle_megabytes=28)  # About 100,000 of them.
    batches = load_splits(["train"], task, config, tf.distribute.get_strategy())["train"]
    started = time.perf_counter()
    iterator = batches.iterator(first_step=int(position * batches.steps_per_pass))
    next(iterator.take(1))
    seconds = time.perf_counter() - started
    iterator.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [(in_memory, position) for in_memory in (True, False) for position in (0.0, 0.9)]
    seconds: dict[tuple[bool, float], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for in_memory, position in cases:
            seconds[in_memory, position].append(seconds_to_first_batch(options.examples, position, in_memory=in_memory))
    for (in_memory, position), found in seconds.items():
        kind = "in memory" if in_memory else "streamed "
        print(f"{options.examples} examples {kind}, at {position:.0%}: {statistics.median(found):.2f} s")


if __name__ == "__main__":
    main()
