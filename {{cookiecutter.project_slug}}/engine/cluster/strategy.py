"""The tf.distribute strategy that the settings and the environment ask for.

TensorFlow trains on the CPU without a word where devices are missing, so they are refused. Nothing was measured on GPUs
or TPUs.
"""

import functools
import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from engine.cluster.devices import describe_own_devices, let_gpu_memory_grow, warn_of_unused_gpus
from engine.cluster.environment import Cluster, find_cluster, refuse_cluster
from engine.cluster.nvidia import identify_gpus, why_no_gpu
from engine.cluster.parameter_servers import check_settings, coordinate, serve
from engine.cluster.rendezvous import ended_after, join
from engine.cluster.workers import Workers
from engine.console import console
from engine.errors import BadInput
from engine.user_errors import first_line
from engine.versions import shared_facts

# Two strategies over one set of GPUs share collective keys and abort each other (tensorflow#61314).
_made: dict[tuple[Any, ...], tf.distribute.Strategy] = {}


def create_strategy(settings: Any) -> tf.distribute.Strategy:
    """Returns the strategy for the settings, the same object for the same devices.

    In a cluster it waits for the other processes. Call it before anything else uses TensorFlow: once the runtime has
    started, devices cannot be simulated and a cluster cannot be joined.

    Args:
        settings: has strategy, simulated_devices, all_reduce, cluster_timeout and eager. In a cluster, what `as_json`
            returns has to be equal in all processes.

    Raises:
        BadInput: devices are missing, or the cluster does not fit the settings.
    """
    if settings.eager:
        refuse_cluster("--eager")
    let_gpu_memory_grow()
    # Else graph optimization joins a gradient's sum and the one over replicas to one sum (AddN) of all their parts. One
    # of three or more begins with a part whose memory it may reuse, which the timing decides, and so the last digit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    cluster = find_cluster(os.environ)
    simulated, gpus = settings.simulated_devices, len(tf.config.list_physical_devices("GPU"))
    timeout = settings.cluster_timeout
    name = settings.strategy
    if name == "auto":
        name = "multi_worker" if cluster else "mirrored" if (simulated or gpus) > 1 else "one_device"
    _check_cluster(name, cluster)
    _check_devices(name, simulated, gpus)
    _check_all_reduce(name, settings, gpus)
    if name == "tpu":
        _check_tpu_library()
    if name == "parameter_server":
        check_settings(settings)
    if simulated:
        _simulate(simulated)
    elif not gpus and name in ("one_device", "multi_worker"):
        warn_of_unused_gpus()

    makers = {
        # TensorFlow's default strategy: none of MirroredStrategy's cost on a single device.
        "one_device": tf.distribute.get_strategy,
        "mirrored": lambda: _mirrored(simulated, gpus, settings.all_reduce),
        "multi_worker": lambda: _multi_worker(cluster, 0 if simulated else gpus, settings),
        "parameter_server": lambda: (coordinate if cluster.job == "chief" else serve)(cluster, timeout=timeout),
        "tpu": _tpu,
    }
    # Simulated devices have one way to sum.
    key = (name, simulated) if simulated else (name, gpus, settings.all_reduce)
    if key not in _made:
        _made[key] = makers[name]()
    return _made[key]


def describe_strategy(strategy: tf.distribute.Strategy) -> str:
    """Returns the name that --strategy has for `strategy`."""
    kinds = {
        "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "tpu": tf.distribute.TPUStrategy,
        "parameter_server": tf.distribute.ParameterServerStrategy,
    }
    return next((name for name, kind in kinds.items() if isinstance(strategy, kind)), "one_device")


def describe_size(strategy: tf.distribute.Strategy) -> str:
    """Returns how many workers and replicas there are, to follow the strategy's name."""
    if hasattr(strategy, "size"):  # The asynchronous one says it itself.
        return strategy.size
    workers = Workers(strategy).count
    return f", {workers} workers" * (workers > 1) + f", {strategy.num_replicas_in_sync} replica(s)"


