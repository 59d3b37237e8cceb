"""The cluster that this process is one task of, and the meeting of its tasks before TensorFlow starts.

The environment describes it: TF_CONFIG, the variables of a Slurm step, or those of a Kubernetes Indexed Job. Whatever
describes it, TensorFlow is told by TF_CONFIG. TensorFlow itself waits for a missing task without limit and without a
word, and takes two tasks with different settings for one cluster; so the tasks meet here first, with a deadline.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from engine.console import console
from engine.errors import BadInput

# In the order in which a cluster's tasks are counted. A chief is a worker too, the first one.
JOBS = ("chief", "worker", "ps")
# Between tries to reach a task that does not answer yet.
SECONDS_BETWEEN_TRIES = 0.2
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
        """Returns the value of TF_CONFIG that tells TensorFlow the same."""
        return json.dumps({"cluster": self.addresses, "task": {"type": self.job, "index": self.index}})


# --- What the environment says ----------------------------------------------------------------------------------------


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the environment describes, or None if it describes none or one of a single task.

    Raises:
        BadInput: the description contradicts itself, or no cluster of several hosts can be what it says.
    """
    if environment.get("TF_CONFIG"):
        cluster = _from_tf_config(environment["TF_CONFIG"])
    elif _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        cluster = _from_slurm(environment)
    elif "JOB_COMPLETION_INDEX" in environment and _number(environment, "WORKERS", 1) > 1:
        cluster = _from_kubernetes(environment)
    else:
        return None
    _check(cluster)
    return cluster if len(cluster.tasks()) > 1 else None


def _from_tf_config(text: str) -> Cluster:
    try:
        described = json.loads(text)
    except ValueError as problem:
        raise BadInput(f"TF_CONFIG is not JSON ({problem}): mend it, or unset it to train on one machine") from None
    example = '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'
    cluster = described.get("cluster") if isinstance(described, dict) else None
    if not isinstance(cluster, dict) or not cluster or not all(isinstance(each, list) for each in cluster.values()):
        raise BadInput(f'TF_CONFIG has no "cluster" with lists of addresses: it has to be like {example}')
    task = described.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("type"), str) or type(task.get("index")) is not int:
        raise BadInput(f'TF_CONFIG has no "task" with a type and an index: it has to be like {example}')
    return Cluster("TF_CONFIG", cluster, task["type"], task["index"])


def _from_slurm(environment: Mapping[str, str]) -> Cluster:
    """Reads what srun sets for each task of a step (man srun, OUTPUT ENVIRONMENT VARIABLES)."""
    names = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise BadInput(f"Slurm's {', '.join(missing)} is not set: start the program with srun")
    listed = environment["SLURM_STEP_NODELIST"]
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", listed], check=True, capture_output=True, text=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as problem:
        raise BadInput(f"SLURM_STEP_NODELIST {listed} cannot be read by scontrol ({problem}): set TF_CONFIG") from None
    tasks_per_node = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):  # "2(x3),1" is 2, 2, 2, 1.
        number, _, times = part.rstrip(")").partition("(x")
        tasks_per_node += [int(number)] * int(times or 1)
    of_rank = [host for host, number in zip(hosts, tasks_per_node, strict=True) for _ in range(number)]
    rank = _number(environment, "SLURM_PROCID", 0)
    here = environment.get("SLURMD_NODENAME", of_rank[rank])
    if here != of_rank[rank]:
        raise BadInput(
            f"SLURM_PROCID {rank} runs on {here}, and by blocks it would be on {of_rank[rank]}: use srun "
            "--distribution=block"
        )
    # Jobs that share a node get ports of their own, below those that systems give to outgoing connections.
    first = 12000 + _number(environment, "SLURM_JOB_ID", 0) * 37 % 20000
    addresses = [f"{host}:{first + number}" for number, host in enumerate(of_rank)]
    return Cluster("Slurm", {"worker": addresses}, "worker", rank)


def _from_kubernetes(environment: Mapping[str, str]) -> Cluster:
    """Reads what deploy/kubernetes.yaml sets: an Indexed Job's pods are called <job>-<index>.<headless service>."""
    missing = [name for name in ("JOB_NAME", "SERVICE_NAME") if not environment.get(name)]
    if missing:
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


