"""Processes that train together: what each of them makes is compared at the start."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.errors import BadInput
from engine.run.agreement import check_objects, same_data


class Together:
    """Two processes, in threads: what they share is collected until both have called."""

    names = ("worker 0", "worker 1")

    def __init__(self) -> None:
        self._barrier, self._values = threading.Barrier(2, timeout=10), [None, None]

    def _all(self, index: int, value: Any) -> list[Any]:
        self._values[index] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def worker(self, index: int) -> SimpleNamespace:
        def gather(values: dict[str, np.ndarray], _: str) -> dict[str, np.ndarray]:
            rows = self._all(index, values)
            return {name: np.stack([row[name] for row in rows]) for name in values}

        def names_where(flag: bool) -> list[str]:
            return [name for name, each in zip(self.names, self._all(index, flag), strict=True) if each]

        from_chief = lambda make: self._all(index, make() if index == 0 else None)[0]  # noqa: E731
        return SimpleNamespace(names=self.names, count=2, gather=gather, names_where=names_where, from_chief=from_chief)


def outcomes(call: Any, *of_each: Any) -> list[Any]:
    """Returns what `call` returns in each of two processes, or the text of its BadInput."""
    together = Together()

    def run(index: int) -> Any:
        try:
            return call(together.worker(index), *of_each[index])
        except BadInput as problem:
            return str(problem)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def batches(*names: str, by_file: bool = False, **different: Any) -> tuple[dict[str, Any]]:
    fingerprint = {"examples": 9, "sha256": "a" * 64, "steps_per_epoch": 3, "steps_per_pass": 3, **different}
    one = SimpleNamespace(shards_by_file=by_file, fingerprint=lambda: fingerprint)
    return (dict.fromkeys(names or ("train",), one),)


def test_other_examples_or_another_order_of_datasets_than_in_the_first_process_are_rejected_in_every_process() -> None:
    assert outcomes(same_data, batches(), batches()) == [{"train": batches()[0]["train"].fingerprint()}] * 2
    for here, there in (
        (batches(), batches(sha256="b" * 64)),
        (batches(), batches(steps_per_pass=4)),
        (batches("train", "validation/a", "validation/b"), batches("train", "validation/b", "validation/a")),
    ):
        for found in outcomes(same_data, here, there):
            assert "worker 1: task.load_examples returned other examples than in the first process" in found


def test_examples_of_files_of_each_process_must_differ() -> None:
    first, second = outcomes(same_data, batches(by_file=True), batches(by_file=True, sha256="b" * 64))
    _, with_another = outcomes(same_data, batches(by_file=True), batches(by_file=True, sha256="c" * 64))
    assert first == second != with_another  # A resumed run notices that the second one's have changed.
    for found in outcomes(same_data, batches(by_file=True), batches(by_file=True)):
        assert found.startswith("task.load_examples('train') returned the same examples for worker 0, worker 1: with")


def made(names: tuple[str, ...] = ("model/a", "model/b"), rate: float = 0.1, rows: int = 3) -> tuple[Any, Any]:
    state = SimpleNamespace(mirrored={name: tf.zeros([rows, 2]) for name in names}, per_replica={})
    return state, SimpleNamespace(optimizers={"optimizer": keras.optimizers.SGD(rate)})


def test_other_objects_or_defaults_than_in_the_first_process_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(check_objects, made(), made()) == [None, None]
    for others, told in (
        (made(("model/b", "model/a")), "(here variable 0 is model/b (3, 2), there model/a (3, 2))"),
        (made(rows=4), "(here variable 0 is model/a (4, 2), there model/a (3, 2))"),  # As of a longer vocabulary.
        (made(rate=0.2), "another optimizer than in the first process (here optimizer/learning_rate is 0.2"),
    ):
        first, second = outcomes(check_objects, made(), others)
        assert first.startswith("worker 1: ")
        assert told in second
    of_threads = iter(["float32", "float64"])
    monkeypatch.setattr(keras.config, "floatx", lambda: next(of_threads))
    for found in outcomes(check_objects, made(), made()):
        assert found.startswith("worker 1: Keras has other defaults than in the first process")
