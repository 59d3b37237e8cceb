"""Brings batches to the replicas several at a time: an element of the input is a stack of them.

Fetching an element for several replicas costs more than a small step does, and so does every return to Python.
"""

import atexit
import functools
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from engine.errors import BadInput

# The size of a stack at most, for all replicas together.
BYTES_OF_STACK = 2**22
# Each of a run's first stacks is so many times as large as the one before, so that the first one is there soon.
GROWTH = 4

_feeds: weakref.WeakSet = weakref.WeakSet()


class StackIterator:
    """The batches of a set from some batch of a pass on, pass after pass.

    Attributes:
        seconds_waited: how long the program has waited for batches so far.
    """

    def __init__(
        self,
        stacks: Iterator[Any],
        sizes: tuple[list[int], list[int]],
        first_pass: int,
        first_step: int,
        *,
        refusal: Callable[[tf.errors.OpError, int, int], BadInput],
    ) -> None:
        """`stacks` begins with batch number `first_step` of a pass; `sizes` is what `stack_sizes` returned.

        `refusal` returns what to raise if TensorFlow cannot give the stack that begins at a batch of a pass.
        """
        self._stacks = stacks
        self._sizes = itertools.chain(sizes[0], itertools.cycle(sizes[1]))
        self._steps_of_pass = sum(sizes[1])
        self._pass, self._step = first_pass, first_step
        self._refusal = refusal
        self._refused: BadInput | None = None
        self._stack: Any = None
        self._next = self._end = 0  # The next batch of the stack to take, and how many there are.
        self.seconds_waited = 0.0
        _feeds.add(self)

    def is_at(self, number: int | None, step: int) -> bool:
        """Returns whether the next batch is number `step` of a pass; None means any."""
        return self._step == step and number in (None, self._pass)

    def take(self, count: int) -> Iterator[tuple[Any, int, int]]:
        """Yields where the next `count` batches are: a stack, the first one's number in it, how many.

        Raises:
            BadInput: the rest of them cannot be read; a later call raises it again.
        """
        while count:
            if self._next == self._end:
                self._fetch()
            first, taken = self._next, min(count, self._end - self._next)
            self._next += taken
            self._step += taken
            count -= taken
            if self._step == self._steps_of_pass:
                self._pass, self._step = self._pass + 1, 0
            yield self._stack, first, taken

    def _fetch(self) -> None:
        if self._refused:
            raise self._refused
        started = time.monotonic()
        try:
            self._stack = next(self._stacks)
        except tf.errors.OpError as problem:
            self._refused = self._refusal(problem, self._pass, self._step)
            raise self._refused from problem
        self.seconds_waited += time.monotonic() - started
        self._next, self._end = 0, next(self._sizes)

    def close(self) -> None:
        """Ends the threads that prepare batches."""
        self._stacks = self._stack = self._refused = None


@atexit.register
def _close_all() -> None:
    # A thread that runs Python code of the user's, such as a generator of examples, can end only while Python runs.
    for feed in list(_feeds):
        feed.close()
    for name in ("last_exc", "last_value", "last_traceback"):  # Their frames hold the feed that failed.
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()


def stack_sizes(steps: int, first_step: int, bytes_of_batch: int) -> tuple[list[int], list[int]]:
    """Returns how many batches to put into each stack: of a pass from `first_step` on, and of each whole one after it.

    Args:
        steps: batches of a whole pass.
        first_step: the first batch of the first pass.
        bytes_of_batch: the size of one, for all replicas.
    """
    # A stack can be used only when all of it is prepared, so a long pass has several.
    largest = max(1, min(BYTES_OF_STACK // bytes_of_batch, max(64, steps // 4)))
    growing, size, left = [], 1, steps - first_step
    while left > 0:
        growing.append(min(size, largest, left))
        left -= growing[-1]
        size *= GROWTH
    whole, rest = divmod(steps, largest)
    sizes = [largest] * whole + [rest] * (rest > 0)
    return growing or sizes, sizes


def stacked(prepared: tf.data.Dataset, sizes: tf.Tensor, replicas: int, share: int) -> tf.data.Dataset:
    """Returns stacks, [batches, share, ...] each, in tuples of one for each replica.

    Args:
        prepared: elements of any number of examples, [n, ...]; the replicas' shares of a batch follow each other.
        sizes: how many batches go into each stack (int64).
        replicas: how many share a batch.
        share: examples of a batch on each.
    """

    def for_replica(replica: int, part: tf.Tensor) -> tf.Tensor:
        if replicas == 1:
            return tf.reshape(part, [-1, share, *part.shape[1:]])
        # Whole shares side by side, so that each is copied in one piece.
        shares = tf.reshape(part, [-1, replicas, share * part.shape[1:].num_elements()])
        return tf.reshape(tf.gather(shares, replica, axis=1), [-1, share, *part.shape[1:]])

    def split(*stack: Any) -> tuple[Any, ...]:
        return tuple(
            tf.nest.map_structure(functools.partial(for_replica, replica), stack) for replica in range(replicas)
        )

    return prepared.rebatch(replicas * share * sizes).map(split)


def on_replicas(strategy: tf.distribute.Strategy, stacks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Yields stacks as strategy.run takes them; `stacks` are tuples of one for each of this process's replicas.

    Each is brought to its replica's device. If there is one replica, its stack stays in the host's memory.
    """
    if strategy.num_replicas_in_sync == 1:
        yield from (stack for (stack,) in stacks)
        return
    devices = strategy.extended.worker_devices
    for parts in stacks:
        brought = []
        for device, stack in zip(devices, parts, strict=True):
            with tf.device(device):
                brought.append(tf.nest.map_structure(tf.identity, stack))
        in_turn = iter(brought)
        yield strategy.experimental_distribute_values_from_function(lambda _, in_turn=in_turn: next(in_turn))
