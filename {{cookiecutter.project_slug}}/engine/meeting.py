"""The meeting of a cluster's processes before TensorFlow starts, and who is not there any more afterwards.

TensorFlow itself waits for a missing process without limit and without a word, and takes two with different settings
for one cluster. So they meet here first, over plain sockets, with a deadline.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from engine.cluster import Cluster
from engine.console import console
from engine.errors import BadInput

# Between tries to reach a task that does not answer yet.
SECONDS_BETWEEN_TRIES = 0.2


def meet(cluster: Cluster, facts: dict[str, Any], *, timeout: float) -> None:
    """Returns when every task has reached every other one, and all have the same `facts`.

    Each task listens at its own address, where TensorFlow will listen afterwards, and tells its facts to whoever asks.
    It leaves when it has reached all and been reached by all, so that nobody needs it any more.

    Args:
        cluster: the cluster and this process's place in it.
        facts: JSON values that have to be equal everywhere, such as the settings.
        timeout: seconds after which whoever is missing is named.

    Raises:
        BadInput: a task is missing, runs with other facts or another description of the cluster, or the address of
            this one is not free.
    """
    deadline = time.monotonic() + timeout
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
                    f"--cluster-timeout {timeout:g}: {named} of {cluster.source} did not come: look at the log there, "
                    f"and whether {cluster.tasks()[cluster.name]} can be reached from there"
                )
            time.sleep(SECONDS_BETWEEN_TRIES)


def lost(cluster: Cluster) -> list[str]:
    """Returns "TASK (ADDRESS) does not answer" and "... is gone" for the other tasks; none while all are well.

    Who does not answer comes first: the others may have ended because of that.
    """
    silent, ended = [], []
    for task, address in cluster.tasks().items():
        if task == cluster.name:
            continue
        try:
            with _connect(address) as connection:
                # A gRPC server speaks first. Without hearing it a stopped process would seem well: the system accepts.
                if not connection.recv(1):
                    raise ConnectionResetError
        except TimeoutError:
            silent.append(f"{task} ({address}) does not answer")
        except OSError:
            ended.append(f"{task} ({address}) is gone")
    return silent + ended


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
    return socket.create_connection((host.strip("[]"), int(port)), timeout=2.0)


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
    meet(cluster, facts, timeout=timeout)
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
