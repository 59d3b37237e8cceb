"""The tf.distribute strategy that the settings and the environment ask for.

TensorFlow silently trains on the CPU where devices are missing, so that is rejected. Untested on several GPUs and TPUs.
"""

import dataclasses
import functools
import os
import socket
from typing import Any

import tensorflow as tf

from engine.cluster import parameter_servers
from engine.cluster.devices import describe_own_devices, let_gpu_memory_grow
from engine.cluster.environment import Cluster, find_cluster, reject_cluster
from engine.cluster.nvidia import identify_gpus, why_no_gpu
from engine.cluster.rendezvous import rendezvous
from engine.cluster.tensorflow_start import start_tensorflow
from engine.console import console
from engine.errors import BadInput, first_line
from engine.machine import shared_facts
from engine.settings import Settings, flag

ALREADY_STARTED = "TensorFlow has already started in this process: make tensors in the hooks, not on import of task.py"


@dataclasses.dataclass(frozen=True)
class StrategyInfo:
    """Facts about a strategy, for the run summary and config.json."""

    name: str  # The value of --strategy.
    size: str  # "2 workers, 4 replica(s)"
    devices: str  # "2 x NVIDIA A100", "CPU, 2 cores"
    all_reduce: str = ""  # How values are summed over devices: "nccl"; "" where they are not.


# Two strategies over one set of GPUs share collective keys and abort each other (tensorflow#61314).
_made: dict[tuple[Any, ...], tuple[tf.distribute.Strategy, StrategyInfo]] = {}
_infos: dict[tf.distribute.Strategy, StrategyInfo] = {}


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
    if name == "parameter_server":
        cluster = parameter_servers.check(settings, cluster)
    _check_cluster(name, cluster)
    _check_devices(name, simulated, gpus)
    _check_all_reduce(name, settings, gpus)
    if simulated:
        _simulate(simulated)

    # Simulated devices have one way to sum.
    key = (name, simulated) if simulated else (name, gpus, settings.all_reduce)
    if key not in _made:
        # TensorFlow itself says nothing (tensorflow#63362, tensorflow#85689).
        uses_cpu = not simulated and not gpus and name in ("one_device", "multi_worker")
        if uses_cpu and (reason := why_no_gpu(os.environ)):
            console.print(f"WARNING: trained on the CPU, because {reason}")
        _made[key] = _create(name, settings, gpus, cluster)
    strategy, info = _made[key]
    _infos[strategy] = info  # TensorFlow's default strategy belongs to several keys.
    return strategy


def strategy_info(strategy: tf.distribute.Strategy) -> StrategyInfo:
    """Returns the facts about a strategy, also about one that create_strategy has not made."""
    replicas = f"{strategy.num_replicas_in_sync} replica(s)"
    return _infos.get(strategy) or StrategyInfo(type(strategy).__name__, replicas, describe_own_devices(0))


# --- Rules ------------------------------------------------------------------------------------------------------------


def _check_cluster(name: str, cluster: Cluster | None) -> None:
    if name == "multi_worker" and not cluster:
        raise BadInput(
            "--strategy multi_worker needs a cluster: use srun, deploy/kubernetes.yaml or python launch.py --workers 2 "
            "-- ..."
        )
    needed = "parameter_server" if cluster and "ps" in cluster.addresses else "multi_worker"
    if cluster and name not in (needed, "tpu"):
        raise BadInput(
            f"--strategy {name} does not fit, because {cluster.source} describes a cluster of "
            f"{len(cluster.processes())} processes ({', '.join(cluster.addresses)}): use --strategy {needed}, or start "
            f"the program without {cluster.source}"
        )


def _check_devices(name: str, simulated: int, gpus: int) -> None:
    most = {"mirrored": simulated, "one_device": 1, "multi_worker": 1}.get(name, 0)
    if simulated > most:
        raise BadInput(
            f"--simulated-devices {simulated} is too high for --strategy {name}, which uses {most} in each process: "
            "remove it, or use --strategy mirrored in one process"
        )
    if name == "mirrored" and not simulated and not gpus:
        reason = why_no_gpu(os.environ) or "this machine shows none"
        raise BadInput(
            f"--strategy mirrored needs GPUs and {reason}: use --simulated-devices N, or --strategy one_device"
        )


