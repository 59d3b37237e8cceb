"""The input pipeline of one process: from its examples to stacks of prepared batches for its replicas.

The order of the operations makes batches the same for any number of replicas: examples -> shuffle by (seed, pass) ->
complete batches -> skip to the position -> this process's shard -> prepare -> several batches at a time -> prefetch.
The k-th global batch of a pass has the same examples however many replicas and processes share it. Of the batches that
were skipped, at most a few small ones are prepared, together with the first one.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from engine.data.examples import Examples, Shard, input_options
from engine.data.preparation import Preparation, PreparedSpec
from engine.data.stacks import stacked
from engine.errors import BadInput

# Stacks that are ready before they are asked for.
STACKS_AHEAD = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What one process prepares of the global batches of a dataset, pass after pass."""

    examples: Examples
    """Those of the dataset, or those in the files that this process loads."""
    preparation: Preparation
    prepared: PreparedSpec
    seed: int
    training: bool
    """Whether the examples are shuffled, in another order in each pass."""
    shard: Shard
    part: int
    """The number of this process if it loads files of its own, else 0."""
    per_replica_batch_size: int
    batches_at_once: int
    """Batches that are prepared in one call."""
    prefetches: bool
    """Whether batches are prepared before they are asked for."""

    def stacks(self, first_pass: int, first_step: int, sizes: tuple[list[int], list[int]]) -> tf.data.Dataset:
        """Returns stacks of the batches from a step of a pass on: tuples of one for each replica of this process.

        `sizes` is the result of `stack_sizes`.
        """
        self.examples.cache()
        sizes_of_first, sizes_of_others = (tf.constant(each, tf.int64) for each in sizes)
        replicas = self.shard.size // self.per_replica_batch_size

        @tf.autograph.experimental.do_not_convert
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            is_first = number == first_pass
            first = tf.where(is_first, tf.constant(first_step, tf.int64), 0)
            sizes_of_pass = tf.cond(is_first, lambda: sizes_of_first, lambda: sizes_of_others)
            return stacked(self._batches(number, first), sizes_of_pass, replicas, self.per_replica_batch_size)

        # Endless, so that the next pass's first batches are prepared while this one is validated.
        endless = tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass)
        return (endless.prefetch(STACKS_AHEAD) if self.prefetches else endless).with_options(input_options())

    def _batches(self, number: tf.Tensor, first_step: tf.Tensor) -> tf.data.Dataset:
        """Returns what this process prepares of a pass's batches, any number of examples in an element."""
        # In evaluation every pass is the same.
        seed = pass_seed(self.seed, number if self.training else tf.zeros_like(number))
        length_and_seed = self.examples.length, tf.stack([seed, self.part])
        order_seed = seed if self.training else None
        shard, size = self.shard, self.shard.examples_per_batch
        if not self.prepared.takes_batches:
            numbered = self.examples.one_by_one(shard, first_step * size, order_seed)
            prepared = self.preparation.one_by_one(numbered, self.prepared, *length_and_seed)
            return prepared.batch(shard.size, drop_remainder=True)
        # Counted from batch 0, so that after a resume a batch is prepared with the same others, and rounded alike.
        skipped, at_once = first_step % self.batches_at_once, self.batches_at_once
        elements, pick = self.examples.batches(shard, (first_step - skipped) * size, order_seed, at_once)
        prepare = self.preparation.batch_function(*length_and_seed)

        def pick_and_prepare(number: tf.Tensor, element: tuple[Any, Any]) -> Any:
            skip = tf.where(number == 0, skipped * shard.size, 0)
            return tf.nest.map_structure(lambda part: part[skip:], prepare(*pick(*element)))

        return elements.enumerate().map(pick_and_prepare, num_parallel_calls=tf.data.AUTOTUNE)

    def rejection(self, problem: tf.errors.OpError, during: str) -> BadInput:
        """Returns the error for batches that cannot be read or prepared; `during` names them."""
        examples = self.examples
        seed = tf.zeros([2], tf.int64)
        one_by_one = self.preparation.one_by_one(examples.unshuffled(), self.prepared, examples.length, seed)
        return examples.rejection(problem, one_by_one, during)


def evaluation_seed(seed: int) -> tf.Tensor:
    """Returns the seed (int64, [2]) from which, with its place, the seed of an example is made in an evaluation."""
    return tf.stack([pass_seed(seed, tf.zeros([], tf.int64)), 0])


def pass_seed(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a seed (int64, 0 to 2**31 - 1) that differs for neighbouring seeds and passes in every bit."""
    pair = tf.stack([tf.constant(seed, tf.int64), number])
    return tf.random.stateless_uniform([], pair, maxval=2**31 - 1, dtype=tf.int64)
