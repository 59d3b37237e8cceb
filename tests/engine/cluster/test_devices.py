"""GPU machines, by stand-ins: what the driver describes, and lists of devices. Nothing here runs on a GPU."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import train
from config import Config
from engine.cluster import devices, nvidia, parameter_servers
from engine.cluster import strategy as strategies
from engine.cluster.devices import describe_arithmetic
from engine.cluster.environment import Cluster
from engine.cluster.nvidia import gpus_of_machine, identify_gpus, visible_gpus
from engine.cluster.strategy import strategy_info
from engine.errors import BadInput
from engine.run.summary import describe_run, print_summary

A100 = {"device_name": "NVIDIA A100", "compute_capability": (8, 0)}
T4 = {"device_name": "Tesla T4", "compute_capability": (7, 5)}
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
SERVED = TF_CONFIG.replace('"worker": [', '"chief": ["c:1"], "ps": ["d:1"], "worker": [')

Machine = Callable[..., list[Any]]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /proc/driver/nvidia/gpus, of a machine with two GPUs."""
    for bus, uuid in (("0000:3b:00.0", "GPU-aaaa-1111"), ("0000:af:00.0", "GPU-bbbb-2222")):
        folder = tmp_path / "gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA A100\nGPU UUID: \t {uuid}\n", encoding="utf-8")
    (tmp_path / "boot_id").write_text("this-machine\n", encoding="utf-8")
    monkeypatch.setattr(nvidia, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(nvidia, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has TensorFlow list GPUs of the given details; returns the list of what is done with them, in order."""
    listed, calls = tf.config.list_physical_devices, []
    # What other tests have made stays, and what these make goes.
    monkeypatch.setattr(strategies, "_made", {})
    monkeypatch.setattr(strategies, "_infos", {})

    def noted(name: str) -> Callable[..., Any]:
        class Strategy:
            num_replicas_in_sync = 2

            def __init__(self, *arguments: Any, **options: Any) -> None:
                calls.append((name, *arguments, *options.values()))

        return Strategy

    def list_gpus(*details: dict[str, Any]) -> list[Any]:
        gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index, _ in enumerate(details)]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: gpus if kind == "GPU" else listed(kind)
        )
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details[gpus.index(gpu)])
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", noted("growth"))
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", noted("mirrored"))
        monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", noted("multi_worker"))
        return calls

    return list_gpus


def create(**settings: Any) -> tf.distribute.Strategy:
    return strategies.create_strategy(Config(**settings))


def cluster_that_says(monkeypatch: pytest.MonkeyPatch, *workers: dict[str, Any]) -> None:
    """Puts this process in a cluster, whose workers say this of themselves besides what this one says."""
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)

    def rendezvous(_: Cluster, facts: dict[str, Any], own: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        return {"worker 0": own, **{f"worker {index}": {**own, **each} for index, each in enumerate(workers, start=1)}}

    monkeypatch.setattr(strategies, "rendezvous", rendezvous)
    monkeypatch.setattr(strategies.console, "quiet", False)


# --- What there is ----------------------------------------------------------------------------------------------------


def test_visible_gpus_are_those_of_the_variable_or_of_the_driver_and_have_one_name(driver: Path, monkeypatch) -> None:
    assert gpus_of_machine() == ["0000:3b:00.0", "0000:af:00.0"]
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaaa, MIG-1, -1, 0"}) == ["GPU-aaaa", "MIG-1"]
    for none in ("", "-1", "NoDevFiles"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": none}) == []
    first, second = "this-machine 0000:3b:00.0", "this-machine 0000:af:00.0"
    assert identify_gpus({}, 2) == [first, second]
    assert identify_gpus({"CUDA_VISIBLE_DEVICES": "1"}, 1) == [second]
    assert identify_gpus({"CUDA_VISIBLE_DEVICES": "GPU-bbbb,0"}, 2) == [second, first]
    assert identify_gpus({"CUDA_VISIBLE_DEVICES": "MIG-7"}, 1) == ["this-machine MIG-7"]
    assert identify_gpus({}, 0) == []
    monkeypatch.setattr(nvidia, "NVIDIA_GPUS", driver / "not there")
    assert visible_gpus({}) == []


@pytest.mark.parametrize("hidden", [None, "-1"])
def test_gpus_that_tensorflow_cannot_use_are_reported_once(
    hidden: str | None, driver: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    machine()
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    create(simulated_devices=1)
    assert "WARNING" not in capsys.readouterr().out
    create()
    create()
    (warning,) = capsys.readouterr().out.splitlines()
    assert "this machine has 2 NVIDIA GPUs, and TensorFlow can use none" in warning
    assert "pip install 'tensorflow[and-cuda]'" in warning
    assert (f"CUDA_VISIBLE_DEVICES is {hidden!r}" in warning) is (hidden is not None)
    with pytest.raises(BadInput, match="--strategy mirrored needs GPUs and this machine has 2 NVIDIA GPUs"):
        create(strategy="mirrored")
    strategies._made.clear()
    monkeypatch.setattr(nvidia, "NVIDIA_GPUS", driver / "not there")
    create()
    assert capsys.readouterr().out == ""


def test_memory_of_all_gpus_grows_before_anything_starts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = machine(A100, A100)
    create()
    kinds = [call[0] for call in calls]
    assert kinds == ["growth", "growth", "mirrored"]
    assert [call[2] for call in calls[:2]] == [True, True]

    calls.clear()
    cluster_that_says(monkeypatch, {"gpus": ["another one"]})
    create()
    assert [call[0] for call in calls] == ["growth", "growth", "multi_worker"]

    calls.clear()
    monkeypatch.setenv("TF_CONFIG", SERVED)
    monkeypatch.setattr(strategies, "serve", lambda *_, **__: calls.append(("serve",)) or sys.exit())
    with pytest.raises(SystemExit):
        create(strategy="parameter_server")
    assert [call[0] for call in calls] == ["growth", "growth", "serve"]


def test_memory_of_a_served_worker_grows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def server(*_: Any, **options: Any) -> None:
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr(tf.distribute, "Server", server)
    cluster = Cluster("TF_CONFIG", {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "worker", 0)
    with pytest.raises(InterruptedError):
        parameter_servers.serve(cluster, timeout=1)
    assert given["config"].gpu_options.allow_growth


def test_gpu_that_cannot_grow_any_more_is_reported(machine: Machine, monkeypatch, capsys) -> None:
    machine(A100)

    def started(*_: Any) -> None:
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", started)
    create()
    assert "GPU:0: TensorFlow has already started (in task.py?) and takes all of its memory" in capsys.readouterr().out


# --- The plan and config.json -----------------------------------------------------------------------------------------


def test_plan_and_config_name_the_devices(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(8))
    train.build(Config(simulated_devices=2, global_batch_size=33))
    print_summary(train.run, train.batches, "with new weights")
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["devices"] == "2 simulated on 8 CPU cores"
    assert lines["all-reduce"] == "one_device"
    assert lines["arithmetic"] == "float32"
    assert lines["batch"] == "33 examples, 17 on each replica, 34 in all with padding"
    recorded = describe_run(train.run, train.batches, {})
    assert (recorded["devices"], recorded["arithmetic"]) == ("2 simulated on 8 CPU cores", "float32")

    machine()
    assert strategy_info(create()) == strategies.StrategyInfo("one_device", "1 replica(s)", "CPU, 8 cores")
    assert strategy_info(create(simulated_devices=1)).devices == "1 simulated on 8 CPU cores"
    assert strategy_info(create()).devices == "CPU, 8 cores"  # The same object, TensorFlow's default strategy.
    machine(A100, A100)
    assert strategy_info(create(strategy="one_device")).devices == "1 x NVIDIA A100"
    assert strategy_info(create(strategy="mirrored")).devices == "2 x NVIDIA A100"
    machine(A100, A100, T4)
    assert strategy_info(create(strategy="mirrored")).devices == "2 x NVIDIA A100, 1 x Tesla T4"
    machine()
    by_somebody_else = strategies.StrategyInfo("OneDeviceStrategy", "1 replica(s)", "CPU, 8 cores")
    assert strategy_info(tf.distribute.OneDeviceStrategy("CPU:0")) == by_somebody_else


def test_products_of_fewer_digits_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(A100)
    assert describe_arithmetic("float32", 0) == "float32 (TF32)"
    assert describe_arithmetic("float32", 2) == "float32"
    assert describe_arithmetic("mixed_bfloat16", 0) == "mixed_bfloat16"
    machine(T4)
    assert describe_arithmetic("float32", 0) == "float32"
    machine({})
    assert describe_arithmetic("float32", 0) == "float32"
    machine(A100)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: False)
    assert describe_arithmetic("float32", 0) == "float32"


# --- How gradients are summed -----------------------------------------------------------------------------------------


def test_gpus_of_a_machine_sum_as_asked_for(machine: Machine) -> None:
    calls = machine(A100, A100)
    for all_reduce, kind in (
        ("auto", type(None)),
        ("nccl", tf.distribute.NcclAllReduce),
        ("hierarchical_copy", tf.distribute.HierarchicalCopyAllReduce),
        ("one_device", tf.distribute.ReductionToOneDevice),
    ):
        calls.clear()
        strategy = create(all_reduce=all_reduce)
        assert create(strategy="mirrored", all_reduce=all_reduce) is strategy
        (made,) = [call for call in calls if call[0] == "mirrored"]
        assert made[1] == ["GPU:0", "GPU:1"]
        assert isinstance(made[2], kind)
        assert strategy_info(strategy).all_reduce == ("nccl" if all_reduce == "auto" else all_reduce)


def test_hierarchical_copy_is_refused_where_it_loses_a_replica(machine: Machine) -> None:
    summed = {}
    for replicas in (2, 3):
        places = [f"CPU:{index}" for index in range(replicas)]
        strategy = tf.distribute.MirroredStrategy(places, tf.distribute.HierarchicalCopyAllReduce())

        def ones() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce("SUM", [tf.ones([]), tf.ones([])])[0]

        per_replica = tf.function(strategy.run)(ones)
        summed[replicas] = {float(each) for each in strategy.experimental_local_results(per_replica)}
    assert summed == {2: {2.0}, 3: {2.0}}  # Where this is fixed, three need not be refused any more.
    machine(A100, A100, A100)
    with pytest.raises(BadInput, match=r"hierarchical_copy does not work with an odd number of GPUs \(3\)"):
        create(all_reduce="hierarchical_copy")


def test_sum_that_the_devices_cannot_have_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = create(simulated_devices=2)
    assert create(simulated_devices=2, all_reduce="one_device") is simulated
    with pytest.raises(BadInput, match="--all-reduce nccl does not work with --simulated-devices 2: use auto or one_"):
        create(simulated_devices=2, all_reduce="nccl")
    with pytest.raises(BadInput, match="--all-reduce nccl does not work with --strategy tpu: use auto"):
        create(strategy="tpu", all_reduce="nccl")
    machine()
    with pytest.raises(BadInput, match="--all-reduce nccl does not work with one CPU: use auto or one_device"):
        create(all_reduce="nccl")
    cluster_that_says(monkeypatch, {})
    with pytest.raises(BadInput, match="--all-reduce nccl does not work with workers without GPUs: use auto"):
        create(all_reduce="nccl")
    machine(A100)
    with pytest.raises(BadInput, match="--all-reduce one_device does not work with several workers: use auto or nccl"):
        create(all_reduce="one_device")


@pytest.mark.parametrize(
    ("cluster", "settings", "reason"),
    [
        ("", {"strategy": "multi_worker"}, "--strategy multi_worker needs a cluster"),
        ("", {"strategy": "parameter_server"}, "--strategy parameter_server needs a cluster with a chief"),
        (TF_CONFIG, {"strategy": "parameter_server"}, "--strategy parameter_server needs a cluster with a chief"),
        (TF_CONFIG, {"strategy": "mirrored"}, "--strategy mirrored does not fit, because TF_CONFIG"),
        (SERVED, {}, "multi_worker does not fit, .* of 4 processes .*: use --strategy parameter_s"),
        ("", {"strategy": "one_device", "simulated_devices": 2}, "--strategy one_device, which uses 1 in each"),
        ("", {"strategy": "tpu", "simulated_devices": 1}, "--strategy tpu, which uses 0"),
        (TF_CONFIG, {"simulated_devices": 2}, "--strategy multi_worker, which uses 1 in each process"),
    ],
)
def test_strategy_that_does_not_go_with_its_surroundings_is_refused(
    cluster: str, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(BadInput, match=reason):
        create(**settings)


def test_machines_sum_by_nccl_if_all_have_gpus_and_else_by_rings(machine: Machine, monkeypatch) -> None:
    implementations = tf.distribute.experimental.CommunicationImplementation
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(8))
    by_worker = {"nccl": "1 x NVIDIA A100 for each worker", "ring": "worker 0: CPU, 8 cores; worker 1: CPU, 4 cores"}
    for gpus, others, implementation, name in (
        ([A100], {"gpus": ["another one"]}, implementations.NCCL, "nccl"),
        ([], {"devices": "CPU, 4 cores"}, implementations.RING, "ring"),
    ):
        calls = machine(*gpus)
        calls.clear()
        strategies._made.clear()
        cluster_that_says(monkeypatch, others)
        strategy = create()
        (options,) = [call[1] for call in calls if call[0] == "multi_worker"]
        assert options.implementation == implementation
        assert options.timeout_seconds is None  # Each sum would keep two threads for so long.
        size, all_reduce = "2 workers, 2 replica(s)", f"{name} between the workers"
        assert strategy_info(strategy) == strategies.StrategyInfo("multi_worker", size, by_worker[name], all_reduce)


def test_gpu_that_two_workers_use_is_refused(driver: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    cluster_that_says(monkeypatch, {})
    with pytest.raises(BadInput, match=r"worker 0 and worker 1 use the same GPU 0000:af:00.0 of .*CUDA_VISIBLE"):
        create()
    cluster_that_says(monkeypatch, {"gpus": ["another-machine 0000:af:00.0"]})
    create()
    # Simulated devices use none.
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(
        strategies, "rendezvous", lambda _, facts, own, **__: said.append((facts, own)) or {"worker 0": own}
    )
    create(simulated_devices=1, epochs=7)
    ((facts, own),) = said
    assert (facts["--epochs"], facts["GPUs"], own["gpus"]) == (7, 0, [])
    assert facts["code"]["task.py"]
    assert "--run-dir" not in facts


# --- TPUs: a stand-in, as there is none to try it on ------------------------------------------------------------------


def test_tpu_is_found_connected_and_initialized_before_its_strategy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    tpu_strategy = type("Strategy", (), {"num_replicas_in_sync": 8})()

    def noted(name: str, result: Any = None) -> Any:
        return lambda *arguments, **options: calls.append((name, *arguments, *options.values())) or result

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", noted("find", "resolver"))
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", noted("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", noted("initialize"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", noted("strategy", tpu_strategy))
    monkeypatch.setenv("TPU_NAME", "mine")
    monkeypatch.setattr(strategies, "_made", {})
    assert create(strategy="tpu") is tpu_strategy
    assert strategy_info(tpu_strategy) == strategies.StrategyInfo("tpu", "8 replica(s)", "8 TPU cores")
    assert calls == [("find", "mine"), ("connect", "resolver"), ("initialize", "resolver"), ("strategy", "resolver")]

    def none_there(**_: Any) -> None:
        raise ValueError("Please provide a TPU Name to connect to.")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", none_there)
    strategies._made.clear()
    with pytest.raises(BadInput, match=r"--strategy tpu finds no TPU \(.*\): .*tensorflow-tpu 2\.20 "):
        create(strategy="tpu")
