"""Whether XLA compiles forward and backward pass (--jit): by itself on GPUs only, and there if the model can be."""

from types import ModuleType
from typing import Any

import tensorflow as tf

from engine.console import console
from engine.errors import BadInput, first_line
from engine.objects import by_name
from engine.replicas import layers_of
from engine.strategy import describe_strategy


def resolve_jit(setting: bool | str, task: ModuleType, strategy: tf.distribute.Strategy, batch_spec: Any) -> bool:
    """Returns whether to compile with XLA.

    Args:
        setting: True, False, or "auto": on GPUs, if XLA can compile task.loss_and_gradients. Not measured: no GPU was
            there; on the CPUs that were, convolutions became slower.
        task: what has the model, and maybe loss_and_gradients.
        strategy: what tells the devices.
        batch_spec: what one replica receives, as tf.TensorSpec.

    Raises:
        BadInput: it is asked for, and a layer needs the other replicas in the middle of what is compiled.
    """
    replicas = strategy.num_replicas_in_sync
    layers = [layer for each in by_name(task.model, "model").values() for layer in layers_of(each)]
    synchronized = [layer.name for layer in layers if replicas > 1 and getattr(layer, "synchronized", False)]
    if setting is True and synchronized:
        raise BadInput(
            f"--jit with the layer {synchronized[0]!r}, which is synchronized over {replicas} replicas inside the "
            "forward pass: leave --jit out, or use synchronized=False or another normalization"
        )
    if setting != "auto":
        return setting
    return not synchronized and has_gpus(strategy) and _can_compile(task, batch_spec)


def has_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas are on GPUs."""
    if describe_strategy(strategy) == "one_device":
        return bool(tf.config.list_logical_devices("GPU"))
    return all("GPU" in device for device in strategy.extended.worker_devices)


def _can_compile(task: ModuleType, batch_spec: Any) -> bool:
    """Returns whether XLA can compile the task's gradients; runs nothing. Says so if it cannot."""
    if not callable(getattr(task, "loss_and_gradients", None)):
        return False
    zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), batch_spec)
    try:
        tf.function(task.loss_and_gradients, jit_compile=True).experimental_get_compiler_ir(zeros)(stage="hlo")
    except Exception as problem:  # noqa: BLE001 - Whatever it is, training works without XLA.
        console.print(f"--jit auto: trained without XLA, which cannot compile this model ({first_line(problem)})")
        return False
    return True
