"""Waits for all processes of a cluster at start-up; detects lost ones.

TensorFlow waits for a missing process silently and without limit, and accepts different settings. So the processes
first hold a rendezvous over plain sockets, with a deadline. Each sends a hello, one line of JSON, to whoever connects
to its address, and reads nothing: it knows a process by its address only, so no stranger can disturb it. The chief
asks the others until it has a verdict; the others ask the chief for it.

TensorFlow's own ports, which open next, trust everybody: the network must be private.
"""

import asyncio
import contextlib
import errno
import json
import re
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

from engine.cluster.environment import Cluster, is_loopback
from engine.errors import BadInput, CountedLoss, PeerLost

Hello = dict[str, Any]
KINDS = {"name": str, "cluster": dict, "facts": dict, "own": dict, "verdict": dict}  # The keys of a hello.

SECONDS_BETWEEN_QUESTIONS = 0.2
SECONDS_PER_CONNECTION = 3.0
SECONDS_UNTIL_FREE = 90.0  # A process that an earlier start left behind ends within this time.
SECONDS_FOR_REJECTION = 10.0  # The others usually ask for it within a moment.
FROZEN = "does not answer, perhaps because it is frozen"
LONGEST_HELLO = 2**24  # Limits a reply, because another program may own the port. A hello has a few thousand bytes.


def rendezvous(
    cluster: Cluster, facts: dict[str, Any], own: dict[str, Any] | None = None, *, timeout: float
) -> dict[str, dict[str, Any]]:
    """Waits until every process answers; returns the `own` of all, by their names.

    The `facts` must be equal in all processes. Both are JSON values; of dictionaries, messages name only the keys that
    differ. The chief waits `timeout` seconds for the others, and the others for the chief.

    Raises BadInput if a process has other facts or another description of the cluster, PeerLost or CountedLoss if one
    is missing, and CountedLoss if this one's port is not free.
    """
    # The chief's verdict is {} until it has one; then its only key is "rejection", "missing" or "everyone".
    hello: Hello = {"name": cluster.name, "cluster": cluster.addresses, "facts": facts, "own": own or {}, "verdict": {}}
    hello = json.loads(json.dumps(hello))  # JSON turns a tuple into a list: compare what the others receive.
    wait_until_free(cluster, timeout)
    verdict = asyncio.run(_meet(cluster, hello, timeout))
    if text := verdict.get("rejection"):
        raise BadInput(text)
    if text := verdict.get("missing"):
        raise kind_of_loss(cluster, text)(text)
    return verdict["everyone"]


def did_not_join(cluster: Cluster, missing: list[str], timeout: float) -> str:
    """Returns the message for missing processes, which has their addresses."""
    addresses = [cluster.processes()[name] for name in missing]
    named = ", ".join(f"{name} ({address})" for name, address in zip(missing, addresses, strict=True))
    late = f"{named} did not join within {timeout:g} s (--cluster-timeout)"
    if unknown := next((address for address in addresses if not _is_resolved(address)), None):
        host, _ = _host_and_port(unknown)
        return f"{late}: {cluster.name} cannot resolve the name {host}, so correct it, or the DNS"
    return f"{late}: check its log, and that {cluster.name} can reach that address"


def kind_of_loss(cluster: Cluster, text: str) -> type[PeerLost]:
    """Returns with which error this process ends. `text` names the others that do not answer, as `lost` does.

    A process that "is gone" is counted by its own end. One that is missing or does not answer may never end, so the
    first of the others is counted for it. That first process may be gone by now, because it ended for the same reason.
    """
    named = [name for name in cluster.processes() if f"{name} (" in text]
    unanswered = [name for name in named if not re.search(rf"{name} \([^)]*\) is gone", text)]
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


def wait_until_free(cluster: Cluster, timeout: float) -> None:
    """Waits while another program uses this process's port, which may be about to end.

    Raises CountedLoss if it does not end in time, and BadInput if this process may not use the port.
    """
    address, seconds = cluster.processes()[cluster.name], min(timeout, SECONDS_UNTIL_FREE)
    place = f"{cluster.source} puts {cluster.name} at {address}"
    try:
        if _is_free(address):
            return
        line = f"{place}, which another program uses: waits up to {seconds:g} s for the port"
        print(line, file=sys.stderr, flush=True)
        if wait_for(lambda: _is_free(address), seconds):
            return
    except OSError as problem:
        raise BadInput(f"{place}, where it cannot listen ({problem.strerror}): choose another port") from None
    raise CountedLoss(f"{place}, which another program uses: end that program, or choose another port")


