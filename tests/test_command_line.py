"""train.py as a user runs it: as a process of its own, with flags."""

import contextlib
import csv
import json
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program

from rendering import Bake, run


def test_run_leaves_what_the_design_says_and_prints_plain_lines(default_bake: Bake, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--epochs", "2", "--simulated-devices", "2", "--limit-steps", "3", "--global-batch-size", "33")
    # A process of its own, whose TensorFlow says nothing while it starts.
    done = default_bake.run(sys.executable, "train.py", "--run-dir", run_dir, *flags)
    assert done.stderr == ""
    files = "best checkpoints config.json curves.png goodput.json metrics.csv result.json steps.csv tensorboard"
    assert {path.name for path in run_dir.iterdir()} == {".lock", *files.split()}
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert (config["settings"]["epochs"], config["strategy"], config["replicas"]) == (2, "mirrored", 2)
    assert config["versions"].keys() == {"tensorflow", "keras", "python", "numpy"}
    rows = list(csv.DictReader((run_dir / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    metrics = ["train/loss", "train/accuracy", "validation/loss", "validation/accuracy"]
    assert list(rows[0]) == ["epoch", "step", "seconds", "examples_per_second", "learning_rate", *metrics]
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "3"), ("2", "6")]
    result = default_bake.result(run_dir)
    assert (result["epochs"], result["step"], len(result["weights_sha256"])) == (2, 6, 64)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000003", "step-00000006"]
    for text in (
        "mirrored, 2 replica(s)",
        "33 examples, 17 on each replica, 34 in all with padding",
        "each of 3 steps",
        "121,994",
    ):
        assert text in done.stdout
    # A pipe gets plain lines.
    assert not re.search(r"[^\n\x20-\x7e]", done.stdout)
    lines = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith("epoch ")).startswith("epoch 1/2  loss ")
    assert f"  next: export    python train.py --export --run-dir {run_dir}" in lines


BAD_LINES = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "def half(:": "SyntaxError: invalid syntax",
}


def test_task_that_cannot_be_imported_is_one_line(bake: Callable[..., Bake]) -> None:
    project = bake().folder
    task = project / "task.py"
    before, after = task.read_text(encoding="utf-8").split("import keras\n", 1)
    for line, reason in BAD_LINES.items():
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
def test_debugger_in_a_step_has_its_prompt_and_the_users_level_of_messages_is_kept(bake: Callable[..., Bake]) -> None:
    project = bake()
    line = '    update_metrics("train", labels, predictions, per_example_loss, sample_weights)'
    project.replace("task.py", line, f"    breakpoint()\n{line}")
    process, terminal = pty.fork()
    if not process:
        os.chdir(project.folder)
        os.environ |= {"TERM": "xterm-256color", "TF_CPP_MIN_LOG_LEVEL": "0"}
        os.execv(sys.executable, [sys.executable, "train.py", "--eager", "--limit-steps", "2", "--epochs", "1"])
    written, answers = "", ["p float(loss) > 0", "c"] * 2
    with contextlib.suppress(OSError):  # Linux says so that the program has ended.
        while data := os.read(terminal, 2**16):
            written += data.decode(errors="replace")
            if answers and written.endswith("(Pdb) "):
                os.write(terminal, f"{answers.pop(0)}\n".encode())
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert not answers
    assert written.count(f"-> {line.strip()}") == 2
    assert len(re.findall(r"(?m)^True", written)) == 2
    # TensorFlow 2.21 and 2.20 write information in these forms.
    assert re.search(r"^(I0000 |[\d-]{10} [\d:.]+: I )", written, re.MULTILINE)
