"""deploy/kubernetes.yaml: valid by the published schema, and its environment is one in which the workers train."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import as_root
import kubernetes_validate
import pytest
import yaml

from rendering import PROJECT, run

START_ID = "TRAINING_START_ID"  # engine/cluster/launcher.py says what it means.
MANIFEST = PROJECT / "deploy" / "kubernetes.yaml"


def manifest(text: str = MANIFEST.read_text(encoding="utf-8")) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def container(described: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (only,) = described["Job"]["spec"]["template"]["spec"]["containers"]
    return only


def environment_given() -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(manifest())["env"] if "value" in each}


def validate(described: dict[str, dict[str, Any]]) -> None:
    for each in described.values():
        # The oldest version in which pod failure policies are stable.
        kubernetes_validate.validate(each, "1.31", strict=True)
    volumes = {each["name"] for each in described["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container(described)["volumeMounts"]} == volumes


def test_manifest_is_valid_and_its_parts_fit_together() -> None:
    described = manifest()
    validate(described)
    job, pod = described["Job"]["spec"], described["Job"]["spec"]["template"]
    environment = environment_given()
    assert job["completions"] == job["parallelism"] == int(environment["WORKERS"])
    assert job["backoffLimit"] == 20 * job["completions"]  # All workers fail when one does.
    assert environment["JOB_NAME"] == described["Job"]["metadata"]["name"]
    assert environment["SERVICE_NAME"] == described["Service"]["metadata"]["name"] == pod["spec"]["subdomain"]
    labels = pod["metadata"]["labels"]
    assert described["Service"]["spec"]["selector"] == labels
    # Only the workers reach each other, whatever the port.
    policy = described["NetworkPolicy"]["spec"]
    workers = {"podSelector": {"matchLabels": labels}}
    assert policy == {**workers, "policyTypes": ["Ingress"], "ingress": [{"from": [workers]}]}
    (start,) = [each["valueFrom"] for each in container(described)["env"] if each["name"] == START_ID]
    # Kubernetes gives it to every pod of a Job: https://kubernetes.io/docs/reference/labels-annotations-taints/
    assert start == {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    # The user of the image, as a number, because Kubernetes does not know its name.
    (user,) = re.findall(r"(?m)^USER (.*)$", (PROJECT / "deploy" / "Dockerfile").read_text(encoding="utf-8"))
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["securityContext"]["runAsUser"] == int(user) > 0


def test_lines_for_gpus_and_data_are_valid_without_their_marks(tmp_path: Path) -> None:
    text = MANIFEST.read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^#   (sed .*? deploy/kubernetes\.yaml) ", text)
    assert len(commands) == 2
    (tmp_path / "deploy").mkdir()
    changed = tmp_path / "deploy" / "kubernetes.yaml"
    changed.write_text(text, encoding="utf-8")
    for command in commands:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    described = manifest(changed.read_text(encoding="utf-8"))
    validate(described)
    assert not re.findall(r"(?m)^ +#(?:gpu|data) ", changed.read_text(encoding="utf-8"))
    trains, pod = container(described), described["Job"]["spec"]["template"]["spec"]
    assert trains["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert [each["mountPath"] for each in trains["volumeMounts"]] == ["/runs", "/dev/shm", "/data"]
    assert [each.get("emptyDir", {}).get("medium") for each in pod["volumes"]] == [None, "Memory", None]


@contextlib.contextmanager
def pods(names: list[str]) -> Iterator[list[str]]:
    """Makes a network namespace for each of two pods, with an address of its own under the pod's name."""
    spaces = [f"pod{number}-{os.getpid()}" for number in range(len(names))]
    hosts = "".join(f"10.231.0.{number + 1} {name}\n" for number, name in enumerate(names))
    try:
        for space in spaces:
            as_root.run("ip", "netns", "add", space)
            # `ip netns exec` shows this file as the namespace's /etc/hosts.
            write = f"mkdir -p /etc/netns/{space} && cat > /etc/netns/{space}/hosts"
            as_root.run("sh", "-c", write, stdin=f"127.0.0.1 localhost\n{hosts}")
        first, second = spaces
        as_root.run(*f"ip link add peer netns {first} type veth peer name peer netns {second}".split())
        for number, space in enumerate(spaces):
            for command in (f"addr add 10.231.0.{number + 1}/24 dev peer", "link set peer up", "link set lo up"):
                as_root.run("ip", "-n", space, *command.split())
        yield spaces
    finally:
        for space in spaces:
            as_root.works("ip", "netns", "del", space)
            as_root.works("rm", "-r", f"/etc/netns/{space}")


def may_make_namespaces() -> bool:
    if not shutil.which("ip"):
        return False
    name = f"try-{os.getpid()}"
    made = as_root.works("ip", "netns", "add", name)
    as_root.works("ip", "netns", "del", name)
    return made


@pytest.mark.long
@pytest.mark.skipif(not may_make_namespaces(), reason="needs iproute2, and may make network namespaces")
def test_processes_in_the_environment_of_the_manifest_train_one_run(tmp_path: Path) -> None:
    arguments = [each.replace("/runs", str(tmp_path)) for each in container(manifest())["args"]]
    arguments[arguments.index("--epochs") + 1] = "2"
    environment = environment_given()
    names = [f"{environment['JOB_NAME']}-{index}.{environment['SERVICE_NAME']}" for index in range(2)]
    with pods(names) as spaces:
        # Only entering the namespace needs root; the program runs as whoever runs the test.
        me = ("setpriv", f"--reuid={os.getuid()}", f"--regid={os.getgid()}", "--clear-groups")
        given = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environment}
        variables = [f"{name}={value}" for name, value in given.items()]
        program = (sys.executable, "-u", "train.py", *arguments)
        started = []
        for index, space in enumerate(spaces):
            enter = (*(as_root.prefix() or ()), "ip", "netns", "exec", space, *me)
            command = [*enter, "env", "-i", *variables, f"JOB_COMPLETION_INDEX={index}", *program]
            started.append(
                subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            written = [process.communicate(timeout=180)[0] for process in started]
        finally:
            for process in started:
                as_root.end(process)
    assert [process.returncode for process in started] == [0, 0], "\n".join(written)
    assert f"worker 1 of worker 0 {names[0]}:12345, worker 1 {names[1]}:12345" in written[1]
    alone = run(
        "python", "train.py", "--epochs=2", "--simulated-devices=2", f"--run-dir={tmp_path / 'alone'}", folder=PROJECT
    )
    assert alone.returncode == 0, alone.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "default")]
    assert results[1]["test/loss"] == pytest.approx(results[0]["test/loss"], rel=1e-5)
