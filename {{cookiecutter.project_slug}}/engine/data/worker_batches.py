"""With parameter servers: training batches of each worker's own, which takes steps without waiting for the others."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from engine.data.batches import Batches
from engine.data.pipelines import input_options
from engine.data.preparation import pass_seed
from engine.data.stacks import CompiledSteps, Stacks
from engine.errors import BadInput


class WorkerPool(Protocol):
    """The part of engine.cluster.parameter_servers.WorkerPool that batches need."""

    count: int

    def iterate(self, dataset: Callable[[], tf.data.Dataset]) -> Any: ...
    def take_steps(self, steps: Callable[..., tf.Tensor], iterators: Any, count: int) -> np.ndarray: ...


class WorkerBatches(Batches):
    """Training batches of which each worker has its own: its shard of the examples, again and again.

    The stacks of its iterator are the workers' iterators.
    """

    def __init__(self, *arguments: Any, load: Callable[[], Any], workers: WorkerPool) -> None:
        """`load` calls task.load_examples; the other arguments are those of Batches. Raises BadInput as it does."""
        super().__init__(*arguments)
        if self.per_replica_batch_size > self.global_batch_size:  # None of its batches is padded.
            raise BadInput(
                f"--global-batch-size {self.global_batch_size}: --strategy parameter_server needs one that is "
                f"divisible by --micro-batches: use {self.per_replica_batch_size}"
            )
        self._load, self._workers = load, workers
        self._stack_size = self.steps_per_pass
        self.examples.may_be_cached = False  # Each worker loads them again.
        self.stacks = WorkerStacks(self.stacks.strategy, self.stacks.batch_spec, self.stacks.padding, workers)

    def _stacks_from(self, step: int) -> Iterator[Any]:
        """Yields the workers' iterators once for each pass from a step on, as a stack of all batches of the pass."""
        first_pass, first_step = divmod(step, self.steps_per_pass)
        for number in itertools.count(first_pass):
            yield self._workers.iterate(functools.partial(self._on_worker, number, first_step))
            first_step = 0

    @tf.autograph.experimental.do_not_convert
    def _on_worker(self, number: int, first_step: int) -> tf.data.Dataset:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return self.endless(number, first_step, self._workers.count, worker)

    def endless(self, number: int, first_step: int, workers: int, worker: tf.Tensor) -> tf.data.Dataset:
        """Returns batches of every `workers`-th example of a pass, again and again, in the graph of a worker."""
        # Loaded where they are used, because a dataset of the chief's cannot be sent to a worker.
        examples = self.examples.for_worker(self._load)
        seed = pass_seed(self._seed, tf.constant(number, tf.int64))
        first = tf.constant(first_step * self.global_batch_size, tf.int64)
        numbered = examples.one_by_one(self._shard, first, seed).shard(workers, worker).repeat()
        batches = self._prepare_one_by_one(numbered, seed).batch(self.per_replica_batch_size, drop_remainder=True)
        if padding := self._prepared.padding:
            batches = batches.map(tf.autograph.experimental.do_not_convert(lambda *batch: padding.cut(batch)))
        return batches.prefetch(tf.data.AUTOTUNE).with_options(input_options())


@dataclasses.dataclass(frozen=True)
class WorkerStacks(Stacks):
    """Stacks that are the workers' iterators, of which each worker sees its own."""

    workers: WorkerPool

    @tf.autograph.experimental.do_not_convert
    def pick(self, stack: Any, index: tf.Tensor) -> Any:
        """Returns the worker's next batch."""
        return next(stack)

    def compile(self, steps: Callable[..., tf.Tensor]) -> CompiledSteps:
        return WorkerSteps(tf.function(steps), self.workers)


@dataclasses.dataclass(frozen=True)
class WorkerSteps(CompiledSteps):
    """Steps that the workers take."""

    workers: WorkerPool

    def __call__(self, stack: Any, first: int | tf.Tensor, count: int | tf.Tensor) -> np.ndarray:
        return self.workers.take_steps(self.function, stack, int(count))

    def graph(self) -> None:
        """Returns None: the workers run the graph."""
