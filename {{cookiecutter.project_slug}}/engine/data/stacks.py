"""Stacks of batches: they bring several batches at a time to the replicas, where a compiled function takes the steps.

A stack is several batches in one tensor, [batches, per-replica batch, ...] on each replica. Fetching an element for
several replicas takes longer than a small step does, and so does every return to Python.
"""

import atexit
import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import batched
from engine.data.padding import Padding
from engine.errors import BadInput, Unavailable
from engine.retries import until_read

BYTES_OF_STACK = 2**22  # The size of a stack at most, for all replicas of a process together.
# Each of the first stacks is this many times as large as the one before, so that the first one is ready soon.
GROWTH = 4
STACKS_UNTIL_SMALL = 1000  # After so many large stacks the sizes start over, because the list of them must end.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many batches each stack of a pass has: as in `pattern`, again and again, until `steps` batches are in stacks.

    A pass of 10^9 examples has too many stacks for a list of them all.
    """

    pattern: tuple[int, ...]
    steps: int

    def __iter__(self) -> Iterator[int]:
        left, sizes = self.steps, itertools.cycle(self.pattern)
        while left > 0:
            yield (size := min(next(sizes), left))
            left -= size

    def without_first(self) -> "Sizes":
        """Returns those of the rest of the pass."""
        first, *others = self.pattern
        return Sizes((*others, first), self.steps - first)


# Returns stacks from a batch of a pass on, and their sizes in that pass (the given ones, if any) and in each later one.
Start = Callable[[int, int, Sizes | None], tuple[Iterator[Any], Sizes, Sizes]]
# Returns the error for a stack that cannot be read, given the pass and the number of its first batch.
Rejection = Callable[[tf.errors.OpError, int, int], BadInput]

_iterators: weakref.WeakSet = weakref.WeakSet()


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
        scalar = tf.TensorSpec((), tf.int32)
        return CompiledSteps(tf.function(steps, input_signature=[self._stack_spec(), scalar, scalar]))

    def _stack_spec(self) -> Any:
        if self.strategy.num_replicas_in_sync == 1:
            return batched(self.batch_spec)
        # Only a distributed dataset has the spec of a stack on several replicas.
        no_stacks = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=batched(self.batch_spec))
        return self.strategy.distribute_datasets_from_function(lambda _: no_stacks).element_spec


class StackIterator:
    """The stacks of a dataset from a batch of a pass on, pass after pass."""

    def __init__(
        self,
        start: Start,
        hook: str,
        first_pass: int,
        first_step: int,
        *,
        rejection: Rejection,
        is_kept: bool = True,
        is_alone: bool = True,
    ) -> None:
        """Starts at batch `first_step` of pass `first_pass`; `hook` is the call that loads the examples.

        Unless `is_kept`, the stacks that are ready are given back after each pass. Unless it `is_alone`, other
        processes wait for its stacks, and all end together at a signal.
        """
        self._start, self._hook, self._rejection, self._is_kept = start, hook, rejection, is_kept
        self._is_alone = is_alone
        self._stacks: Iterator[Any] | None
        self._pass, self._step = first_pass, first_step
        # The sizes of the stacks of this pass to come, which do not depend on faults or on this machine: TensorFlow
        # numbers the steps of a stack, and other workers would wait for ever for steps of their numbers.
        self._stacks, self._sizes, self._sizes_of_others = start(first_pass, first_step, None)
        self._rejected: BadInput | None = None
        self._stack: Any = None
        self._next = self._end = 0  # The next batch of the stack to take, and how many there are.
        self.is_waiting, self.seconds_waited = False, 0.0  # Whether the program waits for batches; how long so far.
        _iterators.add(self)

    def is_at(self, number: int | None, step: int) -> bool:
        """Returns whether the next batch is number `step` of a pass; None means any."""
        return self._step == step and number in (None, self._pass)

    def plan(self, count: int) -> list[tuple[int, int]]:
        """Returns for the next `count` batches what `take` yields, without the stacks."""
        first, end, found = self._next, self._end, []
        sizes = itertools.chain(self._sizes, itertools.cycle(self._sizes_of_others))
        while count:
            first, end = (first, end) if first < end else (0, next(sizes))
            found.append((first, min(count, end - first)))
            first, count = first + found[-1][1], count - found[-1][1]
        return found

    def take(self, count: int) -> Iterator[tuple[Any, int, int]]:
        """Yields the next `count` batches: a stack, the number of the first one in it, how many to take from there.

        Raises BadInput, or Unavailable, if the rest cannot be read; a later call raises it again.
        """
        while count:
            if self._next == self._end:
                self._fetch()
            stack, first, taken = self._stack, self._next, min(count, self._end - self._next)
            self._next += taken
            self._step += taken
            count -= taken
            if self._next == self._end and self._sizes.steps <= 0:
                self._pass, self._step, self._sizes = self._pass + 1, 0, self._sizes_of_others
                if not self._is_kept:
                    self._stacks = self._stack = None
            yield stack, first, taken

    def _fetch(self) -> None:
        if self._rejected:
            raise self._rejected
        started, self.is_waiting = time.monotonic(), True
        try:
            self._stack = until_read(self._next_stack, self._hook, obeys_signals=self._is_alone)
        except Unavailable as problem:
            self._rejected = problem
            raise
        except tf.errors.OpError as problem:
            self._rejected = self._rejection(problem, self._pass, self._step)
            raise self._rejected from problem
        finally:
            self.is_waiting = False
        self.seconds_waited += time.monotonic() - started
        self._next, self._end = 0, next(iter(self._sizes))
        self._sizes = self._sizes.without_first()

    def _next_stack(self) -> Any:
        try:
            if self._stacks is None:
                self._stacks, *_ = self._start(self._pass, self._step, self._sizes)
            return next(self._stacks)
        except tf.errors.OpError:
            self._stacks = None  # The next ones start at the same batch.
            raise

    def close(self) -> None:
        """Ends the threads that prepare batches."""
        self._stacks = iter(())
        self._stack = self._rejected = None


@atexit.register
def _close_all() -> None:
    # A thread that runs the user's Python code, such as a generator of examples, can end only while Python runs.
    for iterator in list(_iterators):
        iterator.close()
    for name in ("last_exc", "last_value", "last_traceback"):  # Their frames hold the iterator that failed.
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()


def stack_sizes(steps: int, first_step: int, bytes_of_share: int) -> tuple[Sizes, Sizes]:
    """Returns the sizes of the stacks in a pass of `steps` batches from its first step on, and in complete ones.

    `bytes_of_share` is the size of a batch on all replicas of a process together.
    """
    # A stack can be used only when all of it is prepared, so a long pass has several.
    largest = max(1, min(BYTES_OF_STACK // bytes_of_share, max(64, steps // 4)))
    growing, size = [], 1
    while size < largest:
        growing.append(size)
        size *= GROWTH
    whole = Sizes((largest,), steps)
    if first_step >= steps:
        return whole, whole
    return Sizes((*growing, *[largest] * STACKS_UNTIL_SMALL), steps - first_step), whole


def stacked(
    prepared: tf.data.Dataset, sizes: tf.Tensor, of_replicas: Sequence[int], per_replica_batch_size: int
) -> tf.data.Dataset:
    """Returns stacks, [batches, per-replica batch, ...] each, in tuples of one for each replica.

    Elements of `prepared` are any number of examples, [n, ...]. Of each batch `of_replicas` says how many examples each
    replica gets, one replica after the other; a per-replica batch that lacks some is padded with copies of weight 0.
    `sizes` (int64) says how many batches go into each stack, again and again.
    """
    size, replicas = per_replica_batch_size, len(of_replicas)
    is_padded = any(count < size for count in of_replicas)

    def for_replica(replica: int, part: tf.Tensor) -> tf.Tensor:
        if is_padded:
            first = sum(of_replicas[:replica])
            rows = [first + min(row, of_replicas[replica] - 1) for row in range(size)]
            of_each = tf.reshape(part, [-1, sum(of_replicas), part.shape[1:].num_elements()])
            return tf.reshape(tf.gather(of_each, rows, axis=1), [-1, size, *part.shape[1:]])
        if replicas == 1:
            return tf.reshape(part, [-1, size, *part.shape[1:]])
        # Complete per-replica batches side by side, so that each is copied in one piece.
        of_each = tf.reshape(part, [-1, replicas, size * part.shape[1:].num_elements()])
        return tf.reshape(tf.gather(of_each, replica, axis=1), [-1, size, *part.shape[1:]])

    def split(*stack: Any) -> tuple[Any, ...]:
        parts = [tf.nest.map_structure(functools.partial(for_replica, each), stack) for each in range(replicas)]
        if not is_padded:
            return tuple(parts)
        factors = [tf.constant([float(row < count) for row in range(size)]) for count in of_replicas]
        return tuple(
            (features, labels, weights * factor, *lengths)
            for (features, labels, weights, *lengths), factor in zip(parts, factors, strict=True)
        )

    return prepared.rebatch(sum(of_replicas) * sizes).map(split)


def on_replicas(strategy: tf.distribute.Strategy, stacks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields stacks as strategy.run takes them; `stacks` are tuples of one for each of this process's replicas.

    Each is brought to its replica's device. The stack of a single replica stays in the host's memory.
    """
    if strategy.num_replicas_in_sync == 1:
        yield from (stack for (stack,) in stacks)
        return
    for parts in stacks:
        brought = []
        for device, stack in zip(strategy.extended.worker_devices, parts, strict=True):
            with tf.device(device):
                brought.append(tf.nest.map_structure(tf.identity, stack))
        in_turn = iter(brought)
        yield strategy.experimental_distribute_values_from_function(lambda _, in_turn=in_turn: next(in_turn))
