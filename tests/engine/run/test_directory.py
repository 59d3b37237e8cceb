"""The directory of a run: what is rejected, and who may use it."""

import dataclasses
import errno
import fcntl
import json
import socket
import sys
import threading
import types
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from config import Config
from engine import versions
from engine.cluster.workers import Workers
from engine.errors import BadInput, CannotWrite, Unavailable
from engine.files import write_atomically, write_json, writing
from engine.run import directory as directory_module
from engine.run.checkpoints import Checkpoints
from engine.run.directory import RunDirectory
from engine.run.state import State


def rejected(path: Path, *, fresh: bool = False) -> str:
    """Returns why a run cannot use a directory."""
    with pytest.raises(BadInput) as problem, RunDirectory(path) as directory:
        if not fresh:
            directory.check_same_run(Config(run_dir=path))
        directory.lock()
        directory.open(fresh=fresh)
    return str(problem.value)


def started(path: Path, settings: Config | None = None, **more: object) -> Path:
    """Makes a directory that contains a run that has started."""
    path.mkdir()
    write_json(path / "config.json", {"settings": (settings or Config(run_dir=path)).as_json(), **more})
    return path


def test_directory_that_cannot_be_one_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, reason in (
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "run", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/proc/run"), "No such file or directory"),  # The tests may run as root, who may write anywhere else.
    ):
        assert rejected(path) == f"--run-dir {path} cannot be used ({reason}): use another one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fresh", [False, True])
def test_directory_of_other_files_is_rejected(fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".part").touch()
    with RunDirectory(tmp_path / "run") as directory:
        directory.lock()
        directory.open(fresh=False)  # With hidden files only, it is of a run that was killed when it started.
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert "is not empty and contains no run (config.json is missing)" in rejected(tmp_path / "run", fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_directory_in_use_is_rejected_until_it_is_not(tmp_path: Path) -> None:
    path = started(tmp_path / "run")
    with RunDirectory(path) as holding:
        holding.lock()
        for fresh in (False, True):
            assert "is in use by another run" in rejected(path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with RunDirectory(path) as directory:
        directory.lock()


def test_run_that_was_killed_where_there_are_no_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Some mounts of Lustre have no flock, some of NFS no lock daemon. A file in its place would stay after SIGKILL.
    path, killed = started(tmp_path / "run"), []
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):

        def flock(*_: object, number: int = number) -> None:
            raise OSError(number, "no locks")

        monkeypatch.setattr(fcntl, "flock", flock)
        for host in ("one", "other"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            killed.append(RunDirectory(path))  # Like a killed program, it releases nothing.
            killed[-1].lock()
            assert "is on a file system without locks: let only one run use it" in capsys.readouterr().out


def test_lock_of_another_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = started(tmp_path / "run", starts=[{"host": "node7", "machine": "another"}])
    with (path / ".lock").open("w") as server, RunDirectory(path) as directory:
        fcntl.flock(server, fcntl.LOCK_EX)  # As a server of NFS keeps the lock of a machine that is dead.
        threading.Timer(1.0, server.close).start()
        directory.lock()
        assert "is in use by another run, last started on node7; if" in capsys.readouterr().out
        monkeypatch.setattr(directory_module, "SECONDS_OF_LEASE", 0.1)
        with pytest.raises(Unavailable, match="last started on node7: end that run"), RunDirectory(path) as third:
            third.lock()


def test_run_with_other_settings_is_rejected(tmp_path: Path) -> None:
    settings = Config(run_dir=started(tmp_path / "run"), seed=1, epochs=50)
    for more, advice in (
        ({}, "use the same ones, another --run-dir, or --fresh"),
        ({"evaluate_only": True}, "use the run's"),
    ):
        with pytest.raises(BadInput) as problem:
            RunDirectory(tmp_path / "run").check_same_run(dataclasses.replace(settings, **more))
        assert str(problem.value).endswith(f"contains a run with other settings (--seed 0 there and 1 now): {advice}")


def test_fresh_moves_a_link_and_not_what_it_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(tmp_path / "real")
    started(tmp_path / "link.1")
    (tmp_path / "link").symlink_to("real")
    with RunDirectory(tmp_path / "link") as directory:
        directory.lock()
        directory.open(fresh=True)
    assert capsys.readouterr().out == f"Moved the run in {tmp_path / 'link'} to link.2\n"
    assert (tmp_path / "link.2").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()
    assert not (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "link").iterdir()] == [".lock"]


def test_fresh_in_the_current_directory_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started(tmp_path / "run"))
    assert "--fresh cannot move --run-dir ., the current folder: start it elsewhere" in rejected(Path("."), fresh=True)


