"""How a run resumes from its newest checkpoint: with other data, other learning rates, another number of workers."""

from collections.abc import Collection
from typing import Any

from engine.data.examples import hook_of
from engine.errors import BadInput
from engine.files import exists
from engine.machine import changed_files
from engine.run.agreement import same_data
from engine.run.checkpoints import restore_newest
from engine.run.directory import RESULT
from engine.run.progress import Progress
from engine.run.training import Run
from engine.settings import Settings


def _changed_data(settings: Settings, before: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    """Returns how each dataset differs from what the run has used so far. Raises BadInput unless that is allowed."""
    changed: dict[str, str] = {}
    for name, now in data.items():
        then = before.get(name, now)
        shown = {"examples": "{} examples then, {} now", "element_spec": "{} then, {} now"}
        texts = [text.format(then[key], now[key]) for key, text in shown.items() if then[key] != now[key]]
        texts += changed_files(then["files"], now["files"])
        if texts or then["sha256"] != now["sha256"]:
            changed[name] = ", ".join(texts) or f"{now['examples']} examples then and now, not the same ones"
    if changed and not settings.allow_changed_data:
        name, text = next(iter(changed.items()))
        raise BadInput(
            f"the data of {hook_of(name)} differ from those that the run has used so far ({text}): restore them, use "
            "another --run-dir or --fresh, or continue with these data with --allow-changed-data"
        )
    return changed


def load_data_of(run: Run, progress: Progress) -> None:
    """Sets `run.user_state` as a checkpoint has it, and reloads the examples that are made of it."""
    run.user_state.clear()
    run.user_state.update(progress.user_state)
    for split in progress.reloaded:
        run.batches.reload(split)


def resume(run: Run) -> tuple[Progress, str] | None:
    """Restores the newest intact checkpoint; returns its progress and "resumed from ...", or None if there is none.

    Raises BadInput if the run cannot be resumed.
    """
    settings, from_chief = run.settings, run.workers.from_chief
    created = created_rates(run)
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
    load_data_of(run, progress)
    before, progress.data = progress.data, same_data(run.workers, run.batches, run.objects.data_files)
    changed = _changed_data(settings, before, progress.data)
    kept: Collection[str] = run.batches
    if changed:  # An evaluation starts over anyway, but an epoch only if its own examples have changed.
        kept = ["train"] if "train" not in changed or "train" in progress.metrics else []
    for name in progress.forget_others(kept):
        run.objects.reset(name)
    if any(settings.monitor.startswith(f"{name}/") for name in changed) and progress.epoch < settings.epochs:
        # The scores of other examples cannot be compared: the next one is the best, and --patience counts from here.
        progress.best_score, progress.best_epoch = None, progress.epoch
    changes = "".join(f"; {name!r} has changed ({difference})" for name, difference in changed.items())
    return progress, f"resumed from {path.name}{_set_changed_rates(run, progress, created)}{changes}"


def created_rates(run: Run) -> dict[str, float]:
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
