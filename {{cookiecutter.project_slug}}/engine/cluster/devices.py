"""GPUs and simulated devices, as TensorFlow lists them. Untested on several GPUs."""

import collections
import os

import tensorflow as tf

from engine.console import console


def let_gpu_memory_grow() -> None:
    """Has TensorFlow take GPU memory as it needs it; otherwise one process takes all, and no second one can start."""
    for gpu in tf.config.list_physical_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            console.print(f"{gpu.name}: TensorFlow has already started (in task.py?) and takes all of its memory")
        except ValueError:
            continue  # It was divided into virtual devices, each with its own limit.


def describe_own_devices(simulated_devices: int, *, only_one: bool = False) -> str:
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
