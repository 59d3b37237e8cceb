"""The processes of a cluster as threads, whose sums are NumPy's."""

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from engine.cluster import peers
from engine.cluster import workers as module
from engine.cluster.peers import FROZEN, GONE
from engine.cluster.workers import Workers
from engine.errors import BadInput, CannotWrite, Damaged, Diverged, PeerLost
from engine.run.checkpoints import Checkpoints
from engine.run.state import State


def throw(problem: Exception) -> None:
    raise problem


class Threads:
    """Workers whose `_sum` meets the others in a barrier."""

    def __init__(self, count: int) -> None:
        self._barrier, self._sent, self.largest = threading.Barrier(count, timeout=60), [None] * count, 0
        self.all = [self._worker(index, count) for index in range(count)]

    def _worker(self, index: int, count: int) -> Workers:
        worker = Workers(tf.distribute.get_strategy())
        worker.count, worker.index, worker.is_chief = count, index, index == 0
        worker.names = [f"worker {each}" for each in range(count)]

        def add(integers: np.ndarray) -> np.ndarray:
            self._sent[index] = integers
            self._barrier.wait()
            total = np.sum(self._sent, axis=0, dtype=np.int32)
            self._barrier.wait()
            self.largest = max(self.largest, integers.size)
            return total

        worker._sum = add
        return worker

    def call(self, function: Callable[[Workers], Any]) -> list[Any]:
        """Returns each worker's result, or its exception."""

        def run(worker: Workers) -> Any:
            try:
                return function(worker)
            except Exception as problem:  # noqa: BLE001
                return problem

        with ThreadPoolExecutor(len(self.all)) as pool:
            return list(pool.map(run, self.all))


VALUES = {
    "large": np.arange(100_003, dtype=np.float32),
    "odd bytes": np.arange(70_001, dtype=np.uint8),
    "columns": np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
    "bits": np.array([-0.0, np.nan, np.inf], np.float64),
    "nothing": np.zeros((0, 3), np.float32),
    "scalar": np.array(7, np.int64),
    "bfloat16": tf.cast(tf.range(50_000.0), tf.bfloat16).numpy(),
}


def test_values_of_the_chief_arrive_bit_for_bit_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 5000)
    threads, texts = Threads(3), np.array([b"", b"a\0b", "ü".encode()] * 30_000, object)
    for received in threads.call(lambda worker: worker.from_chief(lambda: (VALUES, texts))):
        assert not isinstance(received, Exception), received
        for name, value in VALUES.items():
            found = received[0][name]
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
        assert received[1].tolist() == texts.tolist()
    assert threads.largest <= 5000


def test_values_of_all_workers_are_gathered_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 5000)
    threads = Threads(3)
    for to_chief in (False, True):
        gathered = threads.call(
            lambda worker, to_chief=to_chief: worker.gather(
                {name: np.roll(value, worker.index) for name, value in VALUES.items()}, to_chief=to_chief
            )
        )
        assert [each.keys() for each in gathered] == [VALUES.keys(), *[set() if to_chief else VALUES.keys()] * 2]
        for each in gathered[: 1 if to_chief else 3]:
            for name, value in VALUES.items():
                expected = np.stack([np.roll(value, index) for index in range(3)])
                assert (each[name].dtype, each[name].tobytes()) == (expected.dtype, expected.tobytes()), name
    assert threads.largest <= 5000


