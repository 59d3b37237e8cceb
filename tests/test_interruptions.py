"""A run that is killed or stopped, at any moment and many times, ends as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from clusters import outcome, project_with
from processes import until
from programs import Program

from rendering import PROJECT, run

sys.path.insert(0, str(PROJECT))

from small_states import read_checkpoint

LIVES = Path(__file__).parent / "helpers/lives.py"
# Small chunks and frequent saves, so that a life can end in many kinds of moments.
FLAGS = ("--steps-per-execution=3", "--checkpoint-every-steps=5", "--keep-checkpoints=1")

ENDLESS = """
import os, sys

sys.path.insert(0, os.environ["PROJECT"])
import tensorflow as tf
from engine.signals import Signals

endless = tf.function(lambda: tf.while_loop(lambda _: tf.random.uniform([]) < 2.0, lambda x: (x,), (0.0,)))
with Signals().listening():
    print("ready", flush=True)
    endless()
"""
# train.py where after the first checkpoint no file may be larger than 1,000 kB: the weights fit, the state does not.
LIMITED = """
import resource, runpy, sys

sys.path.insert(0, {project!r})
from engine.run.checkpoints import Checkpoints

save = Checkpoints.save


def save_then_limit(self, *arguments):
    saved = save(self, *arguments)
    if self.directory.name == "checkpoints":
        self.writer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    return saved


Checkpoints.save = save_then_limit
runpy.run_path("train.py", run_name="__main__")
"""
# Added to task.py: random numbers from TensorFlow and from NumPy.
DRAWS = """

_compute_loss = compute_loss


def _noisy(image):
    return image + np.random.normal(size=image.shape).astype("float32")


def prepare_example(features, labels):
    image = features / 16.0 + tf.random.normal([8, 8, 1], seed=3)
    return tf.ensure_shape(tf.numpy_function(_noisy, [image], tf.float32), (8, 8, 1)), labels


def compute_loss(*arguments):
    loss, per_example_loss = _compute_loss(*arguments)
    return loss + tf.random.uniform([]), per_example_loss
