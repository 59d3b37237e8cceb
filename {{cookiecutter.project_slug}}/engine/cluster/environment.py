"""The cluster of which this process is one task: from TF_CONFIG, a Slurm step, or a Kubernetes Indexed Job."""

import dataclasses
import ipaddress
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping

from engine.errors import BadInput

# In the order in which a cluster's tasks are counted. A chief is a worker too, the first one.
JOBS = ("chief", "worker", "ps")
KUBERNETES_PORT = 12345


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a cluster, by job, and which of them this process is."""

    source: str
    """What described it, for messages."""
    addresses: dict[str, list[str]]
    """job -> "host:port" of each of its tasks."""
    job: str
    index: int

    def tasks(self) -> dict[str, str]:
        """Returns "worker 1" -> its address, for every task, the chief's first."""
        return {
            f"{job} {index}" if job != "chief" else "chief": address
            for job in JOBS
            for index, address in enumerate(self.addresses.get(job, []))
        }

    @property
    def name(self) -> str:
        """This task's name among `tasks`."""
        return "chief" if self.job == "chief" else f"{self.job} {self.index}"

    @property
    def is_chief(self) -> bool:
        """Whether this task is the one that writes: the chief, or the first worker where no task is called so."""
        return self.name == next(iter(self.tasks()))

    @property
    def has_parameter_servers(self) -> bool:
        return bool(self.addresses.get("ps"))

    def tf_config(self) -> str:
        """Returns the value of TF_CONFIG, from which TensorFlow takes the cluster."""
        return json.dumps({"cluster": self.addresses, "task": {"type": self.job, "index": self.index}})


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the environment describes, or None if it describes none or one of a single task.

    Raises:
        BadInput: the description contradicts itself, or no cluster can be like it.
    """
    if environment.get("TF_CONFIG"):
        cluster = _from_tf_config(environment["TF_CONFIG"])
    elif _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        cluster = _from_slurm(environment)
    elif "JOB_COMPLETION_INDEX" in environment and _number(environment, "WORKERS", 1) > 1:
        cluster = _from_kubernetes(environment)
    else:
        return None
    for problem in _problems(cluster):
        raise BadInput(f"{cluster.source} describes {problem}")
    return cluster if len(cluster.tasks()) > 1 else None


def _from_tf_config(text: str) -> Cluster:
    try:
        described = json.loads(text)
    except ValueError as problem:
        raise BadInput(f"TF_CONFIG is not JSON ({problem}): fix it, or unset it to train on one machine") from None
    example = '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'
    cluster = described.get("cluster") if isinstance(described, dict) else None
    if not isinstance(cluster, dict) or not cluster or not all(isinstance(each, list) for each in cluster.values()):
        raise BadInput(f'TF_CONFIG has no "cluster" with lists of addresses: it has to be like {example}')
    task = described.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("type"), str) or type(task.get("index")) is not int:
        raise BadInput(f'TF_CONFIG has {task!r} for "task", and not a type and a whole number as index, as {example}')
    return Cluster("TF_CONFIG", cluster, task["type"], task["index"])


def _from_slurm(environment: Mapping[str, str]) -> Cluster:
    """Reads what srun sets for each task of a step (man srun, OUTPUT ENVIRONMENT VARIABLES)."""
    names = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
    if missing := [name for name in names if not environment.get(name)]:
        raise BadInput(f"Slurm's {', '.join(missing)} is not set: start the program with srun")
    listed = environment["SLURM_STEP_NODELIST"]
    try:
        hosts = subprocess.check_output(
            ["scontrol", "show", "hostnames", listed], text=True, stderr=subprocess.DEVNULL
        ).split()
    except (OSError, subprocess.CalledProcessError) as problem:
        raise BadInput(f"SLURM_STEP_NODELIST {listed} cannot be read by scontrol ({problem}): set TF_CONFIG") from None
    tasks_per_node = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"]):
        tasks_per_node += [int(number)] * int(times or 1)  # "2(x3),1" is 2, 2, 2, 1.
    host_by_rank = [host for host, number in zip(hosts, tasks_per_node, strict=False) for _ in range(number)]
    rank = _number(environment, "SLURM_PROCID", 0)
    if len(host_by_rank) != _number(environment, "SLURM_STEP_NUM_TASKS", 0) or rank >= len(host_by_rank):
        given = ", ".join(f"{name}={environment[name]}" for name in names)
        raise BadInput(f"Slurm's variables contradict each other ({given}): start the program with srun")
    host = environment.get("SLURMD_NODENAME", host_by_rank[rank])
    if host != host_by_rank[rank]:
        raise BadInput(
            f"SLURM_PROCID {rank} runs on {host}, and by blocks it would be on {host_by_rank[rank]}: use srun "
            "--distribution=block"
        )
    # Jobs that share a node get ports of their own, below those that systems give to outgoing connections.
    first = 12000 + _number(environment, "SLURM_JOB_ID", 0) * 37 % 20000
    addresses = [f"{host}:{first + number}" for number, host in enumerate(host_by_rank)]
    return Cluster("Slurm", {"worker": addresses}, "worker", rank)


def _from_kubernetes(environment: Mapping[str, str]) -> Cluster:
    """Reads what deploy/kubernetes.yaml sets: an Indexed Job's pods are called <job>-<index>.<headless service>."""
    if missing := [name for name in ("JOB_NAME", "SERVICE_NAME") if not environment.get(name)]:
        raise BadInput(f"{', '.join(missing)} is not set beside JOB_COMPLETION_INDEX: see deploy/kubernetes.yaml")
    job, service = environment["JOB_NAME"], environment["SERVICE_NAME"]
    port = _number(environment, "PORT", KUBERNETES_PORT)
    addresses = [f"{job}-{index}.{service}:{port}" for index in range(_number(environment, "WORKERS", 1))]
    return Cluster("Kubernetes", {"worker": addresses}, "worker", _number(environment, "JOB_COMPLETION_INDEX", 0))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name) or str(default)
    if not value.isdecimal():
        raise BadInput(f"{name}={value} in the environment: it has to be a whole number")
    return int(value)


