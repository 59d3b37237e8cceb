"""Waits for all processes of a cluster at start-up.

TensorFlow waits for a missing process silently and without limit, and accepts different settings. So the processes
first hold a rendezvous over plain sockets, with a deadline. Each sends a hello, one line of JSON, to whoever connects
to its address, and reads nothing: it knows a process by its address only, so no stranger can disturb it. The chief
asks the others until it has a verdict; the others ask the chief for it.

TensorFlow's own ports, which open next, trust everybody: the network must be private.
"""

import asyncio
import contextlib
import json
import socket
import textwrap
import time
from typing import Any

from engine.cluster.environment import Cluster, host_and_port, is_loopback
from engine.cluster.peers import did_not_join
from engine.errors import BadInput, CountedLoss

Hello = dict[str, Any]
SECONDS_BETWEEN_QUESTIONS = 0.2
SECONDS_PER_CONNECTION = 3.0
SECONDS_FOR_REJECTION = 10.0  # The others usually ask for it within a moment.
LONGEST_HELLO = 2**24  # Limits a reply, because another program may own the port. A hello has a few thousand bytes.


def rendezvous(cluster: Cluster, facts: dict[str, Any], own: Any = None, *, timeout: float) -> dict[str, Any]:
    """Waits until every process answers; returns the `own` of all, by their names.

    The `facts` must be equal in all processes. Both are JSON values; of dictionaries, messages name only the keys that
    differ. The chief waits `timeout` seconds for the others, and the others for the chief.

    Raises BadInput if a process has other facts or another description of the cluster, PeerLost or CountedLoss if one
    is missing, and CountedLoss if this one's port is not free.
    """
    # The verdict is {} until there is one; then its only key is "rejection", "missing" or "everyone".
    hello: Hello = {"name": cluster.name, "cluster": cluster.addresses, "facts": facts, "own": own, "verdict": {}}
    hello = json.loads(json.dumps(hello))  # JSON turns a tuple into a list: compare what the others receive.
    check_port(cluster)
    verdict = asyncio.run(_meet(cluster, hello, timeout))
    if text := verdict.get("rejection"):
        raise BadInput(text)
    if missing := verdict.get("missing"):
        raise did_not_join(cluster, missing, timeout)
    return verdict["everyone"]


def check_port(cluster: Cluster) -> None:
    """Raises CountedLoss if this process cannot listen at its address.

    Listens nowhere, because other processes would take that for the start of TensorFlow.
    """
    address = cluster.processes()[cluster.name]
    host, port = host_and_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # An ended process may have left connections.
        try:
            bound.bind((host if is_loopback(host) else "", port))
        except OSError as problem:
            raise CountedLoss(
                f"{cluster.source} puts {cluster.name} at {address}, where it cannot listen ({problem.strerror}): end "
                "the program that uses the port, or choose another one"
            ) from None


async def _meet(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, Any]:
    """Returns the verdict; meanwhile it sends the current `hello` to whoever connects to this process's address."""

    # Not a coroutine: Python 3.11 prints the traceback of one that is cancelled before it has begun.
    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(hello).encode() + b"\n")
        writer.close()  # When all is sent.

    host, port = host_and_port(cluster.processes()[cluster.name])
    # None: at all addresses of this machine, as TensorFlow listens afterwards.
    with contextlib.closing(await asyncio.start_server(answer, host if is_loopback(host) else None, port)):
        return await _agree(cluster, hello, timeout)


async def _agree(cluster: Cluster, hello: Hello, timeout: float) -> dict[str, Any]:
    """Returns the verdict, which it puts into `hello`, as soon as those know it from whom others need it."""
    processes = cluster.processes()
    chief = next(iter(processes))
    peers = cluster.others() if cluster.is_chief else {chief: processes[chief]}
    deadline = time.monotonic() + timeout

    async def ask_peers() -> dict[str, Hello]:
        answers = zip(peers, await asyncio.gather(*map(_ask, peers.values())), strict=True)
        return {name: answer for name, answer in answers if answer}

    while not hello["verdict"]:
        answers = await ask_peers()
        differences = (_difference(name, answer, hello) for name, answer in answers.items())
        if difference := next(filter(None, differences), ""):
            hello["verdict"] = {"rejection": difference}
        elif missing := [name for name in peers if name not in answers]:
            hello["verdict"] = {"missing": missing} if time.monotonic() > deadline else {}
        elif cluster.is_chief:
            hello["verdict"] = {"everyone": {name: said["own"] for name, said in {chief: hello, **answers}.items()}}
        else:
            hello["verdict"] = answers[chief]["verdict"]
            deadline = time.monotonic() + timeout  # The chief has a deadline too, and knows who is missing.
        await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
    deadline = time.monotonic() + (timeout if "everyone" in hello["verdict"] else SECONDS_FOR_REJECTION)
    # A process that knows the verdict soon answers no longer.
    while not all(answer["verdict"] for answer in answers.values()) and time.monotonic() < deadline:
        await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
        answers = await ask_peers()
    return hello["verdict"]


async def _ask(address: str) -> Hello | None:
    """Returns the hello of the process at an address; None if nothing answers, or another program."""
    try:
        async with asyncio.timeout(SECONDS_PER_CONNECTION):
            received, writer = await asyncio.open_connection(*host_and_port(address), limit=LONGEST_HELLO)
            with contextlib.closing(writer):
                # If TensorFlow has started there, its first byte differs, and it does not end.
                if (first := await received.read(1)) != b"{":
                    return None
                return json.loads(first + await received.readline())
    except (OSError, ValueError):
        return None


def _difference(name: str, answer: Hello, own: Hello) -> str:
    """Returns why the process at the address of `name` cannot train with this one; "" if it can."""
    if answer["name"] != name:
        return f"{answer['name']} answers at the address of {name}: give each process its own index"
    if answer["cluster"] != own["cluster"]:
        return f"{name} describes the cluster as {answer['cluster']}, but {own['name']} as {own['cluster']}"
    differing: list[str] = []
    for fact in {**own["facts"], **answer["facts"]}:
        here, there = own["facts"].get(fact), answer["facts"].get(fact)
        if isinstance(here, dict) and isinstance(there, dict):
            differing += [f"{key} differs" for key in {**here, **there} if here.get(key) != there.get(key)]
        elif here != there:
            differing.append(f"{fact} {there} there and {here} here")
    listed = textwrap.shorten(", ".join(differing), 500, placeholder=" ...")
    return f"{name} was started with other settings or code ({listed}): start all with the same" if listed else ""
