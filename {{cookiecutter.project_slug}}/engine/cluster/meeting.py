"""The meeting of a cluster's processes before TensorFlow starts, and who is not there any more afterwards.

TensorFlow itself waits for a missing process without limit and without a word, and takes two with different settings
for one cluster. So they meet here first, over plain sockets, with a deadline.

Whoever reaches a process's address can speak to it. So what comes in is bounded in length, in time and in number, and
a hello in a worker's name counts only if that worker's own address answers with the same random number. That keeps
mistakes and strangers out, not somebody who means harm: TensorFlow's own ports, which open next, trust everybody, so
the network has to be private.
"""

import collections
import concurrent.futures
import contextlib
import errno
import ipaddress
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.cluster.environment import Cluster, is_loopback
from engine.console import console
from engine.errors import BadInput

# Between tries to reach a task that does not answer yet.
SECONDS_BETWEEN_TRIES = 0.2
# For a hello that comes, and for an answer to it.
SECONDS_PER_CONNECTION = 3.0
# With more, or with more than two for each task, whoever came first makes room.
CONNECTIONS_AT_ONCE = 64
# A task that has found a difference stays so long, for the other one to find it too.
SECONDS_WITH_A_DIFFERENCE = 2.0
# In a message, of a value that another process has sent.
LONGEST_VALUE = 200
RECEIVED = b"."

Hello = dict[str, Any]


