"""The benchmarks' programs still find what they measure in the engine; their figures are nobody's promise here."""

import os
import subprocess
import sys

import pytest

from rendering import PROJECT, TEMPLATE

PROGRAMS = (
    "loops/ours.py mlp --replicas=2",
    "checkpoint_cost.py --rounds 1 -- --epochs=2",
    "language_model.py --rounds 1 --layers=1 --width=32",
    "live_line.py --rounds 1",
    "resume_cost.py --rounds 1 --examples 10000",
    "step_cost.py --rounds 1",
)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_benchmark_runs(program: str) -> None:
    script, *arguments = program.split()
    folders = os.pathsep.join([str(TEMPLATE / "benchmarks"), str(PROJECT)])
    command = [sys.executable, str(TEMPLATE / "benchmarks" / script), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
