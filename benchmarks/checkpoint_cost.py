"""What saving and reporting cost: the default run with a checkpoint at every epoch.

    python benchmarks/checkpoint_cost.py [--rounds 3] [-- <arguments of train.py>]

Each run is a process of its own. Counted are the seconds that the loop spends in saves (of the whole state
and of the best weights), in reports, and in steps, the first epoch left out, because it compiles.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"


def measure(arguments: list[str]) -> dict[str, float]:
    """Trains in this process; returns the seconds in saves, in reports and in steps."""
    sys.path.insert(0, str(PROJECT))
    import train
    from engine.report.report import Report
    from engine.run.checkpoints import Checkpoints

    saving: list[float] = []
    reporting: list[float] = []
    stepping: list[float] = []

    def timed(function: Any, seconds: list[float]) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*given, **options)
            seconds.append(time.perf_counter() - started)
            return result

        return call

    Checkpoints.save = timed(Checkpoints.save, saving)
    train.train_epoch = timed(train.train_epoch, stepping)
    train.evaluate_split = timed(train.evaluate_split, stepping)
    Report.epoch = timed(Report.epoch, reporting)
    train.main(arguments)
    # Per epoch there is a pass to train and one to validate; after the last one, the test.
    return {
        "saving": sum(saving[2:]),
        "reporting": sum(reporting[1:]),
        "steps": sum(stepping[2:-1]),
        "saves": len(saving[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="measure in this process: used for the rounds")
    parser.add_argument("arguments", nargs="*", help="arguments of train.py")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.arguments)))
        return
    shares: list[float] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [f"--run-dir={folder}", *options.arguments]
            command = [sys.executable, __file__, "--measure", "--", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        shares.append((found["saving"] + found["reporting"]) / found["steps"])
        each = 1000 * found["saving"] / found["saves"]
        reports = 100 * found["reporting"] / found["steps"]
        print(
            f"{found['saves']} saves of {each:.1f} ms; with the reports, {reports:.1f} %, "
            f"{100 * shares[-1]:.1f} % of the steps' time"
        )
    print(f"median: {100 * statistics.median(shares):.1f} %")


if __name__ == "__main__":
    main()
