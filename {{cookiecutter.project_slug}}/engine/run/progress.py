"""How far a run has come: what a checkpoint records beside the variables."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from engine.console import console
from engine.errors import BadInput

FORMAT = 1  # Grows whenever fields change their meaning.


@dataclasses.dataclass
class Progress:
    """Counts and scores of a run, which are JSON values, and what the task keeps."""

    epoch: int = 0  # Complete epochs.
    step: int = 0  # Training steps.
    steps_of_pass: dict[str, int] = dataclasses.field(default_factory=dict)
    """dataset -> steps done of a pass that has not ended: an epoch of "train", or an evaluation of another dataset."""
    metrics: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """dataset -> the metrics of a pass that has ended, while the epoch or the evaluation around it has not."""
    seconds_of_epoch: dict[str, float] = dataclasses.field(default_factory=dict)
    """dataset -> seconds of the current epoch."""
    seconds_waited: float = 0.0  # Seconds of the current epoch in which the training waited for batches.
    seconds: float = 0.0  # Seconds of all complete epochs.
    best_epoch: int | None = None
    best_step: int | None = None
    best_score: float | None = None
    validated_step: int | None = None  # The step of the last complete validation of --validate-every-steps.
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last --learning-rate, and the constant rate that task.create_optimizer gave to each optimizer."""
    data: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # dataset -> its fingerprint
    rates_of_epoch: dict[str, float] = dataclasses.field(default_factory=dict)
    """The learning rates with which the last training ended, or those to which train.py has changed them since."""
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    """A kind of engine/report/report.py -> the seconds that led to this state, of this start and of earlier ones."""
    user_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the task keeps in `run.user_state`: JSON values and NumPy arrays."""
    reloaded: list[str] = dataclasses.field(default_factory=list)  # The splits of which `run.reload` was called.
    format: int = FORMAT

    @classmethod
    def read(cls, record: dict[str, Any], path: Path) -> "Progress":
        """Returns what `record` returned. Raises BadInput if another version of the engine wrote it, to `path`."""
        # It is not damaged: a damaged checkpoint is skipped, and later removed.
        unknown = sorted(record.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown or record.get("format", 1) != FORMAT:
            found = f"format {record.get('format', 1)}" if not unknown else f"unknown: {', '.join(unknown)}"
            raise BadInput(
                f"{path} was written by another version of engine/ ({found}): continue with the version that wrote it, "
                "or use another --run-dir"
            )
        return cls(**record)

    def report_changes(self, rates: dict[str, float]) -> None:
        """Prints which learning rates, by column of metrics.csv, train.py has changed since the last training."""
        before, self.rates_of_epoch = self.rates_of_epoch, rates
        for name, rate in rates.items():
            if before.get(name, rate) != rate:
                console.print(f"{name.replace('_', ' ', 1)} {before[name]:g} -> {rate:g}")

    def spend(self, kind: str, seconds: float) -> None:
        self.spent[kind] = self.spent.get(kind, 0.0) + seconds

    def add(self, name: str, steps: int, seconds: float, waited: float, *, is_first: bool = False) -> None:
        """Counts steps of a pass over a dataset, the seconds that they took, and the seconds waited for batches.

        The first steps of a compiled function are those in which it is compiled.
        """
        waited = min(waited, seconds)
        if name == "train":
            self.step += steps
            self.seconds_waited += waited
        if is_first or name != "train":
            self.spend("starting" if is_first else "evaluating", seconds)
        else:
            self.spend("training", seconds - waited)
            self.spend("waiting", waited)
        self.steps_of_pass[name] = self.steps_of_pass.get(name, 0) + steps
        self.seconds_of_epoch[name] = self.seconds_of_epoch.get(name, 0.0) + seconds

    def end_pass(self, name: str, metrics: dict[str, float]) -> None:
        """Keeps the metrics of a pass that has ended."""
        del self.steps_of_pass[name]
        self.metrics[name] = metrics

    def forget_others(self, names: Collection[str]) -> list[str]:
        """Forgets the datasets that are not among `names`; returns the ones whose pass had not ended."""
        under_way = [name for name in self.steps_of_pass if name not in names]
        for counted in (self.steps_of_pass, self.metrics):
            for name in counted.keys() - set(names):
                del counted[name]
        return under_way

    def end_epoch(self) -> tuple[float, float, float]:
        """Counts one more epoch; returns its seconds in all, in training, and in waiting for training batches."""
        seconds = sum(self.seconds_of_epoch.values())
        times = seconds, self.seconds_of_epoch.get("train", 0.0), self.seconds_waited
        self.epoch += 1
        self.seconds += seconds
        self.metrics, self.seconds_of_epoch, self.seconds_waited = {}, {}, 0.0
        return times

    def consider(self, score: float, direction: str) -> bool:
        """Returns whether a score is the best so far ("min" or "max"), and remembers it if it is. NaN never is."""
        if improved := is_better(score, self.best_score, direction):
            self.best_epoch, self.best_step, self.best_score = self.epochs_started(), self.step, score
        return improved

    def is_best(self) -> bool:
        """Returns whether the weights of this step are the best so far."""
        return self.best_step == self.step

    def epochs_without_improvement(self) -> int:
        """Returns how many epochs have ended since the one with the best score."""
        return self.epoch - (self.best_epoch or 0)

    def epochs_started(self) -> int:
        """Returns how many epochs have started, including complete ones."""
        return self.epoch + (any(self.steps_of_pass.values()) or bool(self.metrics))

    def position(self) -> tuple[int, int, list[str]]:
        """Returns the training steps, the steps of passes that have not ended, and the passes that have."""
        return self.step, sum(self.steps_of_pass.values()), list(self.metrics)

    def record(self) -> dict[str, Any]:
        """Returns it as JSON values, and arrays in `user_state`.

        Raises BadInput if `user_state` would not be the same after a resume.
        """
        values = {name: value for name, value in self.user_state.items() if not (name == str(name) and is_array(value))}
        restored = None
        with contextlib.suppress(ValueError, RecursionError):
            restored = json.loads(json.dumps(values, skipkeys=True, default=repr))
        if repr(restored) != repr(values):
            raise BadInput(
                f"run.user_state {' '.join(repr(values).split())} would not be the same after a resume: use dicts with "
                "text keys, lists, texts, booleans, None, and numbers of Python, such as float(x); and NumPy arrays "
                "beside these"
            )
        return dataclasses.asdict(self)


def is_array(value: Any) -> bool:
    """Returns whether a value of `user_state` is saved as an array of NumPy."""
    return type(value) is np.ndarray and value.dtype.kind in "biufcSUMm"  # Not bfloat16, and no masks.


def is_better(score: float, best_score: float | None, direction: str) -> bool:
    """Returns whether `score` improves on the best so far; None if there is none. NaN improves on nothing."""
    if best_score is None or math.isnan(score):
        return not math.isnan(score)
    return score < best_score if direction == "min" else score > best_score
