"""The folder of an export: replaced as a whole, and only where everything in it is of an export."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadInput
from engine.trained.export import replaced


def write(path: Path, text: str) -> None:
    with replaced(path, ["model"]) as folder:
        (folder / "model.keras").write_text(text)


def test_export_is_replaced_as_a_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "export"
    write(path, "first")
    (path / "saved_model").mkdir()
    with pytest.raises(InterruptedError), replaced(path, ["model"]) as folder:
        (folder / "model.keras").write_text("half")
        raise InterruptedError
    assert {each.name for each in path.iterdir()} == {"model.keras", "saved_model"}
    assert (path / "model.keras").read_text() == "first"
    (tmp_path / ".export.0.new").mkdir()  # A process that is killed leaves such a folder.
    write(path, "second")
    assert [(each.name, each.read_text()) for each in path.iterdir()] == [("model.keras", "second")]
    assert os.listdir(tmp_path) == ["export"]


def test_export_that_a_server_still_reads_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmdir_of_nfs(*_: Any, **options: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    # NFS keeps a file that is open on another machine under a name of its own, so its directory cannot be removed.
    with monkeypatch.context() as held:
        held.setattr(os, "rmdir", rmdir_of_nfs)
        for number in range(3):
            write(tmp_path / "export", str(number))
            assert (tmp_path / "export" / "model.keras").read_text() == str(number)
    write(tmp_path / "export", "last")
    assert os.listdir(tmp_path) == ["export"]


def test_link_in_place_of_the_export_is_followed(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    (run_dir / "export").symlink_to(elsewhere)
    for text in ("first", "second"):
        write(run_dir / "export", text)
        assert (run_dir / "export").is_symlink()
        assert [(each.name, each.read_text()) for each in elsewhere.iterdir()] == [("model.keras", text)]
        assert {each.name for each in tmp_path.iterdir()} == {"run", "elsewhere"}


def test_export_with_files_of_another_origin_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "export"
    (path / "saved_model/variables").mkdir(parents=True)
    for own in ("model.keras", "saved_model/fingerprint.pb", "saved_model/variables/variables.index"):
        (path / own).write_text("")
    for name in ("notes.txt", "other.keras", "saved_model/assets.extra", "saved_model/variables/notes"):
        foreign = path / name
        foreign.write_text("mine")
        with pytest.raises(BadInput, match=rf"^--export: {foreign} is not of an export, .*: move it elsewhere$"):
            write(path, "new")
        assert foreign.read_text() == "mine"
        foreign.unlink()
    write(path, "new")
