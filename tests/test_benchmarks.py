"""The benchmarks' programs still find what they measure in the engine; their figures are nobody's promise here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rendering import PROJECT, TEMPLATE


@pytest.mark.long
def test_programs_run_and_those_of_tables_take_the_same_steps(tmp_path: Path) -> None:
    folders = os.pathsep.join([str(TEMPLATE / "benchmarks"), str(PROJECT)])
    names = ["ours", "keras", "by-hand"]
    options = "--rows 100 --batches 1 --rounds 1 --seconds 0.1 --optimizers sgd"
    tables = f"tables.py {options} --programs {' '.join(names)} --output {tmp_path}"
    for program in ("loops/ours.py mlp --replicas=2", "step_cost.py --rounds 1", tables):
        script, *arguments = program.split()
        command = [sys.executable, str(TEMPLATE / "benchmarks" / script), *arguments]
        options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": folders}}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    results = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))["optimizers"]["sgd"]["100"]
    losses = [results[name]["loss"]["median"] for name in names]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)


def test_speed_counts_neither_the_call_that_compiles_nor_one_that_is_delayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(TEMPLATE / "benchmarks" / "loops")
    import table_common

    clock, calls = [0.0], []
    monkeypatch.setattr(table_common.time, "perf_counter", lambda: clock[0])

    def run_steps(count: int) -> float:
        clock[0] += count / 80 + {0: 60.0, 1: 0.3}.get(len(calls), 0.0)
        calls.append(count)
        return float(len(calls))

    table_common.measure(run_steps, seconds=0.42)
    figures = json.loads(capsys.readouterr().out)
    assert figures["loss"] == 1.0  # The first call's.
    # A call of 4 steps takes a tenth of the time or more.
    assert calls[1:] == [1, 1, 2] + [4] * 9
    assert (figures["steps"], figures["steps/s"]) == (36, pytest.approx(80))
