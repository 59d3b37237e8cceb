"""The examples of a dataset in their order: picked from memory where they fit, else streamed through a shuffle buffer.

The order follows from the seed and, where examples are streamed, from the size of the buffer. An example's place is its
number in that order.
"""

import copy
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from engine.data.element_spec import (
    bytes_in,
    bytes_in_buffer,
    bytes_of,
    is_exact,
    is_static,
    megabytes,
    sha256_of,
    without_folder,
)
from engine.errors import BadInput, first_line, is_users, where_raised
from engine.files import until_read

BYTES_IN_MEMORY = 2**29  # Examples of up to this size are read once and cached.
MEASURED = 256  # The first examples are measured: the same ones after a resume, so that their order is the same.
COUNTED_AT_ONCE = 1024  # Texts whose bytes are counted together while they are read.
SECONDS_TO_SEARCH = 60.0  # How long to search for the example that cannot be read or prepared.
HASHED, HASHED_OF_STREAM = 64, 16  # Examples that `sha256` is made of, however many there are.
PARALLEL_CALLS = 64  # More calls at once than there are cores, so that a core finds the next one waiting.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
BYTES_AHEAD = 2**30  # What a pipeline may prepare ahead; but always two calls, and the stacks.


@dataclasses.dataclass(frozen=True)
class Shard:
    """The examples that one process reads in a pass."""

    examples_per_batch: int  # The size of the batch of all processes.
    places: slice  # The places in each batch that it reads.
    end: int  # The place after the last batch. Copies of an example fill the places behind the last example.

    @property
    def size(self) -> int:
        return self.places.stop - self.places.start


# A dataset, and a function from the parts of its elements to places (int64, [n]) and examples ([n, ...]).
Elements = tuple[tf.data.Dataset, Callable[..., tuple[tf.Tensor, Any]]]


class Examples:
    """A finite number of single examples.

    In the methods, `first` is a place at the beginning of a batch (int64), and `seed` (int64, scalar) shuffles the
    examples; None keeps them in the order of task.load_examples.

    Attributes:
        length: the number of examples.
        element_spec: of one example.
        sha256: a hash that changes with the examples, or with some of them; known after `cache`.
        may_be_cached: whether examples that fit into memory are read once and cached; others are streamed.
    """

    sha256 = ""
    may_be_cached = True

    def __init__(self, hook: str, length: int, element_spec: Any) -> None:
        """Raises BadInput, naming the hook, if there are no examples."""
        if not length:
            raise BadInput(f"{hook} returned no examples: each dataset needs at least one")
        self._hook, self.length, self.element_spec = hook, length, element_spec

    def cache(self) -> None:
        """Reads the examples into memory if they fit. Raises BadInput if they cannot be read."""

    def describe_shuffling(self, processes: int) -> tuple[str, int]:
        """Returns how the examples are shuffled, and the bytes that this takes in each of `processes`."""
        raise NotImplementedError

    def one_by_one(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None) -> tf.data.Dataset:
        """Returns (place, example) of the shard."""
        raise NotImplementedError

    def unshuffled(self) -> tf.data.Dataset:
        """Returns (number, example) of all examples in the order of task.load_examples."""
        raise NotImplementedError

    def batches(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None, at_once: int) -> Elements:
        """Returns elements of `at_once` batches of the shard; the examples need static shapes."""
        elements = self.one_by_one(shard, first, seed).batch(shard.size * at_once)
        return elements, lambda places, examples: (places, examples)

    def for_worker(self, load: Callable[[], Any]) -> "Examples":
        """Returns the same examples for the graph of a worker; `load` calls task.load_examples."""
        return self

    def rejection(self, problem: tf.errors.OpError, one_by_one: tf.data.Dataset, during: str) -> BadInput:
        """Returns the error for examples that cannot be read or prepared; it names the first one that fails.

        `one_by_one` has all of them, read or prepared, in their order. If none fails there, `during` says where.
        """
        number, end = 0, time.monotonic() + SECONDS_TO_SEARCH
        try:
            for _ in one_by_one.with_options(input_options()):
                number += 1
                if time.monotonic() > end:
                    break
        except tf.errors.OpError as failure:
            problem, during = failure, f"on {self._name(number)}"
        failed = f"{self._hook} failed {during}"
        if "_prepare_" in str(problem):  # TensorFlow names the function whose operation failed, here of preparation.py.
            failed = f"task.prepare_example failed {during}, of {self._hook}"
        place = f"{where_raised(problem)}: " if is_users(problem) else ""
        return BadInput(f"{failed} ({place}{first_line(problem)}): fix it, or drop it")

    def _name(self, number: int) -> str:
        return f"example {number}, counted from 0"


