"""The recipes of docs/changing_data.md, as they stand there: data that change between epochs."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from processes import until
from small import linear_model

import task
import train
from pages import blocks, put_section, sections, untested
from rendering import PROJECT

RECIPES = sections("changing_data.md")
DQN = "Reinforcement learning (DQN)"
MONITOR = ("--monitor=validation/pushes", "--monitor-direction=max", "--learning-rate=0.001")
# Puts the blocks of a recipe into the modules, then runs train.py.
PROGRAM = """
import sys
import task, train
for module in (task, train):
    exec(compile(open(f"{module.__name__}.block").read(), f"{module.__name__}.block", "exec"), vars(module))
train.main(sys.argv[1:])
"""


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    return lambda title: put_section(RECIPES[title], monkeypatch, tmp_path)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_every_recipe_is_run() -> None:
    assert not untested(RECIPES, __file__)


def test_images_with_the_largest_losses_count_three_times(
    apply: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(task, "load_images", task.load_examples, raising=False)
    monkeypatch.setattr(task, "create_model", linear_model)
    apply("Hard negatives")
    found = []

    def train_epoch(epoch: int = 0, train_epoch=train.train_epoch) -> dict[str, float]:
        images, labels = task.load_images("train").batch(10_000).get_single_element()
        losses = -tf.nn.log_softmax(task.model(images / 16.0)).numpy()[np.arange(len(labels)), labels]
        found.append((train.batches["train"].number_of_examples - len(labels), np.argsort(losses)[-100:]))
        return train_epoch(epoch)

    monkeypatch.setattr(train, "train_epoch", train_epoch)
    train.main([f"--run-dir={tmp_path / 'run'}", "--epochs=2", "--simulated-devices=1"])
    assert [more for more, _ in found] == [0, 200]
    assert sorted(found[1][1]) == task.user_state["hard"].tolist()


@pytest.mark.long
def test_dqn_has_the_same_losses_on_two_replicas(
    apply: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(DQN)
    found = []
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        train.main([f"--run-dir={folder}", "--epochs=1", f"--simulated-devices={replicas}", *MONITOR])
        found.append([float(rows(folder)[0][name]) for name in ("train/loss", "validation/loss", "validation/pushes")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert train.run.progress.best_score == found[1][2] == pytest.approx(9.35)
    assert train.main(["--check", f"--run-dir={tmp_path / 'check'}", *MONITOR])
    assert "run.reload loads other examples later: only those of a new run are checked" in capsys.readouterr().out


@pytest.mark.long
def test_dqn_learns_and_ends_alike_after_kills(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "starters", "runs", ".*_cache")
    project = shutil.copytree(PROJECT, tmp_path / "project", ignore=ignored)
    (project / "play.py").write_text(PROGRAM, encoding="utf-8")
    for block, name in zip(blocks(RECIPES[DQN]), ("task", "train"), strict=True):
        (project / f"{name}.block").write_text(block, encoding="utf-8")

    def start(folder: str) -> subprocess.Popen:
        flags = [f"--run-dir={folder}", "--epochs=40", "--simulated-devices=1", "--checkpoint-every-steps=37", *MONITOR]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "play.py", *flags], cwd=project, env=environment, **quiet)

    def saved() -> list[str]:
        return sorted(path.name for path in project.glob("killed/checkpoints/step-*"))

    assert start("whole").wait(300) == 0
    pushes = [float(row["validation/pushes"]) for row in rows(project / "whole")]
    assert pushes[0] < 12 and max(pushes) > 150
    for _ in range(3):
        before, process = saved(), start("killed")
        until(lambda before=before: saved()[-1:] > before[-1:], 100)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start("killed").wait(300) == 0
    names = ("epoch", "step", "train/loss", "validation/loss", "validation/pushes")
    ends = [[[row[name] for name in names] for row in rows(project / folder)] for folder in ("whole", "killed")]
    assert ends[0] == ends[1]
