"""GPU machines, by stand-ins: what the driver describes, and lists of devices. Nothing here runs on a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from config import Config
from engine.cluster import environment
from engine.cluster import strategy as strategies
from engine.cluster.environment import Cluster, visible_gpus
from engine.cluster.strategy import describe_arithmetic, strategy_info
from engine.errors import BadInput

A100 = {"device_name": "NVIDIA A100", "compute_capability": (8, 0)}
T4 = {"device_name": "Tesla T4", "compute_capability": (7, 5)}
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
SERVED = TF_CONFIG.replace('"worker": [', '"chief": ["c:1"], "ps": ["d:1"], "worker": [')

Machine = Callable[..., list[Any]]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /proc/driver/nvidia/gpus, of a machine with two GPUs."""
    for bus in ("0000:3b:00.0", "0000:af:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    monkeypatch.setattr(environment, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Has TensorFlow list GPUs of the given details; returns the list of what is done with them, in order."""
    listed, calls = tf.config.list_physical_devices, []
    # What other tests have made stays, and what these make goes.
    monkeypatch.setattr(strategies, "_made", {})

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


def cluster_with(monkeypatch: pytest.MonkeyPatch, devices: str) -> None:
    """Puts this process in a cluster, whose other worker has these devices."""
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)

    def rendezvous(_: Cluster, facts: dict[str, Any], own: str, *, timeout: float) -> dict[str, Any]:
        return {"worker 0": own, "worker 1": devices}

    monkeypatch.setattr(strategies, "rendezvous", rendezvous)
    monkeypatch.setattr(strategies.console, "quiet", False)


def test_visible_gpus_are_those_of_the_variable_or_of_the_driver(driver: Path) -> None:
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaaa, MIG-1, -1, 0"}) == ["GPU-aaaa", "MIG-1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_gpus_that_tensorflow_cannot_use_are_reported_once(
    driver: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    machine()
    create(simulated_devices=1)
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    create()
    create()
    (warning,) = capsys.readouterr().out.splitlines()
    assert "this machine has 2 NVIDIA GPU(s), and TensorFlow can use none (CUDA_VISIBLE_DEVICES is '-1': " in warning
    assert "pip install 'tensorflow[and-cuda]'" in warning
    with pytest.raises(BadInput, match="--strategy mirrored needs GPUs and this machine has 2 NVIDIA GPU"):
        create(strategy="mirrored")
    strategies._made.clear()
    monkeypatch.setattr(environment, "NVIDIA_GPUS", driver / "not there")
    create()
    assert capsys.readouterr().out == ""


def test_memory_of_all_gpus_grows_before_anything_starts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = machine(A100, A100)
    create()
    assert [call[0] for call in calls] == ["growth", "growth", "mirrored"]
    assert [call[2] for call in calls[:2]] == [True, True]

    calls.clear()
    cluster_with(monkeypatch, "")
    create()
    assert [call[0] for call in calls] == ["growth", "growth", "multi_worker"]

    # With parameter servers each server is told, too.
    def server(*_: Any, config: Any, **__: Any) -> None:
        assert config.gpu_options.allow_growth
        raise InterruptedError

    calls.clear()
    monkeypatch.setattr(tf.distribute, "Server", server)
    monkeypatch.setenv("TF_CONFIG", SERVED)
    with pytest.raises(InterruptedError):
        create(strategy="parameter_server")
    assert [call[0] for call in calls] == ["growth", "growth"]


def test_devices_are_described(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies.os, "sched_getaffinity", lambda _: range(8))
    machine()
    assert strategy_info(create()) == strategies.StrategyInfo("one_device", "1 replica(s)", "CPU, 8 cores")
    two = strategies.StrategyInfo("mirrored", "2 replica(s)", "2 simulated on 8 CPU cores", "one_device")
    assert strategy_info(create(simulated_devices=2)) == two
    assert strategy_info(create(simulated_devices=1)).devices == "1 simulated on 8 CPU cores"
    assert strategy_info(create()).devices == "CPU, 8 cores"  # The same object, TensorFlow's default strategy.
    machine(A100, A100)
    assert strategy_info(create(strategy="one_device")).devices == "1 x NVIDIA A100"
    machine(A100, A100, T4)
    assert strategy_info(create(strategy="mirrored")).devices == "2 x NVIDIA A100, 1 x Tesla T4"
    by_somebody_else = strategies.StrategyInfo("OneDeviceStrategy", "1 replica(s)", "2 x NVIDIA A100, 1 x Tesla T4")
    assert strategy_info(tf.distribute.OneDeviceStrategy("CPU:0")) == by_somebody_else


def test_products_of_fewer_digits_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(A100)
    assert describe_arithmetic("float32", 0) == "float32 (TF32)"
    assert describe_arithmetic("float32", 2) == "float32"
    assert describe_arithmetic("mixed_bfloat16", 0) == "mixed_bfloat16"
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: False)
    assert describe_arithmetic("float32", 0) == "float32"
    machine(T4)
    assert describe_arithmetic("float32", 0) == "float32"


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
        ((name, places, reduction),) = [call for call in calls if call[0] != "growth"]
        assert (name, places, type(reduction)) == ("mirrored", ["GPU:0", "GPU:1"], kind)
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
    with pytest.raises(BadInput, match=r"hierarchical_copy does not work with --strategy mirrored on 3 GPU"):
        create(all_reduce="hierarchical_copy")


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [  # TF_CONFIG, GPUs, settings, what is said.
    ("", 0, {"strategy": "multi_worker"}, "--strategy multi_worker needs a cluster"),
    (TF_CONFIG, 0, {"strategy": "parameter_server"}, "--strategy parameter_server needs a cluster with a chief"),
    (TF_CONFIG, 0, {"strategy": "mirrored"}, "--strategy mirrored does not fit, because TF_CONFIG"),
    (SERVED, 0, {}, "multi_worker does not fit, .* of 4 processes .*: use --strategy parameter_s"),
    ("", 0, {"strategy": "one_device", "simulated_devices": 2}, "--strategy one_device, which uses 1 in each"),
    ("", 0, {"strategy": "tpu", "simulated_devices": 1}, "--strategy tpu, which uses 0"),
    (TF_CONFIG, 0, {"simulated_devices": 2}, "--strategy multi_worker, which uses 1 in each process"),
    ("", 0, {"simulated_devices": 2, "all_reduce": "nccl"}, "--strategy mirrored on 0 GPU.*: use auto or one_device"),
    ("", 0, {"strategy": "tpu", "all_reduce": "nccl"}, "nccl does not work with --strategy tpu on 0 GPU.*: use auto"),
    ("", 0, {"all_reduce": "nccl"}, "--strategy one_device on 0 GPU.*: use auto or one_device"),
    (TF_CONFIG, 0, {"all_reduce": "nccl"}, "--strategy multi_worker on 0 GPU.*: use auto"),
    (TF_CONFIG, 1, {"all_reduce": "one_device"}, "--strategy multi_worker on 1 GPU.*: use auto or nccl"),
]


