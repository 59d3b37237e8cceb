"""The cluster of this process, as TF_CONFIG, Slurm or Kubernetes describes it, and its GPUs. Imports no TensorFlow."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.errors import BadInput

# "host0:12345", "10.0.0.1:12345", "[fe80::1%eth0]:12345": no scheme and no space.
ADDRESS = re.compile(r"([\w.-]+|\[[\w:.%-]+\]):(?P<port>[0-9]{1,5})")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # Has a folder for each GPU of the container.
VISIBLE = "CUDA_VISIBLE_DEVICES"
JOBS = ("chief", "worker", "ps")  # In the order in which processes are counted. A chief is the first worker.


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a cluster, by job, and which of them this process is."""

    source: str  # "TF_CONFIG", "Slurm", "Kubernetes" or "launch.py", for messages.
    addresses: dict[str, list[str]]  # job -> "host:port" of each of its processes.
    job: str
    index: int

    def processes(self) -> dict[str, str]:
        """Returns the address of every process by its name, the chief first: "worker 1" -> "host1:12345"."""
        jobs = {job: self.addresses.get(job, []) for job in JOBS}
        return {f"{job} {index}": address for job in jobs for index, address in enumerate(jobs[job])}

    def others(self) -> dict[str, str]:
        """Returns `processes` without this one."""
        return {name: address for name, address in self.processes().items() if name != self.name}

    @property
    def name(self) -> str:
        return f"{self.job} {self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes: the chief, or the first worker of a cluster without one."""
        return self.name == next(iter(self.processes()))

    def tf_config(self) -> str:
        """Returns the value of TF_CONFIG, from which TensorFlow takes the cluster."""
        return json.dumps({"cluster": self.addresses, "task": {"type": self.job, "index": self.index}})


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the environment describes; None without one, or if it has a single process.

    Raises BadInput if the description is malformed or contradicts itself.
    """
    cluster: Cluster | None = None
    if environment.get("TF_CONFIG"):
        cluster = _from_tf_config(environment["TF_CONFIG"])
    elif _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        cluster = _from_slurm(environment)
    elif "JOB_COMPLETION_INDEX" in environment:
        cluster = _from_kubernetes(environment)
    if cluster and (contradiction := next(_contradictions(cluster), "")):
        raise BadInput(f"{cluster.source} describes {contradiction}")
    return cluster if cluster and len(cluster.processes()) > 1 else None


def reject_cluster(flag: str) -> None:
    """Raises BadInput if the environment describes a cluster, which a program with this flag cannot join."""
    if cluster := find_cluster(os.environ):
        raise BadInput(f"{flag} is for one process, but {cluster.source} describes a cluster: start it elsewhere")


def _from_tf_config(text: str) -> Cluster:
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        described = json.loads(text)
        jobs, job, index = described["cluster"], described["task"]["type"], described["task"]["index"]
        has_lists = bool(jobs) and all(isinstance(addresses, list) for addresses in jobs.values())
        if has_lists and isinstance(job, str) and type(index) is int:
            # TensorFlow crashes at a job without processes. An evaluator takes no part in the training.
            used = {name: addresses for name, addresses in jobs.items() if addresses and name != "evaluator"}
            return Cluster("TF_CONFIG", used, job, index)
    example = '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'
    raise BadInput(f"TF_CONFIG {text:.200} must be JSON like {example}: fix it, or unset it to train on one machine")


def _from_slurm(environment: Mapping[str, str]) -> Cluster:
    """Reads the variables that srun sets for each process of a step (man srun, OUTPUT ENVIRONMENT VARIABLES)."""
    nodes, tasks = environment.get("SLURM_STEP_NODELIST", ""), environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    rank, number = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    try:
        listed = subprocess.check_output(["scontrol", "show", "hostnames", nodes], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise BadInput(f"scontrol cannot read SLURM_STEP_NODELIST={nodes} ({problem}): set TF_CONFIG") from None
    hosts = listed.decode(errors="replace").split()
    tasks_per_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        tasks_per_node += [int(count)] * int(times or 1)  # "2(x3),1" is 2, 2, 2, 1.
    host_by_rank = [host for host, count in zip(hosts, tasks_per_node, strict=False) for _ in range(count)]
    host = environment.get("SLURMD_NODENAME")
    if not len(host_by_rank) == number > rank or host not in (None, host_by_rank[rank]):
        raise BadInput(
            f"Slurm's variables contradict each other (SLURM_STEP_NODELIST={nodes}, SLURM_STEP_TASKS_PER_NODE={tasks}, "
            f"SLURM_STEP_NUM_TASKS={number}, SLURM_PROCID={rank} on {host}): start it with srun --distribution=block"
        )
    # Each job gets its own ports, so that jobs can share a node, below those that systems use for outgoing connections.
    first = 12000 + _number(environment, "SLURM_JOB_ID") * 37 % (20000 - number)
    addresses = [f"{host}:{first + index}" for index, host in enumerate(host_by_rank)]
    return Cluster("Slurm", {"worker": addresses}, "worker", rank)


def _from_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Reads the variables of the manifests in deploy/: an Indexed Job's pods are called <job>-<index>.<service>."""
    job, service, index = map(environment.get, ("JOB_NAME", "SERVICE_NAME", "JOB_COMPLETION_INDEX"))
    # Kubeflow Trainer has another name for the number of pods.
    pods = _number(environment, "WORKERS") or _number(environment, "PET_NNODES")
    if pods < 2 and not (job and service):
        return None
    if not (job and service and pods and index):
        raise BadInput(
            f"JOB_NAME={job}, SERVICE_NAME={service}, JOB_COMPLETION_INDEX={index} and WORKERS={pods or None} (or "
            "PET_NNODES) name a cluster only together: set all of them, as deploy/kubernetes.yaml does"
        )
    addresses = [f"{job}-{pod}.{service}:12345" for pod in range(pods)]
    return Cluster("Kubernetes", {"worker": addresses}, "worker", _number(environment, "JOB_COMPLETION_INDEX"))


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name) or "0"
    if not value.isdecimal():
        raise BadInput(f"{name}={value} in the environment must be a whole number")
    return int(value)


