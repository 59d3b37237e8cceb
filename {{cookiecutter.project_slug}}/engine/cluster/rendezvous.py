"""Waits for all processes of a cluster at start-up; detects lost ones.

TensorFlow waits for a missing process without limit and without a word, and accepts processes with different settings.
So the processes meet first, over plain sockets, with a deadline.

Each process sends a hello, one line of JSON, to whoever connects to its address, and reads nothing from them. So a
process is known by its address only, and no stranger can disturb the meeting. The chief asks the others until all
answer; the others ask the chief until it knows the outcome. TensorFlow's own ports, which open next, trust everybody:
the network has to be private.
"""

import concurrent.futures
import contextlib
import errno
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from engine.cluster.environment import Cluster, is_loopback
from engine.console import console
from engine.errors import BadInput

SECONDS_BETWEEN_QUESTIONS = 0.2
SECONDS_PER_CONNECTION = 3.0
# How long the others have to ask for a refusal. They usually need a moment.
SECONDS_FOR_REFUSAL = 10.0
# What answers may be no process of ours. A hello is a few thousand bytes, and some hundred for each task.
LONGEST_HELLO = 2**24
LONGEST_VALUE_IN_MESSAGES = 200

Hello = dict[str, Any]


def join(cluster: Cluster, facts: dict[str, Any], own: dict[str, Any], *, timeout: float) -> dict[str, dict[str, Any]]:
    """Meets the other tasks, and sets TF_CONFIG for TensorFlow. Returns, and raises BadInput, as `rendezvous` does."""
    console.print(f"{cluster.name} of {', '.join(f'{task} {address}' for task, address in cluster.tasks().items())}")
    everyone = rendezvous(cluster, facts, own, timeout=timeout)
    os.environ["TF_CONFIG"] = cluster.tf_config()
    return everyone


