"""A run that is killed or stopped, at any moment and many times, ends as if it had not been."""

import collections
import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rendering import PROJECT, run

LIVES = Path(__file__).parent / "helpers/lives.py"
# Small chunks and frequent saves, so that a life can end in many kinds of moments.
FLAGS = ("--steps-per-execution=3", "--checkpoint-every-steps=5")
LAYOUTS = {
    "one_device": ("--simulated-devices=1",),
    "two_replicas": ("--simulated-devices=2", "--async-checkpoints", "--keep-checkpoints=1"),
}
TIME_COLUMNS = ("seconds", "examples_per_second", "goodput")

Lives = list[dict[str, Any]]


def lives(folder: Path, *arguments: str, epochs: int = 10, ends: int = 0, **options: Any) -> Lives:
    """Runs lives.py; returns how each life ended."""
    given = [f"--{name}={value}" for name, value in options.items()]
    command = ["python", LIVES, f"--run-dir={folder}", f"--log={folder}.log", f"--ends={ends}", *given, "--", *FLAGS]
    done = run(*command, f"--epochs={epochs}", *arguments, folder=folder.parent)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def outcome(run_dir: Path) -> tuple[Any, Any]:
    """Returns what must not depend on interruptions: the rows of metrics.csv, and result.json, without times."""
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = [{name: text for name, text in row.items() if name not in TIME_COLUMNS} for row in csv.DictReader(lines)]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return rows, {name: value for name, value in result.items() if name not in TIME_COLUMNS}


def steps_run(folder: Path) -> dict[str, int]:
    steps: dict[str, int] = collections.Counter()
    for line in Path(f"{folder}.log").read_text(encoding="utf-8").splitlines():
        name, count = line.split()[:2]
        steps[name] += int(count)
    return dict(steps)


def seconds_that_count(folder: Path) -> float:
    """Returns the seconds of the training steps from which no resume went back, without the first ones of a start."""
    chunks: list[tuple[int, float]] = []  # After which step, and the seconds.
    resumed = 0
    for line in Path(f"{folder}.log").read_text(encoding="utf-8").splitlines():
        name, _, after, seconds, is_first = line.split()
        if name != "train":
            continue
        if int(is_first):
            resumed = int(after)
            chunks = [each for each in chunks if each[0] < resumed]
        if int(after) > resumed:
            chunks.append((int(after), float(seconds)))
    return sum(seconds for _, seconds in chunks)


