"""From a strategy's name to the tf.distribute strategy: real or simulated devices, one machine or a cluster of them.

Devices that are asked for and not there are refused, and GPUs that TensorFlow cannot use are reported: by itself it
would train on the CPU without a word. Nothing here was measured on GPUs or TPUs.
"""

import contextlib
import functools
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.cluster.asynchronous import coordinate, serve
from engine.cluster.devices import describe_own_devices, let_gpu_memory_grow, warn_of_unused_gpus
from engine.cluster.environment import find_cluster
from engine.cluster.meeting import ended_after, join
from engine.cluster.nvidia import identify_gpus, why_no_gpu
from engine.console import console
from engine.errors import BadInput
from engine.mistakes import first_line


def create_strategy(
    name: str,
    simulated_devices: int = 0,
    *,
    cluster_timeout: float = 300.0,
    facts: dict[str, Any] | None = None,
    all_reduce: str = "auto",
) -> tf.distribute.Strategy:
    """Returns the strategy for `name`, one of --strategy.

    Call it before anything else uses TensorFlow: devices cannot be simulated, and a cluster cannot be joined, once the
    runtime has started. The same devices give the same strategy object, because two strategies over one set of GPUs
    share collective keys and abort each other (tensorflow#61314).

    Args:
        name: "auto" is "multi_worker" where the environment describes a cluster, else "one_device" on one device and
            "mirrored" on several.
        simulated_devices: logical CPU devices to make and use in this process; 0 uses this machine's GPUs, or its CPU
            if it has none.
        cluster_timeout: seconds to wait for the other tasks of a cluster.
        facts: JSON values that have to be equal in all tasks of a cluster, such as the settings.
        all_reduce: how "mirrored" sums over the GPUs, one of --all-reduce. "auto" is NCCL on GPUs, also between
            machines.

    Raises:
        BadInput: the devices asked for are not there, or the cluster is not what it has to be.
    """
    let_gpu_memory_grow()
    # Else graph optimization joins a gradient's sum and the one over replicas to one sum (AddN) of all their parts. One
    # of three or more begins with a part whose memory it may reuse, which the timing decides, and so the last digit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    cluster = find_cluster(os.environ)
    if all_reduce != "auto" and name in ("tpu", "parameter_server"):
        raise BadInput(f"--all-reduce {all_reduce} with --strategy {name}, which sums in its own way: leave it out")
    if name == "tpu":
        return _tpu()
    if name == "parameter_server":
        return _parameter_server(cluster_timeout)
    if cluster and cluster.has_parameter_servers:
        raise BadInput(
            f"{cluster.source} describes parameter servers, and --strategy is {name}: use --strategy parameter_server, "
            "which is asynchronous, or a cluster of workers only"
        )
    if cluster and name not in ("auto", "multi_worker"):
        raise BadInput(
            f"--strategy {name}, and {cluster.source} describes a cluster of {len(cluster.tasks())}: use "
            f"--strategy multi_worker, or start it without {cluster.source}"
        )
    if name == "multi_worker" and not cluster:
        raise BadInput(
            "--strategy multi_worker needs a cluster, and neither TF_CONFIG nor Slurm nor Kubernetes describes one of "
            "several tasks: start the program with srun, or python launch.py --workers 2 -- ..."
        )
    if cluster and all_reduce not in ("auto", "nccl"):
        raise BadInput(f"--all-reduce {all_reduce} is for one machine: between machines use auto or nccl")
    devices = _simulate(simulated_devices) if simulated_devices else _gpus()
    if not devices and name != "mirrored":
        warn_of_unused_gpus()
    if cluster:
        return _multi_worker(simulated_devices, cluster_timeout, json.dumps(facts or {}), all_reduce)
    if name == "auto":
        name = "mirrored" if len(devices) > 1 else "one_device"
    if name == "one_device" and simulated_devices > 1:
        raise BadInput(
            f"--simulated-devices {simulated_devices} with --strategy one_device: one device is used; "
            "use --strategy mirrored, or leave --simulated-devices out"
        )
    if name == "mirrored" and not devices:
        raise BadInput(
            f"--strategy mirrored needs GPUs and {why_no_gpu(os.environ) or 'this machine shows none'}: use "
            "--simulated-devices N for N replicas on the CPU, or --strategy one_device"
        )
    if simulated_devices and all_reduce not in ("auto", "one_device"):
        raise BadInput(
            f"--all-reduce {all_reduce} is for GPUs, and --simulated-devices {simulated_devices} are on the CPU: leave "
            "--all-reduce out"
        )
    if name == "one_device":
        return _one_device()
    if simulated_devices:
        all_reduce = "one_device"
    elif all_reduce == "hierarchical_copy" and len(devices) % 2:
        # Measured with three replicas on the CPU: their sum is that of the first two.
        raise BadInput(
            f"--all-reduce hierarchical_copy on {len(devices)} GPUs: it sums two halves, and leaves out the last of an "
            "odd number; use one_device"
        )
    return _mirrored(tuple(devices), all_reduce)


def describe_strategy(strategy: tf.distribute.Strategy) -> str:
    """Returns the name that --strategy has for `strategy`."""
    kinds = {
        "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "tpu": tf.distribute.TPUStrategy,
        "parameter_server": tf.distribute.ParameterServerStrategy,
    }
    return next((name for name, kind in kinds.items() if isinstance(strategy, kind)), "one_device")


def _gpus() -> list[str]:
    return [f"GPU:{index}" for index, _ in enumerate(tf.config.list_physical_devices("GPU"))]


