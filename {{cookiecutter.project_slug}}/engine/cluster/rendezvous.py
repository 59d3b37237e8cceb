"""Waits for all processes of a cluster at start-up; detects lost ones.

TensorFlow waits for a missing process silently and without limit, and accepts different settings. So the processes
first hold a rendezvous over plain sockets, with a deadline. Each sends a hello, one line of JSON, to whoever connects
to its address, and reads nothing: it knows a process by its address only, so no stranger can disturb it. The chief
asks the others until all answer; the others ask the chief until it knows the outcome.

TensorFlow's own ports, which open next, trust everybody: the network must be private.
"""

import concurrent.futures
import contextlib
import errno
import json
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.cluster.environment import Cluster, is_loopback
from engine.errors import BadInput, CountedLoss, PeerLost

Hello = dict[str, Any]

SECONDS_BETWEEN_QUESTIONS = 0.2
SECONDS_PER_CONNECTION = 3.0
SECONDS_UNTIL_FREE = 90.0  # A process that an earlier start left behind ends within this time.
SECONDS_FOR_REJECTION = 10.0  # The others usually ask for it within a moment.
FROZEN = "does not answer, perhaps because it is frozen"
LONGEST_HELLO = 2**24  # Limits a reply, because another program may own the port. A hello has a few thousand bytes.


def rendezvous(
    cluster: Cluster, facts: dict[str, Any], own: dict[str, Any] | None = None, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Waits until every process answers; returns the `own` of each, by its name.

    The `facts` must be equal in all processes. Both are JSON values; of dictionaries, messages name only the keys that
    differ. The chief waits `timeout` seconds for the others, and the others for the chief.

    Raises BadInput if a process has other facts or another description of the cluster, PeerLost or CountedLoss if one
    is missing, and CountedLoss if this one's port is not free.
    """
    hello: Hello = {"task": cluster.name, "cluster": cluster.addresses, "facts": facts, "own": own or {}}
    # The chief sets one of them as soon as it knows the outcome; of two, `missing` first.
    hello |= {"missing": [], "rejection": "", "everyone": {}}
    hello = json.loads(json.dumps(hello))  # JSON turns a tuple into a list: compare what the others receive.
    with _answering(cluster, hello, timeout):
        return (_gather if cluster.is_chief else _ask_chief)(cluster, hello, timeout)


def did_not_join(cluster: Cluster, missing: list[str], timeout: float) -> str:
    addresses = [cluster.processes()[name] for name in missing]
    named = ", ".join(f"{name} ({address})" for name, address in zip(missing, addresses, strict=True))
    unknown = next((address for address in addresses if not _is_resolved(address)), None)
    remedy = f"check its log, and that {cluster.name} can reach that address"
    if unknown:
        remedy = f"{cluster.name} cannot resolve the name {_host_and_port(unknown)[0]}, so correct it, or the DNS"
    return f"{named} did not join within {timeout:g} s (--cluster-timeout): {remedy}"


def kind_of_loss(cluster: Cluster, found: str) -> type[PeerLost]:
    """Returns with which error this process ends. `found` names the others that do not answer, as `lost` does.

    A process that "is gone" is counted by its own end. One that is missing or does not answer may never end, so the
    first of the others is counted for it. That one may be gone by now, because it ended for the same reason.
    """
    named = [name for name in cluster.processes() if f"{name} (" in found]
    unanswered = [name for name in named if not re.search(rf"{name} \([^)]*\) is gone", found)]
    if named and not unanswered:
        return PeerLost
    first = next(name for name in cluster.processes() if name not in unanswered)
    return CountedLoss if first == cluster.name else PeerLost


def wait_for(function: Callable[[], Any], seconds: float) -> Any:
    """Calls a function until its result is true, or `seconds` have passed; returns its last result."""
    deadline = time.monotonic() + seconds
    while not (result := function()) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_QUESTIONS)
    return result


def _gather(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, dict[str, Any]]:
    """Asks the others until all answer, then keeps the outcome in `hello` until they know it; runs on the chief."""
    others, deadline = cluster.others(), time.monotonic() + timeout
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(32, len(others))) as threads:

        def ask_all() -> dict[str, Hello]:
            answers = zip(others, threads.map(_ask, others.values()), strict=True)
            return {name: answer for name, answer in answers if answer}

        while not hello["rejection"] and not hello["everyone"]:
            answers = ask_all()
            missing = [name for name in others if name not in answers]
            differences = [_difference(name, answer, hello) for name, answer in answers.items()]
            if any(differences):
                hello["rejection"] = next(filter(None, differences))
            elif not missing:
                hello["everyone"] = {name: answer["own"] for name, answer in {cluster.name: hello, **answers}.items()}
            elif time.monotonic() > deadline:
                hello["missing"] = missing
                hello["rejection"] = did_not_join(cluster, missing, timeout)
            else:
                time.sleep(SECONDS_BETWEEN_QUESTIONS)
        # A process that knows the outcome stops answering, or rejects too.
        seconds = SECONDS_FOR_REJECTION if hello["rejection"] else timeout
        wait_for(lambda: all(answer["rejection"] for answer in ask_all().values()), seconds)
    _raise_rejection(cluster, hello)
    return hello["everyone"]


def _ask_chief(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, dict[str, Any]]:
    """Asks the chief until it knows the outcome; runs on the other processes."""
    chief, address = next(iter(cluster.processes().items()))
    deadline = time.monotonic() + timeout
    while True:
        if answer := _ask(address):
            if difference := _difference(chief, answer, hello):
                # Wait until the chief has found the difference too, or is gone.
                wait_for(lambda: not (reply := _ask(address)) or reply["rejection"], SECONDS_FOR_REJECTION)
                raise BadInput(difference)
            _raise_rejection(cluster, answer)
            if answer["everyone"]:
                return answer["everyone"]
            deadline = time.monotonic() + timeout  # The chief has a deadline too, and knows who is missing.
        elif time.monotonic() > deadline:
            text = did_not_join(cluster, [chief], timeout)
            raise kind_of_loss(cluster, text)(text)
        time.sleep(SECONDS_BETWEEN_QUESTIONS)


def _raise_rejection(cluster: Cluster, outcome: Hello) -> None:
    if text := outcome["rejection"]:
        raise (kind_of_loss(cluster, text) if outcome["missing"] else BadInput)(text)


def _difference(name: str, other: Hello, own: Hello) -> str:
    """Returns why the process at the address of `name` cannot train with this one; "" if it can."""
    if other["task"] == own["task"]:
        return f"two processes are {own['task']} of the cluster: give each its own index"
    if other["cluster"] != own["cluster"]:
        return f"{name} describes the cluster as {other['cluster']}, but {own['task']} as {own['cluster']}"
    if other["task"] != name:
        return f"{other['task']} answers at the address of {name}: check the index of both"
    differing: list[str] = []
    for fact in {**own["facts"], **other["facts"]}:
        here, there = own["facts"].get(fact), other["facts"].get(fact)
        if isinstance(here, dict) and isinstance(there, dict):
            differing += [f"{key} differs" for key in {**here, **there} if here.get(key) != there.get(key)]
        elif here != there:
            differing.append(f"{fact} {there} there and {here} here")
    listed = textwrap.shorten(", ".join(differing), 500, placeholder=" ...")
    return f"{name} was started with other settings or code ({listed}): start all with the same" if listed else ""


# --- Sockets ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _answering(cluster: Cluster, hello: Hello, timeout: float) -> Iterator[None]:
    """Sends the current `hello` to whoever connects to this process's address."""
    server = _server(cluster, min(timeout, SECONDS_UNTIL_FREE))
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(SECONDS_PER_CONNECTION)
                    connection.sendall(json.dumps(hello).encode() + b"\n")
            except OSError:  # Nobody connected, somebody left, or too many files are open.
                over.wait(0.05)

    # The thread ends before the server is closed.
    with server, concurrent.futures.ThreadPoolExecutor(1) as thread:
        server.settimeout(SECONDS_BETWEEN_QUESTIONS)
        thread.submit(answer)
        try:
            yield
        finally:
            over.set()


def _ask(address: str) -> Hello | None:
    """Returns the hello of the process at an address; None if nothing answers, or another program."""
    try:
        with _connect(address) as connection, connection.makefile("rb") as received:
            # If TensorFlow has started there, its first byte differs, and it does not end.
            if (first := received.read(1)) != b"{":
                return None
            hello = json.loads(first + received.readline(LONGEST_HELLO))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"task": str, "cluster": dict, "facts": dict, "own": dict}
    kinds |= {"missing": list, "rejection": str, "everyone": dict}
    return hello if all(isinstance(hello.get(key), kind) for key, kind in kinds.items()) else None


