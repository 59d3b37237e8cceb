"""A Slurm cluster of two nodes on this machine, for as long as a test needs it: munged, slurmctld and two slurmd."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import as_root

CPUS = min(2, os.cpu_count() or 1)  # Of each node. Both nodes use the same ones.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")


def is_installed() -> bool:
    """Returns whether Slurm's programs are installed and may be started: slurmd must be root."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    installed = all(shutil.which(program, path=path) for program in PROGRAMS)
    return installed and as_root.works("unshare", "--mount", "true")


class Slurm:
    """Runs Slurm's commands against the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(self, *command: str, folder: Path | None = None) -> str:
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(command, cwd=folder or self.folder, check=False, **options)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """Returns what `scontrol show job` says of a job, by the name of the field."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(field.removeprefix(f"{name}=") for field in fields if field.startswith(f"{name}="))

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Starts the daemons, with everything they write in `folder`; ends them, and what they started, at the end."""
    slurm = Slurm(folder)
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        controller, *nodes = (each.getsockname()[1] for each in sockets)
    key, munge = folder / "munge.key", Path("/tmp") / f"munge-{os.getpid()}-{time.monotonic_ns()}.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={getpass.getuser()}",
        "AuthType=auth/munge",
        # A job that is requeued begins when its credential has expired.
        f"AuthInfo=socket={munge},cred_expire=5",
        "ProctrackType=proctrack/linuxproc",
        # Binds each task to the cores that it was given.
        "TaskPlugin=task/affinity",
        "SelectType=select/cons_tres",
        "MpiDefault=none",
        "ReturnToService=2",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder / 'spool-%n'}",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd-%n.pid'}",
        "SchedulerParameters=sched_interval=1",
        *(f"NodeName=n{n} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN" for n, port in enumerate(nodes, 1)),
        "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    # The nodes' names lead to this machine, for the processes on the nodes only.
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "127.0.0.1 n1 n2\n")
    with_hosts = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts; exec "$@"', "sh"]
    # sudo keeps no variables.
    variables = [f"{name}={slurm.environment[name]}" for name in ("PATH", "SLURM_CONF")]
    slurmd = [*(as_root.prefix() or []), "env", *variables, *with_hosts, "slurmd", "-D"]

    daemons = {
        "munged": [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}"),
            *(f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")),
        ],
        "slurmctld": ["slurmctld", "-D"],
        "slurmd-n1": [*slurmd, "-N", "n1"],
        "slurmd-n2": [*slurmd, "-N", "n2"],
    }
    started: list[subprocess.Popen] = []
    try:
        for name, command in daemons.items():
            with (folder / f"{name}-out.log").open("w") as log:
                options = {"env": slurm.environment, "stdout": log, "stderr": subprocess.STDOUT, "cwd": folder}
                started.append(subprocess.Popen(command, **options))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while slurm.run("sinfo", "--noheader", "--format=%t %D").split() != ["idle", "2"]:
            assert time.monotonic() < deadline, slurm.logs()
            time.sleep(0.5)
        yield slurm
        slurm.run("scancel", "--user", getpass.getuser())
    finally:
        for process in reversed(started):
            as_root.end(process)
        munge.unlink(missing_ok=True)
