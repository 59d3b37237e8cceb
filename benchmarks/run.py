"""Measures train.py as it ships beside other loops: the same models, data and batches, in turns, on this machine.

    python benchmarks/run.py [--rounds 3] [--workloads mlp cnn] [--replicas 1 2] [--orbit <python with Orbit>] [--costs]

Each figure is the median of its rounds; a round runs every program once, each in a process of its own, one after the
other. Before the first round, programs that take a number of steps per call try several, and keep the fastest. It
writes results.json, results.md and overhead.png into --output, build/benchmarks by default; rows of the same machine
and versions that are there already and are not measured again stay, with the command that gave them. What the documents
speak of is in benchmarks/results.
"""

import argparse
import compileall
import contextlib
import datetime
import importlib.metadata
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
FIGURES = (
    "training steps/s",
    "evaluation examples/s",
    "start to first step, s",
    "peak memory, MiB",
    "added by a checkpoint, ms",
)
# The loop without input, metrics and saves, to compare with. It is measured last.
REFERENCE = "compiled step alone"
STEPS_PER_CALL = (50, 1000)
OVERHEAD = {f"wide{variables}": variables for variables in (4, 40, 400)}
# Programs of their own, whose output is kept as it is.
COSTS = {
    "Checkpoints and reports in the default run": "checkpoint_cost.py",
    "From a position in an epoch to its first batch": "resume_cost.py",
    "What a step of the MLP is made of": "step_cost.py",
}


def programs(orbit: str | None) -> dict[str, dict[str, Any]]:
    """Returns what is measured, by name: script, interpreter, arguments and environment."""
    measured: dict[str, dict[str, Any]] = {
        "train.py": {"script": "ours.py"},
        "tutorial": {"script": "tutorial.py"},
        "Keras fit, 1 step": {"script": "keras_fit.py", "arguments": ["--steps-per-execution=1"]},
        "Keras fit, K steps": {"script": "keras_fit.py", "takes steps": True},
        "Keras fit, K steps, saving": {"script": "keras_fit.py", "takes steps": True, "arguments": ["--saves"]},
    }
    if orbit:
        legacy = {"TF_USE_LEGACY_KERAS": "1"}
        measured["Orbit, Keras 3"] = {"script": "orbit_trainer.py", "python": orbit, "takes steps": True}
        measured["Orbit, Keras 3, saving"] = {**measured["Orbit, Keras 3"], "arguments": ["--saves"]}
        measured["Orbit, tf-keras"] = {**measured["Orbit, Keras 3"], "environment": legacy}
    measured[REFERENCE] = {"script": "compiled_step.py"}
    return measured


@contextlib.contextmanager
def compiled_project() -> Iterator[Path]:
    """Gives, for a while, a copy of the project compiled to bytecode, as a project is from its second start on."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(shutil.copytree(PROJECT, Path(folder, "project")))
        compileall.compile_dir(project, quiet=1)
        yield project


def measure_in_turn(
    chosen: dict[str, dict[str, Any]], project: Path, rounds: int, layout: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Runs the chosen programs one after the other, and that again in each round; those that fail only once."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    chosen = with_best_steps(chosen, project, layout)
    for _ in range(rounds):
        for name, program in chosen.items():
            if not any("error" in one for one in found[name]):
                found[name].append(measure(program, project, **layout))
                print(f"{layout}, {name}: {found[name][-1]}", flush=True)
    return found


def with_best_steps(
    chosen: dict[str, dict[str, Any]], project: Path, layout: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the programs with the number of steps per call that gives the most steps per second, if they take one.

    Numbers above an epoch's steps give the same program as an epoch's. A program that saves takes the number of the
    same one that does not, or 1 where that fails with several.
    """
    longest = WORKLOADS[layout["workload"]].steps
    tried = [f"--steps-per-execution={number}" for number in sorted({min(each, longest) for each in STEPS_PER_CALL})]
    best: dict[str, str] = {}

    def of(name: str, program: dict[str, Any]) -> dict[str, Any]:
        if not program.get("takes steps"):
            return program
        arguments, without_saving = program.get("arguments", []), name.removesuffix(", saving")
        if without_saving not in best:
            figures = {each: measure({**program, "arguments": [each]}, project, **layout) for each in tried}
            rates = {each: figures[each].get("training steps/s", 0) for each in tried}
            best[without_saving] = max(tried, key=lambda each: rates[each])
            if not any(rates.values()):
                best[f"{without_saving}, saving"] = "--steps-per-execution=1"
        return {**program, "arguments": [*arguments, best.get(name, best[without_saving])]}

    return {name: of(name, program) for name, program in chosen.items()}


