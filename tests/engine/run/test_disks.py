"""Checkpoints on disks that damage, lose or hold files, or fail for a while."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from small_states import make_checkpoints, variables

from engine import files
from engine.errors import BadInput, Unavailable
from engine.run import checkpoint_files
from engine.run.checkpoints import Damaged, restore_newest
from engine.run.progress import Progress


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "cut short":
        path.write_bytes(content[: len(content) * 3 // 5])
    elif how == "changed":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["removed", "cut short", "changed"])
@pytest.mark.parametrize("file", ["state.index", "state.data-00000-of-00001", "progress.json", "SHA256SUMS"])
def test_damage_is_found_and_the_checkpoint_before_is_used(file: str, how: str, tmp_path: Path, capsys) -> None:
    state = variables(a=(1000,), b=())
    checkpoints, best = (make_checkpoints(tmp_path / name, state, keep=3) for name in ("states", "best"))
    for step in (1, 2):
        state["a"].assign(tf.fill([1000], float(step)))
        progress = Progress(step=step)
        best.save(step, progress.record())
        checkpoints.save(step, Progress(step=step, best_step=step).record())
    state["a"].assign(tf.zeros([1000]))

    damage(tmp_path / "states" / "step-00000002" / file, how)
    with pytest.raises(Damaged, match="step-00000002 is damaged"):
        checkpoints.restore(tmp_path / "states" / "step-00000002")
    path, progress = restore_newest(checkpoints, best)
    assert (path.name, progress.step, float(state["a"][0])) == ("step-00000001", 1, 1.0)
    assert "step-00000002 is skipped" in capsys.readouterr().out

    # A checkpoint whose best weights are damaged is of no use either.
    damage(tmp_path / "best" / "step-00000001" / file, how)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="has no usable checkpoint"):
        restore_newest(checkpoints, best)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


UNKNOWN = tf.errors.UnknownError(None, None, "state.index; Input/output error")
# TensorFlow takes any error of access for an absent file.
ABSENT = tf.errors.NotFoundError(None, None, "Failed to find any matching files for state")


@pytest.mark.parametrize(
    ("name", "problem", "times", "told"),
    [
        ("load_checkpoint", ABSENT, 2, None),
        ("load_checkpoint", UNKNOWN, 100, "step-00000002 still cannot be read"),
        ("file_sha256", OSError(errno.EMFILE, "Too many open files"), 1, "step-00000002 cannot be read"),
    ],
)
def test_fault_that_passes_is_no_damage(
    name: str, problem: Exception, times: int, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If it were, an older checkpoint would be used, and the next save would remove this one.
    states, best = (make_checkpoints(tmp_path / each, variables(a=(2,)), keep=2) for each in ("states", "best"))
    for step in (1, 2):
        states.save(step, Progress(step=step).record())
    holder = tf.train if name == "load_checkpoint" else checkpoint_files
    left, read = iter(range(times)), getattr(holder, name)

    def read_or_fail(*arguments: Any) -> Any:
        if next(left, None) is not None:
            raise problem
        return read(*arguments)

    monkeypatch.setattr(holder, name, read_or_fail)
    monkeypatch.setattr(files, "SECONDS_TO_WAIT", (0.001,) * 3)
    if told:
        with pytest.raises(Unavailable, match=told):
            restore_newest(states, best)
    else:
        path, progress = restore_newest(states, best)
        assert (path.name, progress.step) == ("step-00000002", 2)


@pytest.mark.parametrize(
    ("holder", "name", "problem", "happens"),
    [
        (tf.raw_ops, "SaveV2", UNKNOWN, False),
        # It happens, and the answer of the server is lost.
        (Path, "rename", OSError(errno.EIO, os.strerror(errno.EIO)), True),
    ],
)
def test_checkpoint_is_written_again_after_a_fault_that_passes(
    holder: Any, name: str, problem: Exception, happens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = make_checkpoints(tmp_path / "states", variables(a=(2,)), keep=2)
    left, call = iter(range(2)), getattr(holder, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        fails = next(left, None) is not None
        result = call(*arguments, **options) if happens or not fails else None
        if fails:
            raise problem
        return result

    monkeypatch.setattr(files, "SECONDS_TO_WAIT", (0.001,) * 3)
    monkeypatch.setattr(holder, name, failing)
    states.save(1, Progress(step=1).record())
    assert os.listdir(tmp_path / "states") == ["step-00000001"]
    assert states.read(states.path(1))[1]["step"] == 1


@pytest.mark.parametrize("newer", [{"colour": "red"}, {"format": 2}])
def test_checkpoint_of_another_version_is_rejected_and_stays(newer: dict, tmp_path: Path) -> None:
    # If it counted as damaged, an older checkpoint would be used, and the next save would remove it.
    checkpoints = make_checkpoints(tmp_path, variables(a=(2,)), keep=2)
    checkpoints.save(1, Progress(step=1).record())
    checkpoints.save(2, Progress(step=2).record() | newer)
    # Its variables may differ, too, which alone would mean another model.
    checkpoints = make_checkpoints(tmp_path, variables(b=(3,)), keep=2)
    with pytest.raises(BadInput, match=r"step-00000002 was written by another version of engine/ .*(colour|format 2)"):
        restore_newest(checkpoints, make_checkpoints(tmp_path / "best", {}))


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
    assert [path.name for path in checkpoints.paths()] == ["step-00000003"]
    # The same step once more, as after a resume: what is held takes the name of nothing.
    checkpoints.save(1, {})
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]
    held = ""
    checkpoints.save(4, {})
    assert sorted(os.listdir(tmp_path)) == ["step-00000004"]
