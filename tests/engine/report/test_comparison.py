"""python train.py --compare: one table, one picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import train
from engine.report.comparison import _read, figure_of_runs
from engine.report.tables import write_rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(path: str, scores: list[float], result: dict[str, Any] | None = None, **settings: Any) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True)
    recorded = {"run_dir": path, "epochs": 3, "seed": 0, "monitor": "validation/loss", **settings}
    (folder / "config.json").write_text(json.dumps({"settings": recorded, "monitor_direction": "min"}))
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
    assert found[""] == ["a", "b", "new"]
    assert found["state"] == ["finished", "unfinished", "unfinished"]
    assert found["epochs"] == ["3", "of", "3", "2", "of", "3", "0", "of", "3"]
    assert found["time"] == ["2.5", "min", "1.7", "min", "0.0", "s"]
    assert found["best validation/loss"] == ["0.25", "0.5"]
    assert found["test/loss"] == ["0.3"]
    assert found["--seed"] == ["0", "1", "1"]
    assert found["--learning-rate"] == ["0.1"]
    assert not {"--run-dir", "--epochs", "test/f1/0"} & found.keys()
    assert (Path("comparison.png")).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in paths[1].iterdir()) == ["config.json", "metrics.csv"]


def test_picture_has_a_panel_for_each_metric_and_a_line_for_each_run() -> None:
    runs = [_read(run("one/x", [0.5, 0.25]), "one/x"), _read(run("two/x", [0.5]), "two/x"), _read(run("c", []), "c")]
    figure = figure_of_runs(runs)
    assert figure
    (axes,) = figure.axes
    assert axes.get_title() == "loss"
    curves = [(line.get_label(), line.get_linestyle(), list(line.get_ydata())) for line in axes.get_lines()]
    assert curves[:3] == [("one/x", "-", [0.5, 0.25]), ("one/x", ":", [1.0, 0.5]), ("two/x", "-", [0.5])]
    assert figure_of_runs(runs[2:]) is None


def test_what_is_no_run_and_other_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run("a", [0.5])
    Path("file").touch()
    for arguments, rule in (
        (["a", "missing"], "--compare missing contains no run"),
        (["a", "file"], "--compare file contains no run"),
        (["a", "--fresh"], "--fresh cannot be combined with --compare"),
        (["a", "--check"], "--compare"),
        ([], "--compare needs directories of runs"),
    ):
        with pytest.raises(SystemExit) as ended:
            train.main(["--compare", *arguments])
        assert ended.value.code == 2
        assert rule in capsys.readouterr().err
    assert not Path("comparison.png").exists()