def _problems(cluster: Cluster) -> Iterator[str]:
    """Yields what TensorFlow would wait on, or fail on, without saying why."""
    if unknown := sorted(set(cluster.addresses) - set(JOBS)):
        hint = "; start an evaluator on its own, with --evaluate-continuously" if "evaluator" in unknown else ""
        yield f"the job {', '.join(unknown)}: a cluster has {', '.join(JOBS)}{hint}"
    if cluster.job not in cluster.addresses:
        yield f"a task of the job {cluster.job!r}, which the cluster does not have: name one it has"
    number = len(cluster.addresses[cluster.job])
    if not 0 <= cluster.index < number:
        rule = f"there are {number} of that job, so it has to be from 0 to {number - 1}"
        yield f"this process as {cluster.job} {cluster.index}: {rule}"
    if len(cluster.addresses.get("chief", [])) > 1:
        yield f"{len(cluster.addresses['chief'])} chiefs: name one, and let the others be workers"
    tasks = cluster.tasks()
    for task, address in tasks.items():
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            yield f"{task} at {address!r}: an address is a host and a port, as host0:12345"
    if shared := [address for address in tasks.values() if list(tasks.values()).count(address) > 1]:
        yield f"two tasks at {shared[0]}: give each task an address of its own"
    local = [address for address in tasks.values() if is_loopback(address.rpartition(":")[0])]
    if local and len(local) < len(tasks):
        yield f"a task at {local[0]}, which is another machine to each host: use the name that the others know it by"


def is_loopback(host: str) -> bool:
    """Returns whether a host, as it is written, is this machine to every machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_cluster(flag: str) -> None:
    """Raises BadInput if the environment describes a cluster, for what one process does alone."""
    if cluster := find_cluster(os.environ):
        raise BadInput(f"{flag} is for one process, and {cluster.source} describes a cluster: start it outside of it")
