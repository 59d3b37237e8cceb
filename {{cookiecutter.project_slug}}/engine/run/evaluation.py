"""Evaluation without training: once, of the best weights, or of every checkpoint of a run as it appears."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cluster.environment import refuse_cluster
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers
from engine.console import console, in_short, print_facts
from engine.errors import BadInput, Damaged
from engine.model.metrics import ResultNames, split_of
from engine.report.summaries import TENSORBOARD, Summaries
from engine.report.tables import read_rows, write_rows
from engine.run.checkpoints import find_best, step_of
from engine.run.directory import RESULT, RunDirectory
from engine.run.program import Program
from engine.run.run import Run
from engine.run.signals import signals
from engine.run.start import initialize
from engine.settings import CONFIG

# Between two looks at the run's directory.
SECONDS_BETWEEN_LOOKS = 1.0


def evaluate(program: Program, settings: Any) -> dict[str, float]:
    """Prints and returns the validation and test metrics of --init-from, or else of the best weights of the run.

    Raises:
        BadInput: there is no such run, or a setting contradicts it.
    """
    if not settings.init_from:
        workers = Workers(create_strategy(settings))
        workers.from_chief(lambda: RunDirectory(settings.run_dir).check_same_run(settings))
    program.build(settings)
    run = program.run
    if run.objects.names.sets == ("train",):
        raise BadInput("--evaluate-only: task.load_examples returned None for 'validation' and 'test': return one")
    with signals.listening(), run.steps_named():
        weights = initialize(run) if settings.init_from else _restore_best(run)
        metrics = {**program.validate(), **program.test()}
        print_facts(f"Evaluation of {weights}", run.objects.names.lines(metrics))  # With all digits: no file has them.
    return metrics


def _restore_best(run: Run) -> Path:
    """Sets the weights to those that the newest checkpoint says are the best; returns where they are."""

    def find() -> Path:
        try:
            return find_best(run.checkpoints, run.best)
        except BadInput as problem:
            raise BadInput(f"--evaluate-only: {problem}, or give --init-from") from problem

    try:
        weights = run.workers.from_chief(find)
        run.best.restore(weights)
    except Damaged as problem:
        raise BadInput(
            f"--evaluate-only: {problem}: bring it back, or give other weights with --init-from"
        ) from problem
    return weights


def evaluate_continuously(program: Program, read_settings: Callable[[], Any]) -> None:
    """Validates each checkpoint of the run in --run-dir as it appears, beside the training.

    The metrics go to the console, to evaluations.csv and to TensorBoard. It ends when the run has ended, or when there
    was nothing new for --evaluation-timeout seconds. Checkpoints that the run has removed before their turn are
    skipped.

    Args:
        program: the module train.py.
        read_settings: returns the settings; those that the command line does not give are the run's, once it is there.

    Raises:
        BadInput: a setting contradicts the run's, or its directory cannot be written.
        CannotWrite: the directory cannot be written any more.
    """
    refuse_cluster("--evaluate-continuously")
    settings = read_settings()
    timeout = f"Nothing new for {settings.evaluation_timeout:g} s (--evaluation-timeout)"
    if not (settings.run_dir / CONFIG).exists():
        console.print(f"Validating the checkpoints of {settings.run_dir} as they appear; there is no run yet")
        if not _appears(settings.run_dir / CONFIG, settings.evaluation_timeout):
            console.print(timeout)
            return
        settings = read_settings()
    RunDirectory(settings.run_dir).check_same_run(settings)
    if not os.access(settings.run_dir, os.W_OK | os.X_OK):
        raise BadInput(
            f"--evaluate-continuously writes to --run-dir {settings.run_dir}, which cannot be written: make it "
            "writable, or use --evaluate-only"
        )
    program.build(settings)
    checkpoints, names = program.run.checkpoints, program.run.objects.names
    if not any(split_of(name) == "validation" for name in names.sets):
        raise BadInput(
            "--evaluate-continuously: task.load_examples('validation') returned None, so there is no validation: "
            "return one, or use --evaluate-only for the test"
        )
    evaluations = Evaluations(settings.run_dir, names)
    console.print(f"Validating the checkpoints of {settings.run_dir} as they appear")
    latest = time.monotonic()
    while True:
        # Checked first: the last checkpoint is written before the result.
        ended = (settings.run_dir / RESULT).exists()
        new = [path for path in checkpoints.paths() if path not in evaluations]
        if new:
            try:
                values, _ = checkpoints.read(new[0])
            except Damaged:
                evaluations.pass_over(new[0])
                continue
            checkpoints.state.assign(values)
            program.run.objects.reset("validation")  # It may have been saved in the middle of a validation.
            with program.run.weights_to_keep(), program.run.live.shown():
                evaluations.add(new[0], program.validate())
            latest = time.monotonic()
        elif ended:
            console.print("The run has ended.")
            return
        elif time.monotonic() > latest + settings.evaluation_timeout:
            console.print(timeout)
            return
        else:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _appears(path: Path, seconds: float) -> bool:
    """Returns whether there is such a file within some time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return True


class Evaluations:
    """The validations of --evaluate-continuously: evaluations.csv, TensorBoard, and a line each."""

    def __init__(self, run_dir: Path, names: ResultNames) -> None:
        """Continues what is there, of a run that still has the same checkpoints."""
        self._names = names
        self._path = run_dir / "evaluations.csv"
        self._rows = read_rows(self._path, key="step")
        self._passed_over: set[str] = set()
        self._summaries = Summaries(run_dir / TENSORBOARD / "evaluation", names)

    def __contains__(self, checkpoint: Path) -> bool:
        return checkpoint.name in self._passed_over or any(row["step"] == step_of(checkpoint) for row in self._rows)

    def pass_over(self, checkpoint: Path) -> None:
        self._passed_over.add(checkpoint.name)

    def add(self, checkpoint: Path, metrics: dict[str, float]) -> None:
        """Reports what was measured of a checkpoint."""
        step = step_of(checkpoint)
        self._rows = sorted([*self._rows, {"step": step, **metrics}], key=lambda row: row["step"])
        console.print(f"{checkpoint.name}  {in_short(self._names, metrics)}")
        self._summaries.add(step, self._names.scalars(metrics))
        write_rows(self._path, self._rows)
