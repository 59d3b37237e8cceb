"""Searches for the best settings of train.py with Optuna, which pip install -e ".[sweep]" installs.

    python sweep.py -- --epochs 5                              20 trials, one after the other
    python sweep.py --trials 50 --parallel 2 -- --epochs 5     two at a time, which share the GPUs

Arguments after -- are for train.py. The same command again continues a sweep that was stopped or killed, its unfinished
trials included. Several programs may share a --sweep-dir: see docs/recipes.md.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine import errors

if __name__ == "__main__":
    errors.end_at_signals()  # Before the other imports, which take a second.

from config import Config

from engine.cluster.environment import reject_cluster, visible_gpus
from engine.cluster.launcher import LOST_CODES, PROGRAM, TrainProcess, stop_all
from engine.command_line import read_settings
from engine.console import console
from engine.errors import BadInput, CannotWrite, Diverged, ProgramExit, Stopped
from engine.files import read_json, writing
from engine.settings import check_is_local
from engine.signals import signals

if TYPE_CHECKING:  # Optuna is an extra, and --help works without it.
    import optuna

    from engine.trials import Trials

# Exit codes of train.py if a signal has ended it, and if the cause is not the trial.
STOPPED = (Stopped.exit_code, 130, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT)
NOT_BY_TRIAL = (CannotWrite.exit_code, *LOST_CODES)
SECONDS_BETWEEN_ATTEMPTS = 10
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


def train_settings(words: list[str], run_dir: Path) -> Config:
    """Returns a trial's settings. Raises BadInput unless they are such of a run that trains, and may be resumed."""
    settings = None
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):  # By --help.
        settings = read_settings(Config, [f"--run-dir={run_dir}", *words])
    wrong = settings and (settings.fresh or settings.check or settings.evaluates or settings.compare)
    if not settings or wrong or settings.run_dir != run_dir:
        raise BadInput(
            "each trial trains in a directory of its own, and is resumed: remove --help, --run-dir, --fresh, --check, "
            "--evaluate-... and --compare"
        )
    if settings.monitor_direction == "auto" and "loss" not in settings.monitor:
        raise BadInput(f"--monitor {settings.monitor} needs --monitor-direction min or max: add it after --")
    return settings


def follow(trials: "Trials", trial: "optuna.Trial", process: TrainProcess, monitor: str) -> str:
    """Follows a trial; returns a line if its process has ended, by itself or because the trial is poor, else "".

    Raises ProgramExit if the next trial would end alike.
    """
    code = process.popen.poll()  # Before the scores are read, so that they are complete.
    if trials.prune(trial, process.scores(monitor)):
        stop_all([process])
    elif code is None:
        return ""
    elif code == 0:
        result = read_json(process.run_dir / "result.json") or {}
        trials.end(trial, result.get(f"best_{monitor}"))
    elif code in STOPPED or "is in use by another run" in process.error():
        trials.release(trial, SECONDS_BETWEEN_ATTEMPTS)
        return f"trial {trial.number} is tried again in {SECONDS_BETWEEN_ATTEMPTS} s: {process.error()}"
    elif code in NOT_BY_TRIAL and not process.error().startswith("unexpected "):
        ending = ProgramExit(f"{process.run_dir} ended with: {process.error()}; then start the same sweep again")
        ending.exit_code = code
        raise ending
    else:
        trials.end(trial, error=process.error(), by_values=code == Diverged.exit_code)
    return trials.describe(trial.number)


def run_trials(trials: "Trials", options: argparse.Namespace, monitor: str) -> None:
    """Runs trials until all have ended, those of other programs too. Raises Stopped if it is to stop before."""
    running: dict[int, tuple[optuna.Trial, TrainProcess]] = {}
    began, ended, gpus = time.monotonic(), 0, visible_gpus(os.environ)
    try:
        while trials.ended() < options.trials:
            for slot in set(range(options.parallel)) - running.keys():
                if trial := trials.take(space, train_settings, options.trials, options.arguments):
                    # Each slot has its GPUs; with more slots than GPUs, several slots share one.
                    shared = gpus[slot :: options.parallel] or gpus[slot % max(1, len(gpus)) :][:1]
                    words = [*trial.user_attrs["arguments"], *trial.user_attrs["flags"]]
                    running[slot] = trial, TrainProcess(words, trials.run_dir(trial.number), shared)
            if errors.asked_to_stop.wait(0.2) or time.monotonic() - began > options.timeout:
                raise Stopped("The sweep was stopped")
            for slot, (trial, process) in [*running.items()]:
                if line := follow(trials, trial, process, monitor):
                    del running[slot]
                    ended += 1
                    left = (options.trials - trials.ended()) * (time.monotonic() - began) / ended
                    best = "".join(f"best {first.value:.4g}, " for first in trials.ranked()[:1])
                    console.print(f"{line} ({best}{left:,.0f} s left)")
    finally:
        stop_all([process for _, process in running.values()])


def summarize(trials: "Trials", options: argparse.Namespace) -> None:
    """Prints all trials and the command of the best one; compares the best five."""
    console.print(f"\n{trials.table()}")
    if best := trials.ranked()[:5]:
        words = [*best[0].user_attrs["arguments"], *best[0].user_attrs["flags"], "--run-dir=runs/best"]
        console.print(f"\nThe best one again: python train.py {shlex.join(words)}\n")
        names = [trials.run_dir(trial.number).name for trial in best]
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
    options, unknown = parser.parse_known_args()
    with errors.exit_codes():
        if unknown:
            raise BadInput(f"{unknown[0]} is not a flag of sweep.py: pass the arguments of train.py after --")
        for name, least, most in (("trials", 0, 10**6), ("parallel", 1, 10**3), ("timeout", 0, float("inf"))):
            if not least <= getattr(options, name) <= most:
                raise BadInput(f"--{name} {getattr(options, name)} must be from {least} to {most}")
        check_is_local("--sweep-dir", options.sweep_dir)
        reject_cluster("sweep.py")
        if not importlib.util.find_spec("optuna"):
            raise BadInput('Optuna is not installed: pip install -e ".[sweep]"')
        from engine.trials import Trials

        settings = train_settings(options.arguments, options.sweep_dir)
        direction = settings.monitor_direction.replace("auto", "min")
        with writing(options.sweep_dir, "start the same command again"):
            trials = Trials(options.sweep_dir, direction, PRUNERS[options.pruner])
            with signals.listening():
                run_trials(trials, options, settings.monitor)
            summarize(trials, options)
        if options.trials and not trials.ranked():
            raise BadInput("no trial has completed: correct the causes in the table, then use another --sweep-dir")


if __name__ == "__main__":
    main()
