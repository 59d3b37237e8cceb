"""deploy/Dockerfile and .dockerignore: what the image would contain is enough to train. Nothing builds it here."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from rendering import PROJECT, STARTERS, Bake

DOCKERFILE = (PROJECT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
# Takes a step of training.
STEP = """
import train
from config import Config
from engine.command_line import read_settings

train.build(read_settings(Config, [*sys.argv[1:], "--global-batch-size=4", "--steps-per-execution=1"]))
((stack, first, count),) = train.batches["train"].iterator().take(1)
print("loss", *train.run_steps["train"](stack, first, count).numpy())
"""
SMALL = {
    "text_pair_classification": ("--layers=1", "--width=8", "--vocabulary-size=100", "--sequence-length=16"),
    "language_model": ("--layers=1", "--width=8", "--sequence-length=32"),
}
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


def image(project: Path, folder: Path, copies: list[list[str]]) -> Bake:
    """Copies what COPY instructions do, as far as .dockerignore lets them."""
    for _, *words in copies:
        *sources, target = (word for word in words if not word.startswith("--"))
        for source in sources:
            assert target == (source if (project / source).is_dir() else "./")
            for path in (*project.glob(source), *project.glob(f"{source}/**/*")):
                name = path.relative_to(project)
                if path.is_file() and not is_ignored(name):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder / name)
    return Bake(folder)


@pytest.mark.parametrize("starter", STARTERS)
def test_what_the_image_contains_is_enough_to_train(starter: str, bake: Callable[..., Bake], tmp_path: Path) -> None:
    project = bake(starter=starter).folder
    for unwanted in ("runs/default/config.json", ".venv/bin/python", "engine/__pycache__/a.pyc", ".git/config"):
        (project / unwanted).parent.mkdir(parents=True, exist_ok=True)
        (project / unwanted).touch()
        assert is_ignored(Path(unwanted))
    # The line for data in the project is there as a comment.
    needed = re.findall(r"(?m)^# (COPY .*)$", DOCKERFILE) if (project / "data").exists() else []
    copies = [*(each for each in INSTRUCTIONS if each[0] == "COPY"), *map(str.split, needed)]
    trained = image(project, tmp_path / "image", copies)
    assert not list(trained.folder.rglob("__pycache__"))
    assert INSTRUCTIONS[-1] == ["ENTRYPOINT", '["python",', '"-u",', '"train.py"]']
    for path in (trained.folder / "data").glob("*.t*"):  # A few of the starter's examples are enough, and faster.
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:40]), encoding="utf-8")
    if starter == "recommendation":
        trained.run("python", "prepare_data.py", "--users=30", "--items=20")
    assert np.isfinite(float(trained.run_code(STEP, *SMALL.get(starter, ())).split("loss ")[1]))


def test_dockerignore_has_everything_that_gitignore_has() -> None:
    for entry in entries(".gitignore"):
        # Without a slash, .gitignore means every folder, and .dockerignore the first one only.
        path = Path(entry.lstrip("/").replace("*", "x"))
        assert is_ignored(path), entry
        assert entry.startswith("/") or is_ignored("a" / path), entry


def test_image_runs_as_a_user_who_is_not_root_on_a_base_of_one_version() -> None:
    assert re.search(r"(?m)^FROM python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE)
    (user,) = re.findall(r"useradd --uid (\d+) ", DOCKERFILE)
    assert int(user) > 0
    assert [each[0] for each in INSTRUCTIONS[INSTRUCTIONS.index(["USER", user]) :]] == ["USER", "ENTRYPOINT"]
