"""The trials of an Optuna study that several programs share; those of a killed one are left to the others.

Optuna is an extra of the project, so a program imports this file only if it is installed. Imports no TensorFlow.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import filelock
import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib

from engine.errors import BadInput

FAILURES_IN_A_ROW = 3
TRIALS_TO_DRAW = 5  # An importance that is estimated from fewer scores would be noise.

Space = Callable[[optuna.Trial], list[str]]  # Suggests the values of a trial; returns its flags.


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial that this program has taken: the flags are of the space, the arguments are those of all its trials."""

    number: int
    flags: list[str]
    arguments: list[str]
    reporter: optuna.Trial
    lock: filelock.BaseFileLock  # The system releases it if this program is killed.


class Trials:
    """All trials of a folder, which may be on several machines that share its file system and its locks."""

    def __init__(self, folder: Path, direction: str, pruner: str) -> None:
        """Opens the study in a folder, or starts one. `direction` says which score is best: "min" or "max".

        `pruner` is the name of a class in optuna.pruners, which is used with its defaults.

        Raises BadInput if the folder cannot be used, or its study has the other direction.
        """
        self._folder = folder
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        optuna_direction: Literal["minimize", "maximize"] = "minimize" if direction == "min" else "maximize"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Optuna's own lock would outlive a program that is killed while it has it.
            lock: Any = self._lock("journal")  # It has the two methods that Optuna calls.
            with lock:
                _cut(folder / "journal.log")
            journal = JournalFileBackend(str(folder / "journal.log"), lock)
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(journal),
                study_name="sweep",
                direction=optuna_direction,
                pruner=getattr(optuna.pruners, pruner)(),
                load_if_exists=True,
            )
        except OSError as problem:
            raise BadInput(f"--sweep-dir {folder} cannot be used ({problem.strerror}): use another one") from None
        if self._study.direction.name != optuna_direction.upper():
            raise BadInput(
                f"--sweep-dir {folder} has scores to {self._study.direction.name.lower()}, and --monitor-direction is "
                f"{direction}: use another one"
            )

    def take(self, space: Space, most: int, arguments: list[str]) -> Trial | None:
        """Returns a trial that a killed program has left, or else a new one; None if there are `most`, all taken.

        `arguments` are recorded with a new trial. One that was left keeps its own.
        """
        with self._lock("take"):
            trials = self._trials()
            for trial in trials:
                if trial.state == TrialState.RUNNING:
                    lock = self._lock(trial.number)
                    with contextlib.suppress(filelock.Timeout):
                        lock.acquire(blocking=False)
                        reporter = optuna.Trial(self._study, trial._trial_id)
                        flags, arguments = trial.user_attrs["flags"], trial.user_attrs["arguments"]
                        return Trial(trial.number, flags, arguments, reporter, lock)
            if len(trials) >= most:
                return None
            # A constant seed would repeat the first proposals after each start.
            sampler = optuna.samplers.TPESampler(seed=len(trials))
            copy = optuna.create_study(direction=self._study.direction, sampler=sampler)
            copy.add_trials(trials)
            asked = copy.ask()
            recorded = {"flags": space(asked), "arguments": arguments}
            # One write adds the trial with all its values, so that a kill cannot leave some of them.
            self._study.add_trial(
                optuna.create_trial(
                    state=TrialState.RUNNING,
                    params=asked.params,
                    distributions=asked.distributions,
                    user_attrs=recorded,
                )
            )
        return self.take(space, most, arguments)

    def prune(self, trial: Trial, scores: Mapping[int, float]) -> bool:
        """Reports the scores of a trial by epoch, from 1; records that it ends early if one is too poor; returns that.

        What it decides does not depend on how many scores come at a time, nor on which are known already.
        """
        last = self._trials()[trial.number].last_step or 0
        for epoch, score in scores.items():
            if epoch > last:
                trial.reporter.report(score, epoch)
            if epoch >= last and trial.reporter.should_prune():
                self._end(trial, state=TrialState.PRUNED)
                return True
        return False

    def complete(self, trial: Trial, score: float) -> None:
        """Records the score of a trial; one that is NaN makes it a failed trial."""
        self._end(trial, score)

    def fail(self, trial: Trial, error: str) -> None:
        """Records a trial that failed. Raises BadInput if it is the third in a row with this error."""
        trial.reporter.set_user_attr("error", error)
        self._end(trial, state=TrialState.FAIL)
        errors = [_error(trial) for trial in self._trials() if trial.state.is_finished()]
        if errors[-FAILURES_IN_A_ROW:] == [error] * FAILURES_IN_A_ROW:
            raise BadInput(f"{FAILURES_IN_A_ROW} trials in a row ended with: {error}")

    def _end(self, trial: Trial, score: float | None = None, state: TrialState | None = None) -> None:
        self._study.tell(trial.number, score, state)
        trial.lock.release()

    def ended(self) -> int:
        """Returns the number of trials that have ended."""
        return sum(trial.state.is_finished() for trial in self._trials())

    def ranked(self) -> list[FrozenTrial]:
        """Returns the trials with a score, the best one first."""
        completed = [trial for trial in self._trials() if trial.state == TrialState.COMPLETE]
        sign = 1 if self._study.direction.name == "MINIMIZE" else -1
        return sorted(completed, key=lambda trial: sign * (trial.value or 0.0))

    def describe(self, number: int) -> str:
        """Returns a line about a trial: its state, its score, and its error or its flags."""
        trial = self._trials()[number]
        score = "" if trial.value is None else f"{trial.value:.4g}"
        text = _error(trial) or shlex.join(trial.user_attrs["flags"])
        return f"trial {number:<4} {trial.state.name.lower():<9} {score:<9} {text}"

    def table(self) -> str:
        """Returns a line for each trial, the best one first, those without a score last."""
        best = [trial.number for trial in self.ranked()]
        others = [trial.number for trial in self._trials() if trial.number not in best]
        return "\n".join(map(self.describe, [*best, *others]))

    def draw(self) -> list[Path]:
        """Draws the importance of each value, and the values of all trials, if there are enough; returns the files."""
        if len(self.ranked()) < TRIALS_TO_DRAW:
            return []
        plots: dict[str, Callable[..., Any]] = {
            "importances": matplotlib.plot_param_importances,
            "trials": matplotlib.plot_parallel_coordinate,
        }
        for name, plot in plots.items():
            plot(self._study).figure.savefig(self._folder / f"{name}.png", bbox_inches="tight")
        return [self._folder / f"{name}.png" for name in plots]

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _lock(self, name: object) -> filelock.BaseFileLock:
        return filelock.FileLock(self._folder / f".{name}.lock", fallback_to_soft=False)


def _error(trial: FrozenTrial) -> str:
    """Returns the error of a failed trial, "" of others: a killed program may leave one in a trial that is resumed."""
    return trial.user_attrs.get("error", "") if trial.state == TrialState.FAIL else ""


def _cut(journal: Path) -> None:
    """Removes half a line at the end, as a full disk leaves it. Optuna would append to it, and never read it again."""
    if journal.exists():
        with journal.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
