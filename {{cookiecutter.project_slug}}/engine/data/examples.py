"""The examples of a split in their order: picked from memory where they fit, else streamed through a shuffle buffer.

The order follows from the seed alone. An example's place is its number in that order.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from engine.data.element_spec import bytes_in_buffer, bytes_of, is_exact, is_static, measured_bytes
from engine.errors import BadInput
from engine.user_errors import first_line, is_users, where_raised

# A set of examples up to this size is read once and kept.
BYTES_IN_MEMORY = 2**29
# Where only the first examples were measured, the others may be larger.
MARGIN = 1.5
# How long to search for the example that cannot be read or prepared.
SECONDS_TO_SEARCH = 60.0
# Calls under way at once. More than there are cores, so that a core finds the next one waiting.
PARALLEL_CALLS = 64


class Examples:
    """A finite set of single examples: those of a split, or of the files of it that one process reads.

    Attributes:
        length: how many there are.
        element_spec: the type of one.
        have_one_shape: whether all of them are tensors of one known shape.
        fingerprint: what a resumed run has to find again of the files they are in, or None if these are not known.
    """

    fingerprint: dict[str, Any] | None = None

    def __init__(
        self,
        dataset: Any,
        hook: str,
        shuffle_bytes: int | None,
        length: int | None = None,
        buffer_size: int | None = None,
    ) -> None:
        """Raises BadInput, naming the `hook` that returned the dataset, unless it is a finite set of examples.

        Args:
            dataset: what the hook returned.
            hook: its name, for messages.
            shuffle_bytes: the size of the buffer that a set is shuffled through if it does not fit into memory; None:
                it is not shuffled.
            length: the number of examples, where the dataset cannot be asked for it: in the graph of a worker.
            buffer_size: that of another such set, where none can be measured: there too.
        """
        self._hook = hook
        self._shuffle_bytes, self._buffer_size = shuffle_bytes, buffer_size
        self.length = _checked_length(hook, dataset) if length is None else length
        # A set that holds fewer than it says would shift all batches after it.
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.length))
        self.element_spec = dataset.element_spec
        self.have_one_shape = is_static(self.element_spec)
        self._kept: Any = None  # All examples in one structure of tensors [length, ...].

    @functools.cached_property
    def _bytes(self) -> float:
        """The bytes of one example. Where its type does not say it, the first ones are read."""
        if is_exact(self.element_spec):
            return bytes_of(self.element_spec)
        try:
            with tf.init_scope():  # Out of the graph that is being built.
                return measured_bytes(self._dataset.with_options(input_options()))
        except tf.errors.OpError as problem:
            raise self.refusal(problem, self._dataset) from problem

    @functools.cached_property
    def fits_in_memory(self) -> bool:
        """Whether the examples are read once and kept; the rest is streamed."""
        margin = 1.0 if is_exact(self.element_spec) else MARGIN
        return self.have_one_shape and self.length * self._bytes * margin <= BYTES_IN_MEMORY

    @property
    def buffer_size(self) -> int:
        """How many of the examples are shuffled at a time where they are streamed."""
        if self._buffer_size is None:
            self._buffer_size = min(self.length, max(1, int(self._shuffle_bytes / self._bytes_in_buffer)))
        return self._buffer_size

    @property
    def _bytes_in_buffer(self) -> float:
        return bytes_in_buffer(self.element_spec, self._bytes)

    def describe_shuffling(self, *, streamed: bool, processes: int) -> tuple[str, int]:
        """Returns how the examples are shuffled, if they are, and how many bytes that takes in one process.

        `processes` is how many share what is held; a shuffle buffer is each process's own.
        """
        if self.fits_in_memory and not streamed:
            return "in memory", 0
        taken = int(self.buffer_size * self._bytes_in_buffer)
        megabytes = f"{max(1, round(taken / 2**20)):,} MB in each process"
        return (
            f"streamed, {self.buffer_size:,} of {self.length:,} examples at a time, {megabytes}",
            taken,
        )

    def keep(self) -> None:
        """Reads the examples into memory if they fit. Raises BadInput if they cannot be read."""
        if self._kept is None and self.fits_in_memory:
            try:
                with tf.device("CPU:0"):
                    self._kept = self._dataset.batch(self.length).with_options(input_options()).get_single_element()
                self._dataset = None  # It may hold arrays, which would stay in memory too.
            except tf.errors.OpError as problem:
                raise self.refusal(problem, self._dataset) from problem
        elif self._kept is None and self._shuffle_bytes is not None:
            _ = self.buffer_size  # If the first examples cannot be read, this is noticed now.

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
    ) -> tf.data.Dataset:
        """Returns prepared batches of the examples from place `first` on; examples need to have one shape.

        Args:
            prepare: takes places (int64, [n]) and examples ([n, ...]) of some batches; returns tensors [n, ...].
            size: examples in a batch; it divides `first` and `end`.
            first: the first place (int64, scalar).
            end: the place after the last one. Copies of an example fill the places behind the set's last one.
            at_once: how many batches to prepare in one call.
            share: which of a batch's examples to return.
            seed: shuffles the examples (int64, scalar); None keeps their order.
        """
        # Counted from place 0, so that after a resume a batch is prepared with the same others, and rounded alike.
        begin = first - first % (size * at_once)

        def prepare_from_first(places: tf.Tensor, examples: Any) -> Any:
            skipped = tf.math.count_nonzero(places < first)
            return tf.nest.map_structure(lambda part: part[skipped:], prepare(places, examples))

        def prepare_share(*batches: Any) -> Any:
            def own(part: tf.Tensor) -> tf.Tensor:
                by_batch = tf.reshape(part, [-1, size, *part.shape[1:]])[:, share]
                return tf.reshape(by_batch, [-1, *part.shape[1:]])

            return prepare_from_first(*tf.nest.map_structure(own, batches))

        if not self.fits_in_memory:
            batches = self.in_order(begin, end, seed).batch(size * at_once)
            return batches.map(prepare_share, num_parallel_calls=tf.data.AUTOTUNE)

        order = tf.range(self.length, dtype=tf.int64)
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
        order = tf.concat([order, tf.zeros([max(0, end - self.length)], tf.int64)], axis=0)[begin:end]
        rows = tuple(tf.reshape(numbers, [-1, size])[:, share] for numbers in (tf.range(begin, end), order))
        kept = self._kept

        def pick(places: tf.Tensor, numbers: tf.Tensor) -> Any:
            places, numbers = tf.reshape(places, [-1]), tf.reshape(numbers, [-1])
            return prepare_from_first(places, tf.nest.map_structure(lambda part: tf.gather(part, numbers), kept))

        rows = tf.data.Dataset.from_tensor_slices(rows).batch(at_once)
        return rows.map(pick, num_parallel_calls=tf.data.AUTOTUNE)

    def in_order(self, first: tf.Tensor, end: int, seed: tf.Tensor | None = None) -> tf.data.Dataset:
        """Returns (place, example) one by one, always streamed; for the arguments see `batches`."""
        dataset = tf.data.Dataset.from_tensor_slices(self._kept) if self._dataset is None else self._dataset
        examples = dataset
        if seed is not None:
            examples = shuffled(dataset, self.buffer_size, seed)
        if end > self.length:
            examples = examples.concatenate(dataset.take(1).repeat(end - self.length))
        if end < self.length:  # Otherwise it is read to its end, and examples beyond its length are noticed.
            examples = examples.take(end)
        return examples.skip(first).enumerate(start=first)

    def stream(self, size: int, first: tf.Tensor, end: int, share: slice, seed: tf.Tensor | None) -> tf.data.Dataset:
        """Returns (place, example) one by one: those of a share of each batch; for the arguments see `batches`."""
        if self.have_one_shape:
            unprepared = self.batches(lambda *each: each, size, first, end, at_once=1, share=share, seed=seed)
            return unprepared.unbatch()
        numbered = self.in_order(first, end, seed)
        if share.stop - share.start < size:
            numbered = numbered.filter(lambda place, _: (place % size >= share.start) & (place % size < share.stop))
        return numbered

    def refusal(
        self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str = "while it was read"
    ) -> BadInput:
        """Returns what to raise if examples cannot be read or prepared: it says which one, and why.

        Args:
            problem: what TensorFlow raised.
            one_by_one: the examples in their order, read or prepared; searched for the one that fails.
            during: when it failed, if that one is not found.
        """
        if "was expected to contain" in str(problem):
            what_to_do = "give assert_cardinality the number of examples that it really has"
            return BadInput(f"{self._hook}: {first_line(problem)}: {what_to_do}")
        if found := _first_that_fails(one_by_one):
            number, problem = found
            during = self._on(number)
        # TensorFlow names the function whose operation failed, which is one of preparation.py.
        prepares = "_prepare_" in str(problem)
        failed = (
            f"task.prepare_example failed {during}, of {self._hook}" if prepares else f"{self._hook} failed {during}"
        )
        place = f"{where_raised(problem)}: " if is_users(problem) else ""
        return BadInput(f"{failed} ({place}{first_line(problem)}): fix it, or leave it out")

    def _on(self, number: int) -> str:
        return f"on example {number}, counted from 0"


def shuffled(dataset: tf.data.Dataset, buffer_size: int | tf.Tensor, seed: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset shuffled through a buffer by a seed (int64, scalar) that may be a tensor."""
    # TensorFlow mixes it with the seed of the graph, which it compares with 0 first: so that one is a number.
    tf.compat.v1.set_random_seed(1)
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)


