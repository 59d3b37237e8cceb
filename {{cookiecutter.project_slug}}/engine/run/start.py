"""How a run begins: it resumes from its newest checkpoint, or begins with other weights, or with new ones."""

import contextlib
import json
import os
from typing import Any

from engine.cluster.workers import Workers
from engine.console import console, print_result
from engine.data.batches import Batches
from engine.errors import BadInput
from engine.files import read_json, write_json
from engine.model.replicas import is_seed
from engine.report.report import Report
from engine.run.checkpoints import read_newest
from engine.run.directory import RESULT, RunDirectory
from engine.run.initial_weights import load_initial_weights
from engine.run.run import Run
from engine.run.state import State, Values
from engine.run.summary import describe_examples, describe_records, describe_run, describe_start, print_plan
from engine.settings import CONFIG
from engine.tracing import draws_in_preparation, draws_in_step, python_in_preparation, python_in_step

# Set by whatever starts a program again when it has died, as launch.py does: the same for all of its starts.
START_ID = "TRAINING_START_ID"
# A run may be started again and again.
STARTS_KEPT = 100


def lock_and_find_result(directory: RunDirectory, settings: Any, workers: Workers) -> dict[str, Any] | None:
    """Locks the directory; returns the result of the run in it, if nothing is left to do.

    Raises:
        BadInput: the directory cannot be used, or holds a run with other settings.
    """

    def look() -> dict[str, Any] | None:
        fresh = _is_fresh(settings)
        if not fresh:
            directory.check_same_run(settings)
        directory.hold()
        return None if fresh else read_json(settings.run_dir / RESULT)

    result = workers.from_chief(look)
    epochs, without_improvement = ((result or {}).get(name) for name in ("epochs", "epochs_without_improvement"))
    if not isinstance(epochs, int) or not isinstance(without_improvement, int):
        return None
    more = "--epochs" if epochs >= settings.epochs else "--patience"
    if more == "--patience" and (settings.patience is None or without_improvement < settings.patience):
        return None
    hint = f"more {more} would continue it; --fresh starts anew"
    console.print(f"Finished already after {epochs} epochs ({hint})")
    print_result(result, settings)
    return result


def begin_run(run: Run, directory: RunDirectory, batches: dict[str, Batches]) -> None:
    """Begins the run and its files. Raises BadInput, before anything is written, if it cannot."""
    settings, from_chief = run.settings, run.workers.from_chief
    _check_same_examples(run.workers, batches)
    _check_steps(run, batches)
    fresh = from_chief(lambda: _is_fresh(settings))
    # 1. The newest checkpoint that is whole.
    begins = None if fresh else _resume(run, batches)
    # 2. Or else the weights of --init-from.
    if not begins and settings.init_from:
        begins = initialize(run)
    # 3. Or else the weights that task.create_model has made.
    begins = begins or "with new weights"
    for each in batches.values():
        each.cache()  # Examples that cannot be read are refused before anything is written.
    monitored = {"monitor": settings.monitor, "direction": run.objects.monitor_direction}
    run.report = Report(settings.run_dir, run.objects.names, epochs=settings.epochs, **monitored)
    from_chief(lambda: _begin_writing(run, directory, batches, fresh))
    print_plan(settings, run.strategy, batches, run.objects, begins)


def _is_fresh(settings: Any) -> bool:
    """Returns whether --fresh is to move the run aside: not if it is one that this same start has begun."""
    if not settings.fresh or not os.environ.get(START_ID):
        return settings.fresh
    with contextlib.suppress(BadInput):
        return (read_json(settings.run_dir / CONFIG) or {}).get("start_id") != os.environ[START_ID]
    return True


