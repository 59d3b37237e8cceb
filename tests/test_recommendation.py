"""The starter recommendation: its record files, that layouts of the replicas change nothing, and its page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rendering import Bake, rendered, run

SMALL = ("--users=300", "--items=100")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The starter's project, with few users and items in data/records; shared."""
    project = rendered(tmp_path_factory.mktemp("recommendation") / "rendered", starter="recommendation")
    project.run("python", "prepare_data.py", *SMALL)
    return project


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--users=0", "--users 0 must be at least 1: pass --users 1 or more"),
        ("--items=10", "--items 10 must be at least 11: pass --items 11 or more"),
        ("--interactions-per-user=2", "--interactions-per-user 2 must be at least 3: "),
    ],
)
def test_bad_number_is_named_and_nothing_is_written(flag: str, reason: str, project: Bake, tmp_path: Path) -> None:
    done = run("python", "prepare_data.py", f"--records={tmp_path / 'records'}", flag, folder=project.folder)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"ERROR: {reason}")
    assert not list(tmp_path.iterdir())


def test_program_prints_the_reachable_recall_and_the_command_that_trains(project: Bake, tmp_path: Path) -> None:
    made = tmp_path / "records"
    command = ("python", "prepare_data.py", f"--records={made}", *SMALL)
    *lines, last = project.run(*command).stdout.splitlines()
    found = json.loads((made / "recall.json").read_text(encoding="utf-8"))
    assert lines == [f"{name}: {value:.4f}" for name, value in found.items()]
    assert last == f"Made {made}, for: python train.py --records {made} --run-dir runs/records"
    for path in made.iterdir():  # The same seed gives the same bytes.
        assert path.read_bytes() == (project.folder / "data/records" / path.name).read_bytes(), path.name
    again = run(*command, folder=project.folder)
    assert again.stderr == f"ERROR: --records {made} exists already: remove it, or pass another folder\n"


# In one process, because each start of TensorFlow takes seconds.
USER_ERRORS = """
import contextlib, io, sys
import train

for flags in (["--records=elsewhere"], ["--best=101"], ["--micro-batches=2"], ["--ranking-weight=-1"], ["--hidden=0"]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            train.main([*flags, f"--run-dir={sys.argv[1]}/run"])
        except SystemExit as ended:
            print(ended.code, errors.getvalue().splitlines()[-1])
"""


def test_user_errors_are_one_line(project: Bake, tmp_path: Path) -> None:
    done = project.run("python", "-c", USER_ERRORS, tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("2 ERROR: ")]
    reasons = [
        "--records elsewhere has no users.jsonl: make it as docs/starter.md shows",
        "--best 101 must be at most the number of items in data/records: pass 100",
        "--micro-batches is 2, and task.train_step calls engine.model.gather_batch: ",
        "--ranking-weight -1.0 must be at least 0",
        "--hidden 0 must be at least 1",
    ]
    assert len(lines) == len(reasons), lines
    for line, reason in zip(lines, reasons, strict=True):
        assert line.startswith(f"2 ERROR: {reason}"), line
    assert not list(tmp_path.iterdir())


AGREE = """
import sys
import numpy as np
import task, train
from config import Config
from engine.cluster.strategy import create_strategy

create_strategy(Config(strategy="mirrored", simulated_devices=4))
weights, metrics = [], []
for replicas in (1, 2, 4):
    flags = [f"--simulated-devices={replicas}", "--epochs=1", "--global-batch-size=64", "--keep-last-batch"]
    result = train.main([*flags, "--items-at-once=30", f"--run-dir={sys.argv[1]}/{replicas}"])
    assert train.strategy.num_replicas_in_sync == replicas
    metrics.append({name: value for name, value in result.items() if name.startswith("test/")})
    weights.append([each.numpy() for one in task.model.values() for each in one.trainable_variables])
assert {"test/loss", "test/auc", "test/recall_at_10", "test/ndcg_at_10"} <= metrics[0].keys()
for other_metrics, other_weights in zip(metrics[1:], weights[1:], strict=True):
    for name, value in metrics[0].items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-5, err_msg=name)
    for one, other in zip(weights[0], other_weights, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * max(0.1, np.abs(one).max()), rtol=0)
print("agree")
"""


