"""The trials of an Optuna study that several programs share; those of a killed one are left to the others.

Optuna is an extra of the project, so a program imports this file only if it is installed. Imports no TensorFlow.
"""

import contextlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from engine.errors import BadInput

FAILURES_IN_A_ROW = 3


class Trials:
    """All trials of a folder, which may be on several machines that share its file system and its locks."""

    def __init__(self, folder: Path, direction: str, pruner: str) -> None:
        """Opens the study in a folder, or starts one. `direction` says which score is best: "min" or "max".

        `pruner` is the name of a class in optuna.pruners, which is used with its defaults.

        Raises BadInput if the folder cannot be used, or its study has the other direction.
        """
        self._folder = folder
        self._locks: dict[int, filelock.BaseFileLock] = {}  # The system releases them if this program is killed.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        wanted = StudyDirection.MINIMIZE if direction == "min" else StudyDirection.MAXIMIZE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Optuna's own lock would outlive a program that is killed while it has it.
            lock: Any = self._lock("journal")  # It has the two methods that Optuna calls.
            with lock, (folder / "journal.log").open("ab+") as file:
                # A full disk leaves half a line at the end. Optuna would append to it, and never read it again.
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log"), lock)),
                study_name="sweep",
                direction=wanted,
                pruner=getattr(optuna.pruners, pruner)(),
                load_if_exists=True,
            )
        except OSError as problem:
            raise BadInput(f"--sweep-dir {folder} cannot be used ({problem.strerror}): use another one") from None
        if (recorded := self._study.direction) != wanted:
            raise BadInput(
                f"--sweep-dir {folder} has scores to {recorded.name.lower()}, and --monitor-direction is {direction}: "
                "use another one"
            )

    def take(self, space: Callable[[optuna.Trial], list[str]], most: int, arguments: list[str]) -> optuna.Trial | None:
        """Returns a trial that a killed program has left, or else a new one; None if there are `most`, all taken.

        A new one gets the user_attrs "flags", from `space`, and "arguments". One that was left keeps its own.
        """
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
            # A constant seed would repeat the first proposals after each start.
            sampler = optuna.samplers.TPESampler(seed=len(trials))
            copy = optuna.create_study(direction=self._study.direction, sampler=sampler)
            copy.add_trials(trials)
            asked = copy.ask()
            attributes = {"flags": space(asked), "arguments": arguments}
            new: dict[str, Any] = {"params": asked.params, "distributions": asked.distributions}
            # One write adds the trial with all its values, so that a kill cannot leave some of them.
            self._study.add_trial(optuna.create_trial(state=TrialState.RUNNING, user_attrs=attributes, **new))
        return self.take(space, most, arguments)

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

    def end(self, trial: optuna.Trial, score: float | None = None, error: str = "") -> None:
        """Records the score of a trial, or the error of one that failed; one whose score is NaN has failed, too.

        Raises BadInput if it is the third in a row with this error.
        """
        if error:
            trial.set_user_attr("error", error)
        self._study.tell(trial.number, score, TrialState.FAIL if error else None)
        self.release(trial)
        errors = [ended.user_attrs.get("error") for ended in self._trials() if ended.state.is_finished()]
        if error and errors[-FAILURES_IN_A_ROW:] == [error] * FAILURES_IN_A_ROW:
            raise BadInput(f"{FAILURES_IN_A_ROW} trials in a row ended with: {error}")

    def release(self, trial: optuna.Trial) -> None:
        """Lets any program take the trial, if it has not ended."""
        self._locks.pop(trial.number).release()

    def ended(self) -> int:
        """Returns the number of trials that have ended."""
        return sum(trial.state.is_finished() for trial in self._trials())

    def ranked(self) -> list[FrozenTrial]:
        """Returns the trials with a score, the best one first."""
        completed = self._study.get_trials(states=[TrialState.COMPLETE])
        return sorted(
            completed, key=lambda trial: trial.value or 0.0, reverse=self._study.direction == StudyDirection.MAXIMIZE
        )

    def describe(self, number: int) -> str:
        """Returns a line about a trial: its state, its score, and its error or its flags."""
        trial = self._trials()[number]
        score = "" if trial.value is None else f"{trial.value:.4g}"
        text = trial.user_attrs.get("error") or shlex.join(trial.user_attrs["flags"])
        return f"trial {number:<4} {trial.state.name.lower():<9} {score:<9} {text}"

    def table(self) -> str:
        """Returns a line for each trial, the best one first, those without a score last."""
        best = [trial.number for trial in self.ranked()]
        others = [trial.number for trial in self._trials() if trial.number not in best]
        return "\n".join(map(self.describe, [*best, *others]))

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _lock(self, name: object) -> filelock.BaseFileLock:
        return filelock.FileLock(self._folder / f".{name}.lock", fallback_to_soft=False)
