"""python train.py --compare: its table."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import train
from engine.console import console
from engine.report.tables import write_rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(path: str, scores: list[float], result: dict[str, Any] | None = None, **settings: Any) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True)
    recorded = {"run_dir": path, "epochs": 3, "seed": 0, "monitor": "validation/loss", **settings}
    strategy = {"strategy": "mirrored", "replicas": 2} if "two" in path else {"strategy": "one_device", "replicas": 1}
    config = {"settings": recorded, "monitor_direction": "min", **strategy}
    (folder / "config.json").write_text(json.dumps(config))
    if scores:
        rows = [{"epoch": n, "step": n, "seconds": 50.0, "validation/loss": score, "train/loss": 2 * score,
                 "validation/f1/0": 0.5} for n, score in enumerate(scores, 1)]  # fmt: skip
        write_rows(folder / "metrics.csv", rows)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def lines(text: str) -> dict[str, list[str]]:
    return {line[:22].strip(): line[22:].split() for line in text.splitlines()}


def test_table_has_what_differs_and_how_each_run_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"best_validation/loss": 0.25, "best_epoch": 2, "test/loss": 0.3, "test/f1/0": 1.0, "epochs": 3}
    paths = [run("runs/a", [0.5, 0.25, 0.75], done), run("runs/b", [0.5, 0.75], learning_rate=0.1, seed=1)]
    paths += [run("runs/new", [], seed=1)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: pytest.fail("devices were started"))
    monkeypatch.setattr(train, "build", lambda _: pytest.fail("the task was built"))
    train.main(["--compare", *map(str, paths)])
    found = lines(capsys.readouterr().out)
    assert found[""] == ["runs/a", "runs/b", "runs/new"]
    assert found["state"] == ["finished", "unfinished", "unfinished"]
    assert found["epochs"] == ["3", "of", "3", "2", "of", "3", "0", "of", "3"]
    assert found["time"] == ["2.5", "min", "1.7", "min", "0.0", "s"]
    assert found["best validation/loss"] == ["0.25", "0.5"]
    assert found["test/loss"] == ["0.3"]
    assert found["--seed"] == ["0", "1", "1"]
    assert found["--learning-rate"] == ["0.1"]
    assert not {"--run-dir", "--epochs", "test/f1/0"} & found.keys()
    assert sorted(path.name for path in paths[1].iterdir()) == ["config.json", "metrics.csv"]


def test_equal_numbers_look_equal_and_different_ones_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(score: float, last: float) -> dict[str, float]:
        return {"best_epoch": 2, "best_validation/loss": score, "test/loss": last, "test/auc": math.nan}

    score = 0.12345678901234567
    next_score = math.nextafter(score, 1)
    monkeypatch.setattr(console, "_width", 120)
    paths = [run("one", [0.5], result(score, 0.25)), run("two", [0.5], result(score, 0.250004))]
    paths += [run("two-b", [0.5], result(next_score, 0.3))]
    train.main(["--compare", *map(str, paths)])
    found = lines(capsys.readouterr().out)
    assert found["strategy"] == ["one_device", "mirrored", "mirrored"]
    assert found["replicas"] == ["1", "2", "2"]
    first, second, third = found["best validation/loss"]
    assert first == second
    assert (float(first), float(third)) == (score, next_score)
    assert found["test/loss"] == ["0.25", "0.250004", "0.3"]
    assert found["test/auc"] == ["nan"] * 3


def test_long_texts_are_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 80)
    runs = [run(f"run_{number}", [0.5], note="x" * 25 if number else "z" * 40) for number in range(5)]
    train.main(["--compare", *map(str, runs)])
    text = capsys.readouterr().out
    assert text.split()[:5] == [f"run_{number}" for number in range(5)]
    assert (text.count("x"), text.count("z")) == (4 * 25, 40)
    assert max(map(len, text.splitlines())) <= 80


def test_files_that_were_edited_by_hand_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number, (name, text, fault) in enumerate((
        ("config.json", '{"settings": []}', "its settings is []"),
        ("config.json", '{"settings": {"seed": 1}, "replicas": "two"}', "its replicas is 'two'"),
        ("config.json", "[]", "it contains a list"),
        ("result.json", '{"best_epoch": "x"}', "its best_epoch is 'x'"),
    )):  # fmt: skip
        (run(f"run-{number}", [0.5]) / name).write_text(text)
        with pytest.raises(SystemExit) as ended:
            train.main(["--compare", f"run-{number}"])
        assert ended.value.code == 2
        assert f"run-{number}/{name} is not what a run writes ({fault}): restore it" in capsys.readouterr().err
    (run("texts", [0.5], {"best_epoch": 1, "best_validation/loss": 0.5}) / "result.json").write_text(
        '{"best_epoch": 1, "best_validation/loss": 0.5, "test/loss": "low", "test/acc": 3}'
    )
    train.main(["--compare", "texts"])
    assert {"test/loss": ["low"], "test/acc": ["3"]}.items() <= lines(capsys.readouterr().out).items()


def test_what_is_no_run_and_other_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run("a", [0.5])
    Path("file").touch()
    for arguments, rule in (
        (["a", "missing"], "--compare missing contains no run"),
        (["a", "file"], "--compare file contains no run"),
        (["a", "--fresh"], "--fresh leaves no run to evaluate"),
        (["a", "--check"], "--compare"),
        ([], "--compare needs at least one value"),
    ):
        with pytest.raises(SystemExit) as ended:
            train.main(["--compare", *arguments])
        assert ended.value.code == 2
        assert rule in capsys.readouterr().err
