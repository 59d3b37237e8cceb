"""The examples of a pass in its order: picked from memory where they fit, else streamed through a shuffle buffer.

Either way the order follows from the seed alone, and the place of an example in it is known.
"""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
from engine.mistakes import first_line, is_users, where_raised

# A set of examples up to this size is read once and kept.
BYTES_IN_MEMORY = 2**29
# What a text is taken to be long, because its type does not say.
BYTES_OF_TEXT = 2**14
# How long to look for the example that cannot be read or prepared.
SECONDS_TO_LOOK = 60.0
# Calls under way at once; a core takes the next one without having to be woken. More than there are cores of any use.
PARALLEL_CALLS = 64


class Examples:
    """Examples one by one, in a fixed order: those of one split, or of one process's part of it.

    Attributes:
        length: how many there are.
        element_spec: the type of one.
        have_one_shape: whether all of them are tensors of one known shape.
    """

    def __init__(self, dataset: Any, hook: str, length: int | None = None) -> None:
        """Raises BadInput, naming the `hook` that returned them, unless they are a finite set of examples.

        `length`, if it is given, is not asked for again.
        """
        self._hook = hook
        self.length = _checked_length(hook, dataset) if length is None else length
        # A set that holds fewer than it says would shift all batches after it.
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.length))
        self.element_spec = dataset.element_spec
        leaves = tf.nest.flatten(self.element_spec)
        self.have_one_shape = all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves)
        self._kept: Any = None  # All examples in one structure of tensors [length, ...].

    def batches(
        self,
        prepare: Callable[[tf.Tensor, Any], Any],
        size: int,
        first: tf.Tensor,
        end: int,
        *,
        at_once: int,
        share: slice,
        seed: tf.Tensor | None,
        shuffle_buffer_size: int,
    ) -> tf.data.Dataset:
        """Returns batches of the examples from place `first` to place `end`; examples need to have one shape.

        Args:
            prepare: what to make of some batches: it takes the places (int64, [n]) and the examples ([n, ...]), and
                returns tensors [n, ...].
            size: examples in a batch; it divides `first` and `end`.
            first: the first place (int64, scalar).
            end: the place after the last one; beyond the last example come copies of one, as padding.
            at_once: how many batches to prepare in one call; counted from place 0 on, so that each is prepared with the
                same others after a resume, and rounded alike.
            share: which of a batch's examples to return.
            seed: shuffles them (int64, scalar); None leaves them in their order.
            shuffle_buffer_size: a set that is larger than this is shuffled through a buffer of this many.
        """
        begin = first - first % (size * at_once)

        def prepare_the_wanted(places: tf.Tensor, examples: Any) -> Any:
            unwanted = tf.math.count_nonzero(places < first)
            return tf.nest.map_structure(lambda part: part[unwanted:], prepare(places, examples))

        if not self._is_kept(None if seed is None else shuffle_buffer_size):
            ordered = self.in_order(begin, end, seed=seed, shuffle_buffer_size=shuffle_buffer_size)

            def own(*batches: Any) -> Any:
                def of_share(part: tf.Tensor) -> tf.Tensor:
                    by_batch = tf.reshape(part, [-1, size, *part.shape[1:]])[:, share]
                    return tf.reshape(by_batch, [-1, *part.shape[1:]])

                return prepare_the_wanted(*tf.nest.map_structure(of_share, batches))

            return ordered.batch(size * at_once).map(own, num_parallel_calls=tf.data.AUTOTUNE)
        order = tf.range(self.length, dtype=tf.int64)
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
        order = tf.concat([order, tf.zeros([max(0, end - self.length)], tf.int64)], axis=0)[begin:end]
        rows = [tf.reshape(part, [-1, size])[:, share] for part in (tf.range(begin, end), order)]
        kept = self._kept

        def pick(places: tf.Tensor, chosen: tf.Tensor) -> Any:
            places, chosen = tf.reshape(places, [-1]), tf.reshape(chosen, [-1])
            return prepare_the_wanted(places, tf.nest.map_structure(lambda part: tf.gather(part, chosen), kept))

        rows = tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(at_once)
        return rows.map(pick, num_parallel_calls=tf.data.AUTOTUNE)

    def in_order(
        self, first: tf.Tensor, end: int, *, seed: tf.Tensor | None, shuffle_buffer_size: int
    ) -> tf.data.Dataset:
        """Returns (place, example), one by one and not from memory, as `batches` does."""
        examples = tf.data.Dataset.from_tensor_slices(self._kept) if self._dataset is None else self._dataset
        if seed is not None:
            # TensorFlow mixes it with the seed of the graph, and compares that one with 0 first: a tensor cannot be.
            tf.compat.v1.set_random_seed(1)
            buffer_size = min(self.length, shuffle_buffer_size)
            examples = examples.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)
        if end > self.length:
            examples = examples.concatenate(self._dataset.take(1).repeat(end - self.length))
        if end < self.length:  # Else it is read until it ends, and more examples than there should be are noticed.
            examples = examples.take(end)
        return examples.skip(first).enumerate(start=first)

    def keep(self, shuffle_buffer_size: int | None) -> None:
        """Reads the examples into memory, if that is where `batches` takes them from; None if it does not shuffle."""
        if self._kept is None and self._is_kept(shuffle_buffer_size):
            try:
                with tf.device("CPU:0"):
                    self._kept = self._dataset.batch(self.length).with_options(input_options()).get_single_element()
                self._dataset = None  # It may be of arrays, which would stay in memory beside what is kept.
            except tf.errors.OpError as problem:
                raise self.refusal(problem, self._dataset) from problem

    def refusal(
        self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str = "while it was read"
    ) -> BadInput:
        """Returns what to raise if examples cannot be read, or prepared: it says which one, and why.

        Args:
            problem: what TensorFlow said.
            one_by_one: the examples in their order, as they were read or prepared, to find the one.
            during: when, if it is not found.
        """
        if "was expected to contain" in str(problem):
            number = "give assert_cardinality the number of examples that it really has"
            return BadInput(f"{self._hook}: {first_line(problem)}: {number}")
        if found := _first_that_fails(one_by_one):
            number, problem = found
            during = f"on example {number}, counted from 0"
        # TensorFlow names the function whose operation failed, which is one of preparation.py.
        failed = f"{self._hook} failed {during}"
        if "_prepare_" in str(problem):
            failed = f"task.prepare_example failed {during}, of {self._hook}"
        said = f"{where_raised(problem)}: {first_line(problem)}" if is_users(problem) else first_line(problem)
        return BadInput(f"{failed} ({said}): fix it, or leave it out")

    def _is_kept(self, shuffle_buffer_size: int | None) -> bool:
        leaves = tf.nest.flatten(self.element_spec)
        if not self.have_one_shape or any(leaf.dtype == tf.string for leaf in leaves):
            return False  # Its size is not known.
        fits = self.length * bytes_of(self.element_spec) <= BYTES_IN_MEMORY
        return fits and self.length <= (shuffle_buffer_size or self.length)


