"""What people wait for before and after a training, in CPU seconds of `python -c "import tensorflow, keras"`.

    python benchmarks/start.py [--rounds 5] [--tests]

In turns: the imports, --check of the example task, a run of one step, and with --tests the project's own tests. Each
figure is the median of the rounds' ratios, with their quartiles.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from run import compiled_project

IMPORTS = "imports"
PROGRAMS = {
    IMPORTS: ["-c", "import tensorflow, keras"],
    "--check": ["train.py", "--check"],
    "a run of one step": ["train.py", "--epochs=1", "--limit-steps=1", "--fresh"],
}
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


def cpu_seconds(arguments: list[str], folder: str) -> float:
    """Runs a program of Python; returns its CPU seconds and those of the processes that it started and waited for."""
    before = sum(os.times()[2:4])
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    return sum(os.times()[2:4]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tests", action="store_true")
    options = parser.parse_args()
    programs = PROGRAMS | ({"pytest": TESTS} if options.tests else {})
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    with compiled_project() as project, tempfile.TemporaryDirectory() as runs:
        for _ in range(options.rounds):
            for name, arguments in programs.items():
                own = [f"--run-dir={runs}/run"] if arguments[0] == "train.py" else []
                seconds[name].append(cpu_seconds([*arguments, *own], str(project)))
    print(f"{IMPORTS}: {statistics.median(seconds[IMPORTS]):.1f} s")
    for name, found in list(seconds.items())[1:]:
        ratios = [own / imports for own, imports in zip(found, seconds[IMPORTS], strict=True)]
        low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        print(f"{name}: {median:.2f} imports ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
