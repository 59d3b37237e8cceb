"""How a run begins, how it is taken up again, and what it comes to.

`program` is the module train.py, with its global objects.
"""

import contextlib
import json
import os
from types import ModuleType
from typing import Any

from engine.console import console
from engine.data.batches import is_by_files
from engine.errors import BadInput
from engine.model import objects
from engine.model.replicas import is_seed
from engine.run.checkpoints import read_newest, weights_sha256
from engine.run.directory import RESULT, RunDirectory
from engine.run.files import write_json
from engine.run.initial_weights import load_initial_weights
from engine.run.plan import describe_run
from engine.run.report import Report
from engine.run.state import State, Values
from engine.settings import CONFIG, Settings, read_json
from engine.tracing import draws_in_preparation, draws_in_step, python_in_preparation, python_in_step

# Set by whatever starts a program again when it has died, as launch.py does: the same in all lives of one start.
START_ID = "TRAINING_START_ID"


def begins_anew(settings: Any) -> bool:
    """Returns whether --fresh is to move the run aside: not if it is one that this same start has begun."""
    if not settings.fresh or not os.environ.get(START_ID):
        return settings.fresh
    with contextlib.suppress(BadInput):
        return (read_json(settings.run_dir / CONFIG) or {}).get("start_id") != os.environ[START_ID]
    return True


def look_into(run_directory: RunDirectory, settings: Settings, *, fresh: bool) -> dict[str, Any] | None:
    """Takes the run's directory for this run; returns the result of the run in it, if that has ended.

    Raises:
        BadInput: the directory cannot be used, or holds a run with other settings.
    """
    if not fresh:
        run_directory.check_same_run(settings)
    run_directory.hold()
    return None if fresh else read_json(settings.run_dir / RESULT)


def is_finished(result: dict[str, Any], settings: Any) -> bool:
    """Returns whether a run that ended with `result` has nothing left to do for the settings epochs and patience."""
    epochs, without_improvement = (result.get(name) for name in ("epochs", "epochs_without_improvement"))
    if not isinstance(epochs, int) or not isinstance(without_improvement, int):
        return False
    return epochs >= settings.epochs or (settings.patience is not None and without_improvement >= settings.patience)


def resume(program: ModuleType) -> str | None:
    """Takes up the run where its newest whole checkpoint was made; returns which, or None if there is none yet.

    Raises:
        BadInput: there was one, or the run has gone further than it is asked to, or it has a position that means other
            examples to this number of workers.
    """
    settings, checkpoints, best = program.config, program.checkpoints, program.best
    from_chief = program.workers.from_chief
    newest = from_chief(lambda: read_newest(checkpoints, best))
    if newest is None:
        if from_chief(lambda: (settings.run_dir / RESULT).exists() or len(best.paths()) > 1):
            raise BadInput(
                f"{checkpoints.directory} is empty, and the run has gone far: bring the checkpoints back, begin a new "
                "--run-dir with --init-from this one, or use --fresh, which moves the run aside"
            )
        return None
    path, values, progress = newest
    if progress.epochs_begun() > settings.epochs:
        raise BadInput(
            f"--epochs {settings.epochs}: the run was stopped in epoch {progress.epochs_begun()}: ask for that many"
        )
    workers = program.workers.count
    if progress.workers != workers and any(progress.steps_of_pass.values()) and is_by_files(program.task.load_examples):
        raise BadInput(
            f"{path} is from the middle of an epoch on {progress.workers} worker(s), and there are {workers}: to each "
            "number of them task.load_examples, which has input_context, gives other batches: go on with "
            f"{progress.workers}, and change the number after an epoch"
        )
    program.progress, progress.workers = progress, workers
    rates = learning_rates(program)
    checkpoints.state.assign(values)
    return f"resumed from {path.name}{_change_learning_rates(program, rates)}"


