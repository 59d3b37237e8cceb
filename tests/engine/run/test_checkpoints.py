"""Checkpoints are whole, verified by name and by checksum, and only the newest are kept."""

import concurrent.futures
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from small_states import make_checkpoints, variables

from config import Config
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers
from engine.errors import BadInput, CannotWrite, Diverged
from engine.run.checkpoints import Checkpoints, Writer
from engine.run.state import LARGE, State, one_of_replicas, weights_sha256


def test_restored_variables_and_record_are_those_saved(tmp_path: Path) -> None:
    saved = {
        "a/b.c": tf.Variable([1.5, 2.5]),
        "a": tf.Variable(3, dtype=tf.int64),
        "a/ü#2": tf.Variable([[7]]),
        "seed": tf.Variable([1, 2**32 - 1], dtype=tf.uint32),
        "half": tf.Variable(tf.cast([1.0, 1 / 3], tf.bfloat16)),
        "none": tf.Variable(tf.zeros([0, 3])),
        "text": tf.Variable("a\0"),
        "texts": tf.Variable(["", "ü"]),
    }
    path = make_checkpoints(tmp_path, saved).save(12, {"best_score": 0.1, "best_epoch": None})
    others = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in saved.items()}
    checkpoints = make_checkpoints(tmp_path, others)
    checkpoints.restore(path)
    assert checkpoints.read(path)[1] == {"step": 12, "best_score": 0.1, "best_epoch": None}
    for name, variable in saved.items():
        np.testing.assert_array_equal(others[name].numpy(), variable.numpy())


@pytest.mark.parametrize("name", ["exp[1]", "a\\b*?{a,b}", "two\nlines -a $b #c ü", "n" * 200], ids=ascii)
def test_directory_of_any_name_is_read_again(name: str, tmp_path: Path) -> None:
    saved = {"a": tf.Variable([1.5, 2.5]), "b": tf.Variable(3)}
    path = make_checkpoints(tmp_path / name, saved).save(1, {})
    other = make_checkpoints(tmp_path / name, variables(a=(2,)) | {"b": tf.Variable(0)})
    other.restore(path)
    np.testing.assert_array_equal(other.state.mirrored["a"].numpy(), [1.5, 2.5])
    assert sorted(file.name for file in tmp_path.iterdir()) == [name]


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def checked(path: Path, target: Path) -> Path:
        missing = {path, *path.iterdir()} - set(synced)
        assert not missing
        synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    make_checkpoints(tmp_path, variables(a=(2,))).save(1, {})
    assert tmp_path in synced  # After the rename.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory can be reset on Linux only")
