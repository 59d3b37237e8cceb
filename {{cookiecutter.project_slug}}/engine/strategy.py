"""From a strategy's name to the tf.distribute strategy, over real or simulated devices.

Devices that are asked for and not there are refused: TensorFlow itself would train on the CPU without a word.
"""

import functools
import os

import tensorflow as tf

from engine.errors import BadInput


def create_strategy(name: str, simulated_devices: int = 0) -> tf.distribute.Strategy:
    """Returns the strategy for `name`: "auto", "one_device" or "mirrored".

    Call it before anything else uses TensorFlow: devices cannot be simulated once the runtime has started. The same
    devices give the same strategy object, because two strategies over one set of GPUs share collective keys and abort
    each other (tensorflow#61314).

    Args:
        name: "auto" is "one_device" on one device and "mirrored" on several.
        simulated_devices: logical CPU devices to make and use; 0 uses this machine's GPUs, or its CPU if it has none.

    Raises:
        BadInput: the devices asked for are not there.
    """
    if os.environ.get("TF_CONFIG"):
        raise BadInput("TF_CONFIG describes a cluster, and this program trains on one machine: unset TF_CONFIG")
    devices = _simulate(simulated_devices) if simulated_devices else _gpus()
    if name == "auto":
        name = "mirrored" if len(devices) > 1 else "one_device"
    if name == "one_device" and simulated_devices > 1:
        raise BadInput(
            f"--simulated-devices {simulated_devices} with --strategy one_device: one device is used; "
            "use --strategy mirrored, or leave --simulated-devices out"
        )
    if name == "mirrored" and not devices:
        raise BadInput(
            "--strategy mirrored needs GPUs and this machine shows none: use --simulated-devices N for N replicas on "
            "the CPU, or --strategy one_device"
        )
    return _one_device() if name == "one_device" else _mirrored(tuple(devices), simulated=simulated_devices > 0)


def make_deterministic() -> None:
    """Makes all operations of this process, from here on, give the same bits every time.

    Besides TensorFlow's own switch this leaves out one of its graph optimizations. Together with another one it may
    rewrite the gradients of several replicas in one order or in another, from trace to trace; a sum in another order
    is rounded in another way.
    """
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"dependency_optimization": False})


def describe_strategy(strategy: tf.distribute.Strategy) -> str:
    """Returns the name that --strategy has for `strategy`."""
    return "mirrored" if isinstance(strategy, tf.distribute.MirroredStrategy) else "one_device"


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
                f"--simulated-devices {count}: TensorFlow has already started in this process with {len(configured)}; "
                "simulate the largest number first, or use a new process"
            ) from None
    return [f"CPU:{index}" for index in range(count)]


@functools.cache
def _one_device() -> tf.distribute.Strategy:
    # TensorFlow's default strategy: the same interface, and none of MirroredStrategy's cost on a single device.
    return tf.distribute.get_strategy()


@functools.cache
def _mirrored(devices: tuple[str, ...], *, simulated: bool) -> tf.distribute.Strategy:
    # Collectives between logical CPUs cost more than a sum on one of them; GPUs keep the default, NCCL.
    reduction = tf.distribute.ReductionToOneDevice() if simulated else None
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=reduction)