def meet(
    cluster: Cluster, facts: dict[str, Any], own: dict[str, Any] | None = None, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Waits until every task has reached every other one; returns what each has said of itself, by task.

    Each task listens at its own address, where TensorFlow will listen afterwards, and says hello to whoever asks. It
    leaves when it has reached all and been reached by all, so that nobody needs it any more.

    Args:
        cluster: the cluster and this process's place in it.
        facts: JSON values that have to be equal everywhere, such as the settings. Of a dictionary among them, messages
            name the keys that differ and not the values.
        own: JSON values that the others are given, and that may differ.
        timeout: seconds after which whoever is missing is named.

    Raises:
        BadInput: a task is missing, runs with other facts or another description of the cluster, or the address of
            this one is not free.
    """
    deadline = time.monotonic() + timeout
    meeting = _Meeting(cluster, facts, own or {})
    differed: float | None = None
    peers = [task for task in cluster.tasks() if task != cluster.name]
    with (
        _listening(cluster, meeting.serve),
        concurrent.futures.ThreadPoolExecutor(max_workers=min(32, len(peers))) as threads,
    ):
        while True:
            list(threads.map(meeting.ask, [task for task in peers if meeting.has_to_ask(task)]))
            missing = [task for task in peers if not meeting.is_done(task)]
            now = time.monotonic()
            if found := meeting.differences():
                differed = differed or now
                known = all(meeting.is_done(task) for task in found)
                if known or now > min(deadline, differed + SECONDS_WITH_A_DIFFERENCE):
                    raise BadInput(next(iter(found.values())))
            elif not missing:
                return {task: meeting.said(task) for task in cluster.tasks()}
            elif now > deadline:
                named = ", ".join(meeting.describe_missing(task) for task in missing)
                raise BadInput(
                    f"--cluster-timeout {timeout:g}: {named} of {cluster.source} did not come: look at the log there, "
                    f"and whether {cluster.tasks()[cluster.name]} can be reached from there"
                )
            time.sleep(SECONDS_BETWEEN_TRIES)


class _Meeting:
    """What one task knows of the others. Its methods are called by several threads."""

    def __init__(self, cluster: Cluster, facts: dict[str, Any], own: dict[str, Any]) -> None:
        self._cluster = cluster
        self._addresses = cluster.tasks()
        said = {"task": cluster.name, "cluster": cluster.addresses, "facts": facts, "own": own}
        # As the others get it: a tuple becomes a list.
        self._hello: Hello = json.loads(json.dumps({**said, "nonce": secrets.token_hex(16)}))
        # The others' are about as long.
        self._longest = 4 * len(_line(self._hello)) + 2**16
        self._reached: dict[str, Hello] = {}  # What each task has answered at its own address.
        self._knows_us: dict[str, str] = {}  # task -> its nonce, if it has said that it has reached this one.
        self._informed: dict[str, str] = {}  # task -> its nonce, if it knows that this one has reached it.
        self._doubted: set[str] = set()  # In whose names somebody came whom they do not seem to be.
        self._came_from: dict[str, str] = {}

    def has_to_ask(self, task: str) -> bool:
        return task in self._doubted or not self.is_done(task)

    def ask(self, task: str) -> None:
        """Says hello to a task at its address; notes its answer. Nothing comes of it if it is not there (any more)."""
        self._doubted.discard(task)
        with contextlib.suppress(OSError, ValueError, RecursionError), _connect(self._addresses[task]) as connection:
            _send(connection, self._hello)
            answer = _receive(connection, self._longest)
            self._reached[task] = answer
            if answer.get("knows") is True:
                connection.sendall(RECEIVED)
                self._knows_us[task] = answer["nonce"]

    def serve(self, connection: socket.socket, host: str) -> None:
        """Answers one that has come, and notes if it is a task that this one has reached."""
        hello = _receive(connection, self._longest)
        task, nonce = hello["task"], hello["nonce"]
        reached = self._reached.get(task)
        knows = reached is not None and reached["nonce"] == nonce
        _send(connection, {**self._hello, "knows": knows})
        if knows:
            if connection.recv(1) == RECEIVED:  # Else it had given up before, and will ask again.
                self._informed[task] = nonce
        elif task in self._addresses and task != self._cluster.name:
            self._doubted.add(task)  # Who started again, for example, has another nonce.
            self._came_from[task] = host

    def is_done(self, task: str) -> bool:
        """Returns whether a task and this one have reached each other, and both know."""
        if task not in self._reached:
            return False
        nonce = self._reached[task]["nonce"]
        return self._knows_us.get(task) == nonce and self._informed.get(task) == nonce

    def said(self, task: str) -> dict[str, Any]:
        return self._hello["own"] if task == self._cluster.name else self._reached[task]["own"]

    def differences(self) -> dict[str, str]:
        """Returns task -> in what it differs so that it cannot train with this one."""
        found = {task: self._difference(task, answer) for task, answer in dict(self._reached).items()}
        return {task: text for task, text in found.items() if text}

    def describe_missing(self, task: str) -> str:
        came = task not in self._reached and task in self._came_from
        hint = f"; one of that name came from {self._came_from[task]}, and does not answer there" if came else ""
        return f"{task} ({self._addresses[task]}{hint})"

    def _difference(self, task: str, other: Hello) -> str:
        own = self._hello
        if other["task"] == own["task"]:
            return f"two processes are {own['task']} of the cluster: give each an index of its own"
        if other["cluster"] != own["cluster"]:
            theirs = _shortened(other["cluster"])
            return f"{task} describes the cluster as {theirs}, and {own['task']} as {own['cluster']}"
        if other["task"] != task:
            return (
                f"{_shortened(other['task'])} answers at {self._addresses[task]}, the address of {task}: look at both"
            )
        facts, others = own["facts"], other["facts"]
        differing: list[str] = []
        for name in {**facts, **others}:
            here, there = facts.get(name), others.get(name)
            if isinstance(here, dict) and isinstance(there, dict):
                differing += [f"{each} differs" for each in {**here, **there} if here.get(each) != there.get(each)]
            elif here != there:
                differing.append(f"{name} {_shortened(there)} there and {_shortened(here)} here")
        if not differing:
            return ""
        listed = [_shortened(each) for each in differing[:5]] + [f"{len(differing) - 5} more"] * (len(differing) > 5)
        return f"{task} was started with other settings or code ({', '.join(listed)}): start all with the same"


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


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
def _listening(cluster: Cluster, serve: Callable[[socket.socket, str], None]) -> Iterator[None]:
    """Has `serve` called, in threads, with each connection that is made to this task's address, and its host."""
    address = cluster.tasks()[cluster.name]
    try:
        servers = _open(address)
    except OSError as problem:
        raise BadInput(
            f"{cluster.source} puts {cluster.name} at {address}, where it cannot listen ({problem.strerror}): end "
            "what uses the port, or choose another"
        ) from None
    connections: collections.deque[socket.socket] = collections.deque()
    over = threading.Event()

    def answer(connection: socket.socket, host: str) -> None:
        with connection, contextlib.suppress(OSError, ValueError, RecursionError):
            serve(connection, host)

    def accept(server: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, place = server.accept()
            except OSError:  # It was closed, or there are too many open files.
                over.wait(0.1)
                continue
            connections.append(connection)
            if len(connections) > max(CONNECTIONS_AT_ONCE, 2 * len(cluster.tasks())):
                _end(connections.popleft())
            threading.Thread(target=answer, args=(connection, place[0]), daemon=True).start()

    threads = [threading.Thread(target=accept, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for each in (*servers, *connections):
            _end(each)  # Which wakes its thread.
        for server, thread in zip(servers, threads, strict=True):
            server.close()
            thread.join()


def _open(address: str) -> list[socket.socket]:
    """Listens at an address if it is one of this machine, else, as behind a container's network, at all there are."""
    host, port = _host_and_port(address)
    try:
        found = {each[4]: each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # Nobody knows the name, yet or at all.
        found = {}
    servers = []
    for place, family in found.items():
        # A machine may know itself by a loopback address, as Debian's do, at which no other one reaches it.
        if ipaddress.ip_address(place[0].partition("%")[0]).is_loopback and not is_loopback(host):
            continue
        try:
            servers.append(socket.create_server(place, family=family))
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                for server in servers:
                    server.close()
                raise
    if servers:
        return servers
    both = socket.has_dualstack_ipv6()
    return [socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)]


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_host_and_port(address), timeout=2.0)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(SECONDS_PER_CONNECTION)
    connection.sendall(_line(message))


def _receive(connection: socket.socket, longest: int) -> Hello:
    """Returns the hello that comes as one line. Raises ValueError if it is none, OSError if it takes too long."""
    deadline = time.monotonic() + SECONDS_PER_CONNECTION
    received = bytearray()
    while not received.endswith(b"\n"):
        if time.monotonic() > deadline:
            raise TimeoutError
        connection.settimeout(SECONDS_PER_CONNECTION)
        part = connection.recv(2**16)
        received += part
        if not part or len(received) > longest:
            raise ValueError("no line, or one that is too long")
    hello = json.loads(received)
    kinds = {"task": str, "nonce": str, "cluster": dict, "facts": dict, "own": dict}
    if not isinstance(hello, dict) or not all(isinstance(hello.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("no hello")
    return hello


def join(
    cluster: Cluster, facts: dict[str, Any], own: dict[str, Any] | None = None, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Meets the other tasks, and tells TensorFlow about the cluster. Returns, and raises BadInput, as `meet` does."""
    console.print(f"{cluster.name} of {', '.join(f'{task} {at}' for task, at in cluster.tasks().items())}")
    said = meet(cluster, facts, own, timeout=timeout)
    os.environ["TF_CONFIG"] = cluster.tf_config()
    return said


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