def learning_rates(program: ModuleType) -> dict[str, Any]:
    """Returns --learning-rate and, by name, what each optimizer has: a number, or what its schedule is made of.

    To be called before a checkpoint is restored, in which the number may be another one.
    """
    rates = {"--learning-rate": getattr(program.config, "learning_rate", None)}
    for name, optimizer in objects.by_name(program.task.optimizer, "optimizer").items():
        with contextlib.suppress(Exception):  # An optimizer or a schedule of the user's own need not tell.
            if hasattr(optimizer.learning_rate, "assign"):
                rates[name] = float(optimizer.learning_rate)
            else:
                rates[name] = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
    return json.loads(json.dumps(rates, default=str))


def _change_learning_rates(program: ModuleType, rates: dict[str, Any]) -> str:
    """Sets the learning rates that task.create_optimizer gives now, where it gave others before; returns what changed.

    Where it gives the same, the checkpoint's stays: the run may have changed it by itself.
    """
    progress, optimizers = program.progress, objects.by_name(program.task.optimizer, "optimizer")
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


def initialize(program: ModuleType) -> str:
    """Begins with the weights of --init-from; returns which they are. Raises BadInput if they do not fit."""
    settings, model = program.config, program.task.model
    variables = objects.model_variables(model)
    weights = State(program.strategy, {name: each for name, each in variables.items() if not is_seed(name)})

    def load() -> tuple[str, Values]:
        report = load_initial_weights(settings.init_from, model, partial=settings.init_partial)
        return report, weights.values()

    report, values = program.workers.from_chief(load)
    weights.assign(values)
    if program.moving_average:
        program.moving_average.start_anew()
    return report


def check_steps(program: ModuleType) -> None:
    """Looks at what the hooks do, before anything is written; warns of what a resumed run may not repeat.

    Raises:
        BadInput: a step changes what no checkpoint can hold.
    """
    program.hidden.check(program.checkpoints.state.variables())
    found = []
    if step := program.hidden.training:
        found += [f"task.train_step: {text}" for text in (*draws_in_step(step), *python_in_step(step))]
    for batches in program.batches.values():
        prepared = batches.preparation
        texts = (*draws_in_preparation(prepared), *python_in_preparation(prepared))
        found += [f"task.prepare_example: {text}" for text in texts]
    for text in dict.fromkeys(found):
        console.print(text)


def begin_writing(program: ModuleType, run_directory: RunDirectory, report: Report, *, fresh: bool) -> None:
    """Makes the run's directory ready for what the run will write."""
    settings, progress = program.config, program.progress
    progress.learning_rates = progress.learning_rates or learning_rates(program)
    progress.workers = program.workers.count
    run_directory.open(fresh=fresh)
    for each in (program.checkpoints, program.best):
        each.clear()
    program.best.forget_after(progress.step)
    report.open(epochs_done=progress.epoch, validated_step=progress.validated_step or 0)
    code = run_directory.code_sha256()
    earlier = read_json(settings.run_dir / CONFIG) or {"start_id": os.environ.get(START_ID)}
    more = {"learning_rate_changes": progress.learning_rate_changes, "start_id": earlier.get("start_id")}
    write_json(settings.run_dir / CONFIG, {**describe_run(settings, program.strategy, code), **more})
    (settings.run_dir / RESULT).unlink(missing_ok=True)


def test_the_best(program: ModuleType) -> dict[str, Any]:
    """Returns what result.json holds: the test metrics of the best weights, and what the run came to."""
    progress = program.progress
    fingerprint = weights_sha256(objects.model_variables(program.task.model))
    program.best.restore(program.best.path(progress.best_step))
    return {
        **program.test(),
        "epochs": progress.epoch,
        "step": progress.step,
        "best_epoch": progress.best_epoch,
        f"best_{program.config.monitor}": progress.best_score,
        "epochs_without_improvement": progress.epochs_without_improvement(),
        "seconds": progress.seconds,
        "weights_sha256": fingerprint,
    }