def test_code_and_versions_that_changed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    # A project with a helper, a package, and an environment inside its folder.
    project = tmp_path / "project"
    for name in ("helper.py", "mine/losses.py", "late.py", ".venv/lib/python3/site-packages/theirs.py", "env/std.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("# One.\n")
        if name != "late.py":
            module = types.ModuleType(name)
            module.__file__ = str(project / name)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(versions, "PROJECT", project.resolve())
    monkeypatch.setattr(sys, "prefix", str(project / "env"))

    facts = versions.shared_facts()
    assert facts["code"].keys() == {"helper.py", "mine/losses.py"}
    assert (facts["keras"], facts["tensorflow"]) == (keras.__version__, tf.__version__)
    directory = RunDirectory(tmp_path / "run")
    recorded = {"code_sha256": facts["code"], "versions": versions.versions()}
    assert "template" not in recorded["versions"]  # There is no pyproject.toml, and nothing is wrong with that.
    started(tmp_path / "run", **recorded)
    settings = Config(run_dir=tmp_path / "run")
    directory.check_same_run(settings)
    assert capsys.readouterr().out == ""

    (project / "helper.py").write_text("# Another one.\n")
    (project / "mine" / "losses.py").unlink()
    (project / "late.py").write_text("# Another one.\n")
    recorded["versions"]["keras"] = "3.0.0"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    write_json(tmp_path / "run" / "config.json", {**config, **recorded})
    directory.check_same_run(settings)
    changes = f"helper.py has changed, mine/losses.py is gone, keras 3.0.0 has become {keras.__version__}"
    assert capsys.readouterr().out == (
        f"Since the run in {tmp_path / 'run'} started, {changes}; further steps use the present ones\n"
    )


@pytest.mark.parametrize("name", ["checkpoints", "best"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_checkpoints_that_are_no_directory_are_rejected_before_the_training(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = started(tmp_path / "run") / name
    path.touch() if kind == "file" else path.symlink_to(tmp_path / "not_mounted")
    reason = f"{path} is neither a directory nor a link to one: restore it, or start a new run"
    assert rejected(tmp_path / "run") == reason
    with RunDirectory(tmp_path / "run") as directory:  # --fresh moves it aside.
        directory.open(fresh=True)


def test_links_among_checkpoints_are_followed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    strategy = tf.distribute.get_strategy()
    state = State(strategy, Workers(strategy), {"a": tf.Variable([1.5])})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    checkpoints = Checkpoints(tmp_path / "checkpoints", state, keep=1)
    first = checkpoints.save(1, {})
    (tmp_path / "elsewhere" / first.name).rename(tmp_path / "archived")
    first.symlink_to(tmp_path / "archived")
    (tmp_path / "elsewhere" / ".step-00000002.part").symlink_to(tmp_path / "archived")
    (tmp_path / "elsewhere" / ".step-00000003.part").touch()
    (tmp_path / "elsewhere" / ".step-notes").touch()
    assert checkpoints.read(first)[0]["a"] == [1.5]
    for step in (2, 3):
        checkpoints.save(step, {})
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [".step-notes", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archived", "checkpoints", "elsewhere"]
    assert (tmp_path / "archived" / "SHA256SUMS").exists()


@pytest.mark.parametrize("part", ["starts", "settings", "versions", "code_sha256", "records"])
def test_damaged_part_of_the_config_is_named(part: str, tmp_path: Path) -> None:
    path = started(tmp_path / "run") / "config.json"
    write_json(path, {**json.loads(path.read_text()), part: "damaged"})
    assert rejected(tmp_path / "run") == f"{path} has no usable {part}: restore the file, or start a new run"


def onto_a_full_disk(path: Path) -> None:
    path.write_text("half")
    Path("/dev/full").write_text("half")


def test_file_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("whole")
    with pytest.raises(CannotWrite, match=r"file cannot be written \(No space left on device\): free disk space"):
        write_atomically(tmp_path / "file", onto_a_full_disk)
    assert (tmp_path / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    remedy = "restore the directory and its permissions, then run the same command again"
    with pytest.raises(CannotWrite, match=rf"gone/file cannot be written \(No such file or directory\): {remedy}"):
        write_json(tmp_path / "gone" / "file", {})
    with pytest.raises(CannotWrite, match=rf"file/file cannot be written \(Not a directory\): {remedy}"):
        write_json(tmp_path / "file" / "file", {})
    with pytest.raises(CannotWrite, match=rf"cannot be written \(.* not a directory\): {remedy}"), writing(tmp_path):
        tf.io.gfile.makedirs(str(tmp_path / "file" / "folder"))
    (tmp_path / "link").symlink_to("file")
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
