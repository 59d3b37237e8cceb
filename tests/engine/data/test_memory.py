"""Which examples are kept in memory, and how many of the others are shuffled at a time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of

from config import Config
from engine.data import element_spec
from engine.data import examples as examples_module
from engine.data.batches import Batches
from engine.data.examples import DatasetExamples
from engine.errors import BadInput
from engine.run import summary

MEGABYTE = 2**20


def made(dataset: tf.data.Dataset, shuffle_bytes: int = MEGABYTE) -> DatasetExamples:
    return DatasetExamples(dataset, "task.load_examples('train')", shuffle_bytes)


def texts(lengths: list[int]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(([b"x" * length for length in lengths], list(range(len(lengths)))))


def ragged(_: int) -> tuple[tf.RaggedTensor, tf.Tensor]:
    return tf.RaggedTensor.from_row_lengths(tf.range(1000), [400, 600]), tf.constant(1)


def unknown_sizes(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.zeros([1000 + 2 * (number % 2)]), number


# Examples; the bytes that one has, counted by hand.
SIZES: dict[str, tuple[Callable[[], tf.data.Dataset], float]] = {
    "numbers": (lambda: tf.data.Dataset.from_tensor_slices((np.zeros((9, 10, 3)), np.zeros(9, np.int8))), 241),
    "texts": (lambda: texts([100, 300]), 200 + element_spec.BYTES_OF_STRING + 4),
    "ragged": (lambda: tf.data.Dataset.range(9).map(ragged), 4000 + 3 * 8 + 4),
    "unknown sizes": (lambda: tf.data.Dataset.range(10).map(unknown_sizes), 4004 + 8),
    # Only the first ones are read.
    "many": (lambda: texts([10] * element_spec.MEASURED + [9999]), 10 + element_spec.BYTES_OF_STRING + 4),
}


@pytest.mark.parametrize("kind", SIZES)
def test_shuffle_buffer_holds_what_fits_by_the_bytes_of_an_example(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, expected = SIZES[kind]
    monkeypatch.setattr(element_spec, "BYTES_OF_ELEMENT", 0)
    monkeypatch.setattr(element_spec, "BYTES_OF_TENSOR", 0)
    assert made(dataset(), shuffle_bytes=int(5 * expected)).buffer_size == min(5, int(dataset().cardinality()))
    assert made(dataset(), shuffle_bytes=int(2 * expected) - 1).buffer_size == 1
    assert made(dataset(), shuffle_bytes=1).buffer_size == 1


def test_small_set_of_texts_is_kept_and_a_large_one_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100 + element_spec.BYTES_OF_STRING + 4
    monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", int(10 * size * examples_module.MARGIN))
    assert made(texts([100] * 10)).describe_shuffling(1) == ("in memory", 0)
    text, taken = made(texts([100] * 11)).describe_shuffling(1)
    assert text == "streamed, 11 of 11 examples at a time, 1 MB in each process"
    assert taken > 11 * size
    # Where nothing says how large the examples are, none is kept.
    assert not made(SIZES["ragged"][0]()).fits_in_memory
    # A type that says it all reads nothing.
    monkeypatch.setattr(examples_module, "measured_bytes", None)
    assert made(tf.data.Dataset.range(10).map(lambda number: (number, number))).fits_in_memory


def test_unreadable_first_example_is_named_before_the_run_begins() -> None:
    def fails(number):
        with tf.control_dependencies([tf.debugging.assert_less(number, tf.constant(7, tf.int64), "no such file")]):
            return tf.zeros([number]), number

    with pytest.raises(BadInput, match=r"task.load_examples\('train'\) failed on example 7, .*no such file"):
        made(tf.data.Dataset.range(9).map(fails)).cache()


def test_more_than_half_of_the_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(summary, "Path", lambda _: limit)
    monkeypatch.setattr(
        summary.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**20}[name]
    )  # 4 GB
    assert summary._memory_warning(2**30, 2) == ""
    assert (
        summary._memory_warning(2**30, 3)
        == "3.0 GB in 3 process(es), more than half of the 4.0 GB of this machine: lower --shuffle-megabytes"
    )
    limit.write_text(f"{2**30}\n")  # Of a container.
    assert "more than half of the 1.0 GB" in summary._memory_warning(2**30, 1)


# --- Folders of images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [True, False])
def test_resume_in_a_folder_of_images_reads_none_before_its_position(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples are paths, and task.prepare_example reads the files."""
    if not is_kept:
        monkeypatch.setattr(examples_module, "BYTES_IN_MEMORY", 0)
    paths = [tmp_path / f"{number:03}.png" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(tf.io.encode_png(tf.fill([2, 2, 1], tf.constant(number, tf.uint8))).numpy())

    def load_examples(_: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((list(map(str, paths)), np.arange(40)))

    def prepare_example(path, label):
        return tf.ensure_shape(tf.io.decode_png(tf.io.read_file(path)), [2, 2, 1]), label

    def batches() -> Batches:
        return batches_of("train", load_examples, prepare_example, Config(global_batch_size=4))

    assert batches().examples.fits_in_memory == is_kept
    whole = [tuple(part.numpy() for part in batch) for batch in batches().one_by_one()]
    labels = np.concatenate([batch[1] for batch in whole])
    assert sorted(labels) == list(range(40))
    assert all(np.all(features == label[:, None, None, None]) for features, label, _ in whole)
    assert np.abs(np.diff(labels)).mean() > 8  # 13 in a complete shuffle, whatever the buffer's bytes.
    for label in labels[: 7 * 4]:
        paths[label].unlink()
    rest = [tuple(part.numpy() for part in batch) for batch in batches().one_by_one(first_step=7)]
    for one, other in zip(whole[7:], rest, strict=True):
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_array_equal(found, expected)
