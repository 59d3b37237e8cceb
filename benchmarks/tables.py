"""Measures training with one large embedding table: steps/s, peak memory, and what two processes send each other.

    python benchmarks/tables.py [--rows 10000 10000000] [--programs ours keras] [--optimizers adagrad] [--rounds 3]
                                [--tf-keras <python with tf-keras>] [--orbit <python with Orbit>]

The model is an embedding of 8 ids, their mean and a dense layer; a batch has 256 examples, whose ids are drawn
uniformly. A round runs every program once, each in a process of its own, one after the other; a figure is the median
of its rounds. Each program takes its steps in a loop in the graph, after a warm-up, for --seconds or a little longer.
"ours" and "orbit" read their batches through their input pipelines, and "ours" has a metric; the others take their
batches out of a tensor in memory. Nothing is saved. It prints the tables, and writes tables.json into --output.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run import HERE, compiled_project, date_and_commit, machine, run_processes, versions

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}
# "python" names the option with the interpreter that runs a program; the others run with the project's.
PROGRAMS: dict[str, dict[str, Any]] = {
    "ours": {"script": "table_ours.py"},
    "ours-2-replicas": {"script": "table_ours.py", "replicas": 2},
    "ours-2-processes": {"script": "table_ours.py", "processes": 2},
    "keras": {"script": "table_keras.py"},
    "tf-keras": {"script": "table_keras.py", "environment": LEGACY, "python": "tf_keras"},
    "tf-keras-2-replicas": {"script": "table_keras.py", "replicas": 2, "environment": LEGACY, "python": "tf_keras"},
    "orbit": {"script": "table_orbit.py", "python": "orbit"},
    "by-hand": {"script": "table_by_hand.py"},
}
REFERENCES = ("tf-keras", "keras")
PEAK, ALL_PEAKS = "peak memory, MiB", "peak memory of all processes, MiB"
# By program: figures, each with its median, lowest and highest value, or "error".
Results = dict[str, dict[str, Any]]


def measure(name: str, project: Path, options: argparse.Namespace, rows: int, optimizer: str) -> dict[str, Any]:
    """Runs a program once; returns its figures, those of the first process of several, or {"error": its last line}."""
    program = PROGRAMS[name]
    command = [
        getattr(options, program["python"]) if "python" in program else sys.executable,
        str(HERE / "loops" / program["script"]),
        f"--rows={rows}",
        f"--optimizer={optimizer}",
        f"--seconds={options.seconds}",
        f"--batches={options.batches}",
        f"--replicas={program.get('replicas', 1)}",
    ]
    environment = {**program.get("environment", {}), "PYTHONPATH": os.pathsep.join([str(HERE), str(project)])}
    found = run_processes(command, environment, program.get("processes", 1))
    if "error" in found[0]:
        return found[0]
    peaks = [each[PEAK] for each in found]
    return {**found[0], PEAK: max(peaks), ALL_PEAKS: sum(peaks)}


def measure_in_turn(project: Path, options: argparse.Namespace, rows: int, optimizer: str) -> Results:
    """Runs the programs one after the other, and that again in each round; those that fail only once."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.programs}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            if not any("error" in each for each in found):
                found.append(measure(name, project, options, rows, optimizer))
                print(f"{optimizer}, {rows:,} rows, {name}: {found[-1]}", file=sys.stderr, flush=True)
    return {name: medians(found) for name, found in rounds.items()}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns each figure's median, lowest and highest value, or the error that the last round ended with."""
    if "error" in rounds[-1]:
        return rounds[-1]
    values = {figure: [each[figure] for each in rounds] for figure in rounds[0]}
    return {
        figure: {"median": statistics.median(found), "low": min(found), "high": max(found)}
        for figure, found in values.items()
    }


