"""The tf.distribute strategy that the settings and the environment ask for.

TensorFlow silently trains on the CPU where devices are missing, so that is rejected. Untested on several GPUs and TPUs.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import platform
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from engine.cluster import parameter_servers
from engine.cluster.environment import Cluster, find_cluster, reject_cluster, why_no_gpu
from engine.cluster.peers import start_tensorflow
from engine.cluster.rendezvous import rendezvous
from engine.console import console
from engine.errors import BadInput, first_line
from engine.machine import code_sha256, versions
from engine.settings import Settings, flag


@dataclasses.dataclass(frozen=True)
class StrategyInfo:
    """Facts about a strategy, for the run summary and config.json."""

    name: str  # The value of --strategy.
    size: str  # "2 workers, 4 replica(s)"
    devices: str  # "2 x NVIDIA A100", "CPU, 2 cores"
    all_reduce: str = ""  # How values are summed over devices: "nccl"; "" where they are not.


Made = tuple[tf.distribute.Strategy, StrategyInfo]
# Two strategies over one set of GPUs share collective keys and abort each other (tensorflow#61314). The newest is last.
_made: dict[tuple[Any, ...], Made] = {}


def create_strategy(settings: Settings) -> tf.distribute.Strategy:
    """Returns the strategy for the settings, the same object for the same devices.

    In a cluster it waits for the other processes, whose settings must be equal. Call it before anything else uses
    TensorFlow: once the runtime has started, devices cannot be simulated and a cluster cannot be joined. Raises
    BadInput if devices are missing, or the cluster does not fit the settings.
    """
    if settings.eager:
        reject_cluster("--eager")
    let_gpu_memory_grow()
    # Otherwise graph optimization merges a gradient's sum and the sum over replicas into one AddN. With three or more
    # terms, the term that AddN starts with depends on the timing, and so does the last digit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    cluster, simulated = find_cluster(os.environ), settings.simulated_devices
    gpus = 0 if simulated else len(tf.config.list_physical_devices("GPU"))
    name: str = settings.strategy
    if name == "auto":
        name = "multi_worker" if cluster else "mirrored" if (simulated or gpus) > 1 else "one_device"
    if problem := next(_problems(name, settings, gpus, cluster), ""):
        raise BadInput(problem)
    if simulated:
        _simulate(simulated)

    # Simulated devices have one way to sum.
    key = (name, simulated) if simulated else (name, gpus, settings.all_reduce)
    # TensorFlow itself says nothing (tensorflow#63362, tensorflow#85689).
    uses_cpu = not simulated and not gpus and name in ("one_device", "multi_worker")
    if key not in _made and uses_cpu and (reason := why_no_gpu(os.environ)):
        console.print(f"WARNING: trained on the CPU, because {reason}")
    _made[key] = _made.pop(key) if key in _made else _create(name, settings, gpus, cluster)
    return _made[key][0]


def strategy_info(strategy: tf.distribute.Strategy) -> StrategyInfo:
    """Returns the facts about a strategy, also about one that create_strategy has not made."""
    # TensorFlow's default strategy may be there several times, with other devices.
    infos = [info for made, info in reversed(_made.values()) if made is strategy]
    replicas = f"{strategy.num_replicas_in_sync} replica(s)"
    return infos[0] if infos else StrategyInfo(type(strategy).__name__, replicas, _describe_devices(0))


def _problems(name: str, settings: Settings, gpus: int, cluster: Cluster | None) -> Iterator[str]:
    """Yields why the strategy of this name does not go with the settings, the devices or the cluster."""
    if name == "parameter_server":
        yield from parameter_servers.problems(settings, cluster)
    simulated = settings.simulated_devices
    needed = "parameter_server" if cluster and "ps" in cluster.addresses else "multi_worker"
    if name == "multi_worker" and not cluster:
        yield (
            "--strategy multi_worker needs a cluster: use srun, deploy/kubernetes.yaml or python launch.py --workers 2 "
            "-- ..."
        )
    if cluster and name not in (needed, "tpu"):
        yield (
            f"--strategy {name} does not fit, because {cluster.source} describes a cluster of "
            f"{len(cluster.processes())} processes ({', '.join(cluster.addresses)}): use --strategy {needed}, or start "
            f"the program without {cluster.source}"
        )
    most = {"mirrored": simulated, "one_device": 1, "multi_worker": 1}.get(name, 0)
    if simulated > most:
        yield (
            f"--simulated-devices {simulated} is too high for --strategy {name}, which uses {most} in each process: "
            "remove it, or use --strategy mirrored in one process"
        )
    if name == "mirrored" and not simulated and not gpus:
        reason = why_no_gpu(os.environ) or "this machine shows none"
        yield f"--strategy mirrored needs GPUs and {reason}: use --simulated-devices N, or --strategy one_device"
    possible = ["auto"]
    if gpus and name in ("mirrored", "one_device", "multi_worker"):
        possible += ["nccl"]
    if name in ("mirrored", "one_device"):
        possible += ["one_device"]
        # HierarchicalCopyAllReduce drops the last of three replicas on the CPU.
        possible += ["hierarchical_copy"] if gpus and (name == "one_device" or not gpus % 2) else []
    if settings.all_reduce not in possible:
        yield (
            f"--all-reduce {settings.all_reduce} does not work with --strategy {name} on {gpus} GPU(s): use "
            f"{' or '.join(possible)}"
        )


def _create(name: str, settings: Settings, gpus: int, cluster: Cluster | None) -> Made:
    devices = _describe_devices(settings.simulated_devices, only_one=name == "one_device")
    if cluster and name == "parameter_server":
        strategy, size = parameter_servers.start(cluster, timeout=settings.cluster_timeout)
        return strategy, StrategyInfo(name, size, f"{devices} (the chief; the workers have their own)")
    workers = all_reduce = ""
    if cluster and name == "multi_worker":
        strategy, devices = _multi_worker(cluster, gpus, devices, settings)
        workers = f"{len(cluster.processes())} workers, "
        all_reduce = f"{'nccl' if gpus else 'ring'} between the workers"
    elif name == "mirrored":
        # Collectives between simulated devices cost more than a sum on one of them.
        asked = settings.all_reduce if gpus else "one_device"
        # One by one, because the order in which tf.add_n takes three or more depends on the timing.
        sum_in_order = functools.partial(functools.reduce, tf.add)
        reductions = {
            "auto": lambda: None,  # TensorFlow's own choice: collective operations by NCCL.
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
            "one_device": functools.partial(tf.distribute.ReductionToOneDevice, accumulation_fn=sum_in_order),
        }
        places = [f"{'GPU' if gpus else 'CPU'}:{index}" for index in range(gpus or settings.simulated_devices)]
        strategy = tf.distribute.MirroredStrategy(places, cross_device_ops=reductions[asked]())
        all_reduce = "nccl" if asked == "auto" else asked
    elif name == "tpu":
        strategy = _tpu()
        devices = f"{strategy.num_replicas_in_sync} TPU cores"
    else:
        # TensorFlow's default strategy has none of MirroredStrategy's cost on a single device.
        strategy = tf.distribute.get_strategy()
    size = f"{workers}{strategy.num_replicas_in_sync} replica(s)"
    return strategy, StrategyInfo(name, size, devices, all_reduce)


def _simulate(count: int) -> None:
    """Splits the CPU into at least `count` logical devices."""
    tf.config.set_visible_devices([], "GPU")  # Otherwise operations that are placed on no device would run on a GPU.
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        raise BadInput(
            f"--simulated-devices {count} is more than {len(configured)}, with which TensorFlow has already "
            "started in this process: make tensors in the hooks, not on import of task.py. In one process, use the "
            "largest number first"
        ) from None


def _multi_worker(cluster: Cluster, gpus: int, devices: str, settings: Settings) -> tuple[tf.distribute.Strategy, str]:
    console.print(f"{cluster.name} of {', '.join(map(' '.join, cluster.processes().items()))}")
    # Only the chief uses --run-dir.
    facts = {flag(name): value for name, value in settings.as_json().items() if name != "run_dir"}
    python = ".".join(platform.python_version_tuple()[:2])  # Patch releases may differ.
    facts |= {"code": code_sha256(), **versions(), "python": python, "GPUs": gpus}
    workers = rendezvous(cluster, facts, devices, timeout=settings.cluster_timeout)
    console.quiet = not cluster.is_chief
    # Without timeout_seconds, which keeps two threads per sum for that time: `peers_named` finds who is gone.
    options = tf.distribute.experimental.CommunicationOptions(implementation="NCCL" if gpus else "RING")
    start = functools.partial(tf.distribute.MultiWorkerMirroredStrategy, communication_options=options)
    strategy = start_tensorflow(cluster, settings.cluster_timeout, start)
    if set(workers.values()) == {devices}:
        return strategy, f"{devices} for each worker"
    return strategy, "; ".join(map(": ".join, workers.items()))


def _tpu() -> tf.distribute.Strategy:
    try:
        # "local" is the TPU of this virtual machine.
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=os.environ.get("TPU_NAME", "local"))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as problem:
        raise BadInput(
            f"--strategy tpu finds no TPU ({first_line(problem)}): for the TPU of this machine install tensorflow-tpu "
            "2.20 instead of tensorflow (docs/clusters.md), for another one set TPU_NAME"
        ) from problem
    return tf.distribute.TPUStrategy(resolver)


def let_gpu_memory_grow() -> None:
    """Has TensorFlow take GPU memory as it needs it; otherwise one process takes all, and no second one can start."""
    for gpu in tf.config.list_physical_devices("GPU"):
        # TensorFlow has started before, or the GPU was divided into virtual devices, each with its own limit.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _describe_devices(simulated_devices: int, *, only_one: bool = False) -> str:
    """Returns the devices of this process: "2 x NVIDIA A100", "4 simulated on 2 CPU cores", "CPU, 2 cores"."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{count} core{'s' * (count > 1)}"
    if simulated_devices:
        return f"{simulated_devices} simulated on {cores.replace('core', 'CPU core')}"
    gpus = tf.config.list_physical_devices("GPU")[: 1 if only_one else None]
    details = map(tf.config.experimental.get_device_details, gpus)
    names = collections.Counter(detail.get("device_name", "GPU") for detail in details)
    return ", ".join(f"{number} x {name}" for name, number in names.items()) or f"CPU, {cores}"


def describe_arithmetic(precision: str, simulated_devices: int) -> str:
    """Returns the precision of the layers: "float32 (TF32)" where GPUs multiply float32 to about 3e-4 only.

    NVIDIA's GPUs do so from Ampere (compute capability 8.0) on, unless it is turned off (tensorflow#127346).
    """
    gpus = [] if simulated_devices else tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    capable = any(tuple(detail.get("compute_capability", ())) >= (8, 0) for detail in details)
    enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    return f"{precision} (TF32)" if precision == "float32" and capable and enabled else precision
