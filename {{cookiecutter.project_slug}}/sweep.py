"""Searches for the best settings of train.py with Optuna, which pip install -e ".[sweep]" installs.

    python sweep.py -- --epochs 5                              20 trials, one after the other
    python sweep.py --trials 50 --parallel 2 -- --epochs 5     two at a time, which share the GPUs

Arguments after -- are for train.py. The same command again continues a sweep that was stopped or killed, its unfinished
trials included. Several programs may share a --sweep-dir: see docs/recipes.md.
"""

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from config import Config

from engine.cluster.environment import visible_gpus
from engine.cluster.launcher import PROGRAM, TrainProcess, stop_all
from engine.command_line import read_settings
from engine.errors import SIGNALS, BadInput, Stopped, asked_to_stop, exit_codes
from engine.files import read_json

if TYPE_CHECKING:  # Optuna is an extra, and --help works without it.
    import optuna

    from engine.trials import Trials

# Classes in optuna.pruners, which are used with their defaults.
PRUNERS = {
    "median": "MedianPruner",
    "hyperband": "HyperbandPruner",
    "successive-halving": "SuccessiveHalvingPruner",
    "none": "NopPruner",
}


def space(trial: "optuna.Trial") -> list[str]:
    """Returns a trial's flags for train.py."""
    # TODO(you): Choose the settings to search over, and their values.
    learning_rate = trial.suggest_float("learning_rate", 3e-4, 3e-2, log=True)
    global_batch_size = trial.suggest_categorical("global_batch_size", [16, 32, 64])
    return [f"--learning-rate={learning_rate}", f"--global-batch-size={global_batch_size}"]


def has_ended(trials: "Trials", trial: "optuna.Trial", process: TrainProcess, monitor: str) -> bool:
    """Follows a trial; returns whether its process has ended, by itself or because the trial is poor."""
    code = process.popen.poll()  # Before the scores are read, so that they are complete.
    if trials.prune(trial, process.scores(monitor)):
        stop_all([process])
    elif code is None:
        return False
    elif code == 0:
        result = read_json(process.run_dir / "result.json") or {}
        trials.end(trial, result[f"best_{monitor}"])
    elif code == Stopped.exit_code or "is in use by another run" in process.error():
        trials.release(trial)  # It will be resumed.
    else:
        trials.end(trial, error=process.error())
    return True


def run_trials(trials: "Trials", options: argparse.Namespace, monitor: str) -> bool:
    """Runs trials until all have ended, those of other programs too; returns False if it is to stop before."""
    running: dict[int, tuple[optuna.Trial, TrainProcess]] = {}
    began, ended, gpus = time.monotonic(), 0, visible_gpus(os.environ)
    try:
        while trials.ended() < options.trials:
            for slot in set(range(options.parallel)) - running.keys():
                if trial := trials.take(space, options.trials, options.arguments):
                    # Each slot has its GPUs; with more slots than GPUs, several slots share one.
                    shared = gpus[slot :: options.parallel] or gpus[slot % max(1, len(gpus)) :][:1]
                    run_dir = options.sweep_dir / f"trial_{trial.number:03}"
                    words = [*trial.user_attrs["arguments"], *trial.user_attrs["flags"]]
                    running[slot] = trial, TrainProcess(words, run_dir, shared)
            if asked_to_stop.wait(0.2) or time.monotonic() - began > options.timeout:
                return False
            for slot, (trial, process) in [*running.items()]:
                if has_ended(trials, trial, process, monitor):
                    del running[slot]
                    ended += 1
                    left = (options.trials - trials.ended()) * (time.monotonic() - began) / ended
                    best = "".join(f"best {first.value:.4g}, " for first in trials.ranked()[:1])
                    print(f"{trials.describe(trial.number)} ({best}{left:,.0f} s left)", flush=True)
        return True
    finally:
        stop_all([process for _, process in running.values()])


def summarize(trials: "Trials", options: argparse.Namespace) -> None:
    """Prints all trials and the command of the best one; compares the best five."""
    print("", trials.table(), sep="\n", flush=True)
    if best := trials.ranked()[:5]:
        words = [*best[0].user_attrs["arguments"], *best[0].user_attrs["flags"], "--run-dir=runs/best"]
        print(f"\nThe best one again: python train.py {shlex.join(words)}\n", flush=True)
        names = [f"trial_{trial.number:03}" for trial in best]
        subprocess.run([sys.executable, PROGRAM, "--compare", *names], cwd=options.sweep_dir, check=False)


def main() -> None:
    """Runs the program. Exit codes: see engine/errors.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials of all programs together (20)")
    parser.add_argument("--parallel", type=int, default=1, help="trials that this program runs at a time (1)")
    parser.add_argument("--timeout", type=float, default=float("inf"), help="seconds after which it stops")
    parser.add_argument("--pruner", choices=PRUNERS, default="median", help="what ends poor trials early")
    parser.add_argument("--sweep-dir", type=Path, default=Path("runs/sweep"), help="folder of the study and its runs")
    parser.add_argument("arguments", nargs="*", help="after --: the arguments of train.py")
    options = parser.parse_args()
    with exit_codes():
        if options.parallel < 1:
            raise BadInput(f"--parallel {options.parallel} must be at least 1")
        if not importlib.util.find_spec("optuna"):
            raise BadInput('Optuna is not installed: pip install -e ".[sweep]"')
        from engine.trials import Trials

        settings = read_settings(Config, options.arguments)
        if settings.fresh or settings.check or settings.evaluates or settings.compare:
            raise BadInput("each trial trains, and is resumed: remove --fresh, --check, --evaluate-... and --compare")
        if settings.monitor_direction == "auto" and "loss" not in settings.monitor:
            raise BadInput(f"--monitor {settings.monitor} needs --monitor-direction min or max: add it after --")
        trials = Trials(options.sweep_dir, settings.monitor_direction.replace("auto", "min"), PRUNERS[options.pruner])
        for number in SIGNALS:
            signal.signal(number, lambda *_: asked_to_stop.set())
        is_complete = run_trials(trials, options, settings.monitor)
        if not asked_to_stop.is_set():
            summarize(trials, options)
        if not is_complete:
            raise Stopped("The sweep was stopped")


if __name__ == "__main__":
    main()
