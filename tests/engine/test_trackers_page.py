"""The recipes of docs/trackers.md, taken from the page as they stand there, and run."""

from pathlib import Path

import pytest

import task
import train
from pages import blocks, put, sections

SECTIONS = sections("trackers.md")
pytestmark = pytest.mark.long


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Trains with the hook of a section, two epochs and then, in a resumed run, one more."""

    def run(title: str, end: str) -> Path:
        (block,) = blocks(SECTIONS[title])
        run_dir = tmp_path / "run"
        for epochs in (2, 3):
            put(block, task, monkeypatch, tmp_path)
            train.main([f"--epochs={epochs}", f"--run-dir={run_dir}", "--simulated-devices=2"])
            exec(end, vars(task))  # noqa: S102 - As the end of the process does.
        assert "task.on_report failed" not in capsys.readouterr().out
        return run_dir

    return run


def test_mlflow(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run_dir = trained("MLflow", "mlflow.end_run()")
    (run,) = mlflow.MlflowClient().search_runs(["0"])  # The resumed run went on in it.
    assert run.info.run_id == (run_dir / "mlflow_run_id").read_text()
    assert (run.info.run_name, run.info.status, run.data.params["seed"]) == ("run", "FINISHED", "0")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "validation/loss")
    assert [each.step for each in history] == [39, 78, 117]
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("validation/loss")
    assert [each.value for each in history] == [float(row.split(",")[column]) for row in rows[1:]]


def test_weights_and_biases(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = trained("Weights & Biases", "wandb.finish()")
    name = (run_dir / "wandb_id").read_text()
    parts = [path.name for path in (run_dir / "wandb").glob("offline-run-*")]
    assert len(parts) == 2  # Of one run, for `wandb sync`.
    assert all(f"-{name}" in part for part in parts)
