"""Processes that train together: what each of them makes is compared at the start."""

import hashlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from engine.errors import BadInput
from engine.run.agreement import check_objects, same_data


def outcome(call: Any, first: Any, second: Any) -> Any:
    """Returns what `call` returns in the second of two processes, or the text of its BadInput."""
    made: list[Any] = []
    gathered: dict[int, dict[str, np.ndarray]] = {}

    def worker(index: int) -> SimpleNamespace:
        def from_chief(make: Any) -> Any:
            made.extend([make()] if index == 0 else [])
            return made[-1] if index == 0 else made.pop(0)

        def gather(values: dict[str, np.ndarray], _: str) -> dict[str, np.ndarray]:
            gathered[index] = values
            rows = [gathered.get(each, {name: value * 0 for name, value in values.items()}) for each in (0, 1)]
            return {name: np.stack([row[name] for row in rows]) for name in values}

        names_where = lambda flag: ["worker 1"] * flag  # noqa: E731
        names = ("worker 0", "worker 1")
        return SimpleNamespace(names=names, count=2, gather=gather, names_where=names_where, from_chief=from_chief)

    # One after the other: the first one knows what it has gathered from the second one the second time.
    for _ in range(2):
        made.clear()
        found = []
        for index, arguments in enumerate((first, second)):
            try:
                found.append(call(worker(index), *arguments))
            except BadInput as problem:
                found.append(str(problem))
    return found[1]


def data(*names: str, file: Path | None = None, **different: Any) -> tuple[dict[str, Any], Any]:
    fingerprint = {"examples": 9, "sha256": "a" * 64, "steps_per_epoch": 3, "steps_per_pass": 3, **different}
    one = SimpleNamespace(fingerprint=lambda: fingerprint, examples=SimpleNamespace(cache=lambda: None))
    return dict.fromkeys(names or ("train",), one), lambda: [file] if file else []


def test_other_data_than_in_the_first_process_are_rejected(tmp_path: Path) -> None:
    for content in ("ab", "ba"):
        (tmp_path / content).mkdir()
        (tmp_path / content / "vocabulary.txt").write_text(content)
    ab, ba = (data(file=tmp_path / content / "vocabulary.txt") for content in ("ab", "ba"))
    hashes = [hashlib.sha256(content).hexdigest() for content in (b"ba", b"ab")]
    files = [{"vocabulary.txt": hash} for hash in hashes]
    assert outcome(same_data, ab, ab) == {"train": {**ab[0]["train"].fingerprint(), "files": files[1]}}
    orders = [("train", *(f"validation/{name}" for name in names)) for names in ("ab", "ba")]
    for here, there, told in (
        (data(), data(sha256="b" * 64), f"train/sha256 is {'b' * 64}, there {'a' * 64}"),
        (data(), data(steps_per_pass=4), "train/steps_per_pass is 4, there 3"),
        (*(data(*names) for names in orders), f"datasets is {[*orders[1]]}, there {[*orders[0]]}"),
        (ab, ba, f"train/files is {files[0]}, there {files[1]}"),
        (ab, data(), f"train/files is {{}}, there {files[1]}"),
    ):
        found = outcome(same_data, here, there)
        what = "worker 1: task.load_examples or task.data_files returned other data than in the first process"
        assert found == f"{what} (here {told}): give all processes the same files"


def made(names: tuple[str, ...] = ("model/a", "model/b"), rate: float = 0.1, rows: int = 3) -> tuple[Any, Any]:
    state = SimpleNamespace(mirrored={name: tf.zeros([rows, 2]) for name in names}, per_replica={})
    return state, SimpleNamespace(optimizers={"optimizer": keras.optimizers.SGD(rate)})


def test_other_objects_or_defaults_than_in_the_first_process_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(check_objects, made(), made()) is None
    for others, told in (
        (made(("model/b", "model/a")), "(here variable 0 is model/b (3, 2), there model/a (3, 2))"),
        (made(rows=4), "(here variable 0 is model/a (4, 2), there model/a (3, 2))"),  # As of a longer vocabulary.
        (made(rate=0.2), "another optimizer than in the first process (here optimizer/learning_rate is 0.2"),
    ):
        assert told in outcome(check_objects, made(), others)
    state, objects = made()
    state.per_replica["model/names"] = tf.Variable("a text")
    assert outcome(check_objects, (state, objects), (state, objects)).startswith("the variable model/names has texts")
    defaults = itertools.cycle(["float32", "float64"])
    monkeypatch.setattr(keras.config, "floatx", lambda: next(defaults))
    found = outcome(check_objects, made(), made())
    assert found.startswith("worker 1: Keras has other defaults than in the first process")
