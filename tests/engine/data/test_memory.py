"""Which examples are kept in memory, and how many of the others are shuffled at a time."""

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of, whole

from config import Config
from engine import machine
from engine.data import batches as batches_module
from engine.data import element_spec
from engine.data import examples as examples_module
from engine.data.examples import DatasetExamples
from engine.run import summary

MEGABYTE = 2**20


def made(dataset: tf.data.Dataset, shuffle_bytes: int = MEGABYTE) -> DatasetExamples:
    return DatasetExamples(dataset, "task.load_examples('train')", shuffle_bytes)


def texts(lengths: list[int]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(([b"x" * length for length in lengths], list(range(len(lengths)))))


def ragged(_: int) -> tuple[tf.RaggedTensor, tf.Tensor]:
    return tf.RaggedTensor.from_row_lengths(tf.range(1000), [400, 600]), tf.constant(1)


# Examples; the bytes that one has, counted by hand.
SIZES: dict[str, tuple[Callable[[], tf.data.Dataset], float]] = {
    "texts": (lambda: texts([100, 300]), 200 + element_spec.BYTES_OF_STRING + 4),
    "ragged": (lambda: tf.data.Dataset.range(9).map(ragged), 4000 + 3 * 8 + 4),
    # Only the first ones are read.
    "many": (lambda: texts([10] * examples_module.MEASURED + [9999]), 10 + element_spec.BYTES_OF_STRING + 4),
}


def test_shuffle_buffer_holds_what_fits_by_the_bytes_of_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_spec, "BYTES_OF_ELEMENT", 0)
    monkeypatch.setattr(element_spec, "BYTES_OF_TENSOR", 0)
    for dataset, expected in SIZES.values():
        assert made(dataset(), shuffle_bytes=int(5 * expected)).buffer_size == min(5, int(dataset().cardinality()))
        assert made(dataset(), shuffle_bytes=int(2 * expected) - 1).buffer_size == 1


def test_small_set_of_texts_is_kept_and_a_large_one_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100 + element_spec.BYTES_OF_STRING + 4
    monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", 10 * size)
    dataset = texts([100] * 10)
    small, of_user = made(dataset), weakref.ref(dataset)
    del dataset
    assert small.describe_shuffling(1) == ("in memory", 0)
    small.cache()
    gc.collect()
    assert of_user() is None  # Its arrays are not in memory a second time.
    text, taken = made(texts([100] * 11)).describe_shuffling(1)
    assert text == "streamed, 11 of 11 examples at a time, 1 MB in each process"
    assert taken > 11 * size
    # Where nothing says how large the examples are, none is kept.
    assert not made(SIZES["ragged"][0]()).fits_in_memory


def test_texts_that_are_sorted_by_length_are_counted_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first examples say that all of them would take a few kilobytes."""
    monkeypatch.setattr(examples_module, "COUNTED_AT_ONCE", 10)
    monkeypatch.setattr(examples_module, "MEASURED", 20)
    monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", 200 * (10 + element_spec.BYTES_OF_STRING + 8))
    read = []

    def dataset(last: int) -> tf.data.Dataset:
        def examples() -> Iterator[tuple[bytes, int]]:
            for number in range(200):
                read.append(number)
                yield b"x" * (10 if number < 100 else last), number

        spec = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
        generated = tf.data.Dataset.from_generator(examples, output_signature=spec)
        return generated.apply(tf.data.experimental.assert_cardinality(200))

    def labels(last: int, first_step: int = 0) -> np.ndarray:
        options = Config(global_batch_size=20)
        batches = batches_of("train", lambda _: dataset(last), lambda text, number: (number, number), options)
        return np.array([batch[1] for batch in whole(batches, 0, first_step)])

    assert made(dataset(10)).fits_in_memory
    read.clear()
    long = made(dataset(3010), 10**5)
    assert not long.fits_in_memory
    # Reading stopped where the limit was passed, and the others are taken to be as large.
    assert len(read) < 20 + 130
    assert long.buffer_size == int(10**5 / element_spec.bytes_in_buffer(long.element_spec, 3010 + 48)) < 200
    assert sorted(labels(10).flat) == list(range(200))
    expected = labels(3010)
    assert sorted(expected.flat) == list(range(200))
    np.testing.assert_array_equal(labels(3010, first_step=4), expected[4:])  # A resume decides alike.


def test_what_is_prepared_ahead_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 32 cores, whose batches take 4 MB."""
    monkeypatch.setattr(batches_module, "CORES", 32)
    drawn: list[int] = []

    def load_examples(_: str) -> tf.data.Dataset:
        def examples() -> Iterator[int]:
            for number in range(4000):
                drawn.append(number)
                yield number

        dataset = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))
        return dataset.apply(tf.data.experimental.assert_cardinality(4000))

    def prepare_example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.fill([2**17], tf.cast(number, tf.float32)), number

    def drawn_before_use() -> int:
        drawn.clear()
        batches = batches_of("validation", load_examples, prepare_example, Config(global_batch_size=8))
        next(batches.iterator().take(1))
        counts = [-1, len(drawn)]
        while counts[-1] != counts[-2]:
            time.sleep(0.5)
            counts.append(len(drawn))
        assert batches.bytes_ahead <= max(examples_module.BYTES_AHEAD, 5.1 * 2**22)
        return counts[-1] // 8

    monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", 0)
    assert drawn_before_use() >= 32
    monkeypatch.setattr(examples_module, "BYTES_AHEAD", 2**25)
    assert drawn_before_use() <= 10
    monkeypatch.setattr(examples_module, "BYTES_AHEAD", 0)
    assert drawn_before_use() <= 8


def test_large_batches_of_an_evaluation_do_not_stay_ready_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated() -> tuple[bool, list[list[list[int]]]]:
        dataset = tf.data.Dataset.range(40)
        batches = batches_of("validation", lambda _: dataset, lambda x: (x, x), Config(global_batch_size=4))
        iterator, passes = batches.iterator(), []
        for epoch in range(2):
            assert iterator is batches.iterator(epoch)
            passes.append([stack[1].numpy().ravel().tolist() for stack, *_ in iterator.take(10)])
        return iterator._stacks is None, passes

    is_released, kept = evaluated()
    assert not is_released
    monkeypatch.setattr(batches_module, "BYTES_KEPT", 0)
    # The stacks are the same, because another worker, with other cores, may keep them ready.
    assert evaluated() == (True, kept)
    assert [[label for stack in stacks for label in stack] for stacks in kept] == [list(range(40))] * 2


def test_more_than_half_of_the_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(machine, "Path", lambda _: limit)
    sizes = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**20}  # 4 GB
    monkeypatch.setattr(machine.os, "sysconf", sizes.__getitem__)
    assert summary._memory_warning(2**30, 2) == ""
    assert "3.0 GB in 3 process(es), more than half of the 4.0 GB of this mach" in summary._memory_warning(2**30, 3)
    limit.write_text(f"{2**30}\n")  # Of a container.
    assert "more than half of the 1.0 GB" in summary._memory_warning(2**30, 1)
