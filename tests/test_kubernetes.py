"""The manifests in deploy/: valid by the published schemas, and what the pods are given makes them train one run."""

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
from kubeflow_trainer_api import models

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

from engine.cluster.environment import find_cluster
from engine.errors import BadInput, Diverged, PeerLost, Stopped

ENGINES = ("kubernetes", "jobset", "kubeflow")
TEXTS = {name: (PROJECT / "deploy" / f"{name}.yaml").read_text(encoding="utf-8") for name in (*ENGINES, "shared")}
DOCKERFILE = (PROJECT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): models.TrainerV1alpha1ClusterTrainingRuntime,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
}
Manifests = dict[str, dict[str, Any]]  # By kind.


def without_marks(text: str) -> str:
    """Returns a manifest with all its optional lines, after the commands of docs/clusters.md."""
    page = (PROJECT / "docs" / "clusters.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^ *sed -i -E ('.*') deploy/\*\.yaml", page)
    assert len(commands) == 3
    for command in commands:
        text = subprocess.run(
            ["bash", "-c", f"sed -E {command}"], input=text, capture_output=True, text=True, check=True
        ).stdout
    return text


def manifests(name: str, text: str | None = None) -> Manifests:
    return {each["kind"]: each for each in yaml.safe_load_all(text or TEXTS[name])}


def jobset_spec(described: Manifests) -> dict[str, Any] | None:
    """Returns the specification of the JobSet, which a runtime contains; None of a plain Job."""
    if runtime := described.get("ClusterTrainingRuntime"):
        return runtime["spec"]["template"]["spec"]
    return described["JobSet"]["spec"] if "JobSet" in described else None


def job_spec(described: Manifests) -> dict[str, Any]:
    if jobset := jobset_spec(described):
        (only,) = jobset["replicatedJobs"]
        return only["template"]["spec"]
    return described["Job"]["spec"]


def pod_spec(described: Manifests) -> dict[str, Any]:
    return job_spec(described)["template"]["spec"]


def container(described: Manifests) -> dict[str, Any]:
    """Returns the container as the pods have it: Trainer puts the TrainJob's fields in the place of the runtime's."""
    (only,) = pod_spec(described)["containers"]
    if "TrainJob" in described:
        trainer = described["TrainJob"]["spec"]["trainer"]
        return only | {"args": trainer["args"], "resources": trainer["resourcesPerNode"]}
    return only


def validate(each: dict[str, Any]) -> None:
    """Raises an exception if a manifest is not valid, or has a field that its schema does not know."""
    if model := MODELS.get((each["apiVersion"], each["kind"])):
        # from_dict drops what it does not know.
        assert model.from_dict(each).to_dict() == each
    else:
        # The oldest version in which pod failure policies are stable.
        kubernetes_validate.validate(each, "1.31", strict=True)


