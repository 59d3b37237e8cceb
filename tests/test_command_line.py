"""train.py as a user runs it: as a process, with flags, more than once."""

import contextlib
import csv
import json
import os
import pty
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from rendering import PROJECT, Bake, run

SHORT = ("--epochs", "2", "--simulated-devices", "2", "--limit-steps", "3")


@pytest.fixture(scope="module")
def trained(default_bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a finished run, and what it printed. Shared, so tests leave it as it is."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    # A process of its own, whose TensorFlow says nothing while it starts.
    done = default_bake.run(sys.executable, "train.py", "--run-dir", run_dir, *SHORT)
    assert done.stderr == ""  # Nothing of TensorFlow's start.
    return run_dir, done.stdout


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text(encoding="utf-8"))


def test_run_leaves_what_the_design_says_and_prints_plain_lines(trained: tuple[Path, str]) -> None:
    run_dir, out = trained
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "best",
        "checkpoints",
        "config.json",
        "curves.png",
        "goodput.json",
        "metrics.csv",
        "result.json",
        "steps.csv",
        "tensorboard",
    }
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert config["settings"]["epochs"] == 2
    assert config["settings"]["seed"] == 0
    assert (config["strategy"], config["replicas"]) == ("mirrored", 2)
    assert config["versions"].keys() == {"tensorflow", "keras", "python", "numpy", "template"}
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    metrics = ["train/loss", "train/accuracy", "validation/loss", "validation/accuracy"]
    assert list(rows[0]) == ["epoch", "step", "seconds", "examples_per_second", "learning_rate", *metrics]
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "3"), ("2", "6")]
    found = result(run_dir)
    assert found["epochs"] == 2
    assert found["step"] == 6
    assert len(found["weights_sha256"]) == 64
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000003", "step-00000006"]
    for text in ("mirrored, 2 replica(s)", "32 examples, 16 on each", "each of 3 steps", "121,994"):
        assert text in out
    # A pipe gets plain lines.
    assert not re.search(r"[^\n\x20-\x7e]", out)
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("epoch ")).startswith("epoch 1/2  loss ")
    assert f"  next: export    python train.py --export --run-dir {run_dir}" in lines


@pytest.mark.parametrize(("seed", "is_same"), [("0", True), pytest.param("4", False, marks=pytest.mark.long)])
def test_two_runs_are_the_same_with_one_seed_only(
    seed: str, is_same: bool, default_bake: Bake, trained: tuple[Path, str], tmp_path: Path
) -> None:
    default_bake.run("python", "train.py", "--run-dir", tmp_path / "run", "--seed", seed, *SHORT)
    assert (result(tmp_path / "run")["weights_sha256"] == result(trained[0])["weights_sha256"]) is is_same


@pytest.mark.long
def test_finished_run_says_so_continues_with_more_epochs_and_starts_over(
    default_bake: Bake, trained: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run")
    first = result(run_dir)

    def train(*arguments: str) -> str:
        return default_bake.run("python", "train.py", "--run-dir", run_dir, *arguments).stdout

    assert "Finished already" in train(*SHORT)
    assert result(run_dir) == first

    # Another number of replicas may resume it.
    assert "resumed from step-00000006" in train(*SHORT, "--epochs", "3", "--simulated-devices", "1")
    assert result(run_dir)["epochs"] == 3
    assert len((run_dir / "metrics.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3
    starts = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["starts"]
    assert [start["step"] for start in starts] == [0, 6]
    assert starts[1]["command"].startswith(f"train.py --run-dir {run_dir} --epochs 2 ")
    assert all(start["host"] and start["time"] for start in starts)

    assert "resumed" not in train("--fresh", *SHORT)
    assert result(run_dir)["weights_sha256"] == first["weights_sha256"]
    assert result(tmp_path / "run.1")["epochs"] == 3


def test_bad_combination_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    arguments = ("--simulated-devices", "3", "--global-batch-size", "2")
    done = run("python", "train.py", "--run-dir", tmp_path / "run", *arguments, folder=PROJECT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("ERROR: --global-batch-size 2 is too small for 3 replica")
    assert done.stderr.count("ERROR: ") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_task_that_cannot_be_imported_is_one_line(bake: Callable[..., Bake]) -> None:
    project = bake().folder
    task = project / "task.py"
    before, after = task.read_text(encoding="utf-8").split("import keras\n", 1)
    for line, reason in (
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module': install the package that has it",
        ),
        ("def half(:", "SyntaxError: invalid syntax"),
    ):
        task.write_text(f"{before}import keras\n{line}\n{after}", encoding="utf-8")
        done = run("python", "train.py", folder=project)
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"ERROR: task.py:{before.count(chr(10)) + 2} <module>: {reason}")
        assert "Traceback" not in done.stderr
        assert not (project / "runs").exists()
    whole = run_program(["train.py"], project, {**os.environ, "TRAINING_TRACEBACK": "1"}).stderr
    assert "Traceback" in whole
    assert whole.splitlines()[-1] == last


@pytest.mark.long
def test_terminal_gets_a_live_line_that_vanishes_and_the_users_level_is_kept(
    default_bake: Bake, tmp_path: Path
) -> None:
    process, terminal = pty.fork()
    if not process:
        os.chdir(default_bake.folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "TF_CPP_MIN_LOG_LEVEL": "0"}
        arguments = ["train.py", "--run-dir", str(tmp_path / "run"), "--epochs", "1", "--limit-steps", "3"]
        os.execv(sys.executable, [sys.executable, *arguments])
    written = b""
    with contextlib.suppress(OSError):  # Linux says so that the program has ended.
        while data := os.read(terminal, 2**16):
            written += data
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    text = written.decode()
    # TensorFlow 2.21 and 2.20 write information in these forms.
    assert re.search(r"^(I0000 |[\d-]{10} [\d:.]+: I )", text, re.MULTILINE)
    # The last live line of training is erased before the first one of the validation.
    before, validation, after = text.partition("epoch 1/1  validation  0 %")
    assert validation
    assert "epoch 1/1  train  0 %  0/3 steps" in before
    assert "\x1b[2K" in before.rpartition("3 steps")[2]
    # Nothing is left of it before the permanent line, which begins its row.
    assert re.search(r"\x1b\[2K\r?(\x1b\[[\d;]*m)*Each metric as train / validation", after.replace("\x1b[0m", ""))
    assert "\nepoch 1/1  loss" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", after).replace("\r", "")
    assert "╭─ Result, of the best weights ─" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", after)


@pytest.mark.long
def test_debugger_in_a_step_has_its_prompt_and_shows_your_line(bake: Callable[..., Bake]) -> None:
    project = bake()
    task = project.folder / "task.py"
    sound = task.read_text(encoding="utf-8")
    line = '    update_metrics("train", labels, predictions, per_example_loss, sample_weights)'
    task.write_text(sound.replace(line, f"    breakpoint()\n{line}"), encoding="utf-8")
    process, terminal = pty.fork()
    if not process:
        os.chdir(project.folder)
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "train.py", "--eager", "--limit-steps", "2", "--epochs", "1"])
    written, answers = "", ["p float(loss) > 0", "c"] * 2
    with contextlib.suppress(OSError):  # Linux says so that the program has ended.
        while data := os.read(terminal, 2**16):
            written += data.decode()
            if answers and written.endswith("(Pdb) "):
                os.write(terminal, f"{answers.pop(0)}\n".encode())
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert not answers
    assert written.count(f"-> {line.strip()}") == 2
    assert len(re.findall(r"(?m)^True", written)) == 2