def _server(cluster: Cluster, seconds: float) -> socket.socket:
    """Listens at this process's address; waits if another process uses the port, which may be about to end."""
    address, started, told = cluster.processes()[cluster.name], time.monotonic(), False
    while True:
        try:
            return _listen(address)
        except OSError as problem:
            fact = f"{cluster.source} puts {cluster.name} at {address}, where it cannot listen ({problem.strerror})"
            if problem.errno != errno.EADDRINUSE:
                raise BadInput(f"{fact}: choose another port") from None
            if time.monotonic() > started + seconds:
                raise CountedLoss(f"{fact}: end the program that uses the port, or choose another port") from None
            if not told:
                print(f"{fact}: waits up to {seconds:g} s for the port", file=sys.stderr, flush=True)
                told = True
        time.sleep(SECONDS_BETWEEN_QUESTIONS)


def _listen(address: str) -> socket.socket:
    """Listens at a loopback address, or else at all addresses of this machine, as TensorFlow does afterwards."""
    host, port = _host_and_port(address)
    if is_loopback(host):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def is_free(address: str) -> bool:
    """Returns whether no program on this machine uses the port of one of its addresses. Listens nowhere."""
    host, port = _host_and_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # An ended process may have left connections.
        try:
            own.bind((host if is_loopback(host) else "", port))
        except OSError as problem:
            return problem.errno != errno.EADDRINUSE
    return True


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_resolved(address: str) -> bool:
    """Returns whether the host of an address has a known name."""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(*_host_and_port(address)))
    return False


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_host_and_port(address), timeout=2.0)


# --- After the rendezvous ---------------------------------------------------------------------------------------------


def lost(cluster: Cluster) -> list[str]:
    """Returns "NAME (ADDRESS) does not answer, ..." and "... is gone" for the other processes that are lost."""
    silent, ended = [], []
    for name, address in cluster.others().items():
        try:
            with _connect(address) as connection:
                # A gRPC server speaks first. The system also accepts connections for a stopped process. A process that
                # was started again waits in the rendezvous, where it sends JSON.
                if connection.recv(1) in (b"", b"{"):
                    raise ConnectionResetError
        except TimeoutError:
            silent.append(f"{name} ({address}) {FROZEN}")
        except OSError:
            ended.append(f"{name} ({address}) is gone")
    return silent + ended  # In this order, because processes end when another one is silent.


def is_listening(address: str) -> bool:
    """Returns whether anything answers at "host:port"."""
    try:
        _connect(address).close()
    except OSError:
        return False
    return True
