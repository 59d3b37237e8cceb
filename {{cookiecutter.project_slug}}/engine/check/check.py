"""python train.py --check: checks your hooks on a few batches and reports what to fix."""

import dataclasses
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.text import Text

from engine.check.checks import PARTS, Check, run_checks
from engine.check.measure import BATCHES
from engine.cluster.environment import reject_cluster
from engine.console import columns, console
from engine.errors import BadInput, Diverged, first_line, where_raised
from engine.settings import Settings


def check_task(program: Any, task: Any, settings: Settings, only: Collection[str] = PARTS) -> bool:
    """Prints a table of checks of task.py, with the settings of training; returns whether all passed. Saves nothing.

    `only` names the parts of `checks.PARTS` to run.
    """
    reject_cluster("--check")
    tf.get_logger().setLevel("ERROR")  # Otherwise it warns of the many functions that are compiled here.
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder:
        comparable = _comparable_settings(settings, Path(folder))
        try:
            checks.extend(run_checks(program, task, comparable, settings.global_batch_size, only))
        except BadInput as problem:
            checks.append(Check(False, _hook_in(str(problem)), str(problem)))
        except Diverged as problem:
            text = f"{problem}: a batch may be padding alone, so divide with tf.math.divide_no_nan"
            checks.append(Check(False, "task.py compute_loss", text))
        except Exception as problem:  # noqa: BLE001 - Whatever the hooks raise is a failed check.
            checks.append(Check(False, where_raised(problem), f"raised {first_line(problem)}"))
    print_checks(checks)
    return all(check.ok for check in checks)


def print_checks(checks: Sequence[Check]) -> None:
    """Prints a line for each check, then how many failed. A terminal wraps long texts."""
    if console.is_terminal:
        ok, fail = Text("ok", "green"), Text("FAIL", "bold red")
        rows = [(ok if each.ok else fail, Text(each.where), Text(each.text)) for each in checks]
        console.print(columns(rows), soft_wrap=False)
    else:
        width = max(len(each.where) for each in checks)
        for each in checks:
            console.print(f"{'ok' if each.ok else 'FAIL':<4}  {each.where:<{width}}  {each.text}")
    if failed := sum(not each.ok for each in checks):
        console.print(f"{failed} of {len(checks)} checks failed", style="bold red")
    else:
        console.print(f"All {len(checks)} checks passed.", style="green")


def _comparable_settings(settings: Settings, folder: Path) -> Settings:
    """Returns settings for two simulated replicas, without the options that hide a fault or cannot cause one."""
    unit = 2 * settings.micro_batches  # Two replicas must be able to share a batch, in micro-batches.
    evaluated = settings.evaluation_batch_size
    return dataclasses.replace(
        settings,
        run_dir=folder,
        strategy="auto",
        simulated_devices=2,
        precision="float32",
        jit=False,
        all_reduce="auto",
        profile=False,
        global_clipnorm=None,  # Clipping makes a gradient that is too large look right.
        global_batch_size=max(unit, settings.global_batch_size // unit * unit),
        evaluation_batch_size=evaluated and max(2, evaluated // 2 * 2),
        steps_per_epoch=None,
        limit_steps=None,
        checkpoint_every_steps=None,
        validate_every_steps=None,
        steps_per_execution=BATCHES - 1,  # Executions of unequal length show whether they share a trace.
    )


def _hook_in(message: str) -> str:
    """Returns "task.py <function>" for a message that names "task.<function>", or starts with a line of a file."""
    if line := re.match(r"\S+\.py:\d+ \S+(?=: )", message):
        return line[0]
    named = re.search(r"\btask\.(?!py\b)(\w+)", message)
    return f"task.py {named[1]}" if named else "settings"