@pytest.mark.long
def test_one_two_and_four_replicas_agree(project: Bake, tmp_path: Path) -> None:
    assert "agree\n" in project.run("python", "-c", AGREE, tmp_path).stdout


@pytest.mark.long
def test_small_data_are_learnt_better_than_popularity(project: Bake, tmp_path: Path) -> None:
    made = tmp_path / "records"
    project.run("python", "prepare_data.py", "--users=4000", "--items=500", f"--records={made}")
    flags = ("--epochs=2", "--global-batch-size=256", f"--records={made}", f"--run-dir={tmp_path / 'run'}")
    project.run("python", "train.py", *flags)
    found = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))["test/recall_at_10"]
    recall = json.loads((made / "recall.json").read_text(encoding="utf-8"))
    assert 1.3 * recall["popularity_recall_at_10"] < found < 1.02 * recall["ceiling_recall_at_10"]


@pytest.mark.long
def test_column_is_added_as_the_page_says(tmp_path: Path) -> None:
    project = rendered(tmp_path / "rendered", starter="recommendation")
    page = (project.folder / "docs/starter.md").read_text(encoding="utf-8")
    (made, used) = re.findall(r'`"device": "phone"`|`USER_COLUMNS = {..., ("device": 4)}`', page)
    assert (made, used) == ("", '"device": 4')
    for name, before, after in (
        ("prepare_data.py", '"country": f"country_{country:02d}"', ', "device": "phone"'),
        ("task.py", '"age_group": 8', f", {used}"),
    ):
        path = project.folder / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, before + after), encoding="utf-8")
    project.run("python", "prepare_data.py", *SMALL)
    project.run("python", "train.py", "--epochs=1", "--global-batch-size=32", "--limit-steps=2", "--export")
    code, _ = re.findall(r"(?s)```python\n(.*?)```", page)
    assert "item_0" in project.run("python", "-c", code.replace("country=", 'device="phone", country=')).stdout
    project.run("python", "-m", "pytest", "-q", "tests/test_task.py", "-k", "not written")


@pytest.mark.long
def test_movielens_is_read_as_the_page_says(tmp_path: Path) -> None:
    project = rendered(tmp_path / "rendered", starter="recommendation")
    page = (project.folder / "docs/starter.md").read_text(encoding="utf-8")
    _, program = re.findall(r"(?s)```python\n(.*?)```", page)
    (project.folder / "movielens.py").write_text(program, encoding="utf-8")
    task = project.folder / "task.py"
    text = task.read_text(encoding="utf-8")
    for columns in ("USER_COLUMNS", "ITEM_COLUMNS"):
        (said,) = re.findall(rf"`({columns} = {{[^.`]*}})`", page)
        text, count = re.subn(rf"(?m)^{columns} = .*$", said, text)
        assert count == 1
    task.write_text(text, encoding="utf-8")
    folder = tmp_path / "ml"
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = [
        f"{user},{movie},{random.integers(1, 11) / 2},{random.integers(10**9)}"
        for user in range(60)
        for movie in random.choice(40, 12, replace=False)
    ]
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]) + "\n")
    movies = [f'{movie},"Film, {movie}",{("Drama", "Drama|War")[movie % 2]}' for movie in range(40)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    project.run("python", "movielens.py", folder)
    flags = ("--epochs=1", "--global-batch-size=60", "--new-items-only")
    project.run("python", "train.py", f"--records={folder / 'records'}", *flags)
    (project.folder / "some.jsonl").write_text('{"user_id": "7"}\n')
    project.run("python", "predict.py", "runs/default", "some.jsonl", "--output=predictions.npz")
    best = np.load(project.folder / "predictions.npz")["items"][0].astype(str)
    mine = sorted((int(row.split(",")[3]), row.split(",")[1]) for row in rows if row.startswith("7,"))
    assert len({*best}) == 10
    assert not {movie for _, movie in mine[:-2]} & {*best}
