"""The NVIDIA GPUs of this machine, as the driver and the environment describe them. Imports no TensorFlow.

TensorFlow lists only the GPUs that it can use. The launcher, and the warning that it uses none, need all of them.
"""

import itertools
import re
import socket
from collections.abc import Mapping
from pathlib import Path

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # Has a folder for each GPU (of the container), named by PCI bus id.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Differs between machines; all containers of a machine share it.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_machine() -> list[str]:
    """Returns the PCI bus ids of the GPUs that the driver knows, in order; none without a driver."""
    return sorted(folder.name for folder in NVIDIA_GPUS.glob("*"))


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a process with this environment can use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE not in environment:
        return [str(index) for index in range(len(gpus_of_machine()))]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    # CUDA uses the GPUs before the first invalid name, such as -1.
    return list(itertools.takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))


def identify_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Returns a name for each of the first `count` visible GPUs that no other GPU has, on any machine.

    Containers number their GPUs from 0, so an index alone does not distinguish two GPUs of one machine.
    """
    machine = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else socket.gethostname()
    names = visible_gpus(environment) or [str(index) for index in range(count)]
    return [f"{machine} {_bus_id(name)}" for name in names[:count]]


def why_no_gpu(environment: Mapping[str, str]) -> str:
    """Returns why TensorFlow may list no GPU although this machine has some, with a remedy; "" if it has none."""
    number = len(gpus_of_machine())
    if not number:
        return ""
    is_hidden = VISIBLE in environment and not visible_gpus(environment)
    hidden = f"{VISIBLE} is {environment[VISIBLE]!r}: unset it, and if that is not enough: " if is_hidden else ""
    return (
        f"this machine has {number} NVIDIA GPU{'s' * (number > 1)}, and TensorFlow can use none ({hidden}pip install "
        "'tensorflow[and-cuda]', with a driver that is new enough)"
    )


def _bus_id(name: str) -> str:
    """Returns the PCI bus id of a GPU that CUDA_VISIBLE_DEVICES names; the name itself if that cannot be found."""
    if name.isdecimal():
        # CUDA may count GPUs of several kinds in another order, but equally in all processes of a machine.
        buses = gpus_of_machine()
        return buses[int(name)] if int(name) < len(buses) else name
    for file in NVIDIA_GPUS.glob("*/information"):
        uuid = re.search(r"GPU UUID:\s*(\S+)", file.read_text(encoding="utf-8"))
        if uuid and uuid[1].startswith(name):  # The name may be abbreviated.
            return file.parent.name
    return name
