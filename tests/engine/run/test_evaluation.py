"""Evaluation beside the training: once, or of every checkpoint as it appears."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, rows, run

import task
import train
from engine.run.checkpoint_files import StoredValues

Ended = Callable[..., tuple[int, str]]


@pytest.mark.usefixtures("same_model")
def test_evaluation_is_of_the_best_weights_and_changes_nothing(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text(encoding="utf-8"))
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    found = train.main([f"--run-dir={whole}", "--evaluate-only", "--simulated-devices=1"])
    assert found["test/loss"] == pytest.approx(result["test/loss"], rel=1e-5)
    assert found["validation/loss"] == pytest.approx(result["best_validation/loss"], rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.mark.usefixtures("same_model")
def test_evaluation_of_damaged_weights_or_with_other_settings_is_refused(
    whole: Path, tmp_path: Path, ended: Ended
) -> None:
    for way in ("--evaluate-only", "--evaluate-continuously=9"):
        code, line = ended(whole, way, "--ema-decay=0.5")
        assert (code, "other settings (--ema-decay 0.9 there and 0.5 now): use the run's" in line) == (2, True), line
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / "best").iterdir():
        (path / "progress.json").unlink()
    code, line = ended(tmp_path / "run", "--evaluate-only", *ONE_REPLICA)
    assert (code, "/best/step-" in line, " is damaged" in line) == (2, True, True), line


@pytest.mark.usefixtures("same_model")
def test_continuous_evaluation_follows_a_run_and_writes_only_its_own(
    whole: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    read, removed = StoredValues.read, folder / "checkpoints" / "step-00000008"

    def read_late(values: StoredValues, names: list[str]) -> dict[str, tf.Tensor]:
        if values.path == removed:  # As the run may do meanwhile.
            shutil.rmtree(removed)
        return read(values, names)

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent != removed}
    monkeypatch.setattr(StoredValues, "read", read_late)
    train.main([f"--run-dir={folder}", "--evaluate-continuously=1"])
    assert "Nothing new for 1 s (--evaluate-continuously)" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    new = {path.relative_to(folder).as_posix() for path in after.keys() - before.keys()}
    assert {name for name in new if not name.startswith("tensorboard/evaluation/")} == {"evaluations.csv"}
    assert before == {path: after[path] for path in before}
    # The newest checkpoint is from the middle of a validation, which counts from the start here.
    (found,) = rows(folder, "evaluations.csv")
    measured = rows(whole, "validations.csv")[1]
    assert found["step"] == measured["step"] == "16"
    assert float(found["validation/loss"]) == pytest.approx(float(measured["validation/loss"]), rel=1e-6)

    # Begun again it has nothing to do, and it ends with the run.
    shutil.copy(whole / "result.json", folder)
    (folder / "checkpoints" / "step-00000099").mkdir()
    train.main([f"--run-dir={folder}", "--evaluate-continuously=9"])
    out = capsys.readouterr().out
    assert "The run has ended." in out
    assert [line.split(":")[0] for line in out.splitlines() if "step-" in line] == ["step-00000099 is skipped"]


def test_continuous_evaluation_waits_for_a_run_and_leaves_its_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.main([f"--run-dir={tmp_path / 'run'}", *ONE_REPLICA, "--evaluate-continuously=1"])
    assert "Nothing new for 1 s (--evaluate-continuously)" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("linear")
def test_run_without_validation_and_test_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: Ended,
) -> None:
    load_examples = task.load_examples
    monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split) if split == "train" else None)
    result = run(tmp_path, *ONE_REPLICA, "--epochs=2", "--monitor=train/loss")
    assert result["test"] is None
    assert "none: task.load_examples('test') returned None" in capsys.readouterr().out
    losses = [float(row["train/loss"]) for row in rows(tmp_path)]
    assert (result["best_epoch"], result["best_train/loss"]) == (losses.index(min(losses)) + 1, min(losses))
    for way, told in (
        ("--evaluate-only", "--evaluate-only: task.load_examples returned None for"),
        ("--evaluate-continuously=9", "task.load_examples('validation') returned None, so there is no validation"),
    ):
        code, line = ended(tmp_path, way, "--simulated-devices=1")
        assert (code, told in line) == (2, True), line
