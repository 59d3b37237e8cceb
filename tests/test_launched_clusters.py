"""Clusters under launch.py, which restarts them, and clusters with parameter servers."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import clusters
import pytest
import tensorflow as tf
from clusters import NORMALIZED, NUMBERS, SLOW, assert_same_numbers, outcome, project_with, wait_for
from processes import is_alive, until

from rendering import PROJECT


class Launched:
    """launch.py, and the workers that it has started."""

    def __init__(self, project: Path, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as output:
            command = [sys.executable, "launch.py", *arguments]
            self.process = subprocess.Popen(command, cwd=project, stdout=output, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def workers(self) -> list[int]:
        number = self.process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text(encoding="utf-8").split()
        return [int(child) for child in children if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.process.poll() is not None or condition())
        assert self.process.poll() is None, self.text

    def kill_the_chief(self, expected: str) -> None:
        """Kills the chief, and waits for what the launcher says then."""
        os.kill(self.workers()[0], signal.SIGKILL)
        self.until(lambda: expected in self.text)


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


@pytest.mark.long
def test_cluster_whose_chief_and_launcher_are_killed_ends_bit_equal(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project, run_dir = project_with(tmp_path, NORMALIZED + SLOW), tmp_path / "run"
    clusters.train(project, tmp_path / "whole", 2, *NUMBERS)
    command = (project, "--workers=2", "--max-restarts=1", "--", *NUMBERS, f"--run-dir={run_dir}")
    launcher = launched(*command)
    launcher.until(lambda: newest_step(run_dir))
    launcher.kill_the_chief(": restarting (")
    before = newest_step(run_dir)
    launcher.until(lambda: newest_step(run_dir) > before)
    workers = launcher.workers()
    launcher.process.kill()
    until(lambda: not any(map(is_alive, workers)), seconds=10)
    again = launched(*command)
    assert again.process.wait(600) == 0, again.text
    assert "resumed from step-" in again.text
    assert outcome(run_dir) == outcome(tmp_path / "whole")


@pytest.mark.long
def test_two_of_three_workers_are_lost_for_good_and_the_numbers_stay(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project, flags = project_with(tmp_path, NORMALIZED + SLOW), (*NUMBERS, "--epochs=3")
    clusters.train(project, tmp_path / "one", 1, *flags, "--simulated-devices=2")
    run_dir, saved = tmp_path / "run", []
    launcher = launched(project, "--workers=3", "--min-workers=1", "--", *flags, f"--run-dir={run_dir}")
    # Three train and validate for an epoch, and two for the next one.
    for epoch in (1, 2):
        launcher.until(lambda epoch=epoch: newest_step(run_dir) > 21 * epoch)
        saved.append(newest_step(run_dir))
        launcher.kill_the_chief(f" is lost: resuming with {3 - epoch} worker(s)")
    assert launcher.process.wait(300) == 0, launcher.text
    # At most one interval between checkpoints is computed again.
    resumed = re.findall(r"resumed from step-(\d+)", launcher.text)
    assert all(int(each) >= step for each, step in zip(resumed, saved, strict=True))
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["replicas"] == 1
    assert_same_numbers(tmp_path / "one", run_dir)


@pytest.mark.long
def test_asynchronous_training_learns_and_survives_deaths_and_a_signal(tmp_path: Path) -> None:
    """A worker dies, and the chief is stopped; then the parameter server dies."""
    run_dir = tmp_path / "run"

    def start(logs: str) -> clusters.Started:
        flags = ("--strategy=parameter_server", "--epochs=20", f"--run-dir={run_dir}")
        return clusters.cluster(PROJECT, tmp_path / logs, {"chief": 1, "worker": 2, "ps": 1}, *flags)

    with start("stopped") as (chief, worker, _, server):
        wait_for("epoch  2/20", chief)
        worker.process.kill()
        wait_for("epoch  4/20", chief)
        chief.process.terminate()
        assert chief.wait(120) == 42
        assert "stopped by SIGTERM, the state is in" in chief.last_line()
        assert server.wait(60) == 0
    with start("server dies") as (chief, *_, server):
        wait_for("epoch  6/20", chief)
        assert "resumed from step-" in chief.text
        server.process.kill()
        assert chief.wait(120) not in (0, 2, 3, 42)  # launch.py restarts after other codes.
    with start("to the end") as started:
        assert [each.wait(400) for each in started] == [0] * 4, started[0].text
    rows, result = outcome(run_dir)
    assert result["test/accuracy"] >= 0.95
    assert (len(rows), result["step"]) == (20, 20 * 39)
    # Every step was counted, by the workers as by the chief.
    reader = tf.train.load_checkpoint(str(max((run_dir / "checkpoints").glob("step-*")) / "state"))
    (counted,) = [name for name in reader.get_variable_to_shape_map() if name.endswith("/iteration")]
    # A piece of an execution that the dead worker had started is done again by the other.
    assert 20 * 39 <= reader.get_tensor(counted) <= 20 * 39 + 40