def describe_devices(strategy: tf.distribute.Strategy, simulated_devices: int) -> str:
    """Returns what the replicas run on, as "2 x NVIDIA A100" or "CPU, 2 cores"."""
    kind = describe_strategy(strategy)
    if kind == "tpu":
        return f"{strategy.num_replicas_in_sync} TPU cores"
    if kind == "parameter_server":
        return f"{describe_own_devices(0)} (the chief; those of the workers are their own)"
    if kind != "multi_worker":
        return describe_own_devices(simulated_devices, only_one=kind == "one_device")
    devices = strategy.devices_of_workers
    if len(set(devices.values())) == 1:
        return f"{next(iter(devices.values()))} for each worker"
    return "; ".join(f"{worker}: {text}" for worker, text in devices.items())


# --- What is refused --------------------------------------------------------------------------------------------------


def _check_cluster(name: str, cluster: Cluster | None) -> None:
    """Raises BadInput if a strategy and the cluster that the environment describes do not go together."""
    if name == "parameter_server" and not (cluster and {"chief", "worker", "ps"} <= set(cluster.addresses)):
        raise BadInput(
            "--strategy parameter_server needs a cluster with a chief, workers and parameter servers (ps) in "
            "TF_CONFIG: use python launch.py --workers 2 --parameter-servers 1 -- ..."
        )
    if name == "multi_worker" and not cluster:
        raise BadInput(
            "--strategy multi_worker needs a cluster, and neither TF_CONFIG nor Slurm nor Kubernetes describes one of "
            "several tasks: start the program with srun, or python launch.py --workers 2 -- ..."
        )
    if not cluster or name in ("parameter_server", "tpu"):
        return
    if cluster.has_parameter_servers:
        raise BadInput(
            f"{cluster.source} describes parameter servers, and --strategy is {name}: use --strategy parameter_server, "
            "which is asynchronous, or a cluster of workers only"
        )
    if name != "multi_worker":
        raise BadInput(
            f"--strategy {name}, and {cluster.source} describes a cluster of {len(cluster.tasks())}: use "
            f"--strategy multi_worker, or start it without {cluster.source}"
        )


def _check_devices(name: str, simulated: int, gpus: int) -> None:
    """Raises BadInput if a strategy cannot use the devices of this process."""
    most = {"mirrored": simulated, "one_device": 1, "multi_worker": 1}.get(name, 0)
    if simulated > most:
        raise BadInput(
            f"--simulated-devices {simulated} with --strategy {name}, which uses {most} of them in a process: use "
            "--strategy mirrored in one process, or leave --simulated-devices out"
        )
    if name == "mirrored" and not simulated and not gpus:
        raise BadInput(
            f"--strategy mirrored needs GPUs and {why_no_gpu(os.environ) or 'this machine shows none'}: use "
            "--simulated-devices N for N replicas on the CPU, or --strategy one_device"
        )


def _check_tpu_library() -> None:
    """Raises BadInput if no library for this machine's TPUs is there; a TPU_NAME is that of other machines."""
    if {"TPU_NAME", "TPU_LIBRARY_PATH"} & set(os.environ) or importlib.util.find_spec("libtpu"):
        return
    raise BadInput(
        "--strategy tpu needs libtpu, which is not installed, and no package of TensorFlow "
        f"{tf.__version__} has it: the newest is tensorflow-tpu 2.20.0, older than pyproject.toml allows. Train "
        "on CPUs or GPUs"
    )


def _check_all_reduce(name: str, settings: Any, gpus: int) -> None:
    """Raises BadInput if the devices cannot sum as --all-reduce asks."""
    asked = settings.all_reduce
    if name in ("tpu", "parameter_server"):
        where, possible = f"--strategy {name}", ("auto",)
    elif name == "multi_worker":
        where, possible = "several machines", ("auto", "nccl")
    elif settings.simulated_devices:
        where, possible = f"--simulated-devices {settings.simulated_devices}", ("auto", "one_device")
    else:
        where, possible = "GPUs", (asked,)
    if asked not in possible:
        raise BadInput(f"--all-reduce {asked} does not work with {where}: use {' or '.join(possible)}")
    if name == "mirrored" and asked == "hierarchical_copy" and gpus % 2:
        # Measured with three replicas on the CPU: their sum is that of the first two.
        raise BadInput(
            f"--all-reduce hierarchical_copy on {gpus} GPUs: it sums two halves, and leaves out the last of an odd "
            "number; use one_device"
        )


