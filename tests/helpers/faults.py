"""Lets one event happen in one worker, once, at a phase of its run. `matrix.py` copies this file beside task.py."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.cluster import rendezvous
from engine.run import start
from engine.run.checkpoints import Checkpoints

STEPS = {"first step": 1, "mid-epoch": 18}  # An epoch has 12.
EVALUATION_STEPS = {"validation": 6, "test": 2}  # An evaluation has 4.
CHECKPOINT = 2  # The one at the end of the second epoch, the last one.


def plant(task: dict[str, Any], phase: str, event: str, victim: int, marker: Path, disk: Path) -> None:
    """Changes the hooks of task.py, whose globals are `task`, and what stands around them.

    `marker` gets the time of the event; where it exists, nothing happens. `disk` is what a full disk fills.
    """
    load_examples, train_step, evaluation_step = (
        task[name] for name in ("load_examples", "train_step", "evaluation_step")
    )
    is_victim = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == victim

    @tf.autograph.experimental.do_not_convert
    def happens(at: str) -> None:
        if not is_victim or at != phase or marker.exists():
            return
        marker.write_text(str(time.time()))
        if event == "exception":
            raise RuntimeError("planted")
        if event == "full disk":
            fill(disk)
        else:
            os.kill(os.getpid(), signal.Signals[event])

    def counting(phases: dict[str, int], phase_of_each: str = "") -> None:
        """Adds an operation to the graph, which counts the steps; the event happens while a step runs."""
        counted = 0

        def count() -> np.int64:
            nonlocal counted
            counted += 1
            for name, number in phases.items():
                if counted == number and phase_of_each in ("", name):
                    happens(name)
            return np.int64(counted)

        tf.numpy_function(count, [], tf.int64)

    def counted_train_step(batch: Any) -> tf.Tensor:
        happens("tracing")
        counting(STEPS)
        return train_step(batch)

    def counted_evaluation_step(split: str, batch: Any) -> tf.Tensor:
        counting(EVALUATION_STEPS, split)
        return evaluation_step(split, batch)

    task["load_examples"] = lambda split: load_examples(split).take(192 if split == "train" else 64)
    # BatchNormalization's statistics and dropout's seeds differ between workers, and have to be restored so.
    layers = (keras.layers.BatchNormalization, keras.layers.Flatten, lambda: keras.layers.Dropout(0.3))
    task["create_model"] = lambda: keras.Sequential(
        [keras.Input((8, 8, 1)), *(layer() for layer in layers), keras.layers.Dense(10)]
    )
    task["train_step"], task["evaluation_step"] = counted_train_step, counted_evaluation_step

    rendezvous._agree = before(rendezvous._agree, lambda: happens("rendezvous"))

    def starts() -> None:
        happens("before TensorFlow's start")
        if phase == "TensorFlow's start" and not marker.exists():
            if is_victim:  # It waits for the other one, and runs no Python meanwhile.
                command = 'sleep 1; date +%s.%N >"$0.part"; mv "$0.part" "$0"; kill -"$1" "$2"'
                subprocess.Popen(["sh", "-c", command, marker, event.removeprefix("SIG"), str(os.getpid())])
            else:
                time.sleep(2.5)

    strategy = tf.distribute.MultiWorkerMirroredStrategy
    strategy.__init__ = before(strategy.__init__, starts)

    saves = 0
    save = Checkpoints.save

    def counted_save(self: Checkpoints, *arguments: Any) -> Path:
        nonlocal saves
        saves += self.directory.name == "checkpoints"
        if saves == CHECKPOINT and self.directory.name == "checkpoints":
            if victim == 0:  # It has written the variables, and neither the record nor the checksums.
                write = tf.raw_ops.SaveV2
                tf.raw_ops.SaveV2 = after(write, lambda: happens("checkpoint"))
                if event == "full disk":
                    tf.raw_ops.SaveV2 = before(write, lambda: happens("checkpoint"))
            else:
                happens("checkpoint")
        return save(self, *arguments)

    Checkpoints.save = counted_save
    start.print_result = before(start.print_result, lambda: happens("end"))


def before(function: Callable[..., Any], happens: Callable[[], None]) -> Callable[..., Any]:
    return lambda *arguments, **options: (happens(), function(*arguments, **options))[1]


def after(function: Callable[..., Any], happens: Callable[[], None]) -> Callable[..., Any]:
    return lambda *arguments, **options: (function(*arguments, **options), happens())[0]


def fill(disk: Path) -> None:
    """Writes a file until the disk has no room left."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(2**10)):
            pass