async def _meet(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, Any]:
    """Returns the verdict; meanwhile it sends the current `hello` to whoever connects to this process's address."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            writer.write(json.dumps(hello).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), SECONDS_PER_CONNECTION)

    host, port = _host_and_port(cluster.processes()[cluster.name])
    # None: at all addresses of this machine, as TensorFlow listens afterwards.
    server = await asyncio.start_server(answer, host if is_loopback(host) else None, port)
    try:
        return await (_decide if cluster.is_chief else _ask_chief)(cluster, hello, timeout)
    finally:
        server.close()


async def _decide(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, Any]:
    """Asks the others until all answer; returns the chief's verdict as soon as they know it."""
    others, deadline = cluster.others(), time.monotonic() + timeout

    async def ask_all() -> dict[str, Hello]:
        answers = zip(others, await asyncio.gather(*map(_ask, others.values())), strict=True)
        return {name: answer for name, answer in answers if answer}

    while not hello["verdict"]:
        answers = await ask_all()
        missing = [name for name in others if name not in answers]
        differences = (_difference(name, answer, hello) for name, answer in answers.items())
        if difference := next(filter(None, differences), ""):
            hello["verdict"] = {"rejection": difference}
        elif not missing:
            everyone = {cluster.name: hello, **answers}
            hello["verdict"] = {"everyone": {name: answer["own"] for name, answer in everyone.items()}}
        elif time.monotonic() > deadline:
            hello["verdict"] = {"missing": did_not_join(cluster, missing, timeout)}
        else:
            await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout if "everyone" in hello["verdict"] else SECONDS_FOR_REJECTION):
            # A process that knows the verdict no longer answers. A second chief has one too.
            while not all(answer["verdict"] for answer in (await ask_all()).values()):
                await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
    return hello["verdict"]


async def _ask_chief(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, Any]:
    """Asks the chief until it has a verdict; returns that, or this process's own if the chief does not fit or join."""
    chief, address = next(iter(cluster.processes().items()))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer := await _ask(address):
            if difference := _difference(chief, answer, hello):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SECONDS_FOR_REJECTION):
                        # Until the chief has found the difference too, or is gone.
                        while (reply := await _ask(address)) and not reply["verdict"]:
                            await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
                return {"rejection": difference}
            if answer["verdict"]:
                return answer["verdict"]
            deadline = time.monotonic() + timeout  # The chief has a deadline too, and knows who is missing.
        await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
    return {"missing": did_not_join(cluster, [chief], timeout)}


async def _ask(address: str) -> Hello | None:
    """Returns the hello of the process at an address; None if nothing answers, or another program."""
    try:
        async with asyncio.timeout(SECONDS_PER_CONNECTION):
            received, writer = await asyncio.open_connection(*_host_and_port(address), limit=LONGEST_HELLO)
            with contextlib.closing(writer):
                # If TensorFlow has started there, its first byte differs, and it does not end.
                if (first := await received.read(1)) != b"{":
                    return None
                hello = json.loads(first + await received.readline())
    except (OSError, ValueError, RecursionError):
        return None
    return hello if all(isinstance(hello.get(key), kind) for key, kind in KINDS.items()) else None


def _difference(name: str, answer: Hello, own: Hello) -> str:
    """Returns why the process at the address of `name` cannot train with this one; "" if it can."""
    if answer["name"] == own["name"]:
        return f"two processes are {own['name']} of the cluster: give each its own index"
    if answer["cluster"] != own["cluster"]:
        return f"{name} describes the cluster as {answer['cluster']}, but {own['name']} as {own['cluster']}"
    if answer["name"] != name:
        return f"{answer['name']} answers at the address of {name}: check the index of both"
    differing: list[str] = []
    for fact in {**own["facts"], **answer["facts"]}:
        here, there = own["facts"].get(fact), answer["facts"].get(fact)
        if isinstance(here, dict) and isinstance(there, dict):
            differing += [f"{key} differs" for key in {**here, **there} if here.get(key) != there.get(key)]
        elif here != there:
            differing.append(f"{fact} {there} there and {here} here")
    listed = textwrap.shorten(", ".join(differing), 500, placeholder=" ...")
    return f"{name} was started with other settings or code ({listed}): start all with the same" if listed else ""


# --- Sockets ----------------------------------------------------------------------------------------------------------


def _is_free(address: str) -> bool:
    """Returns whether no other program uses the port. Raises OSError if this one may not use it.

    Listens nowhere, because other processes would take that for the start of TensorFlow.
    """
    host, port = _host_and_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # An ended process may have left connections.
        try:
            bound.bind((host if is_loopback(host) else "", port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
            return False
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
    silent, gone = [], []
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
            gone.append(f"{name} ({address}) is gone")
    return silent + gone  # In this order, because processes end when another one is silent.


def is_listening(address: str) -> bool:
    """Returns whether anything answers at "host:port"."""
    try:
        _connect(address).close()
    except OSError:
        return False
    return True
