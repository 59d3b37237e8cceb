"""deploy/Dockerfile and .dockerignore: what the image would contain is enough to train. Nothing builds it here."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from rendering import PROJECT, STARTERS, Bake

DOCKERFILE = (PROJECT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
# The step of a starter's task, as small as its settings allow.
SMALL = {
    "text_pair_classification": ("--layers=1", "--width=8", "--vocabulary-size=100", "--sequence-length=16"),
    "language_model": ("--layers=1", "--width=8", "--sequence-length=32"),
}
# The end of a run, its evaluations and reports take longer than all else.
STEP = """
import train
from config import Config
from engine.command_line import read_settings

train.build(read_settings(Config, [*sys.argv[1:], "--global-batch-size=4", "--steps-per-execution=1"]))
((stack, first, count),) = train.batches["train"].iterator().take(1)
print("loss", *train.run_steps["train"](stack, first, count).numpy())
"""
INSTRUCTIONS = [line.split() for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]


def entries(name: str) -> list[str]:
    lines = (PROJECT / name).read_text(encoding="utf-8").splitlines()
    return [line.rstrip("/") for line in lines if line and not line.startswith("#")]


def is_ignored(path: Path) -> bool:
    """Returns whether .dockerignore drops a path of the project, or a folder above it."""
    for each in (PurePosixPath(path), *PurePosixPath(path).parents):
        for entry in entries(".dockerignore"):
            anywhere = entry.startswith("**/")
            if each.match(entry.removeprefix("**/")) and (anywhere or len(each.parts) == entry.count("/") + 1):
                return True
    return False


def image(project: Path, folder: Path, *more: list[str]) -> Path:
    """Copies what the COPY instructions do, and `more`, as far as .dockerignore lets them."""
    for copy in (*(each for each in INSTRUCTIONS if each[0] == "COPY"), *more):
        _, *sources, target = (word for word in copy if not word.startswith("--"))
        for source in sources:
            found = list(project.glob(source))
            assert found, f"COPY {source} finds nothing"
            for path in found:
                assert not is_ignored(path.relative_to(project)), path
                if path.is_dir():
                    shutil.copytree(path, folder / target)
                    for each in [*(folder / target).rglob("*")]:
                        if each.exists() and is_ignored(each.relative_to(folder)):
                            shutil.rmtree(each) if each.is_dir() else each.unlink()
                else:
                    (folder / target).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder / target)
    return folder


@pytest.mark.parametrize("starter", STARTERS)
def test_what_the_image_contains_is_enough_to_train(starter: str, bake: Callable[..., Bake], tmp_path: Path) -> None:
    project = bake(starter=starter).folder
    for unwanted in ("runs/default/config.json", ".venv/bin/python", "engine/__pycache__/a.pyc", ".git/config"):
        (project / unwanted).parent.mkdir(parents=True, exist_ok=True)
        (project / unwanted).touch()
        assert is_ignored(Path(unwanted))
    # The line for data in the project is there as a comment.
    needed = re.findall(r"(?m)^# (COPY .*)$", DOCKERFILE) if (project / "data").exists() else []
    trained = Bake(image(project, tmp_path / "image", *map(str.split, needed)))
    assert not list(trained.folder.rglob("__pycache__"))
    assert INSTRUCTIONS[-1] == ["ENTRYPOINT", '["python",', '"-u",', '"train.py"]']
    if starter == "image_classification":
        trained.run("python", "train.py", "--epochs=1", "--limit-steps=2")
        return
    for path in (trained.folder / "data").glob("*.t*"):  # A few of the starter's examples are enough, and faster.
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:40]), encoding="utf-8")
    if starter == "recommendation":
        trained.run("python", "prepare_data.py", "--users=30", "--items=20")
    printed = trained.run_code(STEP, *SMALL.get(starter, ()))
    assert np.isfinite(float(printed.split("loss ")[1]))


def test_dockerignore_has_everything_that_gitignore_has() -> None:
    for entry in entries(".gitignore"):
        # Without a slash, .gitignore means every folder, and .dockerignore the first one only.
        path = Path(entry.lstrip("/").replace("*", "x"))
        assert is_ignored(path), entry
        assert entry.startswith("/") or is_ignored("a" / path), entry


def test_image_runs_as_a_user_who_is_not_root_on_a_base_of_one_version() -> None:
    (base,) = [each[1] for each in INSTRUCTIONS if each[0] == "FROM"]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    (user,) = [each[1] for each in INSTRUCTIONS if each[0] == "USER"]
    assert int(user) > 0
    assert f"useradd --uid {user} " in DOCKERFILE
    after = [each[0] for each in INSTRUCTIONS[INSTRUCTIONS.index(["USER", user]) + 1 :]]
    assert after == ["ENTRYPOINT"]
