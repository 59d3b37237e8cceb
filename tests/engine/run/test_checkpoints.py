"""Checkpoints are whole, verified by name and by checksum, and only the newest are kept."""

import concurrent.futures
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from config import Config
from engine import retries
from engine.cluster.strategy import create_strategy
from engine.cluster.workers import Workers
from engine.errors import BadInput, CannotWrite, Diverged, Unavailable
from engine.run import checkpoint_files, checkpoints, progress
from engine.run.checkpoints import LARGE, Checkpoints, Damaged, read_newest
from engine.run.progress import Progress
from engine.run.state import State, one_of_replicas, weights_sha256
from engine.run.writer import Writer


def variables(**shapes: tuple[int, ...]) -> dict[str, tf.Variable]:
    return {name.replace("_", "/"): tf.Variable(tf.zeros(shape)) for name, shape in shapes.items()}


def state_of(named: dict[str, tf.Variable]) -> State:
    strategy = tf.distribute.get_strategy()
    return State(strategy, Workers(strategy), named)


def make_checkpoints(directory: Path, named: dict[str, tf.Variable], **options) -> Checkpoints:
    return Checkpoints(directory, state_of(named), **{"keep": 1, **options})


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


@pytest.mark.parametrize(
    "name",
    ["exp[1]", "layers=[64,64]", "a\\b", "s*r", "q?q", "{a,b}", "two\nlines", "-a $b #c", "n" * 200, "ü"],
    ids=ascii,
)
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


def test_values_stay_what_they_were_when_the_variables_change() -> None:
    variable = tf.Variable([1.0, 2.0])
    values = state_of({"a": variable}).values()
    variable.assign_add([1.0, 1.0])
    np.testing.assert_array_equal(values["a"], [1.0, 2.0])


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


def test_every_replica_gets_back_its_own(tmp_path: Path) -> None:
    state = on(3)
    values = {
        "mirrored": np.array([0.1, 0.2], "float32"),
        "layer/seed_generator_state": np.array([[1, 2], [3, 4], [5, 6]], "uint32"),
        "mean": np.array([0.1, 0.2, 0.3], "float32"),
        "text": np.array([b"a", b"", b"a\0"], object),
        "none": np.zeros((3, 0), "float32"),
        "total": np.array([1.1, 2.2, 3.3], "float32"),
    }
    state.assign(values)
    path = Checkpoints(tmp_path, state, keep=1).save(1, {})
    other = on(3)
    Checkpoints(tmp_path, other, keep=1).restore(path)
    for name, value in values.items():
        np.testing.assert_array_equal(other.values()[name], value)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 4), (4, 2), (2, 3)])
def test_another_number_of_replicas_restores_what_it_means(first: int, second: int, tmp_path: Path) -> None:
    state = on(first)
    state.assign(
        {
            "mirrored": np.array([0.1, 0.2], "float32"),
            "layer/seed_generator_state": np.array([[7 + replica, 2] for replica in range(first)], "uint32"),
            "mean": np.arange(first, dtype="float32"),
            "text": np.array([f"of {replica}" for replica in range(first)], object),
            "none": np.zeros((first, 0), "float32"),
            "total": np.arange(1, first + 1, dtype="float32"),
        }
    )
    path = Checkpoints(tmp_path, state, keep=1).save(1, {})
    other = on(second)
    Checkpoints(tmp_path, other, keep=1).restore(path)
    found = other.values()
    for value in other.strategy.experimental_local_results(other.mirrored["mirrored"]):
        np.testing.assert_array_equal(value.numpy(), np.array([0.1, 0.2], "float32"))
    np.testing.assert_array_equal(found["mean"], [(first - 1) / 2] * second)
    assert list(found["text"]) == [b"of 0"] * second  # Texts have no mean.
    assert found["none"].shape == (second, 0)
    assert found["total"].sum() == first * (first + 1) / 2 == other.per_replica["total"].numpy()
    seeds = found["layer/seed_generator_state"]
    np.testing.assert_array_equal(seeds[0], [7, 2])
    assert len(np.unique(seeds, axis=0)) == second


