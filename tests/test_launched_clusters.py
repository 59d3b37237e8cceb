"""Clusters under launch.py, which restarts them, and clusters with parameter servers."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import clusters
import pytest
import tensorflow as tf
from clusters import LOST, NORMALIZED, NUMBERS, RECORDED, assert_same_numbers, outcome, project_with, wait_for
from processes import is_alive, until

from rendering import PROJECT


class Launched:
    """launch.py, and the processes that it has started."""

    def __init__(self, project: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as output:
            command = [sys.executable, "launch.py", *arguments]
            self.process = subprocess.Popen(command, cwd=project, stdout=output, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        """Returns the ids of the workers."""
        number = self.process.pid
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="utf-8").split()
            return [int(child) for child in children if b"TF_CONFIG=" in Path(f"/proc/{child}/environ").read_bytes()]
        return []

    def kill_a_worker(self, draw: random.Random) -> None:
        """Kills a worker with SIGKILL, and waits for what the launcher does then."""
        told = r": restarting \(| is lost: resuming with "
        before = len(re.findall(told, self.text))
        os.kill(draw.choice(self.processes()), signal.SIGKILL)
        until(lambda: self.process.poll() is not None or len(re.findall(told, self.text)) > before)
        assert self.process.poll() is None, self.text

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, self.text

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(project: Path, *arguments: str) -> Launched:
        started.append(Launched(project, tmp_path / f"launched-{len(started)}.log", *arguments))
        return started[-1]

    yield launch
    for each in started:
        each.process.kill()  # The workers end with it.
        each.process.wait()


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:13]) for path in run_dir.glob("checkpoints/step-*")), default=0)


def test_worker_that_is_stopped_before_it_joins_ends_the_others(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project = project_with(tmp_path, "")
    stop = 'import os\nif \'"index": 1\' in os.environ["TF_CONFIG"]:\n    os.kill(os.getpid(), 15)\n'
    (project / "config.py").write_text((project / "config.py").read_text() + stop)
    launcher = launched(project, "--workers=2", "--", f"--run-dir={tmp_path / 'run'}")
    assert launcher.wait(60) == 42  # Not after --cluster-timeout.
    # The other one has no line if the signal comes before it listens.
    assert "[worker 1] stopped by SIGTERM" in launcher.text


@pytest.mark.long
def test_cluster_that_is_killed_often_ends_bit_equal(launched: Callable[..., Launched], tmp_path: Path) -> None:
    """A worker is killed, and then the launcher, with which the others end; then the same command is run again."""
    project, flags = project_with(tmp_path, NORMALIZED + RECORDED), (*NUMBERS, "--epochs=6")
    clusters.train(project, tmp_path / "whole", 2, *flags)
    seed = int(time.time())
    draw, run_dir = random.Random(seed), tmp_path / f"killed-by-{seed}"
    command = (project, "--workers=2", "--max-restarts=1", "--", *flags, f"--run-dir={run_dir}")
    launcher = launched(*command)
    for kills in range(2):
        before = newest_step(run_dir)
        launcher.until(lambda before=before: newest_step(run_dir) > before)
        time.sleep(draw.uniform(0, 1))
        if not kills:
            launcher.kill_a_worker(draw)
    processes = launcher.processes()
    assert len(processes) == 2
    launcher.process.kill()
    until(lambda: not any(is_alive(process) for process in processes), seconds=10)
    again = launched(*command)
    assert again.wait(600) == 0, again.text
    assert "resumed from step-" in again.text
    assert outcome(run_dir) == outcome(tmp_path / "whole")


@pytest.mark.long
def test_two_of_three_workers_are_lost_for_good_and_the_numbers_stay(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project, flags = project_with(tmp_path, NORMALIZED + RECORDED), (*NUMBERS, "--epochs=3")
    clusters.train(project, tmp_path / "one", 1, *flags, "--simulated-devices=2")
    run_dir, draw = tmp_path / "run", random.Random(0)
    launcher = launched(project, "--workers=3", "--min-workers=1", "--", *flags, f"--run-dir={run_dir}")
    # Three train and validate for an epoch, and two for the next one.
    saved = []
    for lost, epoch in ((1, 1), (2, 2)):
        launcher.until(lambda epoch=epoch: newest_step(run_dir) > 21 * epoch)
        saved.append(newest_step(run_dir))
        launcher.kill_a_worker(draw)
        assert f" is lost: resuming with {3 - lost} worker(s)" in launcher.text
    assert launcher.wait(300) == 0, launcher.text
    # At most one interval between checkpoints is computed again.
    resumed = re.findall(r"resumed from step-(\d+)", launcher.text)
    assert len(resumed) == 2
    assert all(int(each) >= step for each, step in zip(resumed, saved, strict=True))
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["replicas"] == 1
    assert_same_numbers(tmp_path / "one", run_dir)


@pytest.mark.long
def test_asynchronous_training_learns_and_survives_deaths_and_a_signal(tmp_path: Path) -> None:
    """A worker dies; then the other one, with which the chief ends; then the parameter server; then the chief stops."""
    run_dir = tmp_path / "run"

    def start(logs: str, number: int) -> contextlib.AbstractContextManager[list[clusters.Worker]]:
        flags = ("--strategy=parameter_server", f"--run-dir={run_dir}")
        return clusters.cluster(PROJECT, tmp_path / logs, {"chief": 1, "worker": number, "ps": 1}, *flags)

    with start("workers die", 2) as (chief, worker, other, server):
        wait_for("epoch  3/30", chief)
        worker.process.kill()
        wait_for("epoch  6/30", chief)
        other.process.kill()
        assert chief.wait(120) == LOST
        assert chief.last_line() == "ERROR: all workers are gone: check their logs, then restart the cluster"
        assert server.wait(60) == 0
    with start("server dies", 1) as (chief, *_, server):
        wait_for("epoch  9/30", chief)
        assert "resumed from step-" in chief.text
        server.process.kill()
        assert chief.wait(120) not in (0, 2, 3, 42)  # launch.py restarts after other codes.
    with start("stopped", 1) as (chief, *_):
        wait_for("epoch 12/30", chief)
        chief.process.terminate()
        assert chief.wait(120) == 42
        assert "stopped by SIGTERM, the state is in" in chief.last_line()
    with start("to the end", 2) as (chief, *others):
        assert [each.wait(400) for each in (chief, *others)] == [0] * 4, chief.text
    rows, result = outcome(run_dir)
    assert result["test/accuracy"] >= 0.95
    assert (len(rows), result["step"]) == (30, 30 * 39)
    # Every step was counted, by the workers as by the chief.
    reader = tf.train.load_checkpoint(str(max((run_dir / "checkpoints").glob("step-*")) / "state"))
    (counted,) = [name for name in reader.get_variable_to_shape_map() if name.endswith("/iteration")]
    # A piece of an execution that the dead worker had started is done again by the other.
    assert 30 * 39 <= reader.get_tensor(counted) <= 30 * 39 + 40