def _check_all_reduce(name: str, settings: Settings, gpus: int) -> None:
    asked, simulated = settings.all_reduce, settings.simulated_devices
    if name in ("tpu", "parameter_server"):
        where, possible = f"--strategy {name}", ["auto"]
    elif name == "multi_worker":
        where, possible = ("several workers", ["auto", "nccl"]) if gpus else ("workers without GPUs", ["auto"])
    elif not gpus:
        where, possible = f"--simulated-devices {simulated}" if simulated else "one CPU", ["auto", "one_device"]
    elif name == "mirrored" and gpus % 2:
        # HierarchicalCopyAllReduce drops the last of three replicas on the CPU.
        where, possible = f"an odd number of GPUs ({gpus})", ["auto", "nccl", "one_device"]
    else:
        return
    if asked not in possible:
        raise BadInput(f"--all-reduce {asked} does not work with {where}: use {' or '.join(possible)}")


def _check_gpus_are_not_shared(workers: dict[str, dict[str, Any]]) -> None:
    """Raises BadInput if two workers use the same GPU; `workers` is the `own` of each."""
    users: dict[str, str] = {}
    for worker, own in workers.items():
        for gpu in own["gpus"]:
            if (user := users.setdefault(gpu, worker)) != worker:
                raise BadInput(
                    f"{user} and {worker} use the same GPU {gpu.split()[-1]} of {own['host']}: set "
                    "CUDA_VISIBLE_DEVICES for each worker, as launch.py does"
                )


# --- The strategies ---------------------------------------------------------------------------------------------------


def _create(
    name: str, settings: Settings, gpus: int, cluster: Cluster | None
) -> tuple[tf.distribute.Strategy, StrategyInfo]:
    devices = describe_own_devices(settings.simulated_devices, only_one=name == "one_device")
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
        strategy = _mirrored(settings.simulated_devices, gpus, asked)
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
            f"--simulated-devices {count} is more than {len(configured)}, with which {ALREADY_STARTED}. In one "
            "process, use the largest number first"
        ) from None


def _mirrored(simulated: int, gpus: int, all_reduce: str) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(simulated)] or [f"GPU:{index}" for index in range(gpus)]
    # One by one, because the order in which tf.add_n takes three or more depends on the timing.
    sum_in_order = functools.partial(functools.reduce, tf.add)
    reductions = {
        "auto": lambda: None,  # TensorFlow's own choice: collective operations by NCCL.
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "one_device": functools.partial(tf.distribute.ReductionToOneDevice, accumulation_fn=sum_in_order),
    }
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reductions[all_reduce]())


def _multi_worker(cluster: Cluster, gpus: int, devices: str, settings: Settings) -> tuple[tf.distribute.Strategy, str]:
    """Returns the strategy and the devices of the workers, after the rendezvous with them."""
    console.print(f"{cluster.name} of {', '.join(map(' '.join, cluster.processes().items()))}")
    # Only the chief uses --run-dir.
    facts = {flag(name): value for name, value in settings.as_json().items() if name != "run_dir"}
    facts |= {**shared_facts(), "GPUs": gpus}
    own = {"host": socket.gethostname(), "devices": devices, "gpus": identify_gpus(os.environ, gpus)}
    workers = rendezvous(cluster, facts, own, timeout=settings.cluster_timeout)
    _check_gpus_are_not_shared(workers)
    console.quiet = not cluster.is_chief
    # Without timeout_seconds, which keeps two threads per sum for that time: `peers_named` finds who is gone.
    options = tf.distribute.experimental.CommunicationOptions(implementation="NCCL" if gpus else "RING")
    try:
        start = functools.partial(tf.distribute.MultiWorkerMirroredStrategy, communication_options=options)
        strategy = start_tensorflow(cluster, settings.cluster_timeout, start)
    except RuntimeError as problem:
        if "program startup" not in str(problem):
            raise
        raise BadInput(f"--strategy multi_worker: {ALREADY_STARTED}") from None
    if all(own["devices"] == devices for own in workers.values()):
        return strategy, f"{devices} for each worker"
    return strategy, "; ".join(f"{worker}: {own['devices']}" for worker, own in workers.items())


def _tpu() -> tf.distribute.Strategy:
    """Connects as TensorFlow's guide "Use TPUs" does. Untested."""
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
