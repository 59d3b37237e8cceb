"""Parameter servers: which settings are refused, and ports in use, and the end of a chief that has no workers left."""

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from config import Config
from engine.cluster import parameter_servers
from engine.cluster.environment import Cluster
from engine.cluster.parameter_servers import WorkerPool
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


def test_chief_waits_as_long_as_one_worker_is_there_and_ends_when_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_servers, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(parameter_servers, "SECONDS_WITHOUT_WORKERS", 0.2)
    pool, done_at = object.__new__(WorkerPool), time.monotonic() + 1
    pool._coordinator = SimpleNamespace(done=lambda: time.monotonic() > done_at, join=lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as worker:
        pool._addresses = ["127.0.0.1:1", f"127.0.0.1:{worker.getsockname()[1]}"]  # Nothing listens at the first.
        pool._wait()
        assert time.monotonic() > done_at
    pool._coordinator = SimpleNamespace(done=lambda: False)
    with pytest.raises(PeerLost, match="all workers are gone: check their logs, then restart the cluster"):
        pool._wait()


def test_chief_ends_when_a_process_is_frozen(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The system accepts connections for a stopped process, which says nothing."""
    monkeypatch.setattr(parameter_servers, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(parameter_servers, "SECONDS_WITHOUT_WORKERS", 1.0)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(parameter_servers.os, "_exit", end)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        addresses = {"chief": ["c:1"], "worker": ["127.0.0.1:1"], "ps": [address]}  # The worker is gone.
        with pytest.raises(SystemExit, match="44"):
            parameter_servers._end_if_frozen(Cluster("TF_CONFIG", addresses, "chief", 0))
    line = f"ERROR: ps 0 ({address}) does not answer, perhaps because it is frozen: end it, then restart the cluster"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("job", ["chief", "ps"])
def test_port_in_use_is_waited_for_and_named(job: str, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        addresses = {name: [address] if name == job else ["127.0.0.1:1"] for name in ("chief", "worker", "ps")}
        start = parameter_servers.coordinate if job == "chief" else parameter_servers.serve
        with pytest.raises(PeerLost, match=f"TF_CONFIG puts {job}.* at {address}, which another program uses: end"):
            start(Cluster("TF_CONFIG", addresses, job, 0), timeout=0.3)
    assert "waits up to 0.3 s for the port" in capsys.readouterr().err