def measure(
    program: dict[str, Any], project: Path, workload: str, replicas: int, workers: int = 1, shuffle: str = "gather"
) -> dict[str, Any]:
    """Runs a program once; returns its figures, those of the first process of several, or {"error": its last line}."""
    command = [
        program.get("python", sys.executable),
        str(HERE / "loops" / program["script"]),
        workload,
        f"--replicas={replicas}",
        f"--shuffle={shuffle}",
        *program.get("arguments", []),
    ]
    environment = {**program.get("environment", {}), "PYTHONPATH": os.pathsep.join([str(HERE), str(project)])}
    first, *_ = run_processes(command, environment, workers)
    return first if "error" in first else {**first, "arguments": program.get("arguments", [])}


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


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns each figure's median, lowest and highest value, or the error that one round ended with."""
    for one in rounds:
        if "error" in one:
            return one
    values = {name: [one[name] for one in rounds] for name in FIGURES if all(name in one for one in rounds)}
    figures = {
        name: {"median": statistics.median(found), "low": min(found), "high": max(found)}
        for name, found in values.items()
    }
    return {"arguments": rounds[0]["arguments"], **figures}


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    packages = ("tensorflow", "keras", "numpy")
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} cores of {', '.join(models)}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def orbit_versions(python: str) -> str:
    """Returns the versions of Orbit and of what it runs on, by its own interpreter."""
    packages = ("tf-models-official", "tensorflow", "keras", "tf-keras")
    listed = f"', '.join(f'{{each}} {{version(each)}}' for each in {packages})"
    code = f"from importlib.metadata import version; print({listed})"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def date_and_commit() -> str:
    """Returns today's date and the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    return f"{datetime.date.today().isoformat()}, {commit}"


def as_markdown(results: dict[str, Any]) -> str:
    """Returns one table per figure: a line per workload and layout, a column per program."""
    names = list(dict.fromkeys(name for row in results["rows"] for name in row["programs"]))
    lines = ["Medians of the rounds (lowest to highest), by", ""]
    lines += [f"- `{command}`" for command in dict.fromkeys(row["command"] for row in results["rows"])]
    lines += ["", *(f"{name}: {value}  " for name, value in results["machine"].items())]
    lines += [
        f"Orbit's rows: {versions}  " for versions in {row["orbit"]: 0 for row in results["rows"] if "orbit" in row}
    ]
    for figure in FIGURES:
        lines += [
            "",
            f"## {figure[0].upper()}{figure[1:]}",
            "",
            f"| | {' | '.join(names)} | measured |",
            "|---" * (len(names) + 2) + "|",
        ]
        for row in results["rows"]:
            cells = [_cell(row["programs"].get(name), figure) for name in names]
            lines.append(f"| {row['workload']}, {_layout(row)} | {' | '.join(cells)} | {row['measured']} |")
    failed = [
        f"- {name}, {row['workload']}, {_layout(row)}: `{found['error']}`"
        for row in results["rows"]
        for name, found in row["programs"].items()
        if "error" in found
    ]
    if any(row["workload"] in OVERHEAD for row in results["rows"]):
        lines += ["", "## Time of a step as replicas and variables grow", "", "![Time of a step](overhead.png)"]
    lines += ["", "## What failed", "", *failed] if failed else []
    for title, (command, output) in results["costs"].items():
        lines += ["", f"## {title}", "", f"`{command}`", "", "```text", *output, "```"]
    return "\n".join(lines) + "\n"


def _place(row: dict[str, Any]) -> tuple[int, int, int, str]:
    return list(WORKLOADS).index(row["workload"]), row["workers"], row["replicas"], row.get("shuffle", "")


def _layout(row: dict[str, Any]) -> str:
    devices = f"{row['workers']} processes" if row["workers"] > 1 else f"{row['replicas']} replica(s)"
    # Rows without the word are of a time when train.py gathered and the others shuffled example by example.
    return f"{devices}, shuffled by {row['shuffle']}" if "shuffle" in row else devices


def _cell(found: dict[str, Any] | None, figure: str) -> str:
    if not found or figure not in found:
        return "fails" if found and "error" in found else "-"
    values = found[figure]
    digits = 0 if values["median"] >= 100 else 1
    return f"{values['median']:,.{digits}f} ({values['low']:,.{digits}f} to {values['high']:,.{digits}f})"


def draw_overhead(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the time of a step as replicas and variables grow, of train.py and of the compiled step alone."""
    import matplotlib.figure

    rows = [row for row in rows if row["workload"] in OVERHEAD and row["workers"] == 1]
    if not rows:
        return
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, replicas in zip(("C0", "C1", "C2", "C3"), sorted({row["replicas"] for row in rows}), strict=False):
        for name, style in (("train.py", "-o"), (REFERENCE, "--x")):
            points = [
                (OVERHEAD[row["workload"]], 1000 / row["programs"][name]["training steps/s"]["median"])
                for row in rows
                if row["replicas"] == replicas and "error" not in row["programs"][name]
            ]
            axes.plot(*zip(*sorted(points), strict=True), style, color=color, label=f"{name}, {replicas} replica(s)")
    axes.set(xlabel="variables", ylabel="milliseconds per step", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", default=["mlp", "cnn", "transformer", "bert"])
    parser.add_argument("--replicas", nargs="+", type=int, help="numbers of replicas instead of each workload's own")
    parser.add_argument("--workers", nargs="*", type=int, default=[2], help="numbers of processes to try the first on")
    parser.add_argument("--shuffle", nargs="+", choices=("gather", "examples"), default=["gather", "examples"])
    parser.add_argument("--overhead", action="store_true", help="models of 4, 40 and 400 variables too")
    parser.add_argument("--costs", action="store_true", help="of saves, positions and the parts of a step too")
    parser.add_argument("--orbit", help="a Python interpreter that has tf-models-official and tf-keras")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "benchmarks")
    options = parser.parse_args()
    workloads = [*options.workloads, *(OVERHEAD if options.overhead else ())]
    layouts = [(name, replicas, 1) for name in workloads for replicas in options.replicas or WORKLOADS[name].replicas]
    layouts += [(name, 1, workers) for name in options.workloads[:1] for workers in options.workers]
    names = ("workload", "replicas", "workers", "shuffle")
    layouts = [
        dict(zip(names, (*each, way), strict=True))
        for each in layouts
        for way in (["gather"] if each[0] in OVERHEAD else options.shuffle)
    ]
    everything, measured = programs(options.orbit), date_and_commit()
    options.output.mkdir(parents=True, exist_ok=True)
    written = options.output / "results.json"
    results = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    if results.get("machine") != machine():
        results = {"rows": [], "costs": {}, "machine": machine()}

    def write() -> None:
        written.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (options.output / "results.md").write_text(as_markdown(results), encoding="utf-8")

    command = f"python benchmarks/run.py {' '.join(sys.argv[1:])}".strip()
    if options.orbit:
        command = command.replace(options.orbit, "<python with Orbit>")
    with compiled_project() as project:
        for layout in layouts:
            chosen = {
                name: program
                for name, program in everything.items()
                if layout["workload"] not in OVERHEAD or name in ("train.py", REFERENCE)
            }
            found = measure_in_turn(chosen, project, options.rounds, layout)
            # One without a way of shuffling is older, and goes when its layout is measured again.
            rows = [
                row for row in results["rows"] if any(row.get(name, value) != value for name, value in layout.items())
            ]
            by_program = {name: medians(rounds) for name, rounds in found.items()}
            described = {"measured": measured, "rounds": options.rounds, "command": command}
            if options.orbit:
                described["orbit"] = orbit_versions(options.orbit)
            rows.append({**layout, **described, "programs": by_program})
            results["rows"] = sorted(rows, key=_place)
            write()
    draw_overhead(results["rows"], options.output / "overhead.png")
    for title, script in COSTS.items() if options.costs else ():
        arguments = [script, f"--rounds={options.rounds}"]
        done = subprocess.run([sys.executable, *arguments], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
        results["costs"][title] = [f"python benchmarks/{' '.join(arguments)}", done.stdout.splitlines()]
        write()


if __name__ == "__main__":
    main()
