"""The trials of an Optuna study that several programs share; those of a killed one are left to the others.

Optuna is an extra of the project, so a program imports this file only if it is installed. Imports no TensorFlow.
"""

import contextlib
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.distributions import check_distribution_compatibility, distribution_to_json, json_to_distribution
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from engine.errors import BadInput, first_line

FAILURES_IN_A_ROW = 3
Space = Callable[[optuna.Trial], list[str]]
Check = Callable[[list[str], Path], object]


class _Journal(JournalFileBackend):
    """The file of a study. A full disk leaves half a line at its end, to which Optuna would append."""

    def __init__(self, path: Path, lock: Any) -> None:
        super().__init__(str(path), lock)
        self._path, self._turn = path, lock

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with self._turn, self._path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            super().append_logs(logs)


class Trials:
    """All trials of a folder, which may be on several machines that share its file system and its locks."""

    def __init__(self, folder: Path, direction: str, pruner: str) -> None:
        """Opens the study in a folder, or starts one. `direction` says which score is best: "min" or "max".

        `pruner` is the name of a class in optuna.pruners, which is used with its defaults.

        Raises BadInput, and changes nothing, if the folder contains anything but a study with this direction.
        """
        self._folder = folder
        self._locks: dict[int, filelock.BaseFileLock] = {}  # The system releases them if this program is killed.
        self._pause_ends = 0.0
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        wanted = StudyDirection.MINIMIZE if direction == "min" else StudyDirection.MAXIMIZE
        options: dict[str, Any] = {"pruner": getattr(optuna.pruners, pruner)(), "load_if_exists": True}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise BadInput(f"--sweep-dir {folder} cannot be used ({problem.strerror}): use another one") from None
        # Optuna's own lock would outlive a program that is killed while it has it.
        with self._lock("journal") as lock:
            path = folder / "journal.log"
            others = [file for file in folder.iterdir() if not file.name.startswith(".") and file != path]
            first = path.read_bytes().partition(b"\n")[0] if path.exists() else b""
            if (others or first) and f'"study_name":"sweep","directions":[{wanted.value}]'.encode() not in first:
                raise BadInput(f"--sweep-dir {folder} has no sweep with --monitor-direction {direction}: use another")
            try:
                storage = optuna.storages.JournalStorage(_Journal(path, lock))
                self._study = optuna.create_study(storage=storage, study_name="sweep", direction=wanted, **options)
            except (LookupError, ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as problem:
                text = f"{path} is damaged ({first_line(problem)})"
                raise BadInput(f"{text}: restore it from a backup, or use another --sweep-dir") from problem

    def run_dir(self, number: int) -> Path:
        """Returns the directory of a trial's run."""
        return self._folder / f"trial_{number:03}"

    def take(self, space: Space, check: Check, most: int, arguments: list[str]) -> optuna.Trial | None:
        """Returns a trial that a killed program has left, or else a new one; None if all are taken, or in a pause.

        A new one gets the user_attrs "flags", from `space`, and "arguments", which `check` may reject together. One
        that was left keeps its own. Raises BadInput if they cannot be used; then nothing is recorded.
        """
        if time.monotonic() < self._pause_ends:
            return None
        with self._lock("take"):
            trials = self._trials()
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    lock = self._lock(trial.number)
                    with contextlib.suppress(filelock.Timeout):
                        lock.acquire(blocking=False)
                        self._locks[trial.number] = lock
                        return optuna.Trial(self._study, trial._trial_id)
            if len(trials) >= most:
                return None
            if (run_dir := self.run_dir(len(trials))).exists():
                raise BadInput(f"{run_dir} belongs to no trial: move it away, or use another --sweep-dir")
            # A constant seed would repeat the first proposals after each start.
            sampler = optuna.samplers.TPESampler(seed=len(trials))
            copy = optuna.create_study(direction=self._study.direction, sampler=sampler)
            copy.add_trials(trials)
            asked = copy.ask()
            try:
                attributes = {"flags": space(asked), "arguments": arguments}
                _check_proposal(attributes["flags"], asked, trials)
                check([*arguments, *attributes["flags"]], run_dir)
            except BaseException as problem:  # SystemExit, too; signals raise nothing here.
                text = str(problem) if isinstance(problem, BadInput) else first_line(problem)
                raise BadInput(
                    f"space in sweep.py: {text}; after a change of its values, use another --sweep-dir"
                ) from problem
            new: dict[str, Any] = {"params": asked.params, "distributions": asked.distributions}
            # One write adds the trial with all its values, so that a kill cannot leave some of them.
            self._study.add_trial(optuna.create_trial(state=TrialState.RUNNING, user_attrs=attributes, **new))
        return self.take(space, check, most, arguments)

    def prune(self, trial: optuna.Trial, scores: Mapping[int, float]) -> bool:
        """Reports the scores of a trial by epoch, from 1; records that it ends early if one is too poor; returns that.

        What it decides does not depend on how many scores come at a time, nor on which are known already.
        """
        last = self._trials()[trial.number].last_step or 0
        for epoch, score in scores.items():
            if epoch > last:
                trial.report(score, epoch)
            if epoch >= last and trial.should_prune():
                self._study.tell(trial.number, state=TrialState.PRUNED)
                self.release(trial)
                return True
        return False

    def end(self, trial: optuna.Trial, score: object = None, error: str = "", *, by_values: bool = False) -> None:
        """Records the score of a trial, or the error of one that failed; one without a number as its score failed, too.

        Raises BadInput if the last trials failed alike, whatever values their errors have, and not `by_values`.
        """
        if not error and (not isinstance(score, int | float) or score != score):  # noqa: PLR0124 - NaN != NaN.
            error = f"its best score in result.json is {score}"
        if error:
            trial.set_user_attr("error", error)
        self._study.tell(trial.number, *([None, TrialState.FAIL] if error else [score]))
        self.release(trial)
        last = [ended for ended in self._trials() if ended.state.is_finished()][-FAILURES_IN_A_ROW:]
        alike = {_failure(ended, with_values=False) for ended in last}
        if error and not by_values and len(last) == FAILURES_IN_A_ROW and len(alike) == 1:
            raise BadInput(f"{FAILURES_IN_A_ROW} trials in a row ended with: {error}")

    def release(self, trial: optuna.Trial, pause: float = 0.0) -> None:
        """Lets any program take the trial, if it has not ended; this one takes none before a pause in seconds ends."""
        self._pause_ends = max(self._pause_ends, time.monotonic() + pause)
        self._locks.pop(trial.number).release()

    def ended(self) -> int:
        """Returns the number of trials that have ended."""
        return sum(trial.state.is_finished() for trial in self._trials())

    def ranked(self) -> list[FrozenTrial]:
        """Returns the trials with a score, the best one first."""
        completed = self._study.get_trials(states=[TrialState.COMPLETE])
        is_reversed = self._study.direction == StudyDirection.MAXIMIZE
        return sorted(completed, key=lambda trial: trial.value or 0.0, reverse=is_reversed)

    def describe(self, number: int) -> str:
        """Returns a line about a trial: its state, its score, and its error or its flags."""
        trial = self._trials()[number]
        score = "" if trial.value is None else f"{trial.value:.4g}"
        text = _failure(trial) or shlex.join(trial.user_attrs["flags"])
        return f"trial {number:<4} {trial.state.name.lower():<9} {score:<9} {text}"

    def table(self) -> str:
        """Returns a line for each trial, the best one first, those without a score last."""
        best = [trial.number for trial in self.ranked()]
        others = [trial.number for trial in self._trials() if trial.number not in best]
        return "\n".join(map(self.describe, [*best, *others]))

    def _trials(self) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False)
        for trial in trials:
            if not {"flags", "arguments"} <= trial.user_attrs.keys():
                raise BadInput(f"--sweep-dir {self._folder}: trial {trial.number} is not of sweep.py: use another one")
        return trials

    def _lock(self, name: object) -> filelock.BaseFileLock:
        return filelock.FileLock(self._folder / f".{name}.lock", fallback_to_soft=False)


def _check_proposal(flags: object, asked: optuna.Trial, trials: list[FrozenTrial]) -> None:
    """Raises an exception unless the flags are texts, and the values can be recorded beside those of other trials."""
    if not isinstance(flags, list) or not all(isinstance(word, str) for word in flags):
        raise TypeError(f"it returned {flags!r}, and not a list of texts, such as ['--learning-rate=0.01']")
    for name, distribution in asked.distributions.items():
        earlier = [trial.distributions[name] for trial in trials if name in trial.distributions]
        for same in [json_to_distribution(distribution_to_json(distribution)), *earlier]:
            check_distribution_compatibility(same, distribution)


def _failure(trial: FrozenTrial, *, with_values: bool = True) -> str:
    """Returns why a trial failed, or "", as of one whose program was killed while it recorded that."""
    error = trial.user_attrs.get("error", "") if trial.state == TrialState.FAIL else ""
    values = [r"\S*\d\S*", *(rf"(?<!\w){re.escape(str(value))}(?!\w)" for value in trial.params.values())]
    return error if with_values else re.sub("|".join(values), "", error)
