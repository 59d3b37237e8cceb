"""What must be the same in all processes before they train: data, the objects of task.py, Keras's defaults."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.data.batches import Batches
from engine.errors import BadInput
from engine.machine import changed_files, data_files_sha256
from engine.model.objects import TaskObjects
from engine.run.state import State
from engine.settings import read_config


def same_data(
    workers: Workers, batches: dict[str, Batches], data_files: Callable[[], Any]
) -> dict[str, dict[str, Any]]:
    """Reads the examples; returns each dataset's fingerprint, with the files of task.data_files, on which all depend.

    Raises BadInput in every process if they differ, or the order of the datasets: each would take its shard of another
    order.
    """
    for dataset in batches.values():
        dataset.examples.cache()
    files = {"files": data_files_sha256(data_files)}
    data = {name: dataset.fingerprint() | files for name, dataset in batches.items()}
    values = {f"{name}/{key}": value for name, one in data.items() for key, value in one.items()}
    what = "task.load_examples or task.data_files returned other data"
    _check_same(workers, {"datasets": [*data], **values}, what, "give all processes the same files")
    return data


def check_files(data_files: Callable[[], Any], run_dir: Path) -> None:
    """Raises BadInput if a file of task.data_files differs from the one that the run in a directory used last."""
    then = (read_config(run_dir) or {}).get("files", {})
    if changes := ", ".join(changed_files(then, data_files_sha256(data_files))):
        raise BadInput(f"the run in {run_dir} used other files of task.data_files ({changes}): restore them")


def check_objects(workers: Workers, state: State, objects: TaskObjects) -> None:
    """Raises BadInput, in every process, if the hooks made others than in the first one: sums pair their variables."""
    defaults = {name: getattr(keras.config, name)() for name in ("floatx", "epsilon", "image_data_format")}
    _check_same(workers, defaults, "Keras has other defaults", "give all processes the same ~/.keras/keras.json")
    texts = [name for name, variable in state.per_replica.items() if variable.dtype == tf.string]
    if texts and workers.count > 1:
        raise BadInput(f"the variable {texts[0]} has texts, which workers cannot exchange: keep numbers in it")
    variables = {**state.mirrored, **state.per_replica}.items()
    names = {f"variable {number}": f"{name} {variable.shape}" for number, (name, variable) in enumerate(variables)}
    what = "the variables of the models, optimizers or metrics have other names or shapes, or another order,"
    remedy = "give all processes the same vocabularies and other files, and make no order depend on a set"
    _check_same(workers, names, what, remedy)
    configs: dict[str, Any] = {}
    for name, optimizer in objects.optimizers.items():
        with contextlib.suppress(Exception):  # A task's own optimizer or schedule may raise anything.
            config = json.loads(json.dumps(optimizer.get_config(), default=lambda value: type(value).__name__))
            configs |= {f"{name}/{key}": value for key, value in config.items() if key != "name"}
    remedy = "give all processes the same values, as settings in config.py"
    _check_same(workers, configs, "task.create_optimizer returned another optimizer", remedy)


def _check_same(workers: Workers, own: dict[str, Any], what: str, remedy: str) -> None:
    first = workers.from_chief(lambda: own)
    if others := workers.names_where(own != first):
        keys = [key for key in {**first, **own} if own.get(key) != first.get(key)]
        found = "".join(f" (here {key} is {own.get(key)}, there {first.get(key)})" for key in keys[:1])
        raise BadInput(f"{', '.join(others)}: {what} than in the first process{found}: {remedy}")