def _first_that_fails(dataset: tf.data.Dataset) -> tuple[int, tf.errors.OpError] | None:
    """Returns the number of the first element that raises, and what; None if none does within a minute."""
    number, end = 0, time.monotonic() + SECONDS_TO_SEARCH
    try:
        for _ in dataset.with_options(input_options()):
            number += 1
            if time.monotonic() > end:
                return None
    except tf.errors.OpError as problem:
        return number, problem
    return None


def input_options() -> tf.data.Options:
    """Returns the options of every pipeline: elements keep their order, and nothing is tuned while it runs."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The thread that tunes a pipeline may miss that it is to end, and is then waited for, up to a minute.
    options.autotune.enabled = False
    options.autotune.initial_parallelism = PARALLEL_CALLS  # What tf.data.AUTOTUNE then stands for.
    return options


def stand_in(spec: Any) -> Examples:
    """Returns examples of a type, to find out what task.prepare_example makes of it. They cannot be read."""
    none = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
    return Examples(none, "task.load_examples", None, length=1)


def _checked_length(hook: str, examples: Any) -> int:
    """Returns the number of examples. Raises BadInput if they are anything but a finite set of single examples."""
    if not isinstance(examples, tf.data.Dataset):
        raise BadInput(f"{hook} returned a {type(examples).__name__}: return a tf.data.Dataset of single examples")
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
