"""deploy/slurm.sh: what it passes on and when it requeues, by stand-ins; and on two nodes of a real Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from processes import until

from rendering import PROJECT

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
    [(0, 1, ""), (2, 1, ""), (3, 1, ""), (42, 20, "requeue 9"), (1, 19, "requeue 9"), (1, 20, "")],
)
def test_job_is_requeued_if_that_can_help(code: int, failures: int, told: str, tmp_path: Path) -> None:
    # However often it was requeued after signals.
    counted = tmp_path / "slurm-9.failures"
    counted.write_text("exit code 1\n" * failures, encoding="utf-8")
    assert started(tmp_path, code, SLURM_RESTART_COUNT="500")[1] == told
    after = counted.read_text(encoding="utf-8").splitlines() if counted.exists() else []
    assert len(after) == {0: 0, 2: 0, 3: 0, 42: failures}.get(code, failures + 1)


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


def log_of(project: Path, job: str) -> str:
    log = project / f"slurm-{job}.out"
    return log.read_text(encoding="utf-8") if log.exists() else ""


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:13]) for path in run_dir.glob("checkpoints/step-*")), default=0)


@pytest.mark.long
@pytest.mark.skipif(not slurm.is_installed(), reason="needs Slurm and munge, and root or sudo without a password")
def test_job_on_two_nodes_resumes_after_its_time_limit_and_without_a_node_that_fails(tmp_path: Path) -> None:
    """It is the only job of an array. Slurm looks at time limits twice a minute."""
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    project = shutil.copytree(PROJECT, tmp_path / "project", ignore=ignored)
    run_dir = project / "runs/4"
    (tmp_path / "slurm").mkdir()
    with slurm.two_nodes(tmp_path / "slurm") as cluster:
        # The script says `python`, as users have it in an activated environment.
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        options = ("--array=4", "--nodes=1-2", "--no-kill", "--time=2", "--signal=TERM@90")
        # Two nodes pad each batch.
        flags = ("--epochs=100000", "--checkpoint-every-steps=20", "--global-batch-size=31")
        job = cluster.run("sbatch", "--parsable", *options, "deploy/slurm.sh", *flags, folder=project).strip()
        until(lambda: "resumed from step-" in log_of(project, job), 240)
        cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=60")
        assert cluster.field(job, "NumNodes") == "2"
        assert cluster.field(job, "Restarts") == "1"
        stopped_at = newest_step(run_dir)
        until(lambda: newest_step(run_dir) > stopped_at, 120)
        cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        until(lambda: log_of(project, job).count("resumed from step-") == 2, 240)
        written = log_of(project, job)
        # --exclusive binds the process of a node to all of its cores.
        assert f"CPU, {slurm.CPUS} core" in written
        assert re.search(r"worker 1 of worker 0 n1:\d+, worker 1 n2:\d+", written)
        assert re.search(r"stopped by .*, the state is in ", written)
        assert "slurm.sh: 1 of 2 nodes failed; resuming on 1" in written
        assert cluster.field(job, "Restarts") == "1"  # The node that failed has cost none.
        assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["settings"]["seed"] == 4
