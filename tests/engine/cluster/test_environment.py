"""What the environment says about a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.environment import find_cluster
from engine.errors import BadInput

TWO = ["host0:12345", "host1:12345"]


def tf_config(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


NO_CLUSTER = [
    {},
    {"TF_CONFIG": ""},
    tf_config({"worker": ["host0:1"]}),
    # A shell inside a Slurm allocation, and a step or a job of one process.
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    {"JOB_COMPLETION_INDEX": "0", "WORKERS": "1"},
    {"JOB_COMPLETION_INDEX": "1", "SERVICE_NAME": "any"},
]


def test_no_cluster_is_found_where_none_is_described() -> None:
    assert [find_cluster(environment) for environment in NO_CLUSTER] == [None] * len(NO_CLUSTER)


def test_first_process_is_the_chief() -> None:
    workers = find_cluster(tf_config({"worker": TWO}, index=1))
    assert workers.processes() == {"worker 0": "host0:12345", "worker 1": "host1:12345"}
    assert (workers.name, workers.is_chief) == ("worker 1", False)
    with_chief = find_cluster(tf_config({"worker": TWO, "chief": ["host2:1"]}, "chief"))
    assert list(with_chief.processes()) == ["chief 0", "worker 0", "worker 1"]
    assert with_chief.is_chief
    # A job without processes is not passed on, because TensorFlow crashes at it.
    without = find_cluster(tf_config({"chief": [], "worker": TWO, "ps": []}))
    assert (json.loads(without.tf_config())["cluster"], without.is_chief) == ({"worker": TWO}, True)


def test_managed_clouds_describe_a_cluster() -> None:
    # Vertex AI has a chief apart from the workers, fields of its own, and maybe an evaluator.
    chief, workers = ["training-chief-0:2222"], ["training-worker-0:2222", "training-worker-1:2222"]
    described = {"cluster": {"chief": chief, "worker": workers, "evaluator": ["training-evaluator-0:2222"]}}
    described |= {"task": {"type": "worker", "index": 1, "cloud": "x"}, "environment": "cloud", "job": "{}"}
    vertex = find_cluster({"TF_CONFIG": json.dumps(described)})
    assert list(vertex.processes().values()) == chief + workers
    assert (vertex.name, vertex.is_chief) == ("worker 1", False)


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
    with pytest.raises(BadInput, match="contradict each other"):
        find_cluster({**step, "SLURM_STEP_NUM_TASKS": "6"})
    with pytest.raises(BadInput, match="scontrol cannot read SLURM_STEP_NODELIST="):
        find_cluster({**step, "SLURM_STEP_NODELIST": ""})


def test_kubernetes_indexed_job_is_a_cluster() -> None:
    pod = {"JOB_COMPLETION_INDEX": "1", "JOB_NAME": "digits", "SERVICE_NAME": "peers", "WORKERS": "2"}
    cluster = find_cluster(pod)
    assert cluster.addresses == {"worker": ["digits-0.peers:12345", "digits-1.peers:12345"]}
    assert cluster.name == "worker 1"
    # Kubeflow Trainer has another name for the number.
    assert find_cluster({**pod, "WORKERS": "", "PET_NNODES": "2"}) == cluster
    for given, reason in {
        ("WORKERS", "two"): "WORKERS=two in the environment must be a whole number",
        ("JOB_NAME", ""): "JOB_NAME=, SERVICE_NAME=peers, .* and WORKERS=2 .* name a cluster only together",
        # A runtime of another version may set neither number.
        ("WORKERS", ""): "JOB_NAME=digits, SERVICE_NAME=peers, .* and WORKERS=None .* name a cluster only together",
    }.items():
        with pytest.raises(BadInput, match=reason):
            find_cluster({**pod, given[0]: given[1]})


MALFORMED = [
    ({"TF_CONFIG": "{'cluster'"}, "TF_CONFIG {'cluster' must be JSON like"),
    ({"TF_CONFIG": "[]"}, "TF_CONFIG [] must be JSON like"),
    ({"TF_CONFIG": "[" * 10**5}, "[[[ must be JSON like"),
    ({"JOB_COMPLETION_INDEX": "", "JOB_NAME": "a", "SERVICE_NAME": "b", "WORKERS": "2"}, "JOB_COMPLETION_INDEX= and"),
    ({"TF_CONFIG": json.dumps({"cluster": {"worker": TWO}})}, "must be JSON like"),
    (tf_config({"worker": "host0:1"}), "must be JSON like"),
    (tf_config({"worker": TWO}, index="0"), "must be JSON like"),
    (tf_config({"worker": TWO}, index=2), "as worker 2, but only worker 0, worker 1: fix its"),
    (
        tf_config({"worker": TWO}, "evaluator"),
        "as an evaluator: unset TF_CONFIG, and start it with --evaluate",
    ),
    (tf_config({"worker": TWO, "master": ["a:1"]}), "the job master: use only chief, worker, ps"),
    (tf_config({"worker": ["host0", "host1:1"]}), "worker 0 at 'host0': an address must be a host"),
    (tf_config({"worker": ["host0:1", "host1:65536"]}), "worker 1 at 'host1:65536'"),
    (tf_config({"worker": ["http://host0:1", "host1:1"]}), "worker 0 at 'http://host0:1': an address must"),
    (tf_config({"worker": ["host0:1", "host 1:1"]}), "worker 1 at 'host 1:1'"),
    (tf_config({"worker": ["host0:1", 7]}), "worker 1 at 7"),
    (tf_config({"worker": ["host0:1", "127.0.0.1:1"]}), "127.0.0.1:1, which is a different"),
]


def test_malformed_cluster_is_refused_with_the_reason() -> None:
    for environment, reason in MALFORMED:
        with pytest.raises(BadInput) as refused:
            find_cluster(environment)
        assert reason in str(refused.value)
        assert "\n" not in str(refused.value)