@pytest.fixture(scope="session", params=["two_replicas", pytest.param("one_device", marks=pytest.mark.long)])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A run that nothing interrupts, and the arguments of its layout."""
    folder = tmp_path_factory.mktemp("whole") / request.param
    assert [each["ended"] for each in lives(folder, *LAYOUTS[request.param])] == [0]
    return folder, LAYOUTS[request.param]


def assert_killed_run_ends_equal(uninterrupted: Path, folder: Path, *layout: str, ends: int, **options: Any) -> Lives:
    found = lives(folder, *layout, ends=ends, signal="SIGKILL", **options)
    killed = collections.Counter(life["place"] for life in found if life["ended"] == -signal.SIGKILL)
    assert set(killed) == {"anywhere", "saving", "validation"}
    assert killed.total() >= 0.8 * ends  # A place may not be reached any more near the end.
    assert found[-1]["ended"] == 0
    assert outcome(folder) == outcome(uninterrupted)
    # Half-written files of the killed are gone.
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
    return found


def test_killed_run_ends_bit_equal(whole: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    uninterrupted, layout = whole
    assert_killed_run_ends_equal(uninterrupted, tmp_path / "killed", *layout, ends=3, seed=0)


@pytest.mark.long
def test_often_killed_run_ends_bit_equal(tmp_path: Path) -> None:
    layout = LAYOUTS["two_replicas"]
    lives(tmp_path / "whole", *layout)
    seed = int(time.time())
    killed = tmp_path / f"killed_by_{seed}"
    found = assert_killed_run_ends_equal(tmp_path / "whole", killed, *layout, ends=12, seed=seed, pause=0.02)
    goodput = json.loads((killed / "result.json").read_text(encoding="utf-8"))["goodput"]
    # A start that was killed before its first steps may have written nothing.
    trained = [each for each in found if each["chunks"]]
    assert len(trained) <= goodput["starts"] <= len(found)
    seconds, (least, most) = goodput["seconds"], (sum(each["seconds"] for each in some) for some in (trained, found))
    # These starts take a few seconds, and each kill takes what came after the last write.
    assert 0.95 * least - 0.5 * len(found) < sum(seconds.values()) < 1.05 * most
    assert seconds["training"] == pytest.approx(seconds_that_count(killed), rel=0.05)
    assert seconds["repeated"] > 0


@pytest.mark.long
def test_run_killed_among_several_sets_ends_bit_equal(tmp_path: Path) -> None:
    """Of validations of 3 chunks of each set, some are killed in the second one; epochs are no passes."""
    layout = (*LAYOUTS["two_replicas"], "--steps-per-epoch=25", "--validate-every-steps=10")
    layout += ("--evaluation-batch-size=12", "--monitor=validation/1/loss")
    lives(tmp_path / "whole", *layout, sets=2)
    assert_killed_run_ends_equal(tmp_path / "whole", tmp_path / "killed", *layout, ends=9, seed=0, sets=2)
    rows, result = outcome(tmp_path / "killed")
    assert rows[-1]["step"] == str(10 * 25)
    assert {"test/0/loss", "test/1/accuracy", "best_validation/1/loss"} <= result.keys()


def test_stopped_run_computes_no_step_twice(whole: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    uninterrupted, layout = whole
    found = lives(tmp_path / "stopped", *layout, ends=3, signal="SIGTERM", seed=1)
    assert [life["ended"] for life in found] == [42] * 3 + [0]
    assert outcome(tmp_path / "stopped") == outcome(uninterrupted)
    assert steps_run(tmp_path / "stopped") == steps_run(uninterrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_signal_while_libraries_are_imported_ends_with_a_line(number: int, code: int, tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    # In the place of a library that takes long, and that catches what is raised meanwhile.
    slow = "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException: pass\n"
    (tmp_path / "project" / "tensorflow.py").write_text(slow, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path / "project",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, written = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    (line,) = written.splitlines()
    assert line.lower().startswith("stopped by ")
    assert not (tmp_path / "project" / "runs").exists()


def test_second_signal_ends_at_once_in_a_chunk_without_end() -> None:
    program = """
import tensorflow as tf
from engine.run.signals import Signals

endless = tf.function(lambda: tf.while_loop(lambda _: tf.random.uniform([]) < 2.0, lambda x: (x,), (0.0,)))
with Signals().listening():
    print("ready", flush=True)
    endless()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("SIGINT: the running steps end")
        process.send_signal(signal.SIGINT)  # As a terminal and a wrapper may send it, both at once.
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()


@pytest.mark.parametrize(
    "output", [pytest.param("> /dev/full", marks=pytest.mark.long), "| true"], ids=["full disk", "nobody reads"]
)
def test_output_that_goes_nowhere_does_not_end_the_training(output: str, tmp_path: Path) -> None:
    command = f"{sys.executable} train.py --run-dir={tmp_path / 'run'} --epochs=1 {output}; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", command, folder=PROJECT)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_full_disk_is_one_line_and_the_run_goes_on_with_more_room(tmp_path: Path) -> None:
    command = ["python", "train.py", f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1", "--limit-steps=4"]
    assert run(*command, "--epochs=1", folder=PROJECT).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}

    # No file may be larger than 1,000 kB: the weights fit, the whole state does not.
    full = run("bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *command, "--epochs=2", folder=PROJECT)
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("ERROR: ")]
    assert full.returncode == 1
    assert "step-00000008 cannot be written" in line
    assert "File too large" in line
    assert "free disk space" in line
    assert "Traceback" not in full.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert after == before

    more = run(*command, "--epochs=2", folder=PROJECT)
    assert "resumed from step-00000004" in more.stdout
    assert more.returncode == 0
