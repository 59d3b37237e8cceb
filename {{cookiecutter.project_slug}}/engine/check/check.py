"""python train.py --check: checks your hooks on a few batches and reports what to fix."""

import dataclasses
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from rich.text import Text

from engine.check.checks import Findings
from engine.check.measure import BATCHES
from engine.cluster.environment import refuse_cluster
from engine.console import columns, console
from engine.errors import BadInput
from engine.run.program import Program
from engine.user_errors import first_line, where_raised


def check_task(program: Program, task: ModuleType, settings: Any) -> bool:
    """Prints a table of findings; returns whether all hold. Trains nothing that is kept, and writes nothing.

    Args:
        program: the module train.py.
        task: the module task.py.
        settings: the settings that training would have.
    """
    refuse_cluster("--check")
    tf.get_logger().setLevel("ERROR")  # It warns of the many functions that are compiled here.
    with tempfile.TemporaryDirectory() as folder:
        findings = Findings(program, task, _settings_to_check(settings, Path(folder)), settings.steps_per_epoch)
        try:
            findings.collect()
        except BadInput as problem:
            findings.fix(_hook_in(str(problem)), str(problem))
        except Exception as problem:  # noqa: BLE001 - Whatever the hooks raise is a finding.
            findings.fix(where_raised(problem), f"raised {first_line(problem)}")
    print_findings(findings.table)
    return not findings.to_fix


def print_findings(table: list[tuple[str, str, str]]) -> None:
    """Prints rows of "ok" or "FIX", a file and hook, and a text, then how many there are of each.

    In a terminal the texts are wrapped in their column; elsewhere each row is one line.
    """
    if console.is_terminal:
        colours = {"ok": "green", "FIX": "bold red"}
        rows = [(Text(verdict, colours[verdict]), Text(where), Text(text)) for verdict, where, text in table]
        console.print(columns(rows), soft_wrap=False)
    else:
        width = max(len(where) for _, where, _ in table)
        for verdict, where, text in table:
            console.print(f"{verdict:<3}  {where:<{width}}  {text}")
    to_fix, total = sum(verdict == "FIX" for verdict, _, _ in table), len(table)
    if to_fix:
        console.print(f"{to_fix} of {total} findings to fix", style="bold red")
    else:
        console.print(f"All {total} hold.", style="green")


def _settings_to_check(settings: Any, folder: Path) -> Any:
    """Returns settings for two simulated replicas, without the options that hide a fault or have no part in one."""
    # One and two replicas have to be able to share a batch, in the micro-batches asked for.
    unit = 2 * settings.micro_batches
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
        async_checkpoints=False,
        steps_per_execution=BATCHES - 1,  # Two calls of unequal length in an epoch show whether both share a trace.
    )


def _hook_in(message: str) -> str:
    """Returns "task.py <function>" for a message that names "task.<function>", or begins with a line of a file."""
    if line := re.match(r"\S+\.py:\d+ \S+(?=: )", message):
        return line[0]
    named = re.search(r"\btask\.(?!py\b)(\w+)", message)
    return f"task.py {named[1]}" if named else "settings"