def test_statistics_that_agree_stay_the_same_bits_on_any_number_of_replicas(tmp_path: Path) -> None:
    state = on(3)
    some = np.linspace(0.5, 1.0, 100, dtype="float32")
    rounded = [number for number in some if np.full(3, number).mean(dtype="float32") != number]
    state.assign({**state.values(), "mean": np.full(3, rounded[0])})
    path = Checkpoints(tmp_path, state, keep=1).save(1, {})
    for replicas in (1, 2, 4):
        other = on(replicas)
        Checkpoints(tmp_path, other, keep=1).restore(path)
        np.testing.assert_array_equal(other.values()["mean"], np.full(replicas, rounded[0]))


def test_newest_are_kept_in_the_order_of_their_steps(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)), keep=2)
    assert checkpoints.paths() == []
    for step in (1, 9, 10, 99_999_999, 100_000_000):
        checkpoints.save(step, {})
    assert [path.name for path in checkpoints.paths()] == ["step-99999999", "step-100000000"]


def test_saving_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)), keep=2)
    for step in (10, 20, 30, 15):
        checkpoints.save(step, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000015"]


def test_other_files_beside_are_left_alone(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)))
    checkpoints.save(1, {})
    (tmp_path / "step-00000009.bak").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    checkpoints.save(2, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000002"]
    assert (tmp_path / "step-00000009.bak").exists()


def test_half_written_checkpoint_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)), keep=2)
    checkpoints.save(1, {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.part")
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]
    # The next save removes what was left behind.
    checkpoints.save(2, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_directory_that_goes_once_all_is_written_fails_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, elsewhere, sync = tmp_path / "run", tmp_path / "elsewhere", checkpoints.sync

    def move_after_the_last(*paths: Path) -> None:
        sync(*paths)
        if paths == (directory / "best",):
            directory.rename(elsewhere)

    directory.mkdir()
    best = make_checkpoints(directory / "best", variables(a=(2,)))
    monkeypatch.setattr(checkpoints, "sync", move_after_the_last)
    best.save(1, {})
    assert (elsewhere / "best" / "step-00000001").is_dir()
    with pytest.raises(CannotWrite, match="restore the directory"):
        best.save(2, {})


def test_same_step_is_saved_again(tmp_path: Path) -> None:
    state = {"a": tf.Variable(1.0)}
    checkpoints = make_checkpoints(tmp_path, state)
    checkpoints.save(5, {})
    state["a"].assign(2.0)
    path = checkpoints.save(5, {})
    state["a"].assign(3.0)
    checkpoints.restore(path)
    assert state["a"].numpy() == 2.0


def test_what_is_written_in_a_thread_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(in_thread=True)
    state = {"a": tf.Variable([1.0, 2.0])}
    (tmp_path / "run").mkdir()
    checkpoints = make_checkpoints(tmp_path / "run" / "checkpoints", state, keep=2, writer=writer)
    begun = concurrent.futures.Future()
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

    shutil.rmtree(tmp_path / "run")
    for tell in (lambda: checkpoints.save(4, {}), writer.wait):
        checkpoints.save(2, {})
        checkpoints.save(3, {})
        with pytest.raises(CannotWrite, match="cannot be written"):
            tell()
        writer.wait()  # Told once.


def test_nothing_is_written_that_names_what_was_not(tmp_path: Path) -> None:
    writer, state = Writer(in_thread=True), variables(a=(2,))
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
    for difference in (
        "3 variables differ",
        "gone float32[2] there and absent now",
        "reshaped float32[3] there and float32[4] now",
        "added absent there and float32[5] now",
    ):
        assert difference in str(refused.value)
    assert all((variable.numpy() == 0).all() for variable in ours.values())


def test_what_was_infinite_from_the_start_is_saved(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, {"mask": tf.Variable([0.0, float("-inf")])})
    checkpoints.save(1, {})
    checkpoints.state.mirrored["mask"].assign([0.0, float("nan")])
    with pytest.raises(Diverged, match="mask is not finite"):
        checkpoints.save(2, {})


@pytest.mark.parametrize("size", [2, LARGE])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_saved(value: float, size: int, tmp_path: Path) -> None:
    state = {"model/a": tf.Variable([1.0] * size), "metrics/train/ratio": tf.Variable(value)}
    checkpoints = make_checkpoints(tmp_path, state, keep=2)
    checkpoints.save(1, {})  # A metric may be anything.
    state["model/a"].assign([1.0] * (size - 1) + [value])
    with pytest.raises(Diverged, match="after step 2 the variable model/a is not finite"):
        checkpoints.save(2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "emptied":
        path.write_bytes(b"")
    elif how == "cut short":
        path.write_bytes(content[: len(content) * 3 // 5])
    elif how == "changed":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["removed", "emptied", "cut short", "changed"])
@pytest.mark.parametrize("file", ["state.index", "state.data-00000-of-00001", "progress.json", "SHA256SUMS"])
def test_damage_is_found_and_the_checkpoint_before_is_used(file: str, how: str, tmp_path: Path, capsys) -> None:
    state = variables(a=(1000,), b=())
    checkpoints, best = (
        make_checkpoints(tmp_path / "states", state, keep=3),
        make_checkpoints(tmp_path / "best", state, keep=3),
    )
    for step in (1, 2):
        state["a"].assign(tf.fill([1000], float(step)))
        progress = Progress(step=step)
        best.save(step, progress.record())
        checkpoints.save(step, Progress(step=step, best_step=step).record())
    state["a"].assign(tf.zeros([1000]))

    damage(tmp_path / "states" / "step-00000002" / file, how)
    with pytest.raises(Damaged, match="step-00000002 is damaged"):
        checkpoints.read(tmp_path / "states" / "step-00000002")
    assert (state["a"].numpy() == 0).all()
    path, values, progress = read_newest(checkpoints, best)
    assert (path.name, progress.step, values["a"][0]) == ("step-00000001", 1, 1.0)
    assert "step-00000002 is skipped" in capsys.readouterr().out

    # A checkpoint whose best weights are damaged is of no use either.
    damage(tmp_path / "best" / "step-00000001" / file, how)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="has no usable checkpoint"):
        read_newest(checkpoints, best)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("times", [2, 100])
@pytest.mark.parametrize("of", ["the tensors", "access", "the record"])
def test_fault_that_passes_is_no_damage(
    of: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # If it were, an older checkpoint would be used, and the next save would remove this one.
    state = variables(a=(2,))
    states, best = (make_checkpoints(tmp_path / name, state, keep=2) for name in ("states", "best"))
    for step in (1, 2):
        states.save(step, Progress(step=step).record())
    left = [times]

    def failing(read: Callable, problem: Exception) -> Callable:
        def read_or_fail(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise problem
            return read(*arguments)

        return read_or_fail

    if of != "the record":
        problem: Exception = tf.errors.UnknownError(None, None, "state.index; Input/output error")
        if of == "access":  # TensorFlow takes any error of it for an absent file.
            problem = tf.errors.NotFoundError(None, None, "Failed to find any matching files for state")
        monkeypatch.setattr(tf.train, "load_checkpoint", failing(tf.train.load_checkpoint, problem))
    else:
        problem = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        monkeypatch.setattr(checkpoint_files, "file_sha256", failing(checkpoint_files.file_sha256, problem))
    monkeypatch.setattr(retries, "SECONDS_TO_WAIT", (0.001,) * 3)
    if times == 2:
        path, _, progress = read_newest(states, best)
        assert (path.name, progress.step) == ("step-00000002", 2)
        assert capsys.readouterr().err.count("step-00000002 cannot be read") == 2
    else:
        with pytest.raises(Unavailable, match="step-00000002 still cannot be read"):
            read_newest(states, best)


@pytest.mark.parametrize("of", ["the tensors", "the sync", "the rename"])
def test_checkpoint_is_written_again_after_a_fault_that_passes(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SECONDS_TO_WAIT", (0.001,) * 3)
    states = make_checkpoints(tmp_path / "states", variables(a=(2,)), keep=2)
    problems: list[Exception] = [OSError(errno.EIO, os.strerror(errno.EIO))] * 2
    if of == "the tensors":
        problems = [tf.errors.UnknownError(None, None, "state.data; Input/output error")] * 2
    holders: dict[str, Any] = {"the tensors": (tf.raw_ops, "SaveV2"), "the sync": (checkpoints, "sync")}
    holder, name = holders.get(of, (Path, "rename"))
    call = getattr(holder, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        if of == "the rename" and problems:
            call(*arguments, **options)  # It happens, and the answer of the server is lost.
        if problems:
            raise problems.pop()
        return call(*arguments, **options)

    monkeypatch.setattr(holder, name, failing)
    states.save(1, Progress(step=1).record())
    assert os.listdir(tmp_path / "states") == ["step-00000001"]
    assert states.read(states.path(1))[1]["step"] == 1


def test_too_many_open_files_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = make_checkpoints(tmp_path / "states", variables(a=(2,)), keep=2)
    for step in (1, 2):
        states.save(step, Progress(step=step).record())

    def fail(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkpoint_files, "file_sha256", fail)
    with pytest.raises(Unavailable, match=r"step-00000002 cannot be read \(OSError: .*Too many open files\)"):
        read_newest(states, states)


@pytest.mark.parametrize("newer", [{"colour": "red"}, {"format": 2}])
def test_checkpoint_of_another_version_is_rejected_and_stays(newer: dict, tmp_path: Path) -> None:
    # If it counted as damaged, an older checkpoint would be used, and the next save would remove it.
    state = variables(a=(2,))
    checkpoints = make_checkpoints(tmp_path, state, keep=2)
    checkpoints.save(1, Progress(step=1).record())
    checkpoints.save(2, Progress(step=2).record() | newer)
    # Its variables may differ, too, which alone would mean another model.
    checkpoints = make_checkpoints(tmp_path, variables(b=(3,)), keep=2)
    with pytest.raises(BadInput, match=r"step-00000002 was written by another version of engine/ .*(colour|format 2)"):
        read_newest(checkpoints, make_checkpoints(tmp_path / "best", state))


def test_files_that_another_program_holds_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NFS keeps a file that is open on another machine under a name of its own, so its directory cannot be removed.
    checkpoints, held = make_checkpoints(tmp_path, variables(a=(2,))), "step-00000001"
    rmdir = os.rmdir

    def rmdir_of_nfs(path, *arguments, **options) -> None:
        if held and held in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy")
        rmdir(path, *arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_of_nfs)
    for step in (1, 2, 3):
        checkpoints.save(step, {})
    hidden, newest = sorted(os.listdir(tmp_path))
    assert (hidden.rpartition(".")[0], newest) == (".step-00000001.removed", "step-00000003")
    # The same steps once more, as after a resume: what is held takes the name of nothing, neither now nor before.
    checkpoints.save(1, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]
    checkpoints.save(2, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000002"]
    held = ""
    checkpoints.save(4, {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000004"]


def test_half_written_checkpoint_that_another_program_holds_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = make_checkpoints(tmp_path, variables(a=(2,)))
    (tmp_path / ".step-00000001.part").mkdir()
    monkeypatch.setattr("engine.run.checkpoints._delete", lambda path: None)
    assert saved.save(1, {}).is_dir()


def test_directory_that_cannot_be_listed_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = make_checkpoints(tmp_path, variables(a=(2,)))
    saved.save(1, {})
    glob = Path.glob

    def stale(path: Path, pattern: str):
        if path == tmp_path and pattern.startswith("."):
            raise OSError(errno.ESTALE, "Stale file handle")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", stale)
    saved.clear()
    saved.save(2, {})
    assert [path.name for path in saved.paths()] == ["step-00000002"]


def test_record_without_a_format_is_of_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Progress(step=1).record()
    del record["format"]
    assert Progress.read(record, tmp_path).step == 1
    monkeypatch.setattr(progress, "FORMAT", 2)
    with pytest.raises(BadInput, match=r"was written by another version of engine/ \(format 1\)"):
        Progress.read(record, tmp_path)


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


def test_mean_over_many_replicas_is_right_in_16_bits() -> None:
    for dtype, low, high in (("float16", 100, 110), (tf.bfloat16.as_numpy_dtype, 1.0, 1.1)):
        rows = np.linspace(low, high, 1000).astype(dtype)
        assert float(one_of_replicas(rows)) == pytest.approx((low + high) / 2, rel=0.01)