class DatasetExamples(Examples):
    """The examples of a tf.data.Dataset."""

    def __init__(self, dataset: tf.data.Dataset, hook: str, shuffle_bytes: int | None) -> None:
        """Raises BadInput, naming the hook, unless it returned a finite dataset of single examples.

        Examples that are streamed are shuffled through a buffer of `shuffle_bytes`, or not at all.
        """
        if not isinstance(dataset, tf.data.Dataset):
            raise BadInput(f"{hook} returned a {type(dataset).__name__}: return a tf.data.Dataset of single examples")
        length = int(dataset.cardinality())
        if length == tf.data.INFINITE_CARDINALITY:
            raise BadInput(f"{hook} returned endless examples: remove repeat(); the epochs are counted for you")
        if length == tf.data.UNKNOWN_CARDINALITY:
            raise BadInput(
                f"{hook} returned examples of unknown number: end it with "
                ".apply(tf.data.experimental.assert_cardinality(<number of examples>))"
            )
        super().__init__(hook, length, dataset.element_spec)
        self._shuffle_bytes = shuffle_bytes
        # A dataset with fewer examples than it says would shift all batches after it.
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
        self._cached: Any = None  # All examples in one structure of tensors [length, ...].

    @functools.cached_property
    def _bytes_of_example(self) -> float:
        """The bytes of one example. Where they do not follow from its element spec, the first ones are read."""
        if is_exact(self.element_spec):
            return bytes_of(self.element_spec)
        with tf.init_scope():  # Outside of the graph that is being built.
            sizes = [bytes_in(example) for example in self._dataset.take(MEASURED).with_options(input_options())]
        return sum(sizes) / len(sizes)

    @functools.cached_property
    def fits_in_memory(self) -> bool:
        """Whether the examples are read once and cached; reads them, if it is likely."""
        may_be_cached = self.may_be_cached and is_static(self.element_spec)
        if may_be_cached and self.length * self._bytes_of_example <= BYTES_IN_MEMORY:
            with tf.init_scope(), tf.device("CPU:0"):
                self._cached = self._read()
        return self._cached is not None

    def _read(self) -> Any:
        """Returns all examples in one structure of tensors [length, ...]; None if they take too much memory."""
        if is_exact(self.element_spec):
            return self._dataset.batch(self.length).with_options(input_options()).get_single_element()
        # The first texts may be shorter than the others. Nothing but the examples decides, so a resume decides alike.
        batches, taken = [], 0
        for batch in self._dataset.batch(COUNTED_AT_ONCE).with_options(input_options()):
            size = bytes_in(batch)
            taken += size
            if taken > BYTES_IN_MEMORY:
                self._bytes_of_example = max(self._bytes_of_example, size / COUNTED_AT_ONCE)
                return None
            batches.append(batch)
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *batches)

    @functools.cached_property
    def buffer_size(self) -> int:
        """The number of examples that are shuffled at a time where they are streamed."""
        in_buffer = bytes_in_buffer(self.element_spec, self._bytes_of_example)
        return min(self.length, max(1, int((self._shuffle_bytes or 0) / in_buffer)))

    def describe_shuffling(self, processes: int) -> tuple[str, int]:
        if self.fits_in_memory:
            return "in memory", 0
        taken = int(self.buffer_size * bytes_in_buffer(self.element_spec, self._bytes_of_example))
        examples = f"{self.buffer_size:,} of {self.length:,} examples at a time"
        return f"streamed, {examples}, {megabytes(taken)} in each process", taken

    def cache(self) -> None:
        if self.sha256:
            return
        try:
            self.sha256 = until_read(self._hash, self._hook, obeys_signals=True)
        except tf.errors.OpError as problem:
            raise self.rejection(problem, self._dataset, "while it was read") from problem

    def _hash(self) -> str:
        if self.fits_in_memory:
            self._dataset = None  # It may refer to arrays, which would stay in memory too.
            places = np.linspace(0, self.length - 1, HASHED, dtype=np.int64)
            hashed: Any = [[tf.gather(part, places)] for part in tf.nest.flatten(self._cached)]
        else:
            if self._shuffle_bytes is not None:
                _ = self.buffer_size  # If the first examples cannot be read, this is noticed now.
            first = self._dataset.take(HASHED_OF_STREAM).with_options(input_options())
            hashed = zip(*(tf.nest.flatten(example, expand_composites=True) for example in first), strict=True)
        return sha256_of(map(without_folder, hashed))

    def batches(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None, at_once: int) -> Elements:
        if not self.fits_in_memory:
            return super().batches(shard, first, seed, at_once)
        order = tf.range(self.length, dtype=tf.int64)
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, 0]))
        padding = tf.zeros([max(0, shard.end - self.length)], tf.int64)
        order = tf.concat([order, padding], axis=0)[first : shard.end]
        cached = self._cached

        def pick(places: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, Any]:
            numbers = tf.reshape(numbers, [-1])
            return tf.reshape(places, [-1]), tf.nest.map_structure(lambda part: tf.gather(part, numbers), cached)

        rows = [-1, shard.examples_per_batch]
        by_batch = (tf.reshape(part, rows)[:, shard.places] for part in (tf.range(first, shard.end), order))
        return tf.data.Dataset.from_tensor_slices(tuple(by_batch)).batch(at_once), pick

    def one_by_one(self, shard: Shard, first: tf.Tensor, seed: tf.Tensor | None) -> tf.data.Dataset:
        size, places = shard.examples_per_batch, shard.places
        if self.fits_in_memory:
            elements, pick = self.batches(shard, first, seed, at_once=1)
            calls = parallel_calls(CORES, shard.size * self._bytes_of_example)
            return elements.map(pick, num_parallel_calls=calls).unbatch()
        numbered = self._in_order(first, shard.end, seed)
        if shard.size == size:
            return numbered
        if is_static(self.element_spec):
            batches = numbered.batch(size)
            return batches.map(lambda *batch: tf.nest.map_structure(lambda part: part[places], batch)).unbatch()
        # Slow: it calls a function for each example of the batch.
        return numbered.filter(lambda place, _: (place % size >= places.start) & (place % size < places.stop))

    def unshuffled(self) -> tf.data.Dataset:
        return self._in_order(0, self.length)

    def _in_order(self, first: tf.Tensor | int, end: int, seed: tf.Tensor | None = None) -> tf.data.Dataset:
        """Returns (place, example) one by one, always streamed."""
        dataset = tf.data.Dataset.from_tensor_slices(self._cached) if self._dataset is None else self._dataset
        examples = dataset if seed is None else shuffled(dataset, self.buffer_size, seed)
        if end > self.length:
            examples = examples.concatenate(dataset.take(1).repeat(end - self.length))
        if end < self.length:  # Otherwise it is read to its end, and examples beyond its length are noticed.
            examples = examples.take(end)
        return examples.skip(first).enumerate(start=first)

    def for_worker(self, load: Callable[[], Any]) -> "DatasetExamples":
        _ = self.buffer_size  # It cannot be measured there.
        examples = copy.copy(self)
        examples._dataset = load().apply(tf.data.experimental.assert_cardinality(self.length))
        return examples


