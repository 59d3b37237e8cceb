"""What the environment says about a cluster, and how its tasks meet: without TensorFlow, in this process."""

import concurrent.futures
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from processes import until

from config import Config
from engine.cluster import meeting as meetings
from engine.cluster import strategy as strategies
from engine.cluster.environment import Cluster, find_cluster
from engine.cluster.meeting import _open, lost, meet
from engine.cluster.workers import _accused
from engine.errors import BadInput
from rendering import PROJECT, run

TWO = ["host0:12345", "host1:12345"]


def tf_config(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


# --- What the environment says ----------------------------------------------------------------------------------------


def test_no_cluster_is_found_where_none_is_described() -> None:
    assert find_cluster({}) is None
    assert find_cluster({"TF_CONFIG": ""}) is None
    assert find_cluster(tf_config({"worker": ["host0:1"]})) is None
    # A shell inside a Slurm allocation, and a step or a Kubernetes Job of one task.
    assert find_cluster({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}) is None
    assert find_cluster({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_cluster({"JOB_COMPLETION_INDEX": "0", "WORKERS": "1"}) is None


def test_first_task_is_the_chief() -> None:
    of_workers = find_cluster(tf_config({"worker": TWO}, index=1))
    assert of_workers.tasks() == {"worker 0": "host0:12345", "worker 1": "host1:12345"}
    assert (of_workers.name, of_workers.is_chief) == ("worker 1", False)
    with_chief = find_cluster(tf_config({"worker": TWO, "chief": ["host2:1"]}, "chief"))
    assert list(with_chief.tasks()) == ["chief", "worker 0", "worker 1"]
    assert with_chief.is_chief
    assert not find_cluster(tf_config({"worker": TWO, "chief": ["host2:1"]}, index=0)).is_chief


def test_slurm_step_is_a_cluster_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames b[1-2],a7" ] && printf "b1\\nb2\\na7\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    step = {
        "SLURM_JOB_ID": "100",
        "SLURM_PROCID": "4",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "b[1-2],a7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURMD_NODENAME": "a7",
    }
    cluster = find_cluster(step)
    hosts, ports = zip(*(address.split(":") for address in cluster.addresses["worker"]), strict=True)
    assert hosts == ("b1", "b1", "b2", "b2", "a7")
    assert len(set(ports)) == 5
    assert all(1024 < int(port) < 32768 for port in ports)
    assert (cluster.name, cluster.source) == ("worker 4", "Slurm")
    # Another job on these nodes listens elsewhere.
    assert not set(find_cluster({**step, "SLURM_JOB_ID": "101"}).addresses["worker"]) & set(cluster.addresses["worker"])
    with pytest.raises(BadInput, match="--distribution=block"):
        find_cluster({**step, "SLURMD_NODENAME": "b1"})
    for broken in ({"SLURM_PROCID": "5"}, {"SLURM_STEP_TASKS_PER_NODE": "x"}, {"SLURM_STEP_NUM_TASKS": "6"}):
        with pytest.raises(BadInput, match="contradict each other"):
            find_cluster({**step, **broken})
    with pytest.raises(BadInput, match="SLURM_STEP_NODELIST is not set: start the program with srun"):
        find_cluster({**step, "SLURM_STEP_NODELIST": ""})


def test_kubernetes_indexed_job_is_a_cluster() -> None:
    pod = {"JOB_COMPLETION_INDEX": "1", "JOB_NAME": "digits", "SERVICE_NAME": "peers", "WORKERS": "2"}
    cluster = find_cluster(pod)
    assert cluster.addresses == {"worker": ["digits-0.peers:12345", "digits-1.peers:12345"]}
    assert cluster.name == "worker 1"
    with pytest.raises(BadInput, match="SERVICE_NAME is not set"):
        find_cluster({**pod, "SERVICE_NAME": ""})
    with pytest.raises(BadInput, match="WORKERS=two in the environment: it has to be a whole number"):
        find_cluster({**pod, "WORKERS": "two"})


MALFORMED = {
    "not JSON": ({"TF_CONFIG": "{'cluster'"}, "is not JSON"),
    "a list": ({"TF_CONFIG": "[]"}, 'has no "cluster"'),
    "no cluster": ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, 'has no "cluster"'),
    "an address that is no list": (tf_config({"worker": "host0:1"}), 'has no "cluster" with lists'),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": {"worker": TWO}})}, 'has None for "task"'),
    "an index that is text": (tf_config({"worker": TWO}, index="0"), "not a type and a whole number as index"),
    "an index too large": (tf_config({"worker": TWO}, index=2), "has to be from 0 to 1"),
    "a negative index": (tf_config({"worker": TWO}, index=-1), "has to be from 0 to 1"),
    "a job that is not there": (tf_config({"worker": TWO}, "chief"), "which the cluster does not have"),
    "an evaluator": (tf_config({"worker": TWO, "evaluator": ["host2:1"]}), "--evaluate-continuously"),
    "two chiefs": (tf_config({"worker": TWO, "chief": ["a:1", "b:1"]}), "2 chiefs"),
    "no port": (tf_config({"worker": ["host0", "host1:1"]}), "worker 0 at 'host0': an address is a host and a port"),
    "a port too large": (tf_config({"worker": ["host0:1", "host1:65536"]}), "worker 1 at 'host1:65536'"),
    "a number for an address": (tf_config({"worker": ["host0:1", 7]}), "worker 1 at 7"),
    "one address twice": (tf_config({"worker": ["host0:1", "host0:1"]}), "two tasks at host0:1"),
    "localhost among hosts": (tf_config({"worker": ["localhost:1", "host1:1"]}), "localhost:1, which is another"),
    "a loopback address among hosts": (tf_config({"worker": ["host0:1", "127.0.0.1:1"]}), "127.0.0.1:1, which is"),
}


@pytest.mark.parametrize(("environment", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_cluster_is_refused_with_the_reason(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(BadInput) as refused:
        find_cluster(environment)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


# --- The meeting ------------------------------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def local(number: int, host: str = "127.0.0.1") -> list[Cluster]:
    addresses = {"worker": [f"{host}:{port}" for port in free_ports(number)]}
    return [Cluster("TF_CONFIG", addresses, "worker", index) for index in range(number)]


def port_of(task: Cluster) -> int:
    return int(task.tasks()[task.name].rpartition(":")[2])


def meeting(tasks: list[Cluster], facts: list[dict[str, Any]], *, seconds: float) -> list[Any]:
    """Has tasks meet, each in a thread and a little later than the one before; returns what each got, or its error."""

    def one(number: int) -> Any:
        time.sleep(0.3 * number)
        try:
            return meet(tasks[number], facts[number], {"index": number}, timeout=seconds)
        except BadInput as refused:
            return str(refused)

    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as threads:
        return list(threads.map(one, range(len(tasks))))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_tasks_that_come_one_after_the_other_meet_and_free_their_addresses(host: str) -> None:
    tasks = local(3, host)
    everyone = {f"worker {index}": {"index": index} for index in range(3)}
    assert meeting(tasks, [{"--epochs": 5}] * 3, seconds=20) == [everyone] * 3
    assert meeting(tasks[::-1], [{}] * 3, seconds=20)[0].keys() == everyone.keys()  # The chief last, at once again.
    assert lost(tasks[0]) == [f"worker {index} ({tasks[0].tasks()[f'worker {index}']}) is gone" for index in (1, 2)]


def test_task_that_is_stopped_is_told_from_those_that_have_ended_and_comes_first() -> None:
    tasks = local(4)
    addresses = tasks[0].tasks()
    # The system takes connections for a stopped process, which never speaks.
    with (
        socket.create_server(("127.0.0.1", port_of(tasks[3]))),
        socket.create_server(("127.0.0.1", port_of(tasks[2]))) as well,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        greeting = thread.submit(lambda: well.accept()[0].send(b"\0"))
        assert lost(tasks[0]) == [
            f"worker 3 ({addresses['worker 3']}) does not answer",
            f"worker 1 ({addresses['worker 1']}) is gone",
        ]
        assert greeting.result() == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_task_is_named_by_all_others(missing: int) -> None:
    tasks = local(3)
    for message in meeting([task for task in tasks if task.index != missing], [{}, {}], seconds=1.5):
        assert re.fullmatch(
            rf"worker {missing} \({tasks[missing].tasks()[f'worker {missing}']}\) did not join within 1.5 s "
            r"\(--cluster-timeout\): check its log, and that worker \d can reach that address",
            message,
        )


def test_task_with_other_settings_or_code_is_named_by_all() -> None:
    facts = [
        {"--epochs": epochs, "keras": "3.15.1", "code": {"task.py": "1" * 64, "helper.py": helper * 64}}
        for epochs, helper in ((5, "2"), (6, "3"), (5, "2"))
    ]
    chief, other, third = meeting(local(3), facts, seconds=2)
    assert "worker 1 was started with other settings or code (--epochs 6 there and 5 here, helper.py differs)" in chief
    assert "worker 0 was started with other settings or code (--epochs 5 there and 6 here, helper.py differs)" in other
    assert third == chief or "did not join" in third  # As it comes after the others have ended, or before.


def test_task_with_another_description_of_the_cluster_is_refused() -> None:
    first = local(2)[0]
    both = first.addresses["worker"]
    longer = Cluster("TF_CONFIG", {"worker": [*both, "127.0.0.1:9"]}, "worker", 1)
    assert all("describes the cluster as" in message for message in meeting([first, longer], [{}, {}], seconds=3))
    turned = Cluster("TF_CONFIG", {"worker": both[::-1]}, "worker", 0)
    assert any("two processes are worker 0" in message for message in meeting([first, turned], [{}, {}], seconds=3))


def test_address_that_is_in_use_is_refused() -> None:
    tasks = local(2)
    with (
        socket.create_server(("", port_of(tasks[0])), family=socket.AF_INET6, dualstack_ipv6=True),
        pytest.raises(BadInput, match="where it cannot listen"),
    ):
        meet(tasks[0], {}, timeout=5)


# --- Strangers at the meeting -----------------------------------------------------------------------------------------


def hello(task: Cluster, /, **more: Any) -> bytes:
    said = {"task": task.name, "cluster": task.addresses, "facts": {}, "own": {}, "refusal": "", "everyone": {}}
    return json.dumps({**said, **more}).encode() + b"\n"


STRANGE = {
    "nothing": b"",
    "no object": b"[]\n",
    "no JSON": b"GET / HTTP/1.1\r\n\r\n\n",
    "no text": b"{\xff\xfe\n",
    "nested too deep": b'{"a":' * 60_000 + b"\n",
    "no end": b"{" * 2**20,
    "a list for a name": lambda task: hello(task, task=["worker 1"]),
    "a number for facts": lambda task: hello(task, facts=7),
    "a text for the cluster": lambda task: hello(task, cluster="mine"),
    "a text for everyone": lambda task: hello(task, everyone="all"),
}


@contextlib.contextmanager
def answering(task: Cluster, line: bytes) -> Iterator[list[int]]:
    """Sends bytes to whoever connects to a task's address; yields how many were taken, for each connection."""
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
        socket.create_server(("127.0.0.1", port_of(task))) as server,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        thread.submit(answer)
        try:
            yield taken
        finally:
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("role", [0, 1])
def test_something_else_that_answers_at_its_address_is_not_taken_for_a_task(
    role: int, line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "LONGEST_HELLO", 2**22)
    tasks = local(2)
    other = tasks[1 - role]
    with (
        answering(other, line if isinstance(line, bytes) else line(other)) as taken,
        pytest.raises(BadInput, match=rf"worker {1 - role} \(.*\) did not join"),
    ):
        meet(tasks[role], {}, timeout=0.3)
    assert taken
    assert max(taken) < 2**24  # A line without end is given up.


def test_strangers_do_not_disturb_the_meeting() -> None:
    tasks = local(2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as open_connections:
        first = thread.submit(meet, tasks[0], {}, timeout=20)
        for line in (hello(tasks[1], facts={"--epochs": 6}), b"x" * 2**20, *[b""] * 20):  # Most say nothing.
            stranger = open_connections.enter_context(reach(tasks[0]))
            with contextlib.suppress(OSError):
                stranger.sendall(line)
        meet(tasks[1], {}, timeout=20)
        assert first.result().keys() == {"worker 0", "worker 1"}


def reach(task: Cluster) -> socket.socket:
    """Connects with a task as soon as it listens."""
    connections: list[socket.socket] = []

    def connect() -> bool:
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", port_of(task)), timeout=20))
        return bool(connections)

    until(connect)
    return connections[0]


def test_task_that_starts_again_during_the_meeting_is_met() -> None:
    tasks = local(3)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(meet, tasks[0], {}, timeout=20)
        with answering(tasks[1], hello(tasks[1])) as taken:  # Then it ends, as if it had been killed.
            until(lambda: len(taken) > 1)
        assert all(len(everyone) == 3 for everyone in meeting(tasks[1:], [{}, {}], seconds=20))
        assert len(first.result()) == 3


def test_task_listens_where_the_cluster_says_and_nowhere_else() -> None:
    tasks = local(2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(meeting, tasks[:1], [{}], seconds=1)
        reach(tasks[0]).close()
        with pytest.raises(ConnectionRefusedError):  # Another address of this machine.
            socket.create_connection(("127.0.0.2", port_of(tasks[0])), timeout=5).close()
        assert "did not join" in first.result()[0]


@pytest.mark.parametrize(
    ("host", "resolved"),
    [
        pytest.param("behind-a-network", "192.0.2.1", id="an address of no machine"),
        pytest.param("debian", "127.0.1.1", id="a loopback address for the own name"),
        pytest.param("later", None, id="a name that nobody knows yet"),
    ],
)
def test_task_listens_everywhere_where_the_address_is_not_this_machines(
    host: str, resolved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        if not resolved:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    (server,) = _open(f"{host}:{port}")
    with server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_start_that_takes_too_long_ends_the_process() -> None:
    program = """
import time
from engine.cluster.meeting import ended_after
with ended_after({}, "late"):
    time.sleep(1)
print("in time")
"""
    for seconds, code, told in ((0.2, 2, "ERROR: late\n"), (60, 0, "in time\n")):
        done = run("python", "-c", program.format(seconds), folder=PROJECT)
        assert (done.returncode, (done.stderr if code else done.stdout)[-len(told) :]) == (code, told)


# --- Which peer is gone -----------------------------------------------------------------------------------------------


def test_tasks_that_tensorflow_accuses_are_named() -> None:
    cluster = local(3)[0]
    tasks = cluster.tasks()
    unhealthy = (
        "Collective ops is aborted by: Error reported from /job:worker/task:2: The following tasks are unhealthy"
    )
    own = "Collective ops is aborted by: x [device /job:worker/replica:0/task:0/device:CPU:0]"
    assert _accused(unhealthy, cluster) == f"worker 2 ({tasks['worker 2']})"
    assert _accused(own, cluster) == "another worker"
    other = Cluster("TF_CONFIG", cluster.addresses, "worker", 1)
    heartbeat = "Collective ops is aborted by: Deadline Exceeded RPC: /tensorflow.CoordinationService/Heartbeat"
    assert _accused(heartbeat, other) == f"worker 0 ({tasks['worker 0']})"
    assert _accused("Incompatible shapes: [2] vs. [3]", cluster) == ""


# --- A signal to a peer -----------------------------------------------------------------------------------------------


def test_own_signal_after_the_stop_of_a_peer_does_not_end_the_save() -> None:
    program = """
import os, signal, time
from engine.errors import Stopped
from engine.run.signals import Preemption

class Workers:
    def any(self, flag):
        return ["worker 1"]

with (preemption := Preemption()).listening():
    try:
        preemption.check(Workers())
    except Stopped as stopped:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        print(stopped)
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = run("python", "-c", program, folder=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "stopped by a signal to worker 1" in done.stdout


# --- TPUs: a stand-in, as there is none to try it on ------------------------------------------------------------------


def test_tpu_is_found_connected_and_initialized_before_its_strategy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def noted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> str:
            calls.append((name, *arguments, *options.values()))
            return name

        return call

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", noted("resolver"))
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", noted("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", noted("initialize"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", noted("strategy"))
    monkeypatch.setenv("TPU_NAME", "mine")
    monkeypatch.setattr(strategies, "_made", {})
    assert strategies.create_strategy(Config(strategy="tpu")) == "strategy"
    expected = [("resolver", "mine"), ("connect", "resolver"), ("initialize", "resolver"), ("strategy", "resolver")]
    assert calls == expected


def test_machine_without_a_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there(**_: Any) -> None:
        raise ValueError("Please provide a TPU Name to connect to.")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", none_there)
    with pytest.raises(BadInput, match="--strategy tpu finds no TPU"):
        strategies.create_strategy(Config(strategy="tpu"))