def _check_same_examples(workers: Workers, batches: dict[str, Batches]) -> None:
    """Raises BadInput, in every process, if some have other examples: each would take its share of another order."""
    own = {name: (each.number_of_examples, (each.fingerprint or {}).get("sha256")) for name, each in batches.items()}
    chiefs = workers.broadcast(own)
    if others := workers.names_where(own != chiefs):
        counts = [f"{split} has {own[split][0]:,}" for split in own if own[split] != chiefs.get(split)]
        here = f" ({', '.join(counts)} here)" if counts else ""
        raise BadInput(
            f"{', '.join(others)}: task.load_examples returned other examples than in the first process{here}: give "
            "all processes the same files"
        )


def _check_steps(run: Run, batches: dict[str, Batches]) -> None:
    """Warns of what the hooks draw or call that a resumed run may not repeat.

    Raises:
        BadInput: a step changes what no checkpoint can hold.
    """
    hidden = run.objects.hidden
    hidden.check(run.checkpoints.state.variables())
    found = []
    if step := hidden.training:
        found += [f"task.train_step: {text}" for text in (*draws_in_step(step), *python_in_step(step))]
    for each in batches.values():
        if not each.traced:  # With --eager.
            continue
        texts = (*draws_in_preparation(each.traced), *python_in_preparation(each.traced))
        found += [f"task.prepare_example: {text}" for text in texts]
    for text in dict.fromkeys(found):
        console.print(text)


def _resume(run: Run, batches: dict[str, Batches]) -> str | None:
    """Takes up the run at its newest whole checkpoint; returns which, or None if there is none yet.

    Raises:
        BadInput: there was one, or the run has gone further than it is asked to, or its position means other examples
            to this number of workers.
    """
    settings, from_chief, workers = run.settings, run.workers.from_chief, run.workers.count
    newest = from_chief(lambda: read_newest(run.checkpoints, run.best))
    if newest is None:
        if from_chief(lambda: (settings.run_dir / RESULT).exists() or len(run.best.paths()) > 1):
            raise BadInput(
                f"{run.checkpoints.directory} is empty, and the run has gone far: bring the checkpoints back, begin a "
                "new --run-dir with --init-from this one, or use --fresh, which moves the run aside"
            )
        return None
    path, values, progress = newest
    if progress.epochs_begun() > settings.epochs:
        raise BadInput(
            f"--epochs {settings.epochs}: the run was stopped in epoch {progress.epochs_begun()}: ask for that many"
        )
    is_within_pass = any(progress.steps_of_pass.values()) or settings.steps_per_epoch
    if progress.workers != workers and is_within_pass and batches["train"].shards_by_file:
        later = "" if settings.steps_per_epoch else ", and change the number after an epoch"
        raise BadInput(
            f"{path} is from the middle of a pass on {progress.workers} worker(s), and there are {workers}: to each "
            "number of them task.load_examples, which has input_context, gives other batches: go on with "
            f"{progress.workers}{later}"
        )
    from_chief(lambda: _check_same_records(run, batches))
    rates = _learning_rates(run)
    run.progress = progress
    run.checkpoints.state.assign(values)
    for name in progress.forget_others(batches):
        run.objects.reset(name)
    return f"resumed from {path.name}{_change_learning_rates(run, rates)}"


def _check_same_records(run: Run, batches: dict[str, Batches]) -> None:
    """Raises BadInput if the record files of a split are not those that the run was begun with."""
    recorded = (read_json(run.settings.run_dir / CONFIG) or {}).get("records", {})
    for split, now in describe_records(batches).items():
        before = recorded.get(split, now)
        if any(now[name] != before.get(name) for name in ("files", "records", "sha256")):
            raise BadInput(
                f"{now['patterns']} has changed since the run in {run.settings.run_dir} began: its records of "
                f"{split!r} are others ({before.get('records'):,} in {before.get('files')} files then, "
                f"{now['records']:,} in {now['files']} now): bring the files back, or use another --run-dir, or --fresh"
            )


def initialize(run: Run) -> str:
    """Begins with the weights of --init-from; returns which they are. Raises BadInput if they do not fit."""
    settings, objects = run.settings, run.objects
    weights = State(run.strategy, {name: each for name, each in objects.weights.items() if not is_seed(name)})

    def load() -> tuple[str, Values]:
        report = load_initial_weights(settings.init_from, objects.model, partial=settings.init_partial)
        return report, weights.values()

    report, values = run.workers.from_chief(load)
    weights.assign(values)
    if objects.average:
        objects.average.start_anew()
    return report