def test_save_takes_no_memory_for_copies_of_the_variables_and_restore_little(tmp_path: Path) -> None:
    def mebibytes(field: str) -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(f"{field}:"))

    named = {str(number): tf.Variable(tf.random.uniform([2**23])) for number in range(8)}  # 32 MiB each
    checkpoints = make_checkpoints(tmp_path, named)

    def peak(function: Callable[[], object]) -> int:
        """Returns by how much memory grows in a call."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # See man 5 proc_pid_clear_refs.
        before = mebibytes("VmRSS")
        function()
        return mebibytes("VmHWM") - before

    assert peak(lambda: checkpoints.save(1, {})) < 64
    assert peak(lambda: checkpoints.restore(checkpoints.paths()[0])) < 128


def on(replicas: int, **values: list[float]) -> State:
    """Returns a state on some replicas: "mirrored", "seed" and "mean" variables, and what a metric sums up."""
    strategy = create_strategy(Config(simulated_devices=replicas))
    summed = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with strategy.scope():
        mirrored = {"mirrored": tf.Variable([0.0, 0.0])}
        per_replica = {
            "layer/seed_generator_state": tf.Variable([0, 0], dtype=tf.uint32),
            "mean": tf.Variable(0.0),
            "text": tf.Variable(""),
            "none": tf.Variable(tf.zeros([0])),
            "total": tf.Variable(0.0, **summed),
        }
    return State(strategy, Workers(strategy), mirrored, per_replica)


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 4), (4, 2)])
def test_every_replica_gets_back_its_own_and_another_number_of_them_what_it_means(
    first: int, second: int, tmp_path: Path
) -> None:
    state, other = on(first), on(second)
    values = {
        "mirrored": np.array([0.1, 0.2], "float32"),
        "layer/seed_generator_state": np.array([[7 + replica, 2] for replica in range(first)], "uint32"),
        "mean": np.arange(first, dtype="float32"),
        "text": np.array([f"of {replica}".encode() for replica in range(first)], object),
        "none": np.zeros((first, 0), "float32"),
        "total": np.arange(1, first + 1, dtype="float32"),
    }
    state.assign(values)
    checkpoints = Checkpoints(tmp_path, state, keep=1)
    path = checkpoints.save(1, {})
    checkpoints.writer.wait()
    Checkpoints(tmp_path, other, keep=1).restore(path)
    found = other.values()
    if first == second:
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value)
        return
    for value in other.strategy.experimental_local_results(other.mirrored["mirrored"]):
        np.testing.assert_array_equal(value.numpy(), values["mirrored"])
    np.testing.assert_array_equal(found["mean"], [(first - 1) / 2] * second)
    assert list(found["text"]) == [b"of 0"] * second  # Texts have no mean.
    assert found["none"].shape == (second, 0)
    assert found["total"].sum() == first * (first + 1) / 2 == other.per_replica["total"].numpy()
    seeds = found["layer/seed_generator_state"]
    np.testing.assert_array_equal(seeds[0], [7, 2])
    assert len(np.unique(seeds, axis=0)) == second


def test_statistics_that_agree_stay_the_same_bits_and_their_mean_is_right_in_16_bits() -> None:
    some = np.linspace(0.5, 1.0, 100, dtype="float32")
    rounded = next(number for number in some if np.full(3, number).mean(dtype="float32") != number)
    assert one_of_replicas(np.full(3, rounded)) == rounded
    rows = np.linspace(100, 110, 1000).astype("float16")
    assert float(one_of_replicas(rows)) == pytest.approx(105, rel=0.01)


def test_newest_are_kept_in_the_order_of_their_steps_and_other_files_beside_are_left_alone(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)), keep=2)
    assert checkpoints.paths() == []
    checkpoints.save(1, {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.part")  # As a killed save leaves it.
    (tmp_path / "step-00000009.bak").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]
    for step in (9, 10, 99_999_999, 100_000_000):
        checkpoints.save(step, {})
    newest = ["step-99999999", "step-100000000"]
    assert [path.name for path in checkpoints.paths()] == newest
    assert {path.name for path in tmp_path.iterdir()} == {*newest, "step-00000009.bak", "step-notes.txt"}
    checkpoints.save(15, {})  # As after a resume from an earlier checkpoint: the later ones go.
    assert [path.name for path in checkpoints.paths()] == ["step-00000015"]


def test_what_is_written_in_a_thread_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, state, begun = Writer(), {"a": tf.Variable([1.0, 2.0])}, concurrent.futures.Future()
    checkpoints = make_checkpoints(tmp_path / "run", state, keep=2, writer=writer)
    write = Checkpoints._write
    with monkeypatch.context() as slowly:
        slowly.setattr(Checkpoints, "_write", lambda *arguments: begun.result(timeout=60) or write(*arguments))
        path = checkpoints.save(1, {})
        state["a"].assign([3.0, 4.0])
        assert not path.exists()
        begun.set_result(None)
        writer.wait()
    checkpoints.restore(path)
    np.testing.assert_array_equal(state["a"].numpy(), [1.0, 2.0])


def test_nothing_is_written_that_names_what_was_not(tmp_path: Path) -> None:
    writer, state = Writer(), variables(a=(2,))
    best, checkpoints = (make_checkpoints(tmp_path / name / "it", state, writer=writer) for name in ("best", "states"))
    (tmp_path / "states").mkdir()
    best.save(1, {})
    checkpoints.save(1, {"best_step": 1})
    with pytest.raises(CannotWrite, match="best"):
        writer.wait()
    assert checkpoints.paths() == []


def test_other_variables_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoints(tmp_path, variables(same=(1,), gone=(2,), reshaped=(3,))).save(1, {})
    ours = variables(same=(1,), reshaped=(4,), added=(5,))
    with pytest.raises(BadInput) as refused:
        make_checkpoints(tmp_path, ours).restore(path)
    for difference in ("3 variables differ", "gone float32[2] there and absent now", "float32[3] there and float32[4]"):
        assert difference in str(refused.value)
    assert all((variable.numpy() == 0).all() for variable in ours.values())


@pytest.mark.parametrize(("size", "value"), [(2, float("nan")), (LARGE, float("inf"))])
def test_what_is_not_finite_is_not_saved(size: int, value: float, tmp_path: Path) -> None:
    # A metric may be anything, and what was infinite from the start may stay so.
    mask = tf.Variable([0.0, float("-inf")])
    state = {"model/a": tf.Variable([1.0] * size), "mask": mask, "metrics/train/ratio": tf.Variable(value)}
    checkpoints = make_checkpoints(tmp_path, state, keep=2)
    checkpoints.accept_infinite()
    checkpoints.save(1, {})
    state["model/a"].assign([1.0] * (size - 1) + [value])
    with pytest.raises(Diverged, match="after step 2 the variable model/a is not finite"):
        checkpoints.save(2, {})
    state["model/a"].assign([1.0] * size)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_fingerprint_is_the_one_documented() -> None:
    state = {"b": tf.Variable([1.0, -2.0]), "a": tf.Variable([[3]])}
    expected = hashlib.sha256(
        b"b float32 (2,)\n"
        + np.array([1.0, -2.0], "float32").tobytes()
        + b"a int32 (1, 1)\n"
        + np.array([[3]], "int32").tobytes()
    ).hexdigest()
    assert weights_sha256(state) == expected
