"""How a run starts: from its newest checkpoint, from other weights, or from new ones."""

import contextlib
import os
from typing import Any

from engine.cluster.launcher import START_ID
from engine.cluster.workers import Workers
from engine.console import console, print_result
from engine.data.batches import Batches
from engine.errors import BadInput
from engine.files import read_json, write_json
from engine.model.variables import is_seed
from engine.report.report import Report
from engine.run.checkpoints import read_newest
from engine.run.directory import RESULT, RunDirectory
from engine.run.initial_weights import load_initial_weights
from engine.run.progress import Progress
from engine.run.run import Run
from engine.run.state import State, Values
from engine.run.summary import describe_records, describe_run, describe_start, print_summary
from engine.settings import CONFIG, Settings
from engine.tracing import unrepeatable_in_preparation, unrepeatable_in_step


def lock_and_find_result(directory: RunDirectory, settings: Settings, workers: Workers) -> dict[str, Any] | None:
    """Locks the directory; returns the result of the run in it if nothing is left to do.

    Raises BadInput if the directory cannot be used, or contains a run with other settings.
    """

    def look() -> dict[str, Any] | None:
        fresh = _is_fresh(settings)
        if not fresh:
            directory.check_same_run(settings)
        directory.lock()
        return None if fresh else read_json(settings.run_dir / RESULT)

    result = workers.from_chief(look) or {}
    epochs, without_improvement = result.get("epochs"), result.get("epochs_without_improvement")
    is_complete = result.keys() >= {"step", "seconds", "weights_sha256"}
    if not is_complete or not isinstance(epochs, int) or not isinstance(without_improvement, int):
        return None  # There is no result yet; or it was edited by hand, and is made again.
    if epochs >= settings.epochs:
        more = "--epochs"
    elif settings.patience is not None and without_improvement >= settings.patience:
        more = "--patience"
    else:
        return None
    console.print(f"Finished already after {epochs} epochs (more {more} would continue it; --fresh starts over)")
    print_result(result, settings)
    return result


def start_run(run: Run, directory: RunDirectory, batches: dict[str, Batches]) -> None:
    """Starts the run and its files. Raises BadInput, before anything is written, if it cannot."""
    settings, from_chief = run.settings, run.workers.from_chief
    _check_same_examples(run.workers, batches)
    _check_steps(run, batches)
    fresh = from_chief(lambda: _is_fresh(settings))
    start = None if fresh else _resume(run, batches)
    if start is None:
        message = initialize(run) if settings.init_from else "with new weights"
        start = Progress(learning_rates=_created_rates(run)), message
    progress, message = start
    for each in batches.values():
        each.examples.cache()  # Examples that cannot be read are rejected before anything is written.
    progress.workers = run.workers.count
    run.start(progress)
    from_chief(lambda: _write_files(run, directory, batches, fresh))
    print_summary(run, batches, message)


def _is_fresh(settings: Settings) -> bool:
    """Returns whether --fresh moves the run aside: not if a restart finds the run that this launch has made."""
    if not settings.fresh or not os.environ.get(START_ID):
        return settings.fresh
    with contextlib.suppress(BadInput):
        return (read_json(settings.run_dir / CONFIG) or {}).get("start_id") != os.environ[START_ID]
    return True


# --- Checks -----------------------------------------------------------------------------------------------------------


def _check_same_examples(workers: Workers, batches: dict[str, Batches]) -> None:
    """Raises BadInput in every process if their examples differ: each would take its shard of another order."""
    own = {name: (each.number_of_examples, (each.fingerprint or {}).get("sha256")) for name, each in batches.items()}
    if others := workers.names_where(own != workers.from_chief(lambda: own)):
        counts = ", ".join(f"{count:,} for {name!r}" for name, (count, _) in own.items())
        raise BadInput(
            f"{', '.join(others)}: task.load_examples returned other examples than in the first process (here "
            f"{counts}): give all processes the same files"
        )


def _check_steps(run: Run, batches: dict[str, Batches]) -> None:
    """Warns of operations in the hooks that a resumed run may not repeat.

    Raises BadInput if a step changes state that no checkpoint can contain.
    """
    run.hidden.check(run.checkpoints.state.variables())
    found = []
    if step := run.hidden.training:
        found += [f"task.train_step: {text}" for texts in unrepeatable_in_step(step) for text in texts]
    for traced in filter(None, (each.traced for each in batches.values())):  # It is None with --eager.
        found += [f"task.prepare_example: {text}" for texts in unrepeatable_in_preparation(traced) for text in texts]
    for text in dict.fromkeys(found):
        console.print(text)


def _check_same_records(run: Run, batches: dict[str, Batches]) -> None:
    """Raises BadInput if the record files of a dataset differ from the files that the run started with."""
    recorded = (read_json(run.settings.run_dir / CONFIG) or {}).get("records", {})
    for name, now in describe_records(batches).items():
        before = recorded.get(name, now)
        if any(now[key] != before.get(key) for key in ("files", "records", "sha256")):
            raise BadInput(
                f"{now['patterns']}: the {name!r} records ({now['records']:,} in {now['files']} files) differ from "
                f"those the run started with ({before.get('records'):,} in {before.get('files')}): restore the files, "
                "or use another --run-dir, or --fresh"
            )