def _check_gpus_are_not_shared(workers: dict[str, dict[str, Any]]) -> None:
    """Raises BadInput if two workers use the same GPU; `workers` is what each one sent about itself."""
    users: dict[str, str] = {}
    for worker, own in workers.items():
        for gpu in own["gpus"]:
            if gpu in users:
                raise BadInput(
                    f"{users[gpu]} and {worker} use the same GPU {gpu.split()[-1]} of {own['host']}: give each its "
                    "own with CUDA_VISIBLE_DEVICES, as launch.py does, or start one process for all GPUs of a machine"
                )
            users[gpu] = worker


# --- The strategies ---------------------------------------------------------------------------------------------------


def _simulate(count: int) -> None:
    """Splits the CPU into at least `count` logical devices."""
    # Without this, operations that are placed on no device would run on a GPU.
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError:
        raise BadInput(
            f"--simulated-devices {count}: TensorFlow has already started in this process with {len(configured)}: "
            "make tensors and variables in the hooks, not where task.py is imported; or, to build for several "
            "numbers in one process, begin with the largest"
        ) from None


def _mirrored(simulated: int, gpus: int, all_reduce: str) -> tf.distribute.Strategy:
    devices = [f"CPU:{index}" for index in range(simulated)] or [f"GPU:{index}" for index in range(gpus)]
    if simulated:
        all_reduce = "one_device"  # Collectives between simulated devices cost more than a sum on one of them.
    reductions = {
        "auto": lambda: None,  # TensorFlow's own choice: collective operations by NCCL.
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "one_device": functools.partial(tf.distribute.ReductionToOneDevice, accumulation_fn=_sum_in_order),
    }
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=reductions[all_reduce]())
    strategy.all_reduce = "nccl" if all_reduce == "auto" else all_reduce  # For the plan.
    return strategy


def _sum_in_order(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    # One by one, because the order in which tf.add_n takes three or more depends on the timing.
    return functools.reduce(tf.add, parts)


def _multi_worker(cluster: Cluster, gpus: int, settings: Any) -> tf.distribute.Strategy:
    timeout = settings.cluster_timeout
    own = {
        "host": socket.gethostname(),
        "devices": describe_own_devices(settings.simulated_devices),
        "gpus": identify_gpus(os.environ, gpus),
    }
    workers = join(cluster, {**_facts(settings), "GPUs": gpus}, own, timeout=timeout)
    _check_gpus_are_not_shared(workers)
    console.quiet = not cluster.is_chief
    communication = tf.distribute.experimental.CommunicationImplementation
    implementation = communication.NCCL if all(each["gpus"] for each in workers.values()) else communication.RING
    if settings.all_reduce == "nccl" and implementation != communication.NCCL:
        raise BadInput("--all-reduce nccl needs GPUs, and the workers have none: leave it out")
    # Without timeout_seconds: for each sum TensorFlow then keeps two threads for so long (measured: 5,000 threads after
    # 2,500 sums with 60 s). `peers_named` finds which process is gone.
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    late = f"TensorFlow did not start on all of {', '.join(cluster.tasks())} within {timeout:g} s (--cluster-timeout)"
    try:
        with ended_after(timeout, late):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as problem:
        if "program startup" not in str(problem):
            raise
        raise BadInput(
            "--strategy multi_worker: TensorFlow has already started in this process: make tensors and variables in "
            "the hooks, not where task.py is imported"
        ) from None
    strategy.all_reduce = f"{implementation.value.lower()} between the workers"  # For the plan, as what follows.
    strategy.devices_of_workers = {worker: each["devices"] for worker, each in workers.items()}
    return strategy


def _facts(settings: Any) -> dict[str, Any]:
    """Returns what has to be equal in all processes: the settings, the project's code, and the versions."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.as_json().items() if name != "run_dir"}
    return flags | shared_facts()


def _tpu() -> tf.distribute.Strategy:
    """Connects as TensorFlow's guide "Use TPUs" does. Not measured."""
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
