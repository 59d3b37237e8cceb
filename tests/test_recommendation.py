"""The starter recommendation: its record files, what it learns, and its page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rendering import Bake, rendered

SMALL = ("--users=300", "--items=100")
BAD_NUMBERS = {
    "--users=0": "--users 0 must be at least 1: pass --users 1 or more",
    "--items=10": "--items 10 must be at least 11: pass --items 11 or more",
    "--interactions-per-user=2": "--interactions-per-user 2 must be at least 3: ",
}
USER_ERRORS = {
    "--records=elsewhere": "--records elsewhere has no users.jsonl: make it as docs/starter.md shows",
    "--best=101": "--best 101 must be at most the number of items in data/records: pass 100",
    "--micro-batches=2": "--micro-batches is 2, and task.train_step calls engine.model.gather_batch: ",
    "--ranking-weight=-1": "--ranking-weight -1.0 must be at least 0",
    "--hidden=0": "--hidden 0 must be at least 1",
}


@pytest.fixture
def project(tmp_path: Path) -> Bake:
    return rendered(tmp_path, starter="recommendation")


def test_program_prints_the_command_that_trains_and_user_errors_are_one_line(project: Bake, tmp_path: Path) -> None:
    made = tmp_path / "records"
    prepare = ["prepare_data", f"--records={made}", *SMALL]
    bad = (["prepare_data", f"--records={tmp_path / 'bad'}", flag] for flag in BAD_NUMBERS)
    wrong = (["train", flag, f"--run-dir={tmp_path / 'run'}"] for flag in USER_ERRORS)
    ended = project.call(prepare, ["prepare_data", *SMALL], prepare, *bad, *wrong)
    (code, (*lines, last)), _, again, *errors = ended
    assert code == 0
    found = json.loads((made / "recall.json").read_text(encoding="utf-8"))
    assert lines == [f"{name}: {value:.4f}" for name, value in found.items()]
    assert last == f"Made {made}, for: python train.py --records {made} --run-dir runs/records"
    for path in made.iterdir():  # The same seed gives the same bytes.
        assert path.read_bytes() == (project.folder / "data/records" / path.name).read_bytes(), path.name
    assert again == (2, [f"ERROR: --records {made} exists already: remove it, or pass another folder"])
    for (code, lines), reason in zip(errors, [*BAD_NUMBERS.values(), *USER_ERRORS.values()], strict=True):
        assert code == 2
        assert lines[-1].startswith(f"ERROR: {reason}")
    assert {path.name for path in tmp_path.iterdir()} == {project.folder.name, "records"}


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
def test_column_is_added_as_the_page_says(project: Bake) -> None:
    page = project.read("docs/starter.md")
    (made, used) = re.findall(r'`"device": "phone"`|`USER_COLUMNS = {..., ("device": 4)}`', page)
    assert (made, used) == ("", '"device": 4')
    country, age = '"country": f"country_{country:02d}"', '"age_group": 8'
    project.replace("prepare_data.py", country, f'{country}, "device": "phone"')
    project.replace("task.py", age, f"{age}, {used}")
    project.run("python", "prepare_data.py", *SMALL)
    project.run("python", "train.py", "--epochs=1", "--global-batch-size=32", "--limit-steps=2", "--export")
    code, _ = re.findall(r"(?s)```python\n(.*?)```", page)
    assert "item_0" in project.run_code(code.replace("country=", 'device="phone", country='))
    project.run("python", "-m", "pytest", "-q", "tests/test_task.py", "-k", "not written")


@pytest.mark.long
def test_movielens_is_read_as_the_page_says(project: Bake, tmp_path: Path) -> None:
    page = project.read("docs/starter.md")
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
