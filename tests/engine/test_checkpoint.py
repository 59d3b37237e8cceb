"""Checkpoints are whole, verified by name, and only the newest are kept."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from engine.checkpoint import Checkpoints, weights_sha256
from engine.errors import BadInput
from engine.strategy import create_strategy


def variables(**shapes: tuple[int, ...]) -> dict[str, tf.Variable]:
    return {name.replace("_", "/"): tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}


def test_restored_variables_and_record_are_those_saved(tmp_path: Path) -> None:
    saved = {"a/b.c": tf.Variable([1.5, 2.5]), "a": tf.Variable(3, dtype=tf.int64), "a/ü#2": tf.Variable([[7]])}
    path = Checkpoints(tmp_path, saved, keep=1).save(12, {"best_score": 0.1, "best_epoch": None})
    others = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in saved.items()}
    record = Checkpoints(tmp_path, others, keep=1).restore(path)
    assert (record["step"], record["best_score"], record["best_epoch"]) == (12, 0.1, None)
    for name, variable in saved.items():
        np.testing.assert_array_equal(others[name].numpy(), variable.numpy())


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 4), (4, 2)])
def test_another_number_of_replicas_restores_every_replica(first: int, second: int, tmp_path: Path) -> None:
    with create_strategy("auto", first).scope():
        saved = {"v": tf.Variable([1.0, 2.0])}
    saved["v"].assign([0.1, 0.2])
    path = Checkpoints(tmp_path, saved, keep=1).save(1, {})
    strategy = create_strategy("auto", second)
    with strategy.scope():
        other = {"v": tf.Variable([9.0, 9.0])}
    Checkpoints(tmp_path, other, keep=1).restore(path)
    for value in strategy.experimental_local_results(other["v"]):
        np.testing.assert_array_equal(value.numpy(), saved["v"].numpy())


def test_newest_are_kept_in_the_order_of_their_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, variables(a=(2,)), keep=2)
    assert checkpoints.newest() is None
    for step in (1, 9, 10, 99_999_999, 100_000_000):
        checkpoints.save(step, {})
    assert [path.name for path in checkpoints.paths()] == ["step-99999999", "step-100000000"]
    assert checkpoints.newest().name == "step-100000000"


def test_saving_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, variables(a=(2,)), keep=2)
    for step in (10, 20, 30, 15):
        checkpoints.save(step, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000015"]


def test_other_files_beside_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, variables(a=(2,)), keep=1)
    checkpoints.save(1, {})
    (tmp_path / "step-00000009.bak").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    checkpoints.save(2, {})
    assert checkpoints.newest().name == "step-00000002"
    assert (tmp_path / "step-00000009.bak").exists()


def test_half_written_checkpoint_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, variables(a=(2,)), keep=2)
    checkpoints.save(1, {})
    with monkeypatch.context() as killing:
        killing.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {})
    assert checkpoints.newest().name == "step-00000001"
    # The next save of the same process, or of one with its number, removes what was left behind.
    checkpoints.save(2, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_same_step_is_saved_again(tmp_path: Path) -> None:
    state = {"a": tf.Variable(1.0)}
    checkpoints = Checkpoints(tmp_path, state, keep=1)
    checkpoints.save(5, {})
    state["a"].assign(2.0)
    path = checkpoints.save(5, {})
    state["a"].assign(3.0)
    checkpoints.restore(path)
    assert state["a"].numpy() == 2.0


def test_other_variables_are_refused_by_name(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, variables(same=(1,), gone=(2,), reshaped=(3,)), keep=1).save(1, {})
    ours = variables(same=(1,), reshaped=(4,), added=(5,))
    with pytest.raises(BadInput) as refused:
        Checkpoints(tmp_path, ours, keep=1).restore(path)
    for difference in (
        "3 variables differ",
        "gone float32[2] there and absent now",
        "reshaped float32[3] there and float32[4] now",
        "added absent there and float32[5] now",
    ):
        assert difference in str(refused.value)
    assert all((variable.numpy() == 0).all() for variable in ours.values())


def test_fingerprint_is_the_one_documented() -> None:
    state = {"b": tf.Variable([1.0, -2.0]), "a": tf.Variable([[3]])}
    expected = hashlib.sha256(
        b"b float32 (2,)\n"
        + np.array([1.0, -2.0], "float32").tobytes()
        + b"a int32 (1, 1)\n"
        + np.array([[3]], "int32").tobytes()
    ).hexdigest()
    assert weights_sha256(state) == expected
    for other in (
        {"b": tf.Variable([1.0, -2.0000002]), "a": tf.Variable([[3]])},
        {"b": tf.Variable([1.0, -2.0]), "c": tf.Variable([[3]])},
        {"b": tf.Variable([1.0, -2.0]), "a": tf.Variable([3])},
    ):
        assert weights_sha256(other) != expected