def _contradictions(cluster: Cluster) -> Iterator[str]:
    """Yields contradictions at which TensorFlow would wait or fail without an explanation."""
    if cluster.job == "evaluator":
        yield "this process as an evaluator: unset TF_CONFIG, and start it with --evaluate-continuously"
    if unknown := sorted(set(cluster.addresses) - set(JOBS)):
        yield f"the job {', '.join(unknown)}: use only {', '.join(JOBS)}"
    processes = cluster.processes()
    if cluster.name not in processes:
        yield f"this process as {cluster.name}, but only {', '.join(processes)}: fix its type or index"
    for name, address in processes.items():
        parts = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None or not 0 < int(parts["port"]) < 2**16:
            yield f"{name} at {address!r}: an address must be a host and a port, as host0:12345"
    addresses = list(processes.values())
    local = [address for address in addresses if is_loopback(host_and_port(address)[0])]
    if local and len(local) < len(addresses):
        yield f"a process at {local[0]}, which is a different machine on each host: use the name that the others know"


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address means this machine on every machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a process with this environment can use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE not in environment:
        return [str(index) for index, _ in enumerate(NVIDIA_GPUS.glob("*"))]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    # CUDA uses the GPUs before the first invalid name, such as -1.
    return list(itertools.takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))


def why_no_gpu(environment: Mapping[str, str]) -> str:
    """Returns why TensorFlow may list no GPU although this machine has some, with a remedy; "" if it has none."""
    number = len([*NVIDIA_GPUS.glob("*")])
    if not number:
        return ""
    return (
        f"this machine has {number} NVIDIA GPU(s), and TensorFlow can use none ({VISIBLE} is "
        f"{environment.get(VISIBLE)!r}: unset it, or pip install 'tensorflow[and-cuda]', with a new enough driver)"
    )
