"""The summary of a run: the lines at its start, and its description in config.json."""

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine import PROJECT
from engine.cluster.strategy import describe_arithmetic, strategy_info
from engine.console import print_facts
from engine.data import element_spec
from engine.data.batches import BYTES_KEPT
from engine.data.element_spec import megabytes
from engine.machine import code_sha256, memory_of_machine, versions
from engine.model.metrics import drifting
from engine.model.rows import describe_tables
from engine.model.variables import by_name
from engine.run.directory import machine
from engine.run.training import Run
from engine.settings import Settings

SECONDS_FOR_GIT = 5.0  # A repository may be large, or its disk slow.


def describe_run(run: Run, earlier: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings, and everything else that results depend on, for config.json; `earlier` is an older one."""
    settings, info = run.settings, strategy_info(run.strategy)
    *_, last = run.batches.values()  # The test dataset, if there is one.
    return {
        "settings": settings.as_json(),
        "strategy": info.name,
        "replicas": run.strategy.num_replicas_in_sync,
        "devices": info.devices,
        "arithmetic": describe_arithmetic(settings.precision, settings.simulated_devices),
        "versions": versions(),
        "code_sha256": {**code_sha256(), **earlier.get("code_sha256", {})},  # The code of the first start stays.
        # --export and predict.py have no data, so they read the element specs here.
        "example": element_spec.encode(last.examples.element_spec),
        "features": element_spec.encode(last.features_spec),
        "data": run.progress.data,
        "files": run.progress.data["train"]["files"],
    }


def describe_start(step: int, settings: Settings) -> dict[str, Any]:
    """Returns the description of a start after `step`, for config.json."""
    return {
        "step": step,
        "learning_rate": settings.learning_rate,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "host": platform.node(),
        "machine": machine(),
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    """Returns the project's commit, with " and changes" if a tracked file differs from it; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PROJECT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_FOR_GIT).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        return f"{commit} and changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def print_summary(run: Run, start: str) -> None:
    """Prints the run summary; `start` says how it starts: "resumed from ...", "with new weights"."""
    settings, info, batches = run.settings, strategy_info(run.strategy), run.batches
    train = batches["train"]
    steps = f"{train.steps_per_pass} steps"
    if train.steps_per_epoch != train.steps_per_pass:
        steps = f"{train.steps_per_epoch} steps; a pass over the examples has {train.steps_per_pass}"
    ahead = train.bytes_ahead
    shuffled, taken = train.examples.describe_shuffling(run.workers.count)
    dropped = f", each drops {train.dropped} examples (--keep-last-batch keeps them)" if train.dropped else ""
    splits = {dataset.split for dataset in batches.values()}
    examples = [f"{name} {dataset.number_of_examples}" for name, dataset in batches.items()]
    examples += [f"no {split}" for split in ("validation", "test") if split not in splits]
    size, padded = train.global_batch_size, run.strategy.num_replicas_in_sync * train.per_replica_batch_size
    padding = f", {padded} in all with padding" if padded > size else ""
    to_evaluate = f", {settings.evaluation_batch_size} to evaluate" if settings.evaluation_batch_size else ""
    drift = f"{', '.join(drifting(run.objects.metrics))}: not added up in float64, so wrong after millions of examples"
    limited = f"to {settings.limit_steps} steps of each dataset (--limit-steps): metrics are of a part of the data"
    facts = {
        "strategy": f"{info.name}, {info.size}",
        "devices": info.devices,
        "all-reduce": info.all_reduce,
        "arithmetic": describe_arithmetic(settings.precision, settings.simulated_devices),
        "batch": f"{size} examples, {train.per_replica_batch_size} on each replica{padding}{to_evaluate}",
        "examples": ", ".join(examples),
        "shuffled": f"train {shuffled}",
        "prepared": f"up to {megabytes(ahead)} ahead, in each process" if ahead > BYTES_KEPT else "",
        "checkpoints": f"{megabytes(run.checkpoints.state.bytes)} each; while one is written, as much memory once more",
        "memory": _memory_warning(taken, run.workers.most_on_one_machine),
        "epochs": f"{settings.epochs}, each of {steps}{dropped}",
        "limited": limited if settings.limit_steps else "",
        "drifting": drift if drifting(run.objects.metrics) else "",
        "parameters": f"{sum(model.count_params() for model in by_name(run.objects.model, 'model').values()):,}",
        "tables": describe_tables(run.objects.model),
        "starts": start,
        "run directory": str(settings.run_dir),
        "export": f"to {settings.run_dir / 'export'}, after the training" if settings.export else "",
    }
    print_facts("Training", {name: fact for name, fact in facts.items() if fact})


def _memory_warning(taken: int, processes: int) -> str:
    """Returns a text if processes that take `taken` bytes each need over half of their machine's memory; else ""."""
    memory = memory_of_machine()
    if memory is None or processes * taken <= memory / 2:
        return ""
    in_all = f"{processes * taken / 2**30:,.1f} GB in {processes} process(es)"
    return f"{in_all}, more than half of the {memory / 2**30:,.1f} GB of this machine: lower --shuffle-megabytes"