@pytest.mark.parametrize("name", [*ENGINES, "shared"])
def test_manifests_are_valid(name: str) -> None:
    without = without_marks(TEXTS[name])
    assert not re.findall(r"(?m)^ +#(?:gpu|data|queue) ", without)
    for marks, text in ((True, TEXTS[name]), (False, without)):
        described = manifests(name, text)
        for each in described.values():
            validate(each)
        if name == "shared":
            continue
        # The models know the fields of a pod, but not all their values.
        spec = job_spec(described)
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "training"}, "spec": spec})
        volumes = {volume["name"]: volume for volume in pod_spec(described)["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container(described)["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert list(mounts) == ["/runs", "/tmp", *([] if marks else ["/dev/shm", "/data"])]
        claim = volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"]
        assert claim == manifests("shared")["PersistentVolumeClaim"]["metadata"]["name"]
        limits = container(described)["resources"].get("limits")
        assert limits == (None if marks else {"nvidia.com/gpu": 8})
        labels = [each["metadata"].get("labels", {}) for each in described.values()]
        assert any("kueue.x-k8s.io/queue-name" in each for each in labels) != marks


def test_pods_are_the_same_on_all_engines() -> None:
    def common(name: str) -> dict[str, Any]:
        described = manifests(name)
        pod = {key: value for key, value in pod_spec(described).items() if key != "subdomain"}
        node = {key: value for key, value in container(described).items() if key != "env"}
        return pod | {"containers": [node], "metadata": job_spec(described)["template"]["metadata"]}

    assert common("kubernetes") == common("jobset") == common("kubeflow")


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    pod, node = pod_spec(manifests("jobset")), container(manifests("jobset"))
    assert pod["automountServiceAccountToken"] is False
    assert node["securityContext"].pop("readOnlyRootFilesystem") is True
    # What the standard "restricted" asks for: https://kubernetes.io/docs/concepts/security/pod-security-standards/
    assert node["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # The user of the image, as a number, because Kubernetes does not know its name.
    (user,) = re.findall(r"(?m)^USER (.*)$", DOCKERFILE)
    assert pod["securityContext"]["runAsUser"] == int(user) > 0
    # Only the workers reach each other, whatever the port.
    workers = {"podSelector": {"matchLabels": job_spec(manifests("jobset"))["template"]["metadata"]["labels"]}}
    policy = manifests("shared")["NetworkPolicy"]["spec"]
    assert policy == {**workers, "policyTypes": ["Ingress"], "ingress": [{"from": [workers]}]}


# How pods end, and how often the incident counts; None ends the training for good.
PEER_LOST = PeerLost.exit_code
DISRUPTED = "DisruptionTarget"
INCIDENTS = {
    "stopped with the state saved": ([Stopped.exit_code] * 8, 0),
    "one of eight crashes": ([1] + [PEER_LOST] * 7, 1),
    "only the network fails": ([PEER_LOST] * 2, 0),
    "a node is lost": ([PEER_LOST] * 3 + [DISRUPTED], 0),
    "a loss that is not finite": ([Diverged.exit_code] * 2, None),
    "bad input on one": ([PEER_LOST, BadInput.exit_code], None),
}


def rule_of(job: dict[str, Any], end: int | str) -> tuple[int, str] | None:
    """Returns the index and the action of the first rule that fits the end of a pod: an exit code, or a condition."""
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In"
        if end in codes["values"] or end in [each["type"] for each in rule.get("onPodConditions", [])]:
            return index, rule["action"]
    return None


def counts(described: Manifests, ends: list[int | str]) -> int | None:
    """Returns how often an incident counts; None if it ends the training for good. As is documented:

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
    https://jobset.sigs.k8s.io/docs/tasks/failure_policy/
    """
    job, jobset = job_spec(described), jobset_spec(described)
    rules = [rule_of(job, end) for end in ends]
    failed = [index for index, action in filter(None, rules) if action == "FailJob"]
    if jobset is None:
        return None if failed else rules.count(None)
    if failed:
        reason, message = "PodFailurePolicy", f"... with exit code ... matching FailJob rule at index {failed[0]}"
    elif rules.count(None) > job["backoffLimit"]:
        reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    else:
        return 0  # The Job replaces the pods, and the JobSet takes no notice.
    for rule in jobset["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return {"FailJobSet": None, "RestartJobSet": 1, "RestartJobSetAndIgnoreMaxRestarts": 0}[rule["action"]]
    return 1


@pytest.mark.parametrize("name", ENGINES)
def test_twenty_incidents_are_allowed_and_only_some_count(name: str) -> None:
    described = manifests(name)
    jobset = jobset_spec(described)
    limit = jobset["failurePolicy"]["maxRestarts"] if jobset else job_spec(described)["backoffLimit"]
    assert limit == 20
    for incident, (ends, expected) in INCIDENTS.items():
        assert counts(described, ends) == counts(described, ends[::-1]) == expected, incident


def environment(name: str, index: int) -> dict[str, str]:
    """Returns the variables that a pod gets, and under "hostname" the name by which the others reach it."""
    described = manifests(name)
    labels = {"batch.kubernetes.io/controller-uid": "uid-of-the-job"}
    if jobset := jobset_spec(described):
        # A JobSet has the name of its TrainJob. The first, and only, Job of a ReplicatedJob ends with -0.
        owner = described["TrainJob" if name == "kubeflow" else "JobSet"]["metadata"]["name"]
        job, service = f"{owner}-{jobset['replicatedJobs'][0]['name']}-0", owner
        labels |= {"jobset.sigs.k8s.io/jobset-name": owner, "jobset.sigs.k8s.io/jobset-uid": "uid-of-the-jobset"}
        assert "network" not in jobset  # It could give the Service another name.
    else:
        job, service = described["Job"]["metadata"]["name"], described["Service"]["metadata"]["name"]
        assert described["Service"]["spec"]["selector"] == job_spec(described)["template"]["metadata"]["labels"]
        assert pod_spec(described)["subdomain"] == service
    labels["batch.kubernetes.io/job-name"] = job
    given = {"JOB_COMPLETION_INDEX": str(index), "hostname": f"{job}-{index}.{service}"}
    if name == "kubeflow":
        # The policy "torch" of Trainer 2.
        assert described["ClusterTrainingRuntime"]["spec"]["mlPolicy"]["torch"] == {}
        nodes = described["TrainJob"]["spec"]["trainer"]["numNodes"]
        given |= {"PET_NNODES": str(nodes), "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "2"}
        given |= {"PET_MASTER_ADDR": f"{job}-0.{service}", "PET_MASTER_PORT": "29400"}
    for variable in container(described)["env"]:
        if "value" in variable:
            given[variable["name"]] = variable["value"]
        else:
            (label,) = re.findall(r"^metadata\.labels\['(.*)'\]$", variable["valueFrom"]["fieldRef"]["fieldPath"])
            given[variable["name"]] = labels[label]
    return given


def workers(name: str) -> int:
    described = manifests(name)
    if "TrainJob" in described:
        runtime, job = described["ClusterTrainingRuntime"], described["TrainJob"]["spec"]
        assert job["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
        # Trainer fills in the numbers of the Job that has this label.
        (replicated,) = jobset_spec(described)["replicatedJobs"]
        assert replicated["template"]["metadata"]["labels"] == {
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
        }
        return job["trainer"]["numNodes"]
    assert job_spec(described)["completions"] == job_spec(described)["parallelism"]
    return job_spec(described)["completions"]


@pytest.mark.parametrize("name", ENGINES)
def test_each_pod_finds_all_of_them(name: str) -> None:
    given = [environment(name, index) for index in range(workers(name))]
    for index, each in enumerate(given):
        cluster = find_cluster(each)
        assert cluster.addresses == {"worker": [f"{pod['hostname']}:12345" for pod in given]}
        assert (cluster.source, cluster.name) == ("Kubernetes", f"worker {index}")
        # It must outlive a restart: a JobSet then makes a new Job.
        assert each["TRAINING_START_ID"] == ("uid-of-the-job" if name == "kubernetes" else "uid-of-the-jobset")


@contextlib.contextmanager
def network() -> Iterator[list[str]]:
    """Makes a network namespace for each of two pods, with the addresses 10.231.0.1 and 10.231.0.2."""
    spaces = [f"pod{number}-{os.getpid()}" for number in range(2)]
    try:
        for space in spaces:
            as_root.run("ip", "netns", "add", space)
        first, second = spaces
        as_root.run(*f"ip link add peer netns {first} type veth peer name peer netns {second}".split())
        for number, space in enumerate(spaces, 1):
            for command in (f"addr add 10.231.0.{number}/24 dev peer", "link set peer up", "link set lo up"):
                as_root.run("ip", "-n", space, *command.split())
        yield spaces
    finally:
        for space in spaces:
            as_root.works("ip", "netns", "del", space)


# In the mount namespace that `ip netns exec` makes: the pods' names, and a folder in the place of the volumes; the rest
# can only be read.
MOUNTS = """
set -e
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1" "$1"
mount -o remount,bind,ro /
cd "$2"
shift 2
exec "$@"
"""


@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("ip") and as_root.works("unshare", "--net", "true")),
    reason="needs iproute2, and may make network namespaces",
)
def test_pods_train_one_run(tmp_path: Path) -> None:
    # Starting TensorFlow is most of the time, so the first pod is one of the JobSet and the second one of the TrainJob,
    # which have the same names. The pods of the plain Job are given what the JobSet's are.
    given = [environment(name, index) for index, name in enumerate(["jobset", "kubeflow"])]
    names = [each.pop("hostname") for each in given]
    hosts = (f"10.231.0.{number} {name}\n" for number, name in enumerate(names, 1))
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(hosts)}")
    (entry_point,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", DOCKERFILE)
    arguments = [each.replace("/runs", str(tmp_path)) for each in container(manifests("jobset"))["args"]]
    arguments[arguments.index("--epochs") + 1] = "2"
    # Only making the pod needs root; the program runs as whoever runs the test, without root's rights.
    user = ("setpriv", f"--reuid={os.getuid()}", f"--regid={os.getgid()}", "--clear-groups", "--no-new-privs")
    program = [*user, "--bounding-set=-all", "--inh-caps=-all", "env", "-i", f"HOME={tmp_path}", f"TMPDIR={tmp_path}"]
    program += [f"PATH={sys.prefix}/bin:{os.environ['PATH']}"]
    started = []
    with network() as spaces:
        for space, variables in zip(spaces, given, strict=True):
            enter = (*(as_root.prefix() or ()), "ip", "netns", "exec", space, "sh", "-c", MOUNTS, "sh")
            words = (f"{key}={value}" for key, value in variables.items())
            command = (*enter, tmp_path, PROJECT, *program, *words, *json.loads(entry_point), *arguments)
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        try:
            written = [process.communicate(timeout=180)[0] for process in started]
        finally:
            for process in started:
                as_root.end(process)
    assert [process.returncode for process in started] == [0, 0], "\n".join(written)
    assert f"worker 1 of worker 0 {names[0]}:12345, worker 1 {names[1]}:12345" in written[1]
    assert (tmp_path / "default/result.json").exists()
