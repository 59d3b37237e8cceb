"""Batches, objects and steps of a run that are nothing but numbers: no model, no graph, no training."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

import train
from engine.data.splits import Splits
from engine.run.training import Run
from engine.settings import Settings

STEPS = 20


class Batches:
    """Batches of one set that are nothing but their numbers."""

    def __init__(self, name: str, steps: int = STEPS) -> None:
        self.name, self.split, self.steps_per_epoch = name, name.split("/")[0], steps
        self.global_batch_size = 10
        self.seconds_waited = 0.0

    def examples_in(self, epoch: int, first_step: int = 0, steps: int | None = None) -> int:
        return self.global_batch_size * (self.steps_per_epoch if steps is None else steps)

    def iterator(self, epoch: int, first_step: int) -> "Batches":
        self._next = first_step
        return self

    def take(self, count: int) -> Iterator[tuple[str, int, int]]:
        while count:
            taken = min(count, 3)  # A stack ends in the middle of a chunk.
            yield "stack", self._next, taken
            self._next, count = self._next + taken, count - taken


class Objects:
    """What a task's objects are to a run: a weight, which counts steps, and the next validation's score."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.user_state = settings, {}
        self.weight = tf.Variable(0.0)
        self.weights = self.mirrored = self.mirrored_weights = {"weight": self.weight}
        self.per_replica: dict[str, tf.Variable] = {}
        self.per_replica_weights: dict[str, tf.Variable] = {}
        self.monitor_direction, self.on_report, self.rates, self.optimizers = "min", None, {}, {}
        self.evaluations, self.data_files = 0, list
        self.resets: list[str] = []
        self.scores: Iterator[float] = iter(())

    def finalize_layers(self) -> None: ...

    def check_loss_scales(self, step: int) -> None: ...

    def report_changes_of_python(self) -> None: ...

    def reset(self, name: str) -> None:
        self.resets.append(name)

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        self.evaluations += 1
        yield

    def learning_rates(self) -> dict[str, float]:
        return dict(self.rates)

    def results(self, name: str) -> dict[str, float]:
        return {f"{name}/loss": 0.0 if name == "train" else next(self.scores)}


def put_into_train_py(run: Run, *batches: Batches, losses: Callable[[int], float] = lambda step: 0.0) -> None:
    """Makes a run and its batches the global objects of train.py, whose loops then use them."""

    def steps_of(split: str) -> Callable[..., np.ndarray]:
        def steps(stack: str, first: int, count: int) -> np.ndarray:
            run.objects.weight.assign_add(count if split == "train" else 0)
            return np.array([losses(step) for step in range(first, first + count)], np.float32)

        return steps

    train.run = run
    train.batches = run.batches = Splits.__new__(Splits)  # Without a hook that loads them.
    run.batches.update({each.name: each for each in batches})
    train.run_steps = {split: steps_of(split) for split in train.SPLITS}
