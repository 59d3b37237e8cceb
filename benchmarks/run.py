"""Compares train.py with other loops: the same models, data and batches, in turns, on this machine.

    python benchmarks/run.py --orbit <python with Orbit> [--rounds 5] [--rows "cnn, 2 replicas"] [--quick]

In a round every program of a row runs once, in a process of its own, and the next round reverses their order. Each
program is compared with train.py of the same round and of the same version of TensorFlow: the figure is the median of
the rounds' ratios, and its spread their quartiles. train.py is "ahead" or "behind" where both quartiles are on one side
of 1, else the two are "level". It writes results.json and results.md into --output, build/benchmarks by default; rows
that are there already stay, and those of the documents are in benchmarks/results. --quick runs the first row only, in
three rounds.
"""

import argparse
import compileall
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import WORKLOADS

HERE = Path(__file__).parent
PROJECT = HERE.parent / "{{cookiecutter.project_slug}}"
SECONDS_AT_MOST = 300
OURS = "train.py"
FIGURES = ("training steps/s", "start to first step, s", "peak memory, MiB")
HIGHER_IS_BETTER = FIGURES[:1]
# Name -> workload, replicas, processes.
ROWS = {
    "mlp, 1 replica": ("mlp", 1, 1),
    "mlp, 2 replicas": ("mlp", 2, 1),
    "mlp, 4 replicas": ("mlp", 4, 1),
    "mlp, 2 processes": ("mlp", 1, 2),
    "cnn, 1 replica": ("cnn", 1, 1),
    "cnn, 2 replicas": ("cnn", 2, 1),
    "transformer, 1 replica": ("transformer", 1, 1),
    "transformer, 2 replicas": ("transformer", 2, 1),
    "bert, 1 replica": ("bert", 1, 1),
}
# Program -> script and environment. Orbit needs TensorFlow 2.20, so everything beside it runs on that version too.
WITH_ORBIT = {
    OURS: ("ours.py", {}),
    "Orbit, Keras 3": ("orbit_trainer.py", {}),
    "Orbit, tf-keras": ("orbit_trainer.py", {"TF_USE_LEGACY_KERAS": "1"}),
}
WITHOUT_ORBIT = {
    OURS: ("ours.py", {}),
    "Keras fit": ("keras_fit.py", {}),
    "compiled step": ("compiled_step.py", {}),
}


@contextlib.contextmanager
def compiled_project() -> Iterator[Path]:
    """Gives, for a while, a copy of the project compiled to bytecode, as a project is from its second start on."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(shutil.copytree(PROJECT, Path(folder, "project")))
        compileall.compile_dir(project, quiet=1)
        yield project


def measure_row(
    programs: dict[str, tuple[str, dict[str, str]]], python: str, project: Path, row: tuple[str, int, int], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Returns the figures of every round of each program; a program that fails runs once."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for number in range(rounds):
        for name in list(programs)[:: 1 if number % 2 == 0 else -1]:
            if not any("error" in one for one in found[name]):
                found[name].append(measure(python, *programs[name], project, *row))
                print(f"{row}, {name}: {found[name][-1]}", flush=True)
    return found


def measure(
    python: str, script: str, environment: dict[str, str], project: Path, workload: str, replicas: int, workers: int
) -> dict[str, Any]:
    """Runs a program once; returns its figures, those of the first process of several, or {"error": its last line}."""
    command = [python, str(HERE / "loops" / script), workload, f"--replicas={replicas}"]
    if script in ("keras_fit.py", "orbit_trainer.py"):
        # An epoch's steps per call are the fastest for both. With several replicas fit fails unless it is one.
        is_single = script == "keras_fit.py" and replicas * workers > 1
        command.append(f"--steps-per-execution={1 if is_single else WORKLOADS[workload].steps}")
    return run_processes(command, {**environment, "PYTHONPATH": os.pathsep.join([str(HERE), str(project)])}, workers)[0]


def run_processes(command: list[str], environment: dict[str, str], workers: int = 1) -> list[dict[str, Any]]:
    """Runs a program, in several processes as a cluster; returns what each prints last, or one {"error": a line}."""
    environment = {**os.environ, **environment, "TF_CPP_MIN_LOG_LEVEL": "2"}
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(workers)]
    processes = []
    for index in range(workers):
        if workers > 1:
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment["BENCHMARK_STARTED"] = repr(time.time())
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [process.communicate(timeout=SECONDS_AT_MOST) for process in processes]
    except subprocess.TimeoutExpired:
        return [{"error": f"not done after {SECONDS_AT_MOST} s"}]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode == -signal.SIGKILL for process in processes):
        return [{"error": "killed, as Linux does if memory is used up"}]
    if any(process.returncode for process in processes):
        said = [line for _, errors in outputs for line in errors.splitlines() if "Error" in line]
        return [{"error": (said or ["ended with an error"])[-1][:200]}]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def compared(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns of each program the median of each figure, and the quartiles of train.py's ratio to it."""
    results: dict[str, dict[str, Any]] = {}
    for name, found in rounds.items():
        if "error" in found[-1]:
            results[name] = found[-1]
            continue
        results[name] = {}
        for figure in FIGURES:
            results[name][figure] = {"median": statistics.median(one[figure] for one in found)}
            ours = rounds[OURS]
            if name != OURS and "error" not in ours[-1]:
                ratios = [one[figure] / other[figure] for one, other in zip(ours, found, strict=True)]
                quartiles = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
                results[name][figure]["ratio"] = quartiles
    return results