def test_only_the_chief_reads_the_values_of_a_save_and_all_hear_of_its_finding(tmp_path: Path) -> None:
    def save(worker: Workers, value: float) -> Any:
        weights, count = tf.Variable([1.0, value]), tf.Variable([2.0 + worker.index])
        state = State(tf.distribute.get_strategy(), worker, {"weights": weights}, {"metrics/count": count})
        checkpoints = Checkpoints(tmp_path, state, keep=1)
        weights.assign([value, value])
        values = state.values()
        return list(values), checkpoints.save(1, {}), values.get("metrics/count", np.zeros(0)).tolist()

    chiefs, others = Threads(2).call(lambda worker: save(worker, 3.0))
    assert chiefs == (["weights", "metrics/count"], tmp_path / "step-00000001", [[2.0], [3.0]])
    assert others == ([], tmp_path / "step-00000001", [])
    for problem in Threads(2).call(lambda worker: save(worker, np.nan)):
        assert isinstance(problem, Diverged)
        assert str(problem) == "after step 1 the variable weights is not finite"


def test_rejection_by_the_chief_is_raised_by_all() -> None:
    for rejection in (BadInput("the reason"), Damaged("the reason")):
        raised = Threads(2).call(lambda worker, rejection=rejection: worker.from_chief(partial(throw, rejection)))
        assert [(type(each), str(each)) for each in raised] == [(type(rejection), "the reason")] * 2
    # A fault that may pass is counted once, as the chief's.
    chiefs, others = Threads(2).call(lambda worker: worker.from_chief(partial(throw, CannotWrite("full"))))
    assert (type(chiefs), type(others)) == (CannotWrite, PeerLost)


def compared(worker: Workers, factor: float, name: str, **options: bool) -> list[float]:
    """Returns a worker's weights after the comparison with the chief's, which they were multiples of."""
    weights = tf.Variable(np.linspace(1.0, 2.0, 5, dtype=np.float32) * (factor if worker.index else 1.0))
    seed = tf.Variable([worker.index, 0])  # The seeds of dropout differ between workers.
    mirrored, per_replica = {"dropout/seed_generator_state": seed}, {}
    (mirrored if name == "weights" else per_replica)[name] = weights
    state = State(tf.distribute.get_strategy(), worker, mirrored, per_replica)
    state.check_workers(state.mirrored_values(), "a hook", **options)
    assert seed.numpy()[0] == worker.index
    return weights.numpy().tolist()


def test_weights_of_all_become_the_chiefs_if_only_rounding_differs() -> None:
    for name in ("weights", "buffer"):
        chiefs, others = Threads(2).call(lambda worker, name=name: compared(worker, 1.0 + 1e-5, name, is_start=True))
        assert others == chiefs
        for problem in Threads(2).call(lambda worker, name=name: compared(worker, 1.01, name, is_start=True)):
            assert isinstance(problem, BadInput)
            assert f"worker 1: 1 of 1 variables ({name}) differ from those of worker 0" in str(problem)
    # Later each replica may have other values of what is not mirrored.
    chiefs, others = Threads(2).call(lambda worker: compared(worker, 1.01, "buffer"))
    assert others != chiefs


def test_workers_that_do_not_do_the_same_say_so() -> None:
    for ways in (
        (lambda worker: worker.check_all_do("train step 3"), lambda worker: worker.check_all_do("validation step 1")),
        (lambda worker: worker.check_all_do("train step 3"), lambda worker: worker.names_where(True)),
        (lambda worker: worker.from_chief(list), lambda worker: worker.from_chief(dict)),
    ):
        for problem in Threads(2).call(lambda worker, ways=ways: ways[worker.index](worker)):
            assert isinstance(problem, BadInput)
            assert "the workers no longer do the same" in str(problem)
            assert "run.on_any_worker" in str(problem)


def test_process_that_is_silent_before_its_end_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SECONDS_UNTIL_GONE", 1.0)
    described = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(described))
    for looks, last in (([{}, {"worker 1": FROZEN}], {"worker 1": GONE}), ([], {"worker 1": FROZEN})):
        states = itertools.chain(looks, itertools.repeat(last))
        monkeypatch.setattr(peers, "lost", lambda _, states=states: next(states))
        with pytest.raises(PeerLost, match=rf"^worker 1 \(b:1\) {last['worker 1']}[:;]"), peers.peers_named():
            raise tf.errors.UnavailableError(None, None, "")
