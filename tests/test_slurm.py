"""deploy/slurm.sh on two nodes of a real Slurm: it trains, and a job that is stopped goes back into the queue."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from processes import until

from rendering import PROJECT, run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not slurm.is_installed(), reason="needs Slurm and munge, and root or sudo without a password"),
]

FLAGS = ("--epochs=20", "--checkpoint-every-steps=20")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("slurm_project") / "project"
    return shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", "runs"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        # The script says `python`, as users have it in an activated environment.
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        yield cluster


def submit(cluster: slurm.Slurm, project: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    return cluster.run("sbatch", "--parsable", *options, "deploy/slurm.sh", *arguments, folder=project).strip()


def log_of(project: Path, job: str) -> str:
    log = project / f"slurm-{job}.out"
    return log.read_text(encoding="utf-8") if log.exists() else ""


def result(run_dir: Path) -> dict[str, object]:
    values = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name != "seconds"}


def has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step-*"))


def test_job_on_two_nodes_trains_and_one_that_is_stopped_resumes(cluster: slurm.Slurm, project: Path) -> None:
    alone = run("python", "train.py", *FLAGS, "--simulated-devices=2", "--run-dir=runs/alone", folder=project)
    assert alone.returncode == 0, alone.stderr
    whole = submit(cluster, project, *FLAGS, "--run-dir=runs/whole")
    assert cluster.wait(whole, seconds=240) == "COMPLETED", log_of(project, whole)
    # --exclusive binds the process of a node to all of its cores.
    assert f"CPU, {slurm.CPUS} core" in log_of(project, whole)

    stopped = submit(cluster, project, *FLAGS, "--run-dir=runs/stopped")
    until(lambda: has_checkpoint(project / "runs/stopped"), 120)
    cluster.run("scancel", "--signal=TERM", stopped)
    assert cluster.wait(stopped, seconds=240) == "COMPLETED", log_of(project, stopped)
    written = log_of(project, stopped)
    assert re.search(r"worker 1 of worker 0 n1:\d+, worker 1 n2:\d+", written)
    assert "stopped by" in written
    assert "resumed from step-" in written
    equal = result(project / "runs/whole")
    assert result(project / "runs/stopped") == equal
    for name, value in result(project / "runs/alone").items():
        if name.startswith("test/"):
            assert equal[name] == pytest.approx(value, rel=1e-5)


def test_job_is_requeued_before_its_time_limit_and_resumes(cluster: slurm.Slurm, project: Path) -> None:
    # Slurm looks at time limits twice a minute: the signal comes 70 s to 100 s after the start.
    limit = ("--time=2", "--signal=TERM@20")
    job = submit(cluster, project, "--epochs=100000", "--run-dir=runs/limited", options=limit)
    until(lambda: "resumed from step-" in log_of(project, job) or cluster.has_ended(job), 400)
    written = log_of(project, job)
    assert cluster.field(job, "Restarts") == "1", written
    assert "resumed from step-" in written
    assert re.search(r"stopped by SIGTERM.*, the state is in ", written)
    cluster.run("scancel", job)
    assert cluster.wait(job, seconds=60) == "CANCELLED"


def test_jobs_of_an_array_have_runs_and_ends_of_their_own(cluster: slurm.Slurm, project: Path) -> None:
    options = ("--array=4-5", "--nodes=1", f"--cpus-per-task={slurm.CPUS}")
    array = submit(cluster, project, "--epochs=60", "--checkpoint-every-steps=20", options=options)
    runs = [project / "runs" / number for number in ("4", "5")]
    until(lambda: all(map(has_checkpoint, runs)), 120)
    # Job 5 comes last, and has the number of the array.
    assert cluster.field(f"{array}_5", "JobId") == array
    cluster.run("scancel", "--signal=TERM", f"{array}_5")
    assert [cluster.wait(f"{array}_{number}", seconds=240) for number in (4, 5)] == ["COMPLETED"] * 2, cluster.logs()
    assert [cluster.field(f"{array}_{number}", "Restarts") for number in (4, 5)] == ["0", "1"]
    settings = [json.loads((each / "config.json").read_text(encoding="utf-8")) for each in runs]
    assert [each["settings"]["seed"] for each in settings] == [4, 5]
    assert result(runs[0])["weights_sha256"] != result(runs[1])["weights_sha256"]
