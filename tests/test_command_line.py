"""train.py as a user runs it: as a process, with flags, more than once."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import PROJECT, Bake, run

SHORT = ("--epochs", "2", "--simulated-devices", "2")


def test_run_leaves_what_the_design_says(default_bake: Bake, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    out = default_bake.run("python", "train.py", "--run-dir", run_dir, *SHORT).stdout
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "best",
        "checkpoints",
        "config.json",
        "curves.png",
        "metrics.csv",
        "result.json",
        "tensorboard",
    }
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert config["settings"]["epochs"] == 2
    assert config["settings"]["seed"] == 0
    assert (config["strategy"], config["replicas"]) == ("mirrored", 2)
    assert config["versions"].keys() == {"tensorflow", "keras", "python", "numpy"}
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    metrics = ["train/loss", "train/accuracy", "validation/loss", "validation/accuracy"]
    assert list(rows[0]) == ["epoch", "step", "seconds", "examples_per_second", "learning_rate", *metrics]
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "39"), ("2", "78")]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    assert result["epochs"] == 2
    assert result["step"] == 78
    assert len(result["weights_sha256"]) == 64
    assert result["test/accuracy"] > 0.5
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000039", "step-00000078"]
    for told in ("mirrored, 2 replica(s)", "32 examples, 16 on each", "39 steps, 10 examples left out", "121,994"):
        assert told in out


def test_two_runs_with_one_seed_are_the_same_and_another_seed_differs(default_bake: Bake) -> None:
    fingerprints = [
        default_bake.run("python", "train.py", "--run-dir", f"runs/{name}", "--seed", seed, *SHORT)
        and default_bake.result(f"runs/{name}")["weights_sha256"]
        for name, seed in (("once", "3"), ("again", "3"), ("other", "4"))
    ]
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0] != fingerprints[2]


def test_finished_run_says_so_goes_on_with_more_epochs_and_starts_anew(bake: Callable[..., Bake]) -> None:
    project = bake()
    project.run("python", "train.py", *SHORT)
    first = project.result("runs/default")
    assert "Finished already" in project.run("python", "train.py", *SHORT).stdout
    assert project.result("runs/default") == first

    # Another number of replicas may go on with it.
    assert "resumed from step-00000078" in project.run("python", "train.py", "--epochs", "3").stdout
    assert project.result("runs/default")["epochs"] == 3
    assert len((project.folder / "runs/default/metrics.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3

    assert "resumed" not in project.run("python", "train.py", "--fresh", *SHORT).stdout
    assert project.result("runs/default")["weights_sha256"] == first["weights_sha256"]
    assert project.result("runs/default.1")["epochs"] == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--epochs", "0"), "--epochs 0 must be from 1 to 2147483647"),
        (("--simulated-devices", "3"), "--global-batch-size 32 cannot be shared equally by 3 replicas: use 30 or 33"),
    ],
    ids=["a value", "a combination"],
)
def test_bad_setting_is_one_line_and_exit_code_2(arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    done = run("python", "train.py", "--run-dir", tmp_path / "run", *arguments, folder=PROJECT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"ERROR: {reason}")
    assert done.stderr.count("ERROR: ") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_check_of_the_shipped_task_has_nothing_to_mend(default_bake: Bake) -> None:
    before = default_bake.files()
    out = default_bake.run("python", "train.py", "--check").stdout.splitlines()
    assert all(line.startswith("ok ") for line in out[:-1])
    assert out[-1] == f"All {len(out) - 1} hold."
    assert default_bake.files() == before