def _check(cluster: Cluster) -> None:
    """Raises BadInput for a description that TensorFlow would wait on, or fail on, without saying why."""
    of = f"{cluster.source} describes"
    if unknown := sorted(set(cluster.addresses) - set(JOBS)):
        hint = "; start an evaluator on its own, with --evaluate-continuously" if "evaluator" in unknown else ""
        raise BadInput(f"{of} the job {', '.join(unknown)}: a cluster has {', '.join(JOBS)}{hint}")
    if cluster.job not in cluster.addresses:
        raise BadInput(f"{of} a task of the job {cluster.job!r}, which the cluster does not have: name one it has")
    number = len(cluster.addresses[cluster.job])
    if not 0 <= cluster.index < number:
        rule = f"there are {number} of that job, so it has to be from 0 to {number - 1}"
        raise BadInput(f"{of} this process as {cluster.job} {cluster.index}: {rule}")
    if len(cluster.addresses.get("chief", [])) > 1:
        raise BadInput(f"{of} {len(cluster.addresses['chief'])} chiefs: name one, and let the others be workers")
    tasks = cluster.tasks()
    for task, address in tasks.items():
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise BadInput(f"{of} {task} at {address!r}: an address is a host and a port, as host0:12345")
    shared = [address for address in tasks.values() if list(tasks.values()).count(address) > 1]
    if shared:
        raise BadInput(f"{of} two tasks at {shared[0]}: give each task an address of its own")
    local = [address for address in tasks.values() if _is_loopback(address.rpartition(":")[0])]
    if local and len(local) < len(tasks):
        raise BadInput(
            f"{of} a task at {local[0]}, which is another machine to each host: use the name that the others know it by"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- The meeting ------------------------------------------------------------------------------------------------------


def meet(cluster: Cluster, facts: dict[str, Any], *, deadline: float) -> None:
    """Returns when every task has reached every other one, and all have the same `facts`.

    Each task listens at its own address, where TensorFlow will listen afterwards, and tells its facts to whoever asks.
    It leaves when it has reached all and been reached by all, so that nobody needs it any more.

    Args:
        cluster: the cluster and this process's place in it.
        facts: JSON values that have to be equal everywhere, such as the settings.
        deadline: a time.monotonic() after which whoever is missing is named.

    Raises:
        BadInput: a task is missing, runs with other facts or another description of the cluster, or the address of
            this one is not free.
    """
    hello = {"task": cluster.name, "cluster": cluster.addresses, "facts": facts}
    peers = {task: address for task, address in cluster.tasks().items() if task != cluster.name}
    heard: dict[str, dict[str, Any]] = {}  # By those who came here.
    reached: dict[str, dict[str, Any]] = {}
    with _listening(cluster, hello, heard):
        while True:
            for task in peers.keys() - reached.keys():
                if answer := _ask(peers[task], hello):
                    reached[task] = answer
            for answer in (*reached.values(), *heard.values()):
                _compare(hello, answer)
            missing = [task for task in peers if task not in reached or task not in heard]
            if not missing:
                return
            if time.monotonic() > deadline:
                named = ", ".join(f"{task} ({peers[task]})" for task in missing)
                raise BadInput(
                    f"--cluster-timeout is over and {named} of {cluster.source} did not come: look at the log there, "
                    f"and whether {cluster.tasks()[cluster.name]} can be reached from there"
                )
            time.sleep(SECONDS_BETWEEN_TRIES)


def gone(cluster: Cluster) -> list[str]:
    """Returns the other tasks, with their addresses, that nothing listens for any more."""
    tasks = cluster.tasks()
    return [f"{task} ({tasks[task]})" for task in tasks if task != cluster.name and not is_listening(tasks[task])]


def is_listening(address: str) -> bool:
    """Returns whether anything answers at "host:port"."""
    try:
        _connect(address).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _listening(cluster: Cluster, hello: dict[str, Any], heard: dict[str, dict[str, Any]]) -> Iterator[None]:
    address = cluster.tasks()[cluster.name]
    port = int(address.rpartition(":")[2])
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as problem:
        raise BadInput(
            f"{cluster.source} puts {cluster.name} at {address}, where it cannot listen ({problem.strerror}): end "
            "what uses the port, or choose another"
        ) from None

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # It was closed: the meeting is over.
                return
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(5.0)
                with connection.makefile("rw", encoding="utf-8") as lines:
                    asked = json.loads(lines.readline())
                    lines.write(json.dumps(hello) + "\n")
                    lines.flush()
                    heard[str(asked["task"])] = asked

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # Wakes the thread.
        server.close()
        thread.join()


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)


def _ask(address: str, hello: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what the task at `address` tells, or None if it is not there, or has left the meeting before."""
    try:
        with _connect(address) as connection, connection.makefile("rw", encoding="utf-8") as lines:
            lines.write(json.dumps(hello) + "\n")
            lines.flush()
            answer = json.loads(lines.readline())
        return answer if isinstance(answer, dict) and "task" in answer else None
    except (OSError, ValueError):
        return None


def _compare(own: dict[str, Any], other: dict[str, Any]) -> None:
    task = other["task"]
    if task == own["task"]:
        raise BadInput(f"two processes are {task} of the cluster: give each an index of its own")
    if other.get("cluster") != own["cluster"]:
        raise BadInput(f"{task} describes the cluster as {other.get('cluster')}, and {own['task']} as {own['cluster']}")
    facts, others = own["facts"], other.get("facts", {})
    differing = [name for name in {**facts, **others} if facts.get(name) != others.get(name)]
    if differing:
        told = ", ".join(f"{name} {others.get(name)} there and {facts.get(name)} here" for name in differing)
        raise BadInput(f"{task} was started with other settings ({told}): start all with the same")


def join(cluster: Cluster, facts: dict[str, Any], *, timeout: float) -> None:
    """Meets the other tasks, and tells TensorFlow about the cluster. Raises BadInput as `meet` does."""
    console.print(f"{cluster.name} of {', '.join(f'{task} {at}' for task, at in cluster.tasks().items())}")
    meet(cluster, facts, deadline=time.monotonic() + timeout)
    os.environ["TF_CONFIG"] = cluster.tf_config()


@contextlib.contextmanager
def ended_after(seconds: float, message: str) -> Iterator[None]:
    """Ends the process, with `message` and exit code 2, if what is inside takes longer; nothing else can stop it."""

    def end() -> None:
        print(f"ERROR: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