def hook_of(name: str) -> str:
    """Returns the call that loads a dataset, for messages: "task.load_examples('validation')['easy']"."""
    split, _, dataset = name.partition("/")
    return f"task.load_examples({split!r})" + (f"[{dataset!r}]" if dataset else "")


def parallel_calls(at_most: int, bytes_of_call: float, bytes_besides: float = 0) -> int:
    """Returns how many calls may run, or wait with their results, at once; besides them, a pipeline has some bytes."""
    return max(2, min(at_most, PARALLEL_CALLS, int((BYTES_AHEAD - bytes_besides) / max(1, bytes_of_call))))


def input_options() -> tf.data.Options:
    """Returns the options of every pipeline: elements keep their order, and nothing is tuned while it runs."""
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The thread that tunes a pipeline may miss that it should end, and is then waited for, up to a minute.
    options.autotune.enabled = False
    options.autotune.initial_parallelism = PARALLEL_CALLS  # tf.data.AUTOTUNE then means this, or a call per core.
    return options


def shuffled(dataset: tf.data.Dataset, buffer_size: int | tf.Tensor, seed: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset shuffled through a buffer by a seed (int64, scalar) that may be a tensor."""
    # TensorFlow mixes it with the seed of the graph, which it first compares with 0, so the graph's must be a number.
    tf.compat.v1.set_random_seed(1)
    return dataset.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)
