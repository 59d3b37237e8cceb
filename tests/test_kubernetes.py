"""deploy/kubernetes.yaml: valid by the published schema, and its environment is one in which the workers train."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rendering import PROJECT, run

START_ID = "TRAINING_START_ID"  # engine/cluster/launcher.py says what it means.
MANIFEST = PROJECT / "deploy" / "kubernetes.yaml"


def manifest() -> dict[str, dict[str, Any]]:
    with MANIFEST.open(encoding="utf-8") as lines:
        return {each["kind"]: each for each in yaml.safe_load_all(lines)}


def container() -> dict[str, Any]:
    (only,) = manifest()["Job"]["spec"]["template"]["spec"]["containers"]
    return only


def environment_given() -> dict[str, str]:
    return {each["name"]: each["value"] for each in container()["env"] if "value" in each}


def test_manifest_is_valid_and_its_parts_fit_together() -> None:
    described = manifest()
    for each in described.values():
        # The oldest version in which pod failure policies are stable.
        kubernetes_validate.validate(each, "1.31", strict=True)
    job, pod = described["Job"]["spec"], described["Job"]["spec"]["template"]
    environment = environment_given()
    assert job["completions"] == job["parallelism"] == int(environment["WORKERS"])
    assert environment["JOB_NAME"] == described["Job"]["metadata"]["name"]
    assert environment["SERVICE_NAME"] == described["Service"]["metadata"]["name"] == pod["spec"]["subdomain"]
    labels = pod["metadata"]["labels"]
    assert described["Service"]["spec"]["selector"] == labels
    # Only the workers reach each other, whatever the port.
    policy = described["NetworkPolicy"]["spec"]
    workers = {"podSelector": {"matchLabels": labels}}
    assert policy == {**workers, "policyTypes": ["Ingress"], "ingress": [{"from": [workers]}]}
    (start,) = [each["valueFrom"] for each in container()["env"] if each["name"] == START_ID]
    # Kubernetes gives it to every pod of a Job: https://kubernetes.io/docs/reference/labels-annotations-taints/
    assert start == {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    claimed = {each["name"] for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container()["volumeMounts"]} == claimed


@contextlib.contextmanager
def pods(names: list[str]) -> Iterator[list[str]]:
    """Makes a network namespace for each of two pods, with an address of its own under the pod's name."""
    spaces = [f"pod{number}-{os.getpid()}" for number in range(len(names))]
    hosts = "".join(f"10.231.0.{number + 1} {name}\n" for number, name in enumerate(names))
    try:
        for space in spaces:
            subprocess.run(["ip", "netns", "add", space], check=True)
            folder = Path("/etc/netns") / space  # Where `ip netns exec` looks for a namespace's own /etc/hosts.
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}", encoding="utf-8")
        first, second = spaces
        cable = f"ip link add peer netns {first} type veth peer name peer netns {second}"
        subprocess.run(cable.split(), check=True)
        for number, space in enumerate(spaces):
            for command in (f"addr add 10.231.0.{number + 1}/24 dev peer", "link set peer up", "link set lo up"):
                subprocess.run(["ip", "-n", space, *command.split()], check=True)
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made


@pytest.mark.long
@pytest.mark.skipif(not may_make_namespaces(), reason="needs iproute2, and to be allowed network namespaces")
def test_processes_in_the_environment_of_the_manifest_train_one_run(tmp_path: Path) -> None:
    arguments = [each.replace("/runs", str(tmp_path)) for each in container()["args"]]
    arguments[arguments.index("--epochs") + 1] = "2"
    environment = environment_given()
    names = [f"{environment['JOB_NAME']}-{index}.{environment['SERVICE_NAME']}" for index in range(2)]
    with pods(names) as spaces:
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, "-u", "train.py", *arguments],
                cwd=PROJECT,
                env={"PATH": os.environ["PATH"], **environment, "JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index, space in enumerate(spaces)
        ]
        try:
            written = [process.communicate(timeout=180)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(written)
    assert f"worker 1 of worker 0 {names[0]}:12345, worker 1 {names[1]}:12345" in written[1]
    alone = run(
        "python", "train.py", "--epochs=2", "--simulated-devices=2", f"--run-dir={tmp_path / 'alone'}", folder=PROJECT
    )
    assert alone.returncode == 0, alone.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "default")]
    assert results[1]["test/loss"] == pytest.approx(results[0]["test/loss"], rel=1e-5)