def as_markdown(by_rows: dict[int, Results], optimizer: str) -> str:
    """Returns the tables of an optimizer: a line per program, a column per number of rows."""
    rows = sorted(by_rows)
    programs = list(by_rows[rows[0]])

    def figure(number: int, name: str, what: str) -> float | None:
        return by_rows[number].get(name, {}).get(what, {}).get("median")

    def table(title: str, cell: Callable[[int, str], str], last: Callable[[str], str] | None = None) -> list[str]:
        columns = [f"{number:,} rows" for number in rows] + (["cost of a step, most over fewest rows"] if last else [])
        lines = ["", f"## {optimizer}: {title}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name in programs:
            cells = [cell(number, name) for number in rows] + ([last(name)] if last else [])
            if set(cells) != {"-"}:
                lines.append(f"| {name} | {' | '.join(cells)} |")
        return lines

    def rate(number: int, name: str) -> str:
        if "error" in by_rows[number][name]:
            return "fails"
        values = by_rows[number][name]["steps/s"]
        digits = 0 if values["median"] >= 100 else 2
        spread = f" ({values['low']:,.{digits}f} to {values['high']:,.{digits}f})"
        return f"{values['median']:,.{digits}f}{spread if values['low'] < values['high'] else ''}"

    def cost(name: str) -> str:
        fewest, most = figure(rows[0], name, "steps/s"), figure(rows[-1], name, "steps/s")
        return f"{fewest / most:,.2f}" if fewest and most else "-"

    def ratio(number: int, name: str, reference: str) -> str:
        its, other = figure(number, name, "steps/s"), figure(number, reference, "steps/s")
        return f"{its / other:.3g}" if its and other else "-"

    def memory(number: int, name: str) -> str:
        largest, together = figure(number, name, PEAK), figure(number, name, ALL_PEAKS)
        if largest is None or together is None:
            return "-"
        return f"{together:,.0f}" if largest == together else f"{together:,.0f} (one process {largest:,.0f})"

    def sent(number: int, name: str) -> str:
        count = figure(number, name, "bytes/step")
        return "-" if count is None else f"{count:,.0f}"

    lines = table("steps/s", rate, cost if len(rows) > 1 else None)
    for reference in REFERENCES:
        if reference in programs:
            lines += table(f"steps/s over {reference}'s", lambda *place, other=reference: ratio(*place, other))
    lines += table("peak memory, MiB", memory)
    if any("processes" in PROGRAMS[name] for name in programs):
        lines += table("bytes that all processes send in a step", sent)
    failed = [
        f"- {name}, {number:,} rows: `{found['error']}`"
        for number in rows
        for name, found in by_rows[number].items()
        if "error" in found
    ]
    lines += ["", f"## {optimizer}: what failed", "", *failed] if failed else []
    return "\n".join(lines)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, help="default: all whose interpreter is given")
    parser.add_argument("--optimizers", nargs="+", choices=("adagrad", "sgd"), default=["adagrad", "sgd"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps that a program takes in a round")
    parser.add_argument("--batches", type=int, default=1000, help="different batches, used again and again")
    parser.add_argument("--tf-keras", help="a Python interpreter that has tensorflow and tf-keras")
    parser.add_argument("--orbit", help="a Python interpreter that has tf-models-official")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "benchmarks")
    options = parser.parse_args()
    missing = {
        name: each["python"] for name, each in PROGRAMS.items() if not getattr(options, each.get("python", "rows"))
    }
    options.programs = options.programs or [name for name in PROGRAMS if name not in missing]
    for name in options.programs:
        if name in missing:
            option = f"--{missing[name].replace('_', '-')}"
            parser.error(f"--programs {name} needs {option}: pass a Python interpreter that has its packages")
    return options


def main() -> None:
    options = read_options()
    optimizers: dict[str, dict[int, Results]] = {}
    results = {
        "machine": machine(),
        "versions": versions(sys.executable),
        "measured": date_and_commit(),
        "options": {},
        "optimizers": optimizers,
    }
    results["options"] = {name: getattr(options, name) for name in ("rounds", "seconds", "batches")}
    if options.orbit:
        results["orbit"] = versions(options.orbit)
    options.output.mkdir(parents=True, exist_ok=True)
    with compiled_project() as project:
        for optimizer in options.optimizers:
            for rows in options.rows:
                found = measure_in_turn(project, options, rows, optimizer)
                optimizers.setdefault(optimizer, {})[rows] = found
                # Again after each size, because the largest ones take long.
                (options.output / "tables.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(as_markdown(optimizers[optimizer], optimizer), flush=True)


if __name__ == "__main__":
    main()
