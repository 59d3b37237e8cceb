"""How a run starts: from its newest checkpoint, from other weights, or from new ones."""

import os
import time
from collections.abc import Collection
from typing import Any

from engine.cluster.launcher import START_ID
from engine.cluster.workers import Workers
from engine.console import console, print_result
from engine.data.batches import Batches
from engine.data.examples import hook_of
from engine.errors import BadInput
from engine.files import exists, read_json, write_json, writing
from engine.model.rows import slow_reads
from engine.report.goodput import Goodput
from engine.report.report import Report
from engine.retries import until_written
from engine.run.agreement import check_objects, same_data
from engine.run.checkpoints import restore_newest
from engine.run.directory import RESULT, RunDirectory, is_fresh
from engine.run.progress import Progress
from engine.run.run import Run
from engine.run.summary import describe_run, describe_start, print_summary
from engine.settings import CONFIG, Settings
from engine.tracing import unrepeatable_in_preparation, unrepeatable_in_step


def lock_and_find_result(directory: RunDirectory, settings: Settings, workers: Workers) -> dict[str, Any] | None:
    """Locks the directory; returns the result of the run in it if nothing is left to do.

    Raises BadInput if the directory cannot be used, or contains a run with other settings.
    """

    def look() -> dict[str, Any] | None:
        fresh = is_fresh(settings)
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


def restore(run: Run, batches: dict[str, Batches]) -> str:
    """Restores the newest checkpoint, unless the run starts with the weights as they are; returns which it is.

    Raises BadInput if the run cannot be resumed, or the processes do not fit together. Writes nothing.
    """
    for dataset in batches.values():
        dataset.examples.cache()  # Examples that cannot be read are rejected before anything is written.
    data = same_data(run.workers, batches)
    fresh = run.workers.from_chief(lambda: is_fresh(run.settings))
    progress, message = (None if fresh else _resume(run, batches, data)) or (
        Progress(learning_rates=_created_rates(run)),
        run.objects.source,
    )
    check_objects(run.workers, run.checkpoints.state, run.objects)
    run.checkpoints.state.check_workers({}, "something in task.create_model or create_optimizer")
    progress.workers, progress.data = run.workers.count, data
    run.start(progress)
    return message


def write_first_files(run: Run, directory: RunDirectory, batches: dict[str, Batches], message: str) -> None:
    """Makes the run's directory, and prints the run summary, with the `message` of `restore`."""
    _warn(run, batches)
    run.workers.from_chief(lambda: _write_files(run, directory, batches))
    run.progress.spend("starting", time.monotonic() - run.began)
    run.write_goodput(is_due=True)
    print_summary(run, batches, message)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _warn(run: Run, batches: dict[str, Batches]) -> None:
    """Prints which operations in the hooks a resumed run may not repeat, and which reads of tables are slow."""
    found = []
    if step := run.traced.get("train"):
        found += [f"task.train_step: {text}" for texts in unrepeatable_in_step(step) for text in texts]
        found += slow_reads(run.objects.model, step)
    for traced in filter(None, (dataset.traced for dataset in batches.values())):  # It is None with --eager.
        found += [f"task.prepare_example: {text}" for texts in unrepeatable_in_preparation(traced) for text in texts]
    for text in dict.fromkeys(found):
        console.print(text)


