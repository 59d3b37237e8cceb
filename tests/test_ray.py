"""deploy/ray_train.py without Ray, and on a real Ray of several nodes."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clusters
import pytest
from processes import until

from rendering import PROJECT

PROGRAM = PROJECT / "deploy/ray_train.py"
# Loaded by Ray's controller: writes the metrics that all workers have reported.
REPORTED = """
import json, os
from ray.train.v2._internal.execution.callback import ReportCallback

class Reported(ReportCallback):
    def after_report(self, training_report, metrics):
        with open(os.environ["REPORTED"], "a") as file:
            file.write(json.dumps(metrics) + "\\n")
"""


def test_absent_ray_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")", encoding="utf-8")
    options = {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, PROGRAM, "--workers", "2"], check=False, **options)
    assert done.returncode == 2
    assert done.stderr == "ERROR: Ray Train cannot be imported (No module named 'ray'): pip install -e \".[ray]\"\n"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A Ray whose nodes are processes of this machine: a head without CPUs, to which tests add nodes."""
    pytest.importorskip("ray.train")
    # A short path, because sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        settings = {"USAGE_STATS_ENABLED": "0", "AUTH_MODE": "disabled", "TMPDIR": folder, "worker_niceness": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(f"RAY_{name}", value)
        # Ray's processes have the variables of the one that starts the cluster.
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("REPORTED", str(tmp_path / "rows"))
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        try:
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Starts deploy/ray_train.py in tmp_path."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> SimpleNamespace:
        log = tmp_path / f"log-{len(started)}"
        with log.open("w") as file:
            command, variables = [sys.executable, PROGRAM, *arguments], {**os.environ, **environment}
            started.append(subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=file, stderr=file, text=True))
        return SimpleNamespace(process=started[-1], read=lambda: log.read_text(encoding="utf-8"))

    yield start
    for process in started:
        process.kill()
        process.wait()


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


@pytest.mark.long
def test_two_workers_have_the_weights_of_a_local_cluster_and_the_numbers_stay_without_a_node(
    cluster: Any, start: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    (tmp_path / "reported.py").write_text(REPORTED, encoding="utf-8")
    lost, _ = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    ray = start("--workers", "2", "--", "--epochs=2", "--run-dir=of_ray", RAY_TRAIN_CALLBACKS="reported.Reported")
    clusters.train(PROJECT, tmp_path / "local", 2, "--epochs=2")
    assert ray.process.wait(300) == 0, ray.read()
    assert result(tmp_path / "of_ray")["weights_sha256"] == result(tmp_path / "local")["weights_sha256"]
    rows = [json.loads(line)[0] for line in (tmp_path / "rows").read_text(encoding="utf-8").splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]

    # Long enough for all three starts; a low learning rate, so that rounding does not grow in so many steps.
    flags = ("--epochs=60", "--learning-rate=1e-4", "--checkpoint-every-steps=20", "--seed=1")
    run_dir = tmp_path / "elastic"
    elastic = ("--workers=2", "--min-workers=1", "--resize-seconds=3")
    ray = start(*elastic, "--", *flags, "--run-dir=elastic", RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="5")

    def starts() -> int:
        config = run_dir / "config.json"
        return len(json.loads(config.read_text(encoding="utf-8"))["starts"]) if config.exists() else 0

    until(lambda: any((run_dir / "checkpoints").glob("step-*")) or ray.process.poll() is not None)
    cluster.remove_node(lost)
    until(lambda: starts() == 2 or ray.process.poll() is not None)
    assert ray.process.poll() is None, ray.read()
    cluster.add_node(num_cpus=1)
    clusters.train(PROJECT, tmp_path / "alone", 1, *flags)
    assert ray.process.wait(300) == 0, ray.read()
    assert starts() == 3
    for name in ("test/loss", "test/accuracy"):
        assert math.isclose(result(run_dir)[name], result(tmp_path / "alone")[name], rel_tol=1e-5), name