def rendezvous(
    cluster: Cluster, facts: dict[str, Any], own: dict[str, Any] | None = None, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Waits until every task answers; returns the `own` of each, by task.

    Args:
        cluster: the cluster and this process's place in it.
        facts: JSON values that have to be equal everywhere, such as the settings. Of a dictionary among them, messages
            name the keys that differ and not the values.
        own: JSON values for the others, which may differ.
        timeout: seconds to wait for the chief, and seconds that the chief waits for the others.

    Raises:
        BadInput: a task is missing, runs with other facts or another description of the cluster, or the address of
            this one is not free.
    """
    hello: Hello = {"task": cluster.name, "cluster": cluster.addresses, "facts": facts, "own": own or {}}
    # The outcome, in the chief's: one of both is set as soon as it is known.
    hello |= {"refusal": "", "everyone": {}}
    hello = json.loads(json.dumps(hello))  # As the others get it: a tuple becomes a list.
    with _answering(cluster, hello):
        return (_gather if cluster.is_chief else _ask_chief)(cluster, hello, timeout)


def _gather(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, dict[str, Any]]:
    """Asks the others until all answer, for the chief; then keeps the outcome in `hello` until they know it."""
    addresses = {task: address for task, address in cluster.tasks().items() if task != cluster.name}
    deadline = time.monotonic() + timeout
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(32, len(addresses))) as threads:

        def ask_all() -> dict[str, Hello]:
            answers = zip(addresses, threads.map(_ask, addresses.values()), strict=True)
            return {task: answer for task, answer in answers if answer}

        while not hello["refusal"] and not hello["everyone"]:
            answers = ask_all()
            missing = [task for task in addresses if task not in answers]
            differences = [_difference(task, answer, hello) for task, answer in answers.items()]
            if any(differences):
                hello["refusal"] = next(filter(None, differences))
            elif not missing:
                hello["everyone"] = {task: answer["own"] for task, answer in {cluster.name: hello, **answers}.items()}
            elif time.monotonic() > deadline:
                hello["refusal"] = _did_not_join(cluster, missing, timeout)
            else:
                time.sleep(SECONDS_BETWEEN_QUESTIONS)
        deadline = time.monotonic() + (SECONDS_FOR_REFUSAL if hello["refusal"] else timeout)
        # Whoever knows the outcome does not answer any more, or refuses too.
        while any(not answer["refusal"] for answer in ask_all().values()) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_QUESTIONS)
    if hello["refusal"]:
        raise BadInput(hello["refusal"])
    return hello["everyone"]


def _ask_chief(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, dict[str, Any]]:
    """Asks the chief for the outcome until it is known, for the others."""
    chief, address = next(iter(cluster.tasks().items()))
    deadline = time.monotonic() + timeout
    while True:
        if answer := _ask(address):
            if difference := _difference(chief, answer, hello):
                _wait_until_chief_refuses(address)
                raise BadInput(difference)
            if answer["refusal"]:
                raise BadInput(answer["refusal"])
            if answer["everyone"]:
                return answer["everyone"]
            deadline = time.monotonic() + timeout  # The chief has a deadline too, and knows who is missing.
        elif time.monotonic() > deadline:
            raise BadInput(_did_not_join(cluster, [chief], timeout))
        time.sleep(SECONDS_BETWEEN_QUESTIONS)


def _wait_until_chief_refuses(address: str) -> None:
    """Returns when the chief has found the difference too, or is gone."""
    deadline = time.monotonic() + SECONDS_FOR_REFUSAL
    while (answer := _ask(address)) and not answer["refusal"] and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_QUESTIONS)


def _did_not_join(cluster: Cluster, missing: list[str], timeout: float) -> str:
    tasks = cluster.tasks()
    named = ", ".join(f"{task} ({tasks[task]})" for task in missing)
    return (
        f"{named} did not join within {timeout:g} s (--cluster-timeout): check its log, and that {cluster.name} can "
        "reach that address"
    )


def _difference(task: str, other: Hello, own: Hello) -> str:
    """Returns why the process at a task's address cannot train with this one; "" if it can."""
    if other["task"] == own["task"]:
        return f"two processes are {own['task']} of the cluster: give each an index of its own"
    if other["cluster"] != own["cluster"]:
        return f"{task} describes the cluster as {_shorten(other['cluster'])}, and {own['task']} as {own['cluster']}"
    if other["task"] != task:
        return f"{_shorten(other['task'])} answers at the address of {task}: check the index of both"
    differing: list[str] = []
    for name in {**own["facts"], **other["facts"]}:
        now, theirs = own["facts"].get(name), other["facts"].get(name)
        if isinstance(now, dict) and isinstance(theirs, dict):
            differing += [f"{key} differs" for key in {**now, **theirs} if now.get(key) != theirs.get(key)]
        elif now != theirs:
            differing.append(f"{name} {_shorten(theirs)} there and {_shorten(now)} here")
    if not differing:
        return ""
    more = [f"{len(differing) - 5} more"] if len(differing) > 5 else []
    listed = ", ".join([_shorten(text) for text in differing[:5]] + more)
    return f"{task} was started with other settings or code ({listed}): start all with the same"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE_IN_MESSAGES else f"{text[:LONGEST_VALUE_IN_MESSAGES]}..."


# --- Sockets ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _answering(cluster: Cluster, hello: Hello) -> Iterator[None]:
    """Sends `hello`, as it is then, to whoever connects to this task's address."""
    address = cluster.tasks()[cluster.name]
    try:
        servers = _open(address)
    except OSError as problem:
        raise BadInput(
            f"{cluster.source} puts {cluster.name} at {address}, where it cannot listen ({problem.strerror}): end "
            "what uses the port, or choose another"
        ) from None
    over = threading.Event()

    def answer(server: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(SECONDS_PER_CONNECTION)
                    connection.sendall(json.dumps(hello).encode() + b"\n")
            except OSError:  # Nobody connected, or somebody left, or there are too many open files.
                over.wait(0.05)

    threads = [threading.Thread(target=answer, args=(server,), daemon=True) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.settimeout(SECONDS_BETWEEN_QUESTIONS)
        thread.start()
    try:
        yield
    finally:
        over.set()
        for server, thread in zip(servers, threads, strict=True):
            thread.join()
            server.close()


def _ask(address: str) -> Hello | None:
    """Returns the hello of the process at an address; None if none answers, or none of ours."""
    deadline = time.monotonic() + SECONDS_PER_CONNECTION
    received = bytearray()
    try:
        with _connect(address) as connection:
            # If TensorFlow has started there, it begins with another byte, and does not end.
            while not received.endswith(b"\n") and received[:1] in (b"", b"{"):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                part = connection.recv(2**16)
                received += part
                if not part or len(received) > LONGEST_HELLO:
                    return None
        hello = json.loads(received)
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"task": str, "cluster": dict, "facts": dict, "own": dict, "refusal": str, "everyone": dict}
    is_hello = isinstance(hello, dict) and all(isinstance(hello.get(name), kind) for name, kind in kinds.items())
    return hello if is_hello else None


def _open(address: str) -> list[socket.socket]:
    """Listens at an address of this machine; at all of its addresses if it is none, as behind a container's network."""
    host, port = _host_and_port(address)
    found = []
    with contextlib.suppress(OSError, UnicodeError):  # Nobody may know the name, yet or at all.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    servers = []
    for family, _, _, _, place in found:
        # A machine may know itself by a loopback address, as Debian's do, at which no other one reaches it.
        if ipaddress.ip_address(place[0].partition("%")[0]).is_loopback and not is_loopback(host):
            continue
        try:
            servers.append(socket.create_server(place, family=family))
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    if servers:
        return servers
    both = socket.has_dualstack_ipv6()
    return [socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_host_and_port(address), timeout=2.0)


# --- After the meeting ------------------------------------------------------------------------------------------------


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
