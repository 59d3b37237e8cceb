"""The directory of a run: what is rejected, and who may use it."""

import errno
import fcntl
import json
import sys
import threading
import types
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from small_states import make_checkpoints

from config import Config
from engine import machine
from engine.errors import BadInput, CannotWrite, Unavailable
from engine.files import write_atomically, write_json
from engine.run import directory as directory_module
from engine.run.directory import Directory


def at(path: Path, *, fresh: bool = False) -> Directory:
    return Directory(Config(run_dir=path, fresh=fresh))


def rejected(path: Path, *, fresh: bool = False) -> str:
    """Returns why a run cannot use a directory."""
    with pytest.raises(BadInput) as problem, at(path, fresh=fresh) as directory:
        if not fresh:
            directory.check_same_run()
        directory.lock()
        directory.open()
    return str(problem.value)


def started(path: Path, settings: Config | None = None, **more: object) -> Path:
    """Makes a directory that contains a run that has started."""
    path.mkdir()
    write_json(path / "config.json", {"settings": (settings or Config(run_dir=path)).as_json(), **more})
    return path


def test_directory_that_cannot_be_one_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, reason in (
        (tmp_path / "file" / "run", "Not a directory"),
        (Path("/proc/run"), "No such file or directory"),  # The tests may run as root, who may write anywhere else.
    ):
        assert rejected(path) == f"--run-dir {path} cannot be used ({reason}): use another one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fresh", [False, True])
def test_directory_of_other_files_is_rejected(fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".part").touch()
    with at(tmp_path / "run") as directory:
        directory.lock()
        directory.open()  # With hidden files only, it is of a run that was killed when it started.
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert "is not empty and contains no run (config.json is missing)" in rejected(tmp_path / "run", fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_directory_in_use_is_rejected_until_it_is_not(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    with at(path) as holding:
        holding.lock()
        for fresh in (False, True):
            assert "is in use by another run" in rejected(path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with at(path) as directory:
        directory.lock()


def test_run_that_was_killed_where_there_are_no_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Some mounts of Lustre have no flock, some of NFS no lock daemon. A file in its place would stay after SIGKILL.
    path, killed, numbers = started(tmp_path / "run"), [], iter((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP))

    def flock(*_: object) -> None:
        raise OSError(next(numbers), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(3):
        killed.append(at(path))  # Like a killed program, it releases nothing.
        killed[-1].lock()
        assert "is on a file system without locks: let only one run use it" in capsys.readouterr().out


def test_lock_of_another_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = started(tmp_path / "run", starts=[{"host": "node7", "machine": "another"}])
    with (path / ".lock").open("w") as server, at(path) as directory:
        fcntl.flock(server, fcntl.LOCK_EX)  # As a server of NFS keeps the lock of a machine that is dead.
        threading.Timer(1.0, server.close).start()
        directory.lock()
        assert "is in use by another run, last started on node7; if" in capsys.readouterr().out
        monkeypatch.setattr(directory_module, "SECONDS_OF_LEASE", 0.1)
        with pytest.raises(Unavailable, match="last started on node7: end that run"), at(path) as third:
            third.lock()


def test_fresh_moves_a_link_and_not_what_it_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(tmp_path / "real")
    started(tmp_path / "link.1")
    (tmp_path / "link").symlink_to("real")
    with at(tmp_path / "link", fresh=True) as directory:
        directory.lock()
        directory.open()
    assert capsys.readouterr().out == f"Moved the run in {tmp_path / 'link'} to link.2\n"
    assert (tmp_path / "link.2").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()
    assert not (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "link").iterdir()] == [".lock"]


def test_code_and_versions_that_changed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    # A project with a helper, a package, and an environment inside its folder.
    project = tmp_path / "project"
    for name in ("helper.py", "mine/losses.py", ".venv/lib/python3/site-packages/theirs.py", "env/std.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("# One.\n")
        module = types.ModuleType(name)
        module.__file__ = str(project / name)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(machine, "PROJECT", project.resolve())
    monkeypatch.setattr(sys, "prefix", str(project / "env"))

    code, recorded = machine.code_sha256(), machine.versions()
    assert code.keys() == {"helper.py", "mine/losses.py"}
    settings = Config(run_dir=tmp_path / "run")
    started(tmp_path / "run", code_sha256=code, versions=recorded)
    at(tmp_path / "run").check_same_run()
    assert capsys.readouterr().out == ""

    (project / "helper.py").write_text("# Another one.\n")
    (project / "mine" / "losses.py").unlink()
    config = {"settings": settings.as_json(), "code_sha256": code, "versions": {**recorded, "keras": "3.0.0"}}
    write_json(tmp_path / "run" / "config.json", config)
    at(tmp_path / "run").check_same_run()
    changes = f"helper.py has changed, mine/losses.py is gone, keras 3.0.0 has become {keras.__version__}"
    assert f"Since the run in {tmp_path / 'run'} started, {changes}; further" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["checkpoints", "best"])
def test_checkpoints_that_are_no_directory_are_rejected_before_the_training(name: str, tmp_path: Path) -> None:
    path = started(tmp_path / "run") / name
    path.touch() if name == "best" else path.symlink_to(tmp_path / "not_mounted")
    reason = f"{path} is neither a directory nor a link to one: restore it, or start a new run"
    assert rejected(tmp_path / "run") == reason
    with at(tmp_path / "run", fresh=True) as directory:  # --fresh moves it aside.
        directory.open()


def test_links_among_checkpoints_are_followed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    checkpoints = make_checkpoints(tmp_path / "checkpoints", {"a": tf.Variable([1.5])})
    first = checkpoints.save(1, {})
    (tmp_path / "elsewhere" / first.name).rename(tmp_path / "archived")
    first.symlink_to(tmp_path / "archived")
    assert checkpoints.read(first)[0]["a"] == [1.5]
    checkpoints.save(2, {})
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step-00000002"]
    assert (tmp_path / "archived" / "SHA256SUMS").exists()


def test_file_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    def onto_a_full_disk(path: Path) -> None:
        path.write_text("half")
        Path("/dev/full").write_text("half")

    (tmp_path / "file").write_text("whole")
    with pytest.raises(CannotWrite, match=r"file cannot be written \(No space left on device\): free disk space"):
        write_atomically(tmp_path / "file", onto_a_full_disk)
    assert (tmp_path / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    remedy = "restore the directory and its permissions, then run the same command again"
    with pytest.raises(CannotWrite, match=rf"gone/file cannot be written \(No such file or directory\): {remedy}"):
        write_json(tmp_path / "gone" / "file", {})
    (tmp_path / "link").symlink_to("file")
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
