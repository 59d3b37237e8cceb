"""How many steps run per return to Python."""

from types import SimpleNamespace

import pytest

from config import Config
from engine.run.chunks import Chunks


class Alone:
    """This process's own numbers are the chief's."""

    def broadcast(self, value: int) -> int:
        return value


def lengths(chunks: Chunks, split: str, calls: int, seconds_of_step: float) -> list[int]:
    """Returns how many steps each of so many calls ran, if the first step took 10 seconds more, to compile."""
    ran = []
    for call in range(calls):
        count = chunks.next(split, left=10**6, step=0)
        chunks.took(split, count, count * seconds_of_step + (0 if call else 10))
        ran.append(count)
    return ran


@pytest.mark.parametrize(
    ("seconds_of_step", "expected"),
    [(0.0001, [1, 1, 2, 4, 8, 16, 32, 64]), (0.18, [1, 1, 2, 4, 5, 5, 5, 5]), (3, [1] * 8)],
)
def test_automatic_length_doubles_to_a_second_s_worth(seconds_of_step: float, expected: list[int]) -> None:
    chunks = Chunks(Config(steps_per_execution="auto"), Alone())
    assert lengths(chunks, "train", 8, seconds_of_step) == expected
    # Those of another split are found for themselves.
    assert lengths(chunks, "validation", 8, 0.1) == [1, 1, 2, 4, 8, 10, 10, 10]


def test_given_length_stays() -> None:
    chunks = Chunks(Config(steps_per_execution=7), Alone())
    assert lengths(chunks, "train", 3, 0.001) == [7, 7, 7]
    assert chunks.next("train", left=2, step=0) == 2


def test_shorter_chunk_says_nothing_of_the_length() -> None:
    chunks = Chunks(Config(steps_per_execution="auto"), Alone())
    lengths(chunks, "train", 4, 0.0001)
    chunks.took("train", 2, 100)
    assert chunks.next("train", left=100, step=0) == 8


def test_chunks_of_training_end_at_multiples() -> None:
    settings = Config(steps_per_execution=20, checkpoint_every_steps=30, validate_every_steps=12)
    chunks = Chunks(settings, Alone())
    ends = [0]
    while ends[-1] < 60:
        ends.append(ends[-1] + chunks.next("train", left=100, step=ends[-1]))
    assert ends == [0, 12, 24, 30, 36, 48, 60]
    assert chunks.next("validation", left=100, step=11) == 20


def test_length_is_the_chief_s_on_every_worker() -> None:
    chunks = Chunks(Config(steps_per_execution="auto"), SimpleNamespace(broadcast=lambda value: 3))
    chunks.took("train", 1, 0.001)
    assert chunks.next("train", left=100, step=0) == 3
