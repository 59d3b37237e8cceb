"""The benchmarks' programs still find what they measure in the engine; their figures are nobody's promise here."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rendering import PROJECT, TEMPLATE


def run_benchmark(program: str) -> None:
    script, *arguments = program.split()
    folders = os.pathsep.join([str(TEMPLATE / "benchmarks"), str(PROJECT)])
    command = [sys.executable, str(TEMPLATE / "benchmarks" / script), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.long
@pytest.mark.parametrize("program", ["loops/ours.py mlp --replicas=2", "step_cost.py --rounds 1"])
def test_benchmark_runs(program: str) -> None:
    run_benchmark(program)


@pytest.mark.long
def test_programs_of_tables_take_the_same_steps(tmp_path: Path) -> None:
    programs = ["ours", "keras", "by-hand"]
    options = "--rows 100 --batches 1 --rounds 1 --seconds 0.1 --optimizers sgd"
    run_benchmark(f"tables.py {options} --programs {' '.join(programs)} --output {tmp_path}")
    results = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))["optimizers"]["sgd"]["100"]
    losses = [results[program]["loss"]["median"] for program in programs]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)


@pytest.fixture
def table_common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TEMPLATE / "benchmarks" / "loops")
    import table_common

    return table_common


def test_speed_counts_neither_the_call_that_compiles_nor_one_that_is_delayed(
    table_common: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
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


def test_bytes_per_step_are_those_that_pass_the_loopback_interface(
    table_common: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    piece, pieces = bytes(50_000), 100

    def run_steps(count: int) -> float:
        for _ in range(count * pieces):
            sending.sendall(piece)
            receiving.recv(len(piece), socket.MSG_WAITALL)
        return 0.0

    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname())
        receiving, _ = server.accept()
        with sending, receiving:
            table_common.measure(run_steps, seconds=0.01, counts_bytes=True)
    size = pieces * len(piece)
    assert size <= json.loads(capsys.readouterr().out)["bytes/step"] < 1.2 * size


def test_tables_show_ratios_growth_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TEMPLATE / "benchmarks")
    from tables import ALL_PEAKS, PEAK, as_markdown, medians

    def found(*rates: float) -> dict[str, Any]:
        return medians([{"steps/s": rate, PEAK: 100.0, ALL_PEAKS: 150.0} for rate in rates])

    results = {
        1000: {"ours": found(20.0), "keras": medians([{"steps/s": 1.0}, {"error": "too large"}])},
        10: {"ours": found(40.0, 60.0, 50.0), "keras": found(400.0)},
    }
    lines = as_markdown(results, "sgd").splitlines()
    assert [line for line in lines if "ours |" in line or "keras |" in line or "too large" in line] == [
        "| ours | 50.00 (40.00 to 60.00) | 20.00 | 2.50 |",
        "| keras | 400 | fails | - |",
        "| ours | 0.125 | - |",
        "| keras | 1 | - |",
        "| ours | 150 (one process 100) | 150 (one process 100) |",
        "| keras | 150 (one process 100) | - |",
        "- keras, 1,000 rows: `too large`",
    ]
