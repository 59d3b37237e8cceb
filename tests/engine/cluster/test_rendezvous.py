"""The rendezvous of the processes of a cluster, and which are lost: without TensorFlow, in this process."""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from processes import until

from engine.cluster import rendezvous as module
from engine.cluster.environment import Cluster, host_and_port
from engine.cluster.peers import FROZEN, GONE, _accused, loss, lost
from engine.cluster.rendezvous import rendezvous
from engine.errors import BadInput, CountedLoss, PeerLost


def local(number: int, host: str = "127.0.0.1") -> list[Cluster]:
    with contextlib.ExitStack() as open_servers:
        servers = [open_servers.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        addresses = {"worker": [f"{host}:{each.getsockname()[1]}" for each in servers]}
    return [Cluster("TF_CONFIG", addresses, "worker", index) for index in range(number)]


def is_listening(address: str) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(host_and_port(address), timeout=2.0).close()
        return True
    return False


def port_of(process: Cluster) -> int:
    return int(process.processes()[process.name].rpartition(":")[2])


def together(members: list[Cluster], facts: list[dict[str, Any]], *, seconds: float) -> list[Any]:
    """Has processes meet, each in a thread, a little later than the one before; returns each one's result or error."""

    def one(number: int) -> Any:
        time.sleep(0.3 * number)
        try:
            return rendezvous(members[number], facts[number], {"index": number}, timeout=seconds)
        except (BadInput, PeerLost) as refused:
            return f"{refused.exit_code}: {refused}"

    with concurrent.futures.ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(one, range(len(members))))


def hello(process: Cluster, /, **more: Any) -> bytes:
    said = {"name": process.name, "cluster": process.addresses, "facts": {}, "own": {}, "verdict": {}}
    return json.dumps({**said, **more}).encode() + b"\n"