# --- The state --------------------------------------------------------------------------------------------------------


def _resume(run: Run, batches: dict[str, Batches]) -> tuple[Progress, str] | None:
    """Restores the newest intact checkpoint; returns its progress and "resumed from ...", or None if there is none.

    Raises BadInput if the run cannot be resumed.
    """
    settings, from_chief, workers = run.settings, run.workers.from_chief, run.workers.count
    newest = from_chief(lambda: read_newest(run.checkpoints, run.best))
    if newest is None:
        if from_chief(lambda: (settings.run_dir / RESULT).exists() or len(run.best.paths()) > 1):
            raise BadInput(
                f"{run.checkpoints.directory} is empty although the run has gone far: restore the checkpoints, start a "
                "new --run-dir with --init-from this one, or use --fresh, which moves the run aside"
            )
        return None
    path, values, progress = newest
    if (reached := progress.epochs_started()) > settings.epochs:
        raise BadInput(f"--epochs {settings.epochs}: the run already reached epoch {reached}; pass at least {reached}")
    is_within_pass = any(progress.steps_of_pass.values()) or settings.steps_per_epoch
    if progress.workers != workers and is_within_pass and batches["train"].shards_by_file:
        later = "" if settings.steps_per_epoch else ", and change the number after an epoch"
        raise BadInput(
            f"{path} is from the middle of a pass on {progress.workers} worker(s), and there are {workers} (with "
            f"input_context the batches depend on that number): resume with {progress.workers}{later}"
        )
    from_chief(lambda: _check_same_records(run, batches))
    created = _created_rates(run)
    run.checkpoints.state.assign(values)
    for name in progress.forget_others(batches):
        run.objects.reset(name)
    return progress, f"resumed from {path.name}{_set_changed_rates(run, progress, created)}"


def initialize(run: Run) -> str:
    """Loads the weights of --init-from; returns which they are. Raises BadInput if they do not fit."""
    settings, objects = run.settings, run.objects
    weights = {name: each for name, each in objects.weights.items() if not is_seed(name)}
    state = State(run.strategy, run.workers, weights)

    def load() -> tuple[str, Values]:
        assert settings.init_from is not None  # The callers check that.
        report = load_initial_weights(settings.init_from, objects.model, partial=settings.init_partial)
        return report, state.values()

    report, values = run.workers.from_chief(load)
    state.assign(values)
    objects.average.start_over()
    return report


def _created_rates(run: Run) -> dict[str, float]:
    """Returns --learning-rate, and the constant rates that task.create_optimizer gave to the optimizers.

    Call it before a checkpoint is restored, which may contain other rates. No checkpoint contains a schedule.
    """
    optimizers, rates = run.objects.optimizers, run.objects.learning_rates()
    constant = {name: rate for name, rate in rates.items() if hasattr(optimizers[name].learning_rate, "assign")}
    return {"--learning-rate": run.settings.learning_rate, **constant}


def _set_changed_rates(run: Run, progress: Progress, created: dict[str, float]) -> str:
    """Sets the learning rates that task.create_optimizer has changed since the last start; returns which.

    Other rates stay as in the checkpoint, because the run may have changed them by itself.
    """
    before, progress.learning_rates = progress.learning_rates, created
    texts: dict[str, str] = {}  # Change -> the first name with it: optimizers usually have --learning-rate.
    for name, rate in created.items():
        if before.get(name, rate) != rate:
            texts.setdefault(f"{before[name]:g} -> {rate:g}", name)
            if name in run.objects.optimizers:
                run.objects.optimizers[name].learning_rate = rate
    return "".join(f"; {where} {change}" for change, where in texts.items())


# --- The files --------------------------------------------------------------------------------------------------------


def _write_files(run: Run, directory: RunDirectory, batches: dict[str, Batches], fresh: bool) -> None:
    settings, progress, direction = run.settings, run.progress, run.objects.monitor_direction
    directory.open(fresh=fresh)
    for each in (run.checkpoints, run.best):
        each.clear()
    # Weights that were saved after the checkpoint will be saved again.
    run.best.forget(progress.step, but=progress.best_step)
    earlier = read_json(settings.run_dir / CONFIG) or {"start_id": os.environ.get(START_ID)}
    starts = [*earlier.get("starts", []), describe_start(progress.step, settings)][-100:]  # There may be many.
    resumed = [start["step"] for start in starts if 0 < start["step"] <= progress.step]
    done = {"epochs_done": progress.epoch, "validated_step": progress.validated_step or 0, "step": progress.step}
    run.report = Report(settings, run.objects.names, direction, resumed=resumed, **done)
    config = {
        **describe_run(run, batches, earlier),
        "start_id": earlier.get("start_id"),
        "monitor_direction": direction,
        "starts": starts,
    }
    write_json(settings.run_dir / CONFIG, config)
    (settings.run_dir / RESULT).unlink(missing_ok=True)