def verdict(figure: str, quartiles: list[float]) -> str:
    """Returns whether train.py is "ahead", "level" or "behind"."""
    low, _, high = quartiles
    if low <= 1 <= high:
        return "level"
    return "ahead" if (low > 1) == (figure in HIGHER_IS_BETTER) else "behind"


def versions(python: str) -> dict[str, str]:
    """Returns what the figures of an interpreter depend on."""
    packages = ("tensorflow", "keras", "tf-models-official", "tf-keras", "numpy")
    code = (
        "import importlib.metadata as m, json; d = {i.metadata['Name'].lower(): i.version for i in m.distributions()}; "
    )
    code += f"print(json.dumps({{name: d[name] for name in {packages} if name in d}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def machine() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{len(os.sched_getaffinity(0))} cores of {', '.join(models)}, Python {platform.python_version()}"


def date_and_commit() -> str:
    """Returns today's date and the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    return f"{datetime.date.today().isoformat()}, {commit}"


def as_markdown(results: dict[str, Any]) -> str:
    """Returns two tables per figure, one for each version of TensorFlow."""
    lines = [f"Machine: {results['machine']}"]
    for figure in FIGURES:
        for title, table in results["tables"].items():
            lines += ["", f"## {figure[0].upper()}{figure[1:]}, {title}", "", *rows_of(figure, table)]
    failed = [
        f"- {name}, {row}: `{found['error']}`"
        for table in results["tables"].values()
        for row, of_row in table["rows"].items()
        for name, found in of_row["programs"].items()
        if "error" in found
    ]
    return "\n".join([*lines, *(["", "## What failed", "", *failed] if failed else [])]) + "\n"


def rows_of(figure: str, table: dict[str, Any]) -> list[str]:
    """Returns the lines of a table: train.py's median, then the other programs' with their ratios and verdicts."""
    names = list(dict.fromkeys(name for row in table["rows"].values() for name in row["programs"]))
    lines = [f"| | {' | '.join(names)} | measured |", "|---" * (len(names) + 2) + "|"]
    for row in (name for name in ROWS if name in table["rows"]):
        of_row = table["rows"][row]
        cells = [_cell(figure, of_row["programs"].get(name)) for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} | {of_row['measured']} |")
    return lines


def _cell(figure: str, found: dict[str, Any] | None) -> str:
    if not found or "error" in found:
        return "fails" if found else "-"
    value = found[figure]["median"]
    text = f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
    if "ratio" not in found[figure]:
        return text
    low, median, high = found[figure]["ratio"]
    return f"{text}: {verdict(figure, [low, median, high])}, {median:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="the first row only, in three rounds")
    parser.add_argument("--orbit", help="a Python interpreter with Orbit")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "benchmarks")
    options = parser.parse_args()
    rows, rounds = (options.rows[:1], 3) if options.quick else (options.rows, options.rounds)
    tables = [(sys.executable, WITHOUT_ORBIT)]
    if options.orbit:
        tables.insert(0, (options.orbit, WITH_ORBIT))
    options.output.mkdir(parents=True, exist_ok=True)
    written = options.output / "results.json"
    results = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    if results.get("machine") != machine():
        results = {"machine": machine(), "tables": {}}
    with compiled_project() as project:
        for row in rows:
            for python, programs in tables:
                found = versions(python)
                table = results["tables"].setdefault(f"TensorFlow {found['tensorflow']}", {"rows": {}})
                table["versions"] = found
                measured = compared(measure_row(programs, python, project, ROWS[row], rounds))
                table["rows"][row] = {"measured": date_and_commit(), "rounds": rounds, "programs": measured}
                written.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                (options.output / "results.md").write_text(as_markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