@contextlib.contextmanager
def answering(process: Cluster, line: bytes) -> Iterator[list[int]]:
    """Sends bytes to whoever connects to a process's address; yields how many were taken, for each connection."""
    taken: list[int] = []

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                taken.append(0)
                with connection, contextlib.suppress(OSError):
                    while taken[-1] < (2**27 if line[-1:] == b"{" else 1):
                        connection.sendall(line)
                        taken[-1] += max(1, len(line))

    with (
        socket.create_server(("127.0.0.1", port_of(process))) as server,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        thread.submit(answer)
        try:
            yield taken
        finally:
            server.shutdown(socket.SHUT_RDWR)


def test_processes_that_come_one_after_the_other_meet_and_free_their_addresses() -> None:
    members = local(3, "[::1]")
    everyone = {f"worker {index}": {"index": index} for index in range(3)}
    assert together(members, [{"--epochs": 5}] * 3, seconds=20) == [everyone] * 3
    assert together(members[::-1], [{}] * 3, seconds=20)[0].keys() == everyone.keys()  # The chief last, at once again.


def test_process_that_is_stopped_is_told_from_those_that_have_ended() -> None:
    members = local(5)
    # The system takes connections for a stopped process, which never speaks.
    with (
        socket.create_server(("127.0.0.1", port_of(members[3]))),
        socket.create_server(("127.0.0.1", port_of(members[2]))) as well,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
        answering(members[4], hello(members[4])),  # It was lost, and waits in the rendezvous again.
    ):
        greeting = thread.submit(lambda: well.accept()[0].send(b"\0"))
        assert lost(members[0]) == {"worker 1": GONE, "worker 3": FROZEN, "worker 4": GONE}
        assert greeting.result() == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_process_is_named_by_all_others(missing: int) -> None:
    members = local(3)
    # The chief comes last, and the others go by its deadline: it knows who is missing.
    present = [member for member in members[::-1] if member.index != missing]
    # Whatever starts processes again counts one of them.
    for message, code in zip(together(present, [{}, {}], seconds=1.5), (43, 44), strict=True):
        address = re.escape(members[missing].processes()[f"worker {missing}"])
        assert re.fullmatch(
            rf"{code}: worker {missing} \({address}\) did not join within 1.5 s "
            r"\(--cluster-timeout\): check its log, and that worker \d can reach that address",
            message,
        )


def test_process_with_other_settings_or_code_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [
        {"--epochs": epochs, "keras": "3.15.1", "code": {"task.py": "1" * 64, "helper.py": helper * 64}}
        for epochs, helper in ((5, "2"), (6, "3"), (5, "2"))
    ]
    members, ask = local(3), module._ask

    async def slow_for_the_chief(address: str) -> dict[str, Any] | None:
        # The other one finds the difference first.
        await asyncio.sleep(0 if address == members[0].processes()["worker 0"] else 1)
        return await ask(address)

    monkeypatch.setattr(module, "_ask", slow_for_the_chief)
    chief, other, third = together(members, facts, seconds=20)
    assert "worker 1 was started with other settings or code (--epochs 6 there and 5 here, helper.py differs)" in chief
    assert "worker 0 was started with other settings or code (--epochs 5 there and 6 here, helper.py differs)" in other
    assert third == chief


def test_process_with_another_description_of_the_cluster_is_refused() -> None:
    first = local(2)[0]
    both = first.addresses["worker"]
    longer = Cluster("TF_CONFIG", {"worker": [*both, "127.0.0.1:9"]}, "worker", 1)
    assert all("describes the cluster as" in message for message in together([first, longer], [{}, {}], seconds=3))
    turned = Cluster("TF_CONFIG", {"worker": both[::-1]}, "worker", 0)
    messages = together([first, turned], [{}, {}], seconds=3)
    assert any("worker 0 answers at the address of worker 1: give each process its own" in line for line in messages)


def test_port_in_use_is_named() -> None:
    member = local(1)[0]
    # The code of this end is tried again.
    with (
        socket.create_server(("127.0.0.1", port_of(member))),
        pytest.raises(CountedLoss, match=r"worker 0 at .*, where it cannot listen \(Address already in use\): end the"),
    ):
        rendezvous(member, {}, timeout=0.3)


STRANGE = {
    "nothing": b"",
    "no object": b"[]\n",
    "no text": b"{\xff\xfe\n",
    "no end": b"{" * 2**20,
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_something_else_that_answers_at_its_address_is_not_taken_for_a_process(
    line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_HELLO", 2**22)
    first, second = local(2)
    with (
        answering(second, line) as taken,
        pytest.raises(PeerLost, match=r"worker 1 \(.*\) did not join"),
    ):
        rendezvous(first, {}, timeout=0.3)
    assert taken
    assert max(taken) < 2**24  # A line without end is given up.


def test_strangers_do_not_disturb_the_rendezvous_which_no_other_address_can_reach() -> None:
    members = local(2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as open_connections:
        first = thread.submit(rendezvous, members[0], {}, timeout=20)
        until(lambda: is_listening(members[0].processes()["worker 0"]))
        for line in (hello(members[1], facts={"--epochs": 6}), b"x" * 2**20, *[b""] * 20):  # Most say nothing.
            stranger = open_connections.enter_context(socket.create_connection(("127.0.0.1", port_of(members[0]))))
            with contextlib.suppress(OSError):
                stranger.sendall(line)
        with pytest.raises(ConnectionRefusedError):  # Another address of this machine.
            socket.create_connection(("127.0.0.2", port_of(members[0])), timeout=5).close()
        rendezvous(members[1], {}, timeout=20)
        assert first.result().keys() == {"worker 0", "worker 1"}


def test_question_in_the_last_moment_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (process,) = local(1)

    async def agree(*_: Any) -> dict[str, Any]:
        """Ends while the answer begins, as asyncio.run does with what is under way."""
        with socket.create_connection(host_and_port(process.processes()[process.name])):
            for _ in range(10):
                await asyncio.sleep(0)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    if "accept" not in str(task.get_coro()):
                        task.cancel()
        return {"everyone": {}}

    monkeypatch.setattr(module, "_agree", agree)
    assert rendezvous(process, {}, timeout=5.0) == {}
    assert not caplog.records


def test_process_listens_everywhere_where_the_address_is_not_a_loopback_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    addresses = {"worker": [f"a-name-that-nobody-knows-yet:{port}", "127.0.0.1:1"]}
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        chief = thread.submit(rendezvous, Cluster("TF_CONFIG", addresses, "worker", 0), {}, timeout=2.0)
        until(lambda: is_listening(f"127.0.0.1:{port}"), seconds=10)
        until(lambda: is_listening(f"127.0.0.2:{port}"), seconds=10)
        with pytest.raises(PeerLost):
            chief.result()


def test_one_end_is_counted_where_a_process_does_not_answer() -> None:
    members = local(3)
    for states, kinds in (
        ({}, [CountedLoss, PeerLost, PeerLost]),  # One of them hangs, and nobody knows which.
        ({"worker 0": FROZEN}, [CountedLoss, CountedLoss, PeerLost]),
        ({"worker 1": GONE}, [PeerLost] * 3),
        ({"worker 0": FROZEN, "worker 1": GONE}, [CountedLoss, CountedLoss, PeerLost]),
    ):
        left = [index for index in range(3) if f"worker {index}" not in states]
        assert [type(loss(members[index], states, "")) for index in left] == [kinds[index] for index in left]


def test_processes_that_tensorflow_accuses_are_named() -> None:
    chief, other, _ = local(3)
    for cluster, message, accused in (
        (chief, "Error reported from /job:worker/task:2: x", ["worker 2"]),
        (chief, "x [device /job:worker/replica:0/task:0/device:CPU:0]", []),  # Its own.
        (other, "Deadline Exceeded: /tensorflow.CoordinationService/Heartbeat", ["worker 0"]),
    ):
        assert _accused(f"Collective ops is aborted by: {message}", cluster) == accused