def _changed_data(settings: Settings, before: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    """Returns how each dataset differs from what the run has used so far. Raises BadInput unless that is allowed."""
    changed: dict[str, str] = {}
    for name, now in data.items():
        then = before.get(name, now)
        shown = {"examples": "{} examples then, {} now", "element_spec": "{} then, {} now"}
        texts = [text.format(then[key], now[key]) for key, text in shown.items() if then[key] != now[key]]
        if texts or then["sha256"] != now["sha256"]:
            changed[name] = ", ".join(texts) or f"{now['examples']} examples then and now, not the same ones"
    if changed and not settings.allow_changed_data:
        name, text = next(iter(changed.items()))
        raise BadInput(
            f"{hook_of(name)} returned other examples than the run has used so far ({text}): restore the data, use "
            "another --run-dir or --fresh, or continue with these examples with --allow-changed-data"
        )
    return changed


# --- The state --------------------------------------------------------------------------------------------------------


def _resume(run: Run, batches: dict[str, Batches], data: dict[str, Any]) -> tuple[Progress, str] | None:
    """Restores the newest intact checkpoint; returns its progress and "resumed from ...", or None if there is none.

    `data` has the fingerprints of the datasets. Raises BadInput if the run cannot be resumed.
    """
    settings, from_chief, workers = run.settings, run.workers.from_chief, run.workers.count
    created = _created_rates(run)
    newest = restore_newest(run.checkpoints, run.best)
    if newest is None:
        if from_chief(lambda: exists(settings.run_dir / RESULT) or len(run.best.paths()) > 1):
            raise BadInput(
                f"{run.checkpoints.directory} is empty although the run has gone far: restore the checkpoints, start a "
                "new --run-dir with --init-from this one, or use --fresh, which moves the run aside"
            )
        return None
    path, progress = newest
    if (reached := progress.epochs_started()) > settings.epochs:
        raise BadInput(f"--epochs {settings.epochs}: the run already reached epoch {reached}; pass at least {reached}")
    is_within_pass = any(progress.steps_of_pass.values()) or settings.steps_per_epoch
    if progress.workers != workers and is_within_pass and batches["train"].shards_by_file:
        later = "" if settings.steps_per_epoch else ", and change the number after an epoch"
        raise BadInput(
            f"{path} is from the middle of a pass on {progress.workers} worker(s), and there are {workers} (with "
            f"input_context the batches depend on that number): resume with {progress.workers}{later}"
        )
    is_shared_alike = progress.workers == workers or not batches["train"].shards_by_file
    changed = _changed_data(settings, progress.data, data) if is_shared_alike else {}
    kept: Collection[str] = batches
    if changed:  # An evaluation starts over anyway, but an epoch only if its own examples have changed.
        kept = ["train"] if "train" not in changed or "train" in progress.metrics else []
    for name in progress.forget_others(kept):
        run.objects.reset(name)
    if any(settings.monitor.startswith(f"{name}/") for name in changed) and progress.epoch < settings.epochs:
        # The scores of other examples cannot be compared: the next one is the best, and --patience counts from here.
        progress.best_score, progress.best_epoch = None, progress.epoch
    message = f"resumed from {path.name}{_set_changed_rates(run, progress, created)}"
    return progress, message + _describe_changes(settings, progress, changed, data)


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


def _describe_changes(settings: Settings, progress: Progress, changed: dict[str, str], data: dict[str, Any]) -> str:
    """Returns which datasets have changed, and what that does to the schedule, to append to "resumed from ..."."""
    text = "".join(f"; {name!r} has changed ({each})" for name, each in changed.items())
    before, now = (each["train"]["steps_per_epoch"] if changed else 0 for each in (progress.data, data))
    if before == now:
        return text
    epochs = settings.epochs
    end = progress.step + (epochs - progress.epoch - ("train" in progress.metrics)) * now
    return (
        f"{text}; {before} steps per epoch then, {now} now: the learning-rate schedule spans {epochs * now} steps "
        f"instead of {epochs * before}, and the training ends after step {end}"
    )


# --- The files --------------------------------------------------------------------------------------------------------


def _write_files(run: Run, directory: RunDirectory, batches: dict[str, Batches]) -> None:
    settings, progress, direction = run.settings, run.progress, run.objects.monitor_direction
    directory.open(fresh=is_fresh(settings))
    for checkpoints in (run.checkpoints, run.best):
        checkpoints.clear()
    # Weights that were saved after the checkpoint will be saved again.
    run.best.forget(progress.step, but=progress.best_step)
    earlier = read_json(settings.run_dir / CONFIG) or {"start_id": os.environ.get(START_ID)}
    starts = [*earlier.get("starts", []), describe_start(progress.step, settings)][-100:]  # There may be many.
    resumed = [start["step"] for start in starts if 0 < start["step"] <= progress.step]
    done = {"epochs_done": progress.epoch, "validated_step": progress.validated_step or 0, "step": progress.step}
    config = {
        **describe_run(run, batches, earlier),
        "start_id": earlier.get("start_id"),
        "monitor_direction": direction,
        "starts": starts,
    }
    # First of all, because a directory with other files and without it counts as foreign.
    write_json(settings.run_dir / CONFIG, config)
    run.report = Report(settings, run.objects.names, direction, resumed=resumed, **done)
    run.goodput = Goodput(settings.run_dir, progress.spent, run.began)
    with writing(settings.run_dir / RESULT):
        until_written(lambda: (settings.run_dir / RESULT).unlink(missing_ok=True), settings.run_dir / RESULT)