"""

PLACES = ("anywhere", "saving", "validation")  # Where the signals come, in turns.

Lives = list[dict[str, Any]]


def lives(folder: Path, signals: list[str], *arguments: str, **options: Any) -> Lives:
    """Runs lives.py; returns how each life ended."""
    given = [f"--{name}={value}" for name, value in options.items()]
    command = ["python", LIVES, f"--run-dir={folder}", f"--log={folder}.log", "--signals", *signals, *given]
    done = run(*command, "--", *FLAGS, *arguments, folder=folder.parent)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def trained(folder: Path) -> list[tuple[int, int, float, bool]]:
    """Returns how many steps each chunk of training had, after which one, its seconds, and whether a life began."""
    lines = map(str.split, Path(f"{folder}.log").read_text(encoding="utf-8").splitlines())
    return [(int(n), int(after), float(s), first == "1") for name, n, after, s, first in lines if name == "train"]


def seconds_that_count(folder: Path) -> float:
    """Returns the seconds of the training steps from which no resume went back, without the first ones of a start."""
    chunks: list[tuple[int, float]] = []  # After which step, and the seconds.
    resumed = 0
    for _, after, seconds, is_first in trained(folder):
        if is_first:
            resumed = after
            chunks = [each for each in chunks if each[0] < resumed]
        if after > resumed:
            chunks.append((after, seconds))
    return sum(seconds for _, seconds in chunks)


def assert_ended_run_ends_equal(folder: Path, signals: list[str], *arguments: str, **options: Any) -> Lives:
    """Ends a run in `folder` by the signals, one life each; compares its end with that of one that was left alone."""
    whole, disturbed = folder / "whole", folder / "disturbed"
    assert [each["ended"] for each in lives(whole, [], *arguments, **options)] == [0]
    found = lives(disturbed, signals, *arguments, **options)
    ended = [life["place"] for life in found if life["ended"]]
    assert set(ended) == {*PLACES[: len(signals)]}
    assert len(ended) >= 0.8 * len(signals)  # A place may not be reached any more near the end.
    assert found[-1]["ended"] == 0
    assert outcome(disturbed) == outcome(whole)
    # Half-written files of the killed are gone.
    assert not [path for path in disturbed.rglob(".*") if path.name != ".lock"]
    return found


def test_stopped_and_killed_run_ends_bit_equal_and_a_stop_repeats_no_step(tmp_path: Path) -> None:
    flags = ("--epochs=6", "--simulated-devices=1")
    found = assert_ended_run_ends_equal(tmp_path, ["SIGTERM", "SIGKILL", "SIGINT"], *flags, seed=0)
    assert [each["ended"] for each in found] == [42, -signal.SIGKILL, 42, 0]
    chunks = trained(tmp_path / "disturbed")
    second = [number for number, (*_, is_first) in enumerate(chunks) if is_first][1]
    assert sum(count for count, *_ in chunks[:second]) == chunks[second][1]


@pytest.mark.long
def test_often_killed_run_ends_bit_equal(tmp_path: Path) -> None:
    seed = int(time.time())
    flags = ("--epochs=10", "--simulated-devices=2", "--steps-per-epoch=25", "--validate-every-steps=10")
    found = assert_ended_run_ends_equal(tmp_path, ["SIGKILL"] * 12, *flags, seed=seed, pause=0.02)
    goodput = json.loads((tmp_path / "disturbed/result.json").read_text(encoding="utf-8"))["goodput"]
    # A start that was killed before its first steps may have written nothing.
    with_steps = [each for each in found if each["chunks"]]
    assert len(with_steps) <= goodput["starts"] <= len(found), seed
    seconds, (least, most) = goodput["seconds"], (sum(each["seconds"] for each in some) for some in (with_steps, found))
    # These starts take a few seconds, and each kill takes what came after the last write.
    assert 0.95 * least - 0.5 * len(found) < sum(seconds.values()) < 1.05 * most
    assert seconds["training"] == pytest.approx(seconds_that_count(tmp_path / "disturbed"), rel=0.05)
    assert seconds["repeated"] > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_signal_while_libraries_are_imported_ends_with_a_line(number: int, code: int, tmp_path: Path) -> None:
    project_with(tmp_path, "")
    # In the place of a library that takes long, and that catches what is raised meanwhile.
    slow = "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException: pass\n"
    (tmp_path / "project" / "tensorflow.py").write_text(slow, encoding="utf-8")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path / "project", **pipes)
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


def test_second_signal_ends_at_once_in_a_chunk_without_end(tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(ENDLESS, encoding="utf-8")
    process = Program([str(program)], tmp_path, out, tmp_path / "err", {**os.environ, "PROJECT": str(PROJECT)})
    try:
        until(lambda: out.exists() and "ready" in out.read_text(), 100)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        until(lambda: "SIGINT: the running steps end" in out.read_text(), 100)
        process.send_signal(signal.SIGINT)  # As a terminal and a wrapper may send it, both at once.
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_full_disk_of_the_output_ends_nothing_and_one_of_the_run_is_one_line(tmp_path: Path) -> None:
    flags = (f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1", "--limit-steps=4", "--epochs=2")
    program, nowhere, err = tmp_path / "limited.py", Path("/dev/full"), tmp_path / "err"
    program.write_text(LIMITED.format(project=str(PROJECT)), encoding="utf-8")
    assert Program([str(program), *flags], PROJECT, nowhere, err).wait(200) == 1
    (line,) = [line for line in err.read_text(encoding="utf-8").splitlines() if line.startswith("ERROR: ")]
    for text in ("step-00000008 cannot be written", "File too large", "free disk space"):
        assert text in line
    assert "Traceback" not in err.read_text(encoding="utf-8")
    (saved,) = (tmp_path / "run/checkpoints").glob("[!.]*")
    assert read_checkpoint(saved)[1]["step"] == 4  # Its files have their checksums.


@pytest.mark.long
def test_draws_that_a_resumed_run_does_not_repeat_are_reported(tmp_path: Path) -> None:
    project = project_with(tmp_path, DRAWS)
    done = run("python", "train.py", "--simulated-devices=1", "--limit-steps=2", "--epochs=1", folder=project)
    assert done.returncode == 0, done.stderr
    reported = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("task.")]
    assert len(reported) == 3, done.stdout
    assert all("(task.py:" in line for line in reported)