def _begin_writing(run: Run, directory: RunDirectory, batches: dict[str, Batches], fresh: bool) -> None:
    settings, progress = run.settings, run.progress
    progress.learning_rates = progress.learning_rates or _learning_rates(run)
    progress.workers = run.workers.count
    directory.open(fresh=fresh)
    for each in (run.checkpoints, run.best):
        each.clear()
    # Weights saved after the checkpoint that the run goes on from will be saved again.
    run.best.forget(progress.step, but=progress.best_step)
    earlier = read_json(settings.run_dir / CONFIG) or {"start_id": os.environ.get(START_ID)}
    starts = [*earlier.get("starts", []), describe_start(progress.step)][-STARTS_KEPT:]
    run.report.open(
        epochs_done=progress.epoch,
        validated_step=progress.validated_step or 0,
        step=progress.step,
        resumed=[start["step"] for start in starts if 0 < start["step"] <= progress.step],
        settings=settings.as_json(),
    )
    description = describe_run(settings, run.strategy, directory.code_sha256())
    more = {"learning_rate_changes": progress.learning_rate_changes, "start_id": earlier.get("start_id")}
    more["records"] = describe_records(batches)
    more |= {"monitor_direction": run.objects.monitor_direction, "starts": starts}
    write_json(settings.run_dir / CONFIG, {**description, **describe_examples(batches), **more})
    (settings.run_dir / RESULT).unlink(missing_ok=True)


# --- A resume with another --learning-rate ----------------------------------------------------------------------------


def _learning_rates(run: Run) -> dict[str, Any]:
    """Returns --learning-rate and, by name, what each optimizer has: a number, or what its schedule is made of.

    Call it before a checkpoint is restored, in which the number may be another one.
    """
    rates = {"--learning-rate": run.settings.learning_rate}
    for name, optimizer in run.objects.optimizers.items():
        with contextlib.suppress(Exception):  # An optimizer or a schedule of the user's own need not tell.
            if hasattr(optimizer.learning_rate, "assign"):
                rates[name] = float(optimizer.learning_rate)
            else:
                rates[name] = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
    return json.loads(json.dumps(rates, default=str))


def _change_learning_rates(run: Run, rates: dict[str, Any]) -> str:
    """Sets the learning rates that task.create_optimizer gives now, where it gave others before; returns what changed.

    Where it gives the same, the checkpoint's stays: the run may have changed it by itself.
    """
    progress, optimizers = run.progress, run.objects.optimizers
    before, progress.learning_rates = progress.learning_rates, rates
    changed = {name: rate for name, rate in rates.items() if before.get(name, rate) != rate}
    numbers = {name: rate for name, rate in changed.items() if _are_numbers(before[name], rate)}
    for name in numbers.keys() & optimizers.keys():
        optimizers[name].learning_rate = numbers[name]
    pairs = {name: [float(f"{each:.7g}") for each in (before[name], rate)] for name, rate in numbers.items()}
    setting = pairs.get("--learning-rate")
    pairs = {name: pair for name, pair in pairs.items() if pair != setting or name == "--learning-rate"}
    if not pairs:  # A schedule may still be another one: it is stretched to all --epochs.
        return ""
    changes = ", ".join(f"{_rate_name(name)} {earlier:g} -> {since:g}" for name, (earlier, since) in pairs.items())
    if changed.keys() == {"--learning-rate"} and optimizers.keys() <= rates.keys():
        return f"; {changes} changes nothing, because task.create_optimizer does not use it"
    progress.learning_rate_changes.append({"step": progress.step, **pairs})
    return f"; {changes} from step {progress.step} on"


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _rate_name(name: str) -> str:
    return name if name.startswith("--") else f"learning rate of {name!r}"
