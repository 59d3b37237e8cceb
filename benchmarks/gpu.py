"""Tries a project on a machine with one GPU: its tests, its numbers, its speed, and a kill.

    python benchmarks/gpu.py [--parts check numbers ...] [--seconds 340] [--small] [--output build/gpu]

It needs Python with the project's packages and pytest, and no network. Parts that would start after --seconds are left
out; the report names them. --small takes small models and tries the program itself on a CPU. Every part prints its
lines, which are also in gpu.md.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from run import HERE, compiled_project, date_and_commit, run_processes, versions

# Programs of a row: name -> script and arguments.
OURS = {"train.py": ("ours.py", ["--saves"]), "train.py, no saves": ("ours.py", ["--no-saves"])}
FIT = {"Keras fit": ("keras_fit.py", ["--saves"])}
TUTORIAL = {"tutorial": ("tutorial.py", ["--saves"]), "tutorial, no saves": ("tutorial.py", [])}
COMPILED = {"compiled step": ("compiled_step.py", [])}
VARIANTS: dict[str, tuple[list[str], dict[str, tuple[str, list[str]]]]] = {
    "float32": ([], OURS | FIT | TUTORIAL | COMPILED),
    "bfloat16": (["--precision=mixed_bfloat16"], OURS | FIT | COMPILED),
    "jit": (["--jit"], OURS | COMPILED),
}
# Two devices from one, and a model with an Embedding; for runs of train.py with other arguments.
RUNNER = """
import sys, train, task, keras, tensorflow as tf
devices, embedding, *arguments = sys.argv[1:]
if devices == "2":
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    limits = [tf.config.LogicalDeviceConfiguration(memory_limit=4096 if kind == "GPU" else None) for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices(kind)[0], limits)
    both = tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"], tf.distribute.ReductionToOneDevice())
    train.create_strategy = lambda settings: both
if embedding == "1":
    def create_model():
        layers = [keras.layers.Embedding(17, 8), keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((64,), dtype="int32"), *layers])
    task.create_model = create_model
    task.prepare_example = lambda features, label: (tf.cast(tf.reshape(features, [-1]), "int32"), label)
    task.predict_step = lambda features: {"label": tf.argmax(task.model(features), axis=1)}
train.main(arguments)
"""


class Machine:
    """Runs programs in a copy of the project, each in a process of its own."""

    def __init__(self, project: Path, folder: Path, *, small: bool) -> None:
        self.project, self.folder, self.small = project, folder, small
        self.environment = {**os.environ, "PYTHONPATH": str(project), "TF_CPP_MIN_LOG_LEVEL": "2"}

    def run(self, *command: str) -> str:
        """Returns what a program prints; raises CalledProcessError with it if the program fails."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.project,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout

    def train(self, name: str, *arguments: str, devices: int = 1, embedding: bool = False) -> Path:
        """Trains for two short epochs; returns the run directory."""
        folder = self.folder / name
        short = [f"--run-dir={folder}", "--epochs=2", "--limit-steps=20", *arguments]
        self.run("-c", RUNNER, str(devices), str(int(embedding)), *short)
        return folder

    def loop(self, workload: str, script: str, arguments: list[str]) -> dict[str, Any]:
        """Returns the figures of one loop of benchmarks/loops, or {"error": its last line}."""
        paths = os.pathsep.join([str(HERE), str(self.project)])
        command = [sys.executable, str(HERE / "loops" / script), workload, *arguments]
        return run_processes(command, {"PYTHONPATH": paths})[0]


def check(machine: Machine) -> Iterator[str]:
    """--check of the example task."""
    yield machine.run("train.py", "--check").splitlines()[-1]


def numbers(machine: Machine) -> Iterator[str]:
    """The metrics on one device and on two logical devices of it."""
    one, two = (machine.train(f"numbers{n}", "--deterministic", devices=n) for n in (1, 2))
    pairs = zip(metrics_of(one), metrics_of(two), strict=True)
    yield f"metrics differ by {max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs):.1e} at most"


def deterministic(machine: Machine) -> Iterator[str]:
    """Two runs of a model with an Embedding, with --deterministic."""
    shas = {sha_of(machine.train(f"embedding{n}", "--deterministic", embedding=True)) for n in (1, 2)}
    yield "an Embedding gives the same bits twice" if len(shas) == 1 else "an Embedding gives other bits each time"


def speed(machine: Machine) -> Iterator[str]:
    """Steps per second beside the other loops, and what saves cost."""
    yield "| | " + " | ".join(OURS | FIT | TUTORIAL | COMPILED) + " |"
    yield "|---" * 7 + "|"
    for workload in ("mlp", "cnn") if machine.small else ("transformer", "resnet", "bert"):
        for variant, (flags, programs) in VARIANTS.items():
            if workload == "bert" and variant != "float32":
                continue
            rates = {name: machine.loop(workload, script, [*own, *flags]) for name, (script, own) in programs.items()}
            cells = [rate_of(rates.get(name)) for name in OURS | FIT | TUTORIAL | COMPILED]
            yield f"| {workload}, {variant} | {' | '.join(cells)} |"


def kill(machine: Machine) -> Iterator[str]:
    """A run that is killed in its second epoch and resumed, beside one that is not."""
    arguments = ["--deterministic", "--checkpoint-every-steps=5"]
    whole = machine.train("whole", *arguments)
    folder = machine.folder / "killed"
    command = [sys.executable, "-c", RUNNER, "1", "0", f"--run-dir={folder}", "--epochs=2", "--limit-steps=20"]
    with subprocess.Popen([*command, *arguments], cwd=machine.project, env=machine.environment) as process:
        while process.poll() is None and not (folder / "metrics.csv").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    machine.train("killed", *arguments)
    yield "the same bits" if sha_of(folder) == sha_of(whole) else "other bits"


def tests(machine: Machine) -> Iterator[str]:
    """The project's own tests."""
    yield machine.run("-m", "pytest", "-q", "-p", "no:cacheprovider").splitlines()[-1]


PARTS: dict[str, Callable[[Machine], Iterator[str]]] = {
    "check": check,
    "numbers": numbers,
    "deterministic": deterministic,
    "kill": kill,
    "speed": speed,
    "tests": tests,
}


def metrics_of(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [float(value) for row in rows for name, value in row.items() if name.startswith(("train/", "validation/"))]


def sha_of(run_dir: Path) -> str:
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))["weights_sha256"]


def rate_of(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    return figures["error"][:60] if "error" in figures else f"{figures['training steps/s']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--small", action="store_true", help="small models, for a machine without a GPU")
    parser.add_argument("--output", type=Path, default=HERE.parent / "build" / "gpu")
    options = parser.parse_args()
    started, lines = time.monotonic(), [f"{date_and_commit()}, {versions(sys.executable)}"]
    options.output.mkdir(parents=True, exist_ok=True)
    with compiled_project() as project, tempfile.TemporaryDirectory() as folder:
        machine = Machine(project, Path(folder), small=options.small)
        for part in options.parts:
            seconds = time.monotonic() - started
            lines += ["", f"## {part}, after {seconds:.0f} s", ""]
            try:
                for line in PARTS[part](machine) if seconds < options.seconds else ["no time was left"]:
                    lines.append(line)
                    print(f"{part}: {line}", flush=True)
                    (options.output / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
            except subprocess.CalledProcessError as problem:
                lines += ["failed:", *problem.output.splitlines()[-5:]]
                print("\n".join(lines[-6:]), flush=True)
    (options.output / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
