"""Batches arrive in stacks of several: in order, whole, and whatever the numbers of steps they are asked for in."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loading import batches_of
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from config import Config
from engine.data import stacks
from engine.data.batches import Batches
from engine.data.stacks import BYTES_OF_STACK, STEPS_OF_STACK, StackIterator, stack_size
from rendering import PROJECT


def counting(split: str, count: int, *, replicas: int = 1, **options: Any) -> Batches:
    numbers, config = tf.data.Dataset.range(count), Config(simulated_devices=replicas, global_batch_size=4)
    return batches_of(split, lambda _: numbers, lambda number: (number, number), config, **options)


def take(batches: Batches, feed: StackIterator, count: int) -> list[float]:
    """Returns the first example of each of the next `count` batches."""
    stacks = list(feed.take(count))
    first = tf.function(lambda *given: tf.nest.flatten(batches.stacks.pick(*given), expand_composites=True)[0][0])
    return [float(first(stack, tf.constant(start + index))) for stack, start, taken in stacks for index in range(taken)]


def test_steps_of_any_number_take_the_batches_in_order_pass_after_pass() -> None:
    batches = counting("validation", 400, replicas=2)
    feed = batches.iterator()
    for epoch in range(2):
        taken = [take(batches, feed, count) for count in (1, 2, 30, 1, 66)]
        assert [len(each) for each in taken] == [1, 2, 30, 1, 66]
        np.testing.assert_array_equal(np.concatenate(taken), np.arange(0, 400, 4))
        # It goes on: the same one serves the next pass.
        assert batches.iterator(epoch + 1) is feed
    assert take(batches, batches.iterator(first_step=3), 4) == [12, 16, 20, 24]


def test_no_thread_tunes_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may miss that it is to end; whoever closes the input then waits for its next turn, up to a minute."""
    tuned = []
    create = OwnedIterator.__init__

    def noted(iterator: OwnedIterator, dataset: tf.data.Dataset | None = None, **options) -> None:
        tuned.append(dataset.options().autotune.enabled is not False)
        create(iterator, dataset, **options)

    monkeypatch.setattr(OwnedIterator, "__init__", noted)
    list(counting("train", 40, replicas=2).iterator().take(10))
    assert tuned == [False]


def test_stack_of_one_gpu_stays_in_the_memory_of_the_host() -> None:
    batches = counting("validation", 40, strategy=tf.distribute.MirroredStrategy(["CPU:1"]))
    steps = batches.stacks.compile(lambda stack, first, count: batches.stacks.pick(stack, first + count - 1)[0])
    for stack, first, count in batches.iterator().take(10):
        assert all("CPU:0" in part.device for part in stack)
        assert steps(stack, first, count)[0] % 4 == 0


def test_stacks_fit_their_size_and_have_complete_calls() -> None:
    for steps, at_once, bytes_of_batch in itertools.product(
        (1, 2, 39, 64, 65, 1000, 12345), (1, 5, 16), (1, BYTES_OF_STACK // 100, 3 * BYTES_OF_STACK)
    ):
        if at_once * bytes_of_batch > 2**20 and at_once > 1:  # Batches asks for no such stacks.
            continue
        size = stack_size(steps, bytes_of_batch, at_once)
        assert size % at_once == 0
        assert size == 1 or 1 < size <= BYTES_OF_STACK // bytes_of_batch
        assert size < min(steps, max(STEPS_OF_STACK)) + at_once  # A step waits for its stack only so long.


def test_stacks_hold_more_steps_the_smaller_the_share_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stack is a call, of which TensorFlow keeps some memory for ever in a cluster."""
    monkeypatch.setattr(stacks, "BYTES_OF_STACK", 80 * 24)  # A batch of 4 has 80 bytes.
    made = [counting("train", 800, replicas=4, pipelines=(processes, 0)) for processes in (1, 2)]
    assert [batches.stack_size for batches in made] == [16, 48]


def test_place_of_a_step_in_its_stack_takes_no_list_in_a_billion_examples() -> None:
    steps, started = 10**9 // 32, []

    def start(step: int) -> Iterator[int]:
        started.append(step)
        return itertools.count(step // 64)

    batches = SimpleNamespace(stacks_from=start, steps_per_pass=steps, stack_size=64, read=lambda read: read())
    batches.is_kept = True
    iterator = StackIterator(batches, 7 * steps - 3)
    assert steps % 64 == 16
    # The end of a pass, two stacks of the next one, and a part of the next stack.
    taken = [(first, count) for _, first, count in iterator.take(3 + 128 + 5)]
    assert taken == [(13, 3), (0, 64), (0, 64), (0, 5)]
    assert [(first, count) for _, first, count in iterator.take(60)] == [(5, 59), (0, 1)]
    assert started == [7 * steps - 3]


ENDLESS_GENERATOR = """
import atexit
import itertools
import time

def see() -> None:  # Called after what the engine registers later.
    before = prepared[0]
    time.sleep(0.5)
    print("continues" if prepared[0] > before else "ended", flush=True)

prepared = [0]
atexit.register(see)
import tensorflow as tf
from config import Config
from types import SimpleNamespace
from engine.data import examples, load_splits

def load(_):
    numbers = tf.data.Dataset.from_generator(itertools.count, output_signature=tf.TensorSpec((), tf.int64))
    return numbers.apply(tf.data.experimental.assert_cardinality(10**9))

def count(number):
    prepared[0] += 1
    time.sleep(0.001)
    return number

def prepare(number):
    return tf.ensure_shape(tf.py_function(count, [number], tf.int64), []), number

examples.BYTES_IN_MEMORY = 0
examples.DatasetExamples.buffer_size = 10
task = SimpleNamespace(load_examples=load, prepare_example=prepare)
batches = load_splits(["train"], task, Config(global_batch_size=4), tf.distribute.get_strategy())
next(batches["train"].iterator().take(1))
print("taken", flush=True)
"""


@pytest.mark.long
def test_program_ends_while_a_generator_of_examples_runs() -> None:
    """TensorFlow's threads wait for Python, and Python's end must not wait for them: they have ended before."""
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", ENDLESS_GENERATOR], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "taken\nended\n"), ended.stderr
    assert time.monotonic() - started < 90
