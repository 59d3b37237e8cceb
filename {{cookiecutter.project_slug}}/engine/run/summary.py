"""What a run is: config.json, and the lines at its start."""

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf

from engine.cluster.devices import describe_arithmetic
from engine.cluster.strategy import describe_devices, describe_size, describe_strategy
from engine.cluster.workers import Workers
from engine.console import print_facts
from engine.data import element_spec
from engine.data.batches import Batches
from engine.model.objects import by_name
from engine.versions import PROJECT, versions

# A repository may be large, or on a slow disk.
SECONDS_FOR_GIT = 5.0


def describe_run(settings: Any, strategy: tf.distribute.Strategy, code_sha256: dict[str, str]) -> dict[str, Any]:
    """Returns what config.json holds: the settings, and what else the numbers depend on."""
    return {
        "settings": settings.as_json(),
        "strategy": describe_strategy(strategy),
        "replicas": strategy.num_replicas_in_sync,
        "devices": describe_devices(strategy, settings.simulated_devices),
        "arithmetic": describe_arithmetic(settings.precision, settings.simulated_devices),
        "versions": versions(),
        "code_sha256": code_sha256,
    }


def describe_start(step: int) -> dict[str, Any]:
    """Returns what config.json keeps of each start of a run: after which step, by which command, from which code."""
    return {
        "step": step,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "host": platform.node(),
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    """Returns the project's commit, with "and changes" if a file of it has changed since; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PROJECT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_FOR_GIT).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        return f"{commit} and changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def describe_examples(batches: dict[str, Batches]) -> dict[str, Any]:
    """Returns the types of an example and of its features for config.json: --export and predict.py have no data.

    They are those of the last set: of the test, if there is one.
    """
    *_, last = batches.values()
    return {"example": element_spec.encode(last.example_spec), "features": element_spec.encode(last.features_spec)}


def describe_records(batches: dict[str, Batches]) -> dict[str, Any]:
    """Returns the record files of every split that has some, for config.json: a resume needs the same ones."""
    return {split: each.fingerprint for split, each in batches.items() if each.fingerprint}


def print_plan(
    settings: Any, strategy: tf.distribute.Strategy, batches: dict[str, Batches], task: ModuleType, begins: str
) -> None:
    """Prints what is about to happen; `begins` is how: "resumed from ...", "with new weights"."""
    train = batches["train"]
    steps = f"{train.steps_per_pass} steps"
    if train.steps_per_epoch != train.steps_per_pass:
        steps = f"{train.steps_per_epoch} steps; a pass over the examples has {train.steps_per_pass}"
    limited = {}
    if settings.limit_steps:
        text = f"to {settings.limit_steps} steps of each set (--limit-steps), so the metrics are of a part of the data"
        limited = {"limited": text}
    shuffled, taken = train.describe_shuffling()
    left_out = f", {train.dropped} examples left out of each (--keep-last-batch keeps them)" if train.dropped else ""
    splits = {each.split for each in batches.values()}
    examples = [f"{name} {each.number_of_examples}" for name, each in batches.items()]
    examples += [f"no {split}" for split in ("validation", "test") if split not in splits]
    to_evaluate = f", {settings.evaluation_batch_size} to evaluate" if settings.evaluation_batch_size else ""
    all_reduce = getattr(strategy, "all_reduce", None)  # Set where values are summed over devices.
    facts = {
        "strategy": describe_strategy(strategy) + describe_size(strategy),
        "devices": describe_devices(strategy, settings.simulated_devices),
        **({"all-reduce": all_reduce} if all_reduce else {}),
        "arithmetic": describe_arithmetic(settings.precision, settings.simulated_devices),
        "batch": f"{train.global_batch_size} examples, {train.per_replica_batch_size} on each replica{to_evaluate}",
        "examples": ", ".join(examples),
        "shuffled": f"train {shuffled}",
        **_too_much_memory(taken, Workers(strategy).on_one_machine),
        "epochs": f"{settings.epochs}, each of {steps}{left_out}",
        **limited,
        "parameters": f"{sum(model.count_params() for model in by_name(task.model, 'model').values()):,}",
        "begins": begins,
        "run directory": str(settings.run_dir),
        **({"export": f"to {settings.run_dir / 'export'}, after the training"} if settings.export else {}),
    }
    print_facts("Training", facts)


def _too_much_memory(taken: int, processes: int) -> dict[str, str]:
    """Returns a line more if the processes of one machine, each with so many bytes, take over half of its memory."""
    if not hasattr(os, "sysconf"):  # On Windows.
        return {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # A container may have less.
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    if processes * taken <= memory / 2:
        return {}
    in_all = f"{processes * taken / 2**30:,.1f} GB in {processes} process(es)"
    text = f"{in_all}, more than half of the {memory / 2**30:,.1f} GB of this machine: lower --shuffle-megabytes"
    return {"memory": text}