def _first_that_fails(dataset: tf.data.Dataset) -> tuple[int, tf.errors.OpError] | None:
    """Returns the number of the first element that cannot be had, and why; None if there is none, or it is far."""
    number, end = 0, time.monotonic() + SECONDS_TO_LOOK
    try:
        for _ in dataset.with_options(input_options()):
            number += 1
            if time.monotonic() > end:
                return None
    except tf.errors.OpError as problem:
        return number, problem
    return None


def input_options() -> tf.data.Options:
    """Returns the options of every pipeline: elements in their order, and what runs in parallel does so at once."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The thread that tunes a pipeline may miss that it is to end, and is waited for then: up to a minute. What is to be
    # tuned (tf.data.AUTOTUNE) keeps the number of calls that it begins with.
    options.autotune.enabled = False
    options.autotune.initial_parallelism = PARALLEL_CALLS
    return options


def bytes_of(spec: Any) -> int:
    """Returns the size of what an element spec of static shapes describes; of a text a guess."""
    return sum(
        leaf.shape.num_elements() * (BYTES_OF_TEXT if leaf.dtype == tf.string else leaf.dtype.size)
        for leaf in tf.nest.flatten(spec)
    )


def _checked_length(hook: str, examples: tf.data.Dataset) -> int:
    """Returns the number of examples. Raises BadInput if the hook returned anything but a finite set of examples."""
    if not isinstance(examples, tf.data.Dataset):
        raise BadInput(f"{hook} returned a {type(examples).__name__}: return a tf.data.Dataset of single examples")
    spec = examples.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise BadInput(
            f"{hook} returned elements of {as_text(spec)}: each has to be a tuple (features, labels) or "
            "(features, labels, weight)"
        )
    if len(spec) == 3 and (not isinstance(spec[2], tf.TensorSpec) or spec[2].shape.rank != 0):
        raise BadInput(f"{hook} returned weights of {as_text(spec[2])}: each example has one number as its weight")
    length = int(examples.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise BadInput(f"{hook} returned endless examples: leave out repeat(); the epochs are counted for you")
    if length == tf.data.UNKNOWN_CARDINALITY:
        raise BadInput(
            f"{hook} returned examples of unknown number: end it with "
            ".apply(tf.data.experimental.assert_cardinality(<number of examples>))"
        )
    if length == 0:
        raise BadInput(f"{hook} returned no examples: each needs at least one")
    return length


def as_text(spec: Any) -> str:
    """Returns an element spec as one short line: shapes and dtypes in their structure."""

    def leaf_text(leaf: Any) -> str:
        return f"{leaf.dtype.name}{list(leaf.shape)}" if isinstance(leaf, tf.TensorSpec) else type(leaf).__name__

    return str(tf.nest.map_structure(leaf_text, spec)).replace("'", "")
