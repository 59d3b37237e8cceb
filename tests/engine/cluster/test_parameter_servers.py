"""Parameter servers: which settings are refused, and ports in use, and the end of a chief that has no workers left."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from config import Config
from engine.cluster import parameter_servers
from engine.cluster.environment import Cluster
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput, PeerLost

SERVED = (
    '{"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:1"]}, "task": {"type": "chief", "index": 0}}'
)
REFUSED: dict[str, dict[str, Any]] = {
    "--ema-decay cannot be combined with --strategy parameter_server": {"ema_decay": 0.9},
    "--deterministic cannot be combined with --strategy parameter_server": {"deterministic": True},
    "--steps-per-epoch cannot be combined with --strategy parameter_server": {"steps_per_epoch": 5},
    "--precision mixed_float16 cannot be combined with --strategy param": {"precision": "mixed_float16"},
    "--strategy parameter_server cannot be combined with --eager, which is for one process": {"eager": True},
}


def test_settings_for_which_replicas_must_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", SERVED)
    for reason, settings in REFUSED.items():
        with pytest.raises(BadInput, match=reason):
            create_strategy(Config(strategy="parameter_server", cluster_timeout=1.0, **settings))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the chief look for the others often; when it ends, it raises SystemExit. Counts how often it looked."""
    monkeypatch.setattr(parameter_servers, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(parameter_servers, "SECONDS_WITHOUT_WORKERS", 1.0)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(parameter_servers.os, "_exit", end)
    looks, lost = [], parameter_servers.lost
    monkeypatch.setattr(parameter_servers, "lost", lambda cluster: looks.append(1) or lost(cluster))
    return looks


def cluster_of(workers: list[str], server: str) -> Cluster:
    return Cluster("TF_CONFIG", {"chief": ["c:1"], "worker": workers, "ps": [server]}, "chief", 0)


@contextlib.contextmanager
def speaking() -> Iterator[tuple[str, Callable[[], None]]]:
    """A process that speaks first, as TensorFlow's server does; yields its address, and what ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].send(b"\0")

        thread.submit(speak)
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", lambda: server.shutdown(socket.SHUT_RDWR)
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


def test_chief_waits_as_long_as_one_worker_is_there_and_ends_when_none_is_left(looks: list[int], capsys) -> None:
    with speaking() as (server, _), speaking() as (worker, end_worker), ThreadPoolExecutor(1) as thread:
        cluster = cluster_of(["127.0.0.1:1", worker], server)  # Nothing listens at the first.
        watching = thread.submit(parameter_servers._end_without_others, cluster)
        time.sleep(2.0)
        assert not watching.done()
        assert looks
        end_worker()
        with pytest.raises(SystemExit, match="43"):
            watching.result(timeout=20)
    line = "ERROR: all workers are gone: check their logs, then restart the cluster"
    assert capsys.readouterr().err.splitlines() == [line]


def test_chief_ends_when_a_process_is_frozen(looks: list[int], capsys) -> None:
    """The system accepts connections for a stopped process, which says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(SystemExit, match="44"):
            parameter_servers._end_without_others(cluster_of(["127.0.0.1:1"], address))  # The worker is gone.
    line = f"ERROR: ps 0 ({address}) does not answer, perhaps because it is frozen: end it, then restart the cluster"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("job", ["chief", "ps"])
def test_port_in_use_is_named(job: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        addresses = {name: [address] if name == job else ["127.0.0.1:1"] for name in ("chief", "worker", "ps")}
        with pytest.raises(PeerLost, match=f"TF_CONFIG puts {job}.* at {address}, where it cannot listen"):
            parameter_servers.start(Cluster("TF_CONFIG", addresses, job, 0), timeout=0.3)