def _simulate(count: int) -> list[str]:
    """Splits the CPU into at least `count` logical devices and returns the first `count`."""
    # Without this, operations that are placed on no device would run on a GPU.
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) < count:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        except RuntimeError:
            raise BadInput(
                f"--simulated-devices {count}: TensorFlow has already started in this process with {len(configured)}: "
                "make tensors and variables in the hooks, not where task.py is imported; or, to build for several "
                "numbers in one process, begin with the largest"
            ) from None
    return [f"CPU:{index}" for index in range(count)]


@functools.cache
def _one_device() -> tf.distribute.Strategy:
    # TensorFlow's default strategy: the same interface, and none of MirroredStrategy's cost on a single device.
    return tf.distribute.get_strategy()


@functools.cache
def _mirrored(devices: tuple[str, ...], all_reduce: str) -> tf.distribute.Strategy:
    reductions = {
        "auto": lambda: None,  # TensorFlow's own choice: collective operations by NCCL.
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        # What simulated devices always have: collectives between them cost more than a sum on one of them.
        "one_device": functools.partial(tf.distribute.ReductionToOneDevice, accumulation_fn=_sum_in_order),
    }
    strategy = tf.distribute.MirroredStrategy(list(devices), cross_device_ops=reductions[all_reduce]())
    strategy.all_reduce = "nccl" if all_reduce == "auto" else all_reduce  # For the plan.
    return strategy


def _sum_in_order(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    # One by one, because the order in which tf.add_n takes three or more depends on the timing.
    return functools.reduce(tf.add, parts)


@functools.cache
def _multi_worker(
    simulated_devices: int, cluster_timeout: float, facts: str, all_reduce: str
) -> tf.distribute.Strategy:
    cluster = find_cluster(os.environ)
    gpus = 0 if simulated_devices else len(_gpus())
    own = {
        "host": socket.gethostname(),
        "devices": describe_own_devices(simulated_devices),
        "gpus": identify_gpus(os.environ, gpus),
    }
    workers = join(cluster, {**json.loads(facts), "GPUs": gpus}, own, timeout=cluster_timeout)
    check_gpus_are_not_shared(workers)
    console.quiet = not cluster.is_chief
    communication = tf.distribute.experimental.CommunicationImplementation
    implementation = communication.NCCL if all(each["gpus"] for each in workers.values()) else communication.RING
    if all_reduce == "nccl" and implementation != communication.NCCL:
        raise BadInput("--all-reduce nccl needs GPUs, and the workers have none: leave it out")
    late = f"--cluster-timeout {cluster_timeout:g}: TensorFlow did not start on all of {', '.join(cluster.tasks())}"
    # Without timeout_seconds: for each sum TensorFlow then keeps two threads for so long (measured: 5,000 threads after
    # 2,500 sums with 60 s). Which process is gone is found by `peers_named`.
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    with _local_devices(simulated_devices), ended_after(cluster_timeout, late):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    strategy.all_reduce = f"{implementation.value.lower()} between the workers"  # For the plan, as what follows.
    strategy.devices_of_workers = {worker: each["devices"] for worker, each in workers.items()}
    return strategy


def check_gpus_are_not_shared(workers: dict[str, dict[str, Any]]) -> None:
    """Raises BadInput if two workers use the same GPU; `workers` is what each has said of itself."""
    users: dict[str, str] = {}
    for worker, each in workers.items():
        for gpu in each["gpus"]:
            if gpu in users:
                raise BadInput(
                    f"{users[gpu]} and {worker} use the same GPU {gpu.split()[-1]} of {each['host']}: give each its "
                    "own with CUDA_VISIBLE_DEVICES, as launch.py does, or start one process for all GPUs of a machine"
                )
            users[gpu] = worker


@functools.cache
def _parameter_server(cluster_timeout: float) -> tf.distribute.Strategy:
    cluster = find_cluster(os.environ)
    needed = {"chief", "worker", "ps"}
    if cluster is None or not needed <= set(cluster.addresses):
        raise BadInput(
            "--strategy parameter_server needs a cluster with a chief, workers and parameter servers (ps) in "
            "TF_CONFIG: use python launch.py --workers 2 --parameter-servers 1 -- ..."
        )
    if cluster.job != "chief":
        serve(cluster, timeout=cluster_timeout)
    return coordinate(cluster, timeout=cluster_timeout)


@functools.cache
def _tpu() -> tf.distribute.Strategy:
    """Not measured: no TPU was there to try it on. The order is that of TensorFlow's guide "Use TPUs"."""
    try:
        # "local" is the TPU of this virtual machine.
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=os.environ.get("TPU_NAME", "local"))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, tf.errors.OpError) as problem:
        raise BadInput(
            f"--strategy tpu finds no TPU ({first_line(problem)}): start it on a TPU virtual machine, or name one in "
            "TPU_NAME"
        ) from problem
    return tf.distribute.TPUStrategy(resolver)


@contextlib.contextmanager
def _local_devices(simulated: int) -> Iterator[None]:
    """Lets the strategy take all simulated devices of this worker; by itself it takes all GPUs, or one CPU."""
    if not simulated:
        yield
        return
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    def all_simulated(_: Any, __: Any, worker: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker}/device:CPU:{number}" for number in range(simulated)), "CPU"

    by_itself = CollectiveAllReduceExtended._initialize_local_devices
    CollectiveAllReduceExtended._initialize_local_devices = all_simulated
    try:
        yield
    finally:
        CollectiveAllReduceExtended._initialize_local_devices = by_itself