def test_strategy_that_does_not_go_with_its_surroundings_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster, gpus, settings, reason in REFUSED:
        machine(*[A100] * gpus)
        monkeypatch.setenv("TF_CONFIG", cluster)
        with pytest.raises(BadInput, match=reason):
            create(**settings)


def test_machines_sum_by_nccl_if_all_have_gpus_and_else_by_rings(machine: Machine, monkeypatch) -> None:
    implementations = tf.distribute.experimental.CommunicationImplementation
    monkeypatch.setattr(strategies.os, "sched_getaffinity", lambda _: range(8))
    by_worker = {"nccl": "1 x NVIDIA A100 for each worker", "ring": "worker 0: CPU, 8 cores; worker 1: CPU, 4 cores"}
    for gpus, others, implementation, name in (
        ([A100], "1 x NVIDIA A100", implementations.NCCL, "nccl"),
        ([], "CPU, 4 cores", implementations.RING, "ring"),
    ):
        calls = machine(*gpus)
        calls.clear()
        strategies._made.clear()
        cluster_with(monkeypatch, others)
        strategy = create()
        (options,) = [call[1] for call in calls if call[0] == "multi_worker"]
        assert options.implementation == implementation
        assert options.timeout_seconds is None  # Each sum would keep two threads for so long.
        size, all_reduce = "2 workers, 2 replica(s)", f"{name} between the workers"
        assert strategy_info(strategy) == strategies.StrategyInfo("multi_worker", size, by_worker[name], all_reduce)


def test_workers_compare_their_settings_and_code(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(A100)
    said: list[dict[str, Any]] = []
    cluster_with(monkeypatch, "")
    monkeypatch.setattr(strategies, "rendezvous", lambda _, *given, **__: said.extend(given) or {"worker 0": given[1]})
    create(simulated_devices=1, epochs=7)
    facts, _ = said
    assert (facts["--epochs"], facts["GPUs"]) == (7, 0)  # Simulated devices use no GPU.
    assert facts["code"]["task.py"]
    assert "--run-dir" not in facts


def test_tpu_is_initialized_before_use_and_an_absent_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def noted(name: str, result: Any = None) -> Any:
        return lambda *arguments, **options: calls.append((name, *arguments, *options.values())) or result

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", noted("find", "resolver"))
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", noted("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", noted("initialize"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", noted("strategy", SimpleNamespace(num_replicas_in_sync=8)))
    monkeypatch.setenv("TPU_NAME", "mine")
    _, info = strategies._create("tpu", Config(), 0, None)
    assert info == strategies.StrategyInfo("tpu", "8 replica(s)", "8 TPU cores")
    assert calls == [("find", "mine"), *((each, "resolver") for each in ("connect", "initialize", "strategy"))]
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", lambda **_: int("none"))  # A ValueError.
    with pytest.raises(BadInput, match=r"--strategy tpu finds no TPU \(.*\): .*tensorflow-tpu 2\.20 "):
        create(strategy="tpu")
