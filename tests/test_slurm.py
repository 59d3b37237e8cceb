"""deploy/slurm.sh: what it passes on and when it requeues, by stand-ins; and on two nodes of a real Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from processes import until

from rendering import PROJECT, run

START_ID = "TRAINING_START_ID"  # engine/cluster/launcher.py says what it means.


def started(tmp_path: Path, code: int, nodes: str = "2", **environment: str) -> tuple[list[str], str]:
    """Runs the script where srun ends with `code`; returns the arguments of the last srun, and those of scontrol.

    `nodes` are the answers to how many nodes the job has, one after the other.
    """
    calls = tmp_path / "calls"
    calls.mkdir()
    (calls / "nodes").write_text("".join(f"{each}\n" for each in nodes.split()), encoding="utf-8")
    stand_ins = {
        "srun": f'echo "${START_ID}" "$@" > {calls}/srun\nexit {code}',
        "scontrol": f'echo "$@" > {calls}/scontrol',
        # The last answer is given again and again.
        "squeue": f'echo "$@" > {calls}/squeue\n'
        + f"head -n1 {calls}/nodes\n[ $(wc -l <{calls}/nodes) -le 1 ] || sed -i 1d {calls}/nodes",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = {**inherited, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9", **environment}
    command = ["bash", PROJECT / "deploy/slurm.sh", "--epochs", "5"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, check=False, timeout=20)
    assert done.returncode == code
    told = (calls / "scontrol").read_text(encoding="utf-8").strip() if (calls / "scontrol").exists() else ""
    return (calls / "srun").read_text(encoding="utf-8").split(), told


def test_process_that_lost_another_one_does_not_hide_its_exit_code(tmp_path: Path) -> None:
    """srun ends with the highest one."""
    script = (PROJECT / "deploy/slurm.sh").read_text(encoding="utf-8")
    (line,) = re.findall("(?m)^train='(.*)'$", script)
    (tmp_path / "train.py").write_text("import sys\nassert sys.argv[1:-1] == ['a b']\nsys.exit(int(sys.argv[-1]))\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for code, seen in ((0, 0), (2, 2), (42, 42), (43, 1), (44, 1)):
        command = ["bash", "-c", line, "train.py", "a b", str(code)]
        assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == seen


@pytest.mark.parametrize(
    ("code", "failures", "told"),
    [
        *((code, 0, "") for code in (0, 2, 3)),
        (42, 20, "requeue 9"),
        (1, 0, "requeue 9"),
        (137, 19, "requeue 9"),
        (1, 20, ""),
    ],
)
def test_job_is_requeued_if_that_can_help(code: int, failures: int, told: str, tmp_path: Path) -> None:
    # However often it was requeued after signals.
    counted = tmp_path / "slurm-9.failures"
    counted.write_text("exit code 1\n" * failures, encoding="utf-8")
    assert started(tmp_path, code, SLURM_RESTART_COUNT="500")[1] == told
    after = counted.read_text(encoding="utf-8").splitlines() if counted.exists() else []
    assert len(after) == {0: 0, 2: 0, 3: 0, 42: failures}.get(code, failures + 1)


def test_job_whose_failures_cannot_be_counted_is_not_requeued(tmp_path: Path) -> None:
    (tmp_path / "slurm-9.failures").mkdir()  # The file cannot be written, as on a full disk.
    assert started(tmp_path, 1)[1] == ""


def test_job_that_loses_a_node_continues_on_the_others(tmp_path: Path) -> None:
    words, told = started(tmp_path, 43, nodes="3 2 2 2")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(words)
    assert told == "requeue 9"  # The second failure is of a program, not of a node.
    assert (tmp_path / "slurm-9.failures").read_text(encoding="utf-8") == "exit code 43\n"


def test_job_of_an_array_has_a_run_directory_and_is_requeued_alone(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "4"}
    words, told = started(tmp_path, 42, **array)
    assert words[-7:] == ["train.py", "--run-dir", "runs/3", "--seed", "3", "--epochs", "5"]
    assert "--cpus-per-task=4" in words
    assert told == "requeue 9_3"
    # By the array's number Slurm would answer for all of its jobs.
    assert "--jobs=9_3" in (tmp_path / "calls/squeue").read_text(encoding="utf-8")


def test_job_whose_controller_is_away_uses_the_nodes_that_it_began_with(tmp_path: Path) -> None:
    (start_id, *words), _ = started(tmp_path, 0, nodes="", SLURM_JOB_NUM_NODES="4")
    assert start_id == "slurm-9"
    assert {"--nodes=4", "--ntasks=4"} <= set(words)
    assert words[-3:] == ["train.py", "--epochs", "5"]
    assert not [word for word in words if word.startswith("--cpus-per-task")]


# --- On a real Slurm --------------------------------------------------------------------------------------------------

needs_slurm = pytest.mark.skipif(
    not slurm.is_installed(), reason="needs Slurm and munge, and root or sudo without a password"
)
FLAGS = ("--epochs=20", "--checkpoint-every-steps=20", "--global-batch-size=31")  # Two nodes pad each batch.


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


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:13]) for path in run_dir.glob("checkpoints/step-*")), default=0)


@pytest.mark.long
@needs_slurm
def test_job_on_two_nodes_resumes_after_a_stop_and_without_a_node_that_fails(
    cluster: slurm.Slurm, project: Path
) -> None:
    run_dir = project / "runs/two"
    job = submit(cluster, project, *FLAGS, "--run-dir=runs/two", options=("--nodes=1-2", "--no-kill"))
    until(lambda: newest_step(run_dir) > 0, 120)
    assert cluster.field(job, "NumNodes") == "2"
    # --exclusive binds the process of a node to all of its cores.
    assert f"CPU, {slurm.CPUS} core" in log_of(project, job)
    cluster.run("scancel", "--signal=TERM", job)
    until(lambda: "resumed from step-" in log_of(project, job), 240)
    stopped_at = newest_step(run_dir)
    until(lambda: newest_step(run_dir) > stopped_at, 120)
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    assert cluster.wait(job, seconds=240) == "COMPLETED", log_of(project, job)
    written = log_of(project, job)
    assert re.search(r"worker 1 of worker 0 n1:\d+, worker 1 n2:\d+", written)
    assert re.search(r"stopped by .*, the state is in ", written)
    assert "slurm.sh: 1 of 2 nodes failed; resuming on 1" in written
    assert written.count("resumed from step-") == 2
    assert cluster.field(job, "Restarts") == "1"  # After the signal; the node that failed has cost none.
    done = run("python", "train.py", *FLAGS, "--run-dir=runs/alone", folder=project)
    assert done.returncode == 0, done.stderr
    found, expected = (json.loads((project / f"runs/{name}/result.json").read_text()) for name in ("two", "alone"))
    for name in ("test/loss", "test/accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.long
@needs_slurm
def test_jobs_of_an_array_are_requeued_before_their_time_limit_and_have_runs_of_their_own(
    cluster: slurm.Slurm, project: Path
) -> None:
    # Slurm looks at time limits twice a minute: the signal comes 70 s to 100 s after the start.
    options = ("--array=4-5", "--nodes=1", f"--cpus-per-task={slurm.CPUS}", "--time=2", "--signal=TERM@20")
    array = submit(cluster, project, "--epochs=100000", options=options)
    jobs = [f"{array}_{number}" for number in (4, 5)]

    def log(job: str) -> str:
        return log_of(project, cluster.field(job, "JobId"))

    until(lambda: all("resumed from step-" in log(job) or cluster.has_ended(job) for job in jobs), 400)
    for number, job in zip((4, 5), jobs, strict=True):
        written = log(job)
        assert cluster.field(job, "Restarts") == "1", written
        assert "resumed from step-" in written
        assert re.search(r"stopped by SIGTERM.*, the state is in ", written)
        config = json.loads((project / f"runs/{number}/config.json").read_text(encoding="utf-8"))
        assert config["settings"]["seed"] == number
    # Job 5 came last, and has the number of the array.
    assert cluster.field(jobs[1], "JobId") == array
    cluster.run("scancel", array)
    assert {cluster.wait(job, seconds=60) for job in jobs} == {"CANCELLED"}


@pytest.mark.long
@needs_slurm
def test_jobs_of_an_array_share_the_trials_of_a_sweep(cluster: slurm.Slurm, project: Path) -> None:
    recipes = (PROJECT / "docs/recipes.md").read_text(encoding="utf-8")
    command, trials = "python sweep.py -- --epochs 5", "python sweep.py --trials 2 -- --epochs 1"
    options = ("--array=1-2", "--nodes=1", f"--cpus-per-task={slurm.CPUS}")
    assert f'sbatch --array=1-4 --nodes=1 --cpus-per-task=8 --wrap="{command}"' in recipes
    array = cluster.run("sbatch", "--parsable", *options, f"--wrap={trials}", folder=project).strip()
    assert [cluster.wait(f"{array}_{number}", seconds=240) for number in (1, 2)] == ["COMPLETED"] * 2, cluster.logs()
    lines = "\n".join(log_of(project, f"{array}_{number}") for number in (1, 2))
    ended = re.findall(r"^trial (\d+) +complete .*left\)$", lines, re.MULTILINE)
    assert sorted(map(int, ended)) == [0, 1]
    assert all((project / f"runs/sweep/trial_{number:03}/result.json").exists() for number in range(2))
