"""deploy/slurm.sh on two nodes of a real Slurm: it trains, and a job that is stopped goes back into the queue."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import slurm

from rendering import PROJECT, run

pytestmark = [pytest.mark.long, pytest.mark.skipif(not slurm.is_installed(), reason="needs Slurm and munge, and root")]

FLAGS = ("--epochs=20", "--checkpoint-every-steps=20")


def result(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


def test_job_on_two_nodes_trains_and_one_that_is_stopped_resumes(tmp_path: Path) -> None:
    shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    project = tmp_path / "project"
    alone = run("python", "train.py", *FLAGS, "--simulated-devices=2", "--run-dir=runs/alone", folder=project)
    assert alone.returncode == 0, alone.stderr
    (tmp_path / "slurm").mkdir()
    with slurm.two_nodes(tmp_path / "slurm") as cluster:
        # The script says `python`, as users have it in an activated environment.
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"

        def submit(run_dir: str) -> str:
            return cluster.run(
                "sbatch", "--parsable", "deploy/slurm.sh", *FLAGS, f"--run-dir={run_dir}", folder=project
            ).strip()

        whole = submit("runs/whole")
        assert cluster.wait(whole, seconds=240) == "COMPLETED", (project / f"slurm-{whole}.out").read_text()

        stopped = submit("runs/stopped")
        deadline = time.monotonic() + 120
        while not list((project / "runs" / "stopped" / "checkpoints").glob("step-*")):
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.2)
        cluster.run("scancel", "--signal=TERM", stopped)  # What --signal sends before the time limit.
        log = project / f"slurm-{stopped}.out"
        assert cluster.wait(stopped, seconds=240) == "COMPLETED", log.read_text()
        written = log.read_text()

    assert re.search(r"worker 1 of worker 0 n1:\d+, worker 1 n2:\d+", written)
    assert "stopped by" in written
    assert "resumed from step-" in written
    equal = {name: value for name, value in result(project / "runs/whole").items() if name != "seconds"}
    assert {name: value for name, value in result(project / "runs/stopped").items() if name != "seconds"} == equal
    for name, value in result(project / "runs/alone").items():
        if name.startswith("test/"):
            assert equal[name] == pytest.approx(value, rel=1e-5)
