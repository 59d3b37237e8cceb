"""Stacks of batches: they bring several batches at a time to the replicas, where a compiled function takes the steps.

A stack is several batches in one tensor, [batches, per-replica batch, ...] on each replica. Fetching an element for
several replicas takes longer than a small step does, and so does every return to Python.
"""

import atexit
import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import batched
from engine.data.preparation import Padding
from engine.errors import BadInput, Unavailable

BYTES_OF_STACK = 2**22  # The size of a stack at most, for all replicas of a process together.
# The steps of a stack: a quarter of an epoch within these limits. A step can be taken when its complete stack is ready.
STEPS_OF_STACK = 64, 512


@dataclasses.dataclass(frozen=True)
class CompiledSteps:
    """A compiled function, a tf.function, that takes steps on a stack."""

    function: Any

    def __call__(self, stack: Any, first: int | tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
        """Takes `count` steps, from batch number `first` of the stack on; returns their losses ([count])."""
        return self.function(stack, first, count)

    def graph(self) -> tf.Graph | None:
        """Returns the graph of the steps, traced now if it was not before; None if no graph runs in this process."""
        return None if tf.config.functions_run_eagerly() else self.function.get_concrete_function().graph

    def trace_count(self) -> int:
        """Returns how many times the steps were traced."""
        return self.function.experimental_get_tracing_count()


@dataclasses.dataclass(frozen=True, repr=False)
class Stacks:
    """How steps take batches out of the stacks of a dataset."""

    strategy: tf.distribute.Strategy
    batch_spec: Any  # It describes a per-replica batch: static shapes; with padding, the examples' lengths too.
    padding: Padding | None

    @tf.autograph.experimental.do_not_convert
    def pick(self, stack: Any, index: tf.Tensor) -> Any:
        """Returns batch number `index` of a stack: (features, labels, sample_weights) on each replica."""
        return self.strategy.run(self._pick_on_replica, args=(stack, index))

    @tf.autograph.experimental.do_not_convert
    def _pick_on_replica(self, stack: Any, index: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        # The stack of a single replica is in the host's memory, and a GPU would fetch all of it for each batch.
        is_single = context.num_replicas_in_sync == 1
        with tf.device("CPU:0") if is_single else contextlib.nullcontext():
            batch = tf.nest.map_structure(lambda part: tf.gather(part, index), stack)
            return self.padding.cut(batch, context) if self.padding else batch

    def compile(self, steps: Callable[..., tf.Tensor]) -> CompiledSteps:
        """Compiles a function of (stack, first, count) that returns losses ([count]); all stacks share one graph."""
        scalar, stack_spec = tf.TensorSpec((), tf.int32), batched(self.batch_spec)
        if self.strategy.num_replicas_in_sync > 1:  # Only a distributed dataset has the spec of a stack on them.
            no_stacks = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=stack_spec)
            stack_spec = self.strategy.distribute_datasets_from_function(lambda _: no_stacks).element_spec
        return CompiledSteps(tf.function(steps, input_signature=[stack_spec, scalar, scalar]))


class StackIterator:
    """The batches of a dataset in stacks, pass after pass. Its position is the number of its next step.

    Stacks have `stack_size` batches, counted from the first one of a pass; the last stack of a pass may have fewer.
    """

    def __init__(self, batches: Any, next_step: int) -> None:
        """Starts at `next_step` of engine.data.batches.Batches, counted from 0 over all passes."""
        self._batches, self.next_step = batches, next_step
        self._stacks: Iterator[Any] | None = batches.stacks_from(next_step)
        self._stack: Any = None  # The stack that contains the next step; None if it has not been read.
        self._rejected: BadInput | None = None
        _iterators.add(self)
        self.is_waiting, self.seconds_waited = False, 0.0  # Whether the program waits for batches; how long so far.

    def take(self, count: int) -> Iterator[tuple[Any, int, int]]:
        """Yields the next `count` batches: a stack, the number of the first one in it, how many to take from there.

        Raises BadInput, or Unavailable, if the rest cannot be read; a later call raises it again.
        """
        end, size, steps_per_pass = self.next_step + count, self._batches.stack_size, self._batches.steps_per_pass
        while self.next_step < end:
            step_of_pass = self.next_step % steps_per_pass
            first = step_of_pass % size
            taken = min(end - self.next_step, size - first, steps_per_pass - step_of_pass)
            stack = self._stack = self._fetch() if self._stack is None else self._stack
            self.next_step += taken
            ends_pass = step_of_pass + taken == steps_per_pass
            if ends_pass or first + taken == size:
                self._stack = None
            if ends_pass and not self._batches.is_kept:
                self._stacks = None
            yield stack, first, taken

    def _fetch(self) -> Any:
        if self._rejected:
            raise self._rejected
        started, self.is_waiting = time.monotonic(), True
        try:
            return self._batches.read(self._next_stack)
        except Unavailable as problem:
            self._rejected = problem
            raise
        except tf.errors.OpError as problem:
            self._rejected = self._batches.rejection(problem, self.next_step)
            raise self._rejected from problem
        finally:
            self.is_waiting = False
            self.seconds_waited += time.monotonic() - started

    def _next_stack(self) -> Any:
        try:
            self._stacks = self._stacks or self._batches.stacks_from(self.next_step)
            return next(self._stacks)
        except tf.errors.OpError:
            self._stacks = None  # The next attempt starts at the same stack.
            raise


_iterators: weakref.WeakSet[StackIterator] = weakref.WeakSet()


@atexit.register
def _end_pipelines() -> None:
    """Ends all pipelines before Python ends.

    Their threads may be in a tf.numpy_function, and some libraries, such as pyarrow, wait for their own threads then.
    """
    for iterator in _iterators:
        iterator._stacks = iterator._stack = None


def stack_size(steps_per_epoch: int, bytes_of_share: int, batches_at_once: int) -> int:
    """Returns how many batches a stack has: a multiple of those that are prepared at once.

    `bytes_of_share` is the size of a batch on all replicas of a process together.
    """
    at_least, at_most = STEPS_OF_STACK
    wanted = min(steps_per_epoch, max(at_least, min(at_most, steps_per_epoch // 4)))
    calls = min(BYTES_OF_STACK // bytes_of_share // batches_at_once, -(-wanted // batches_at_once))
    return max(1, calls) * batches_at_once


def stacked(
    prepared: tf.data.Dataset, stack_size: int, of_replicas: Sequence[int], per_replica_batch_size: int
) -> tf.data.Dataset:
    """Returns stacks, [batches, per-replica batch, ...] each, in tuples of one for each replica.

    Elements of `prepared` are any number of examples, [n, ...]. Of each batch `of_replicas` says how many examples each
    replica gets, one replica after the other; a per-replica batch that lacks some is padded with copies of weight 0.
    Each stack has `stack_size` batches; the last one may have fewer.
    """
    size, total = per_replica_batch_size, sum(of_replicas)

    def for_replica(first: int, count: int, part: tf.Tensor) -> tf.Tensor:
        # In one dimension, so that each per-replica batch is copied in one piece.
        batches = tf.reshape(part, [-1, total, part.shape[1:].num_elements()])
        if count < total:
            batches = batches[:, first : first + count]
        if count < size:
            batches = tf.concat([batches, tf.repeat(batches[:, -1:], size - count, axis=1)], axis=1)
        return tf.reshape(batches, [-1, size, *part.shape[1:]])

    def split(*stack: Any) -> tuple[Any, ...]:
        parts = []
        for replica, count in enumerate(of_replicas):
            share = functools.partial(for_replica, sum(of_replicas[:replica]), count)
            features, labels, weights, *lengths = tf.nest.map_structure(share, stack)
            if count < size:
                weights *= [float(row < count) for row in range(size)]
            parts.append((features, labels, weights, *lengths))
        return tuple(parts)

    return prepared.rebatch(total * stack_size).map(split)


def on_replicas(strategy: tf.distribute.Strategy, stacks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields stacks as strategy.run takes them; `stacks` are tuples of one for each of this process's replicas.

    Each is brought to its replica's device. The stack of a single replica stays in the host's memory.
    """
    for parts in stacks:
        if strategy.num_replicas_in_sync == 1:
            yield parts[0]
            continue
        brought = []
        for device, stack in zip(strategy.extended.worker_devices, parts, strict=True):
            with tf.device(device):
                brought.append(tf.nest.map_structure(tf.identity, stack))
        in_turn = iter(brought)
        yield strategy.experimental_distribute_values_from_function(lambda _, in_turn=in_turn: next(in_turn))
