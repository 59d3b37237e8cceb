"""Evaluation without training: once, of the best weights, or of every checkpoint of a run as it appears."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cluster.environment import reject_cluster
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers
from engine.console import console, digits, print_facts
from engine.data.stacks import CompiledSteps
from engine.errors import BadInput, Damaged
from engine.files import exists
from engine.model.metrics import split_of
from engine.report.report import TENSORBOARD, Summaries
from engine.report.tables import read_rows, write_rows
from engine.run.agreement import check_files
from engine.run.checkpoint_files import step_of
from engine.run.checkpoints import restore_best
from engine.run.directory import RESULT, Directory
from engine.run.resume import load_data_of
from engine.settings import CONFIG, Settings
from engine.signals import signals


def evaluate(program: Any, settings: Settings, read_settings: Callable[[], Settings]) -> dict[str, float] | None:
    """Prints and returns the validation and test metrics of --init-from, or else of the run's best weights.

    With --evaluate-continuously it validates each checkpoint instead, and returns None; `read_settings` reads the
    settings again, once there is a run. Raises BadInput if there is no such run, or a setting contradicts it.
    """
    if settings.evaluate_continuously:
        _evaluate_continuously(program, settings, read_settings)
        return None
    if not settings.init_from:
        Workers(create_strategy(settings)).from_chief(lambda: Directory(settings).check_same_run())
    program.build(settings)
    run = program.run
    if not settings.init_from:
        run.workers.from_chief(lambda: check_files(run.objects.data_files, settings.run_dir))
    if run.objects.names.datasets == ("train",):
        raise BadInput("--evaluate-only: task.load_examples returned None for 'validation' and 'test': return one")
    with signals.listening(), run.steps_named():
        weights = run.objects.source
        if not settings.init_from:
            weights, progress = restore_best(run.checkpoints, run.best)
            load_data_of(run, progress)
        run.trace(evaluation_steps(program))
        metrics = program.evaluate_split("validation") | program.evaluate_split("test")
        print_facts(f"Evaluation of {weights}", run.objects.names.lines(metrics))  # All digits, as no file has them.
    return metrics


def evaluation_steps(program: Any) -> dict[str, CompiledSteps]:
    """Returns the steps of the splits that are evaluated."""
    return {split: steps for split, steps in program.run_steps.items() if split != "train"}


def _evaluate_continuously(program: Any, settings: Settings, read_settings: Callable[[], Settings]) -> None:
    """Validates each checkpoint of the run in --run-dir as it appears, until it ends, or for so long without one.

    The metrics go to the console, to evaluations.csv and to TensorBoard. Checkpoints that the run removes before their
    turn are skipped. Once there is a run, its settings are the defaults.

    Raises BadInput if a setting contradicts the run's, CannotWrite if a write fails.
    """
    reject_cluster("--evaluate-continuously")
    console.print(f"Validating the checkpoints of {settings.run_dir} as they appear")
    if not _wait_for(lambda: exists(settings.run_dir / CONFIG), settings):
        return
    settings = read_settings()
    Directory(settings).check_same_run()
    program.build(settings)
    check_files(program.run.objects.data_files, settings.run_dir)
    if not any(split_of(name) == "validation" for name in program.run.objects.names.datasets):
        raise BadInput(
            "--evaluate-continuously: task.load_examples('validation') returned None, so there is no validation: "
            "return one, or use --evaluate-only for the test"
        )
    _validate_as_they_appear(program, settings)


def _validate_as_they_appear(program: Any, settings: Settings) -> None:
    run, names = program.run, program.run.objects.names
    file, result = settings.run_dir / "evaluations.csv", settings.run_dir / RESULT
    rows, summaries = read_rows(file, key="step"), Summaries(settings.run_dir / TENSORBOARD / "evaluation", names)
    seen: set[Any] = {row["step"] for row in rows}  # It contains steps, and the paths of damaged checkpoints.

    def new() -> Path | str | None:
        # It looks for the result first, because a run writes its last checkpoint before that.
        has_ended = exists(result)
        path = next((path for path in run.checkpoints.paths() if seen.isdisjoint((path, step_of(path)))), None)
        return path or ("ended" if has_ended else None)

    while isinstance(path := _wait_for(new, settings), Path):
        try:
            run.checkpoints.restore(path)
        except Damaged as problem:
            if path.exists():  # Otherwise the run has removed it meanwhile.
                console.print(f"{path.name} is skipped: {problem}")
            seen.add(path)
            continue
        if not run.traced:
            run.trace(evaluation_steps(program))
        run.objects.reset("validation")  # The checkpoint may be from the middle of a validation.
        with run.evaluation_weights(), contextlib.closing(run.live):
            metrics = program.evaluate_split("validation")
        seen.add(step := step_of(path))
        texts = [f"{name} {digits(value)}" for name, value in names.lines(metrics).items()]
        console.print("  ".join([path.name, *texts]))
        summaries.add(step, names.scalars(metrics))
        rows = sorted([*rows, {"step": step, **metrics}], key=lambda row: row["step"])
        write_rows(file, rows)
    if path:
        console.print("The run has ended.")


def _wait_for(find: Callable[[], Any], settings: Settings) -> Any:
    """Returns the first true value that `find` returns; None, and prints a line, after --evaluate-continuously."""
    seconds = settings.evaluate_continuously or 0.0
    deadline = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > deadline:
            console.print(f"Nothing new for {seconds:g} s (--evaluate-continuously)")
            return None
        time.sleep(1.0)
    return found
