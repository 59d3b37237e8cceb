"""The starter language_model: its record files, and that no layout of the replicas changes what it learns."""

import subprocess
import sys
from pathlib import Path

import pytest

from rendering import Bake, cookiecutter, run


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The starter's project; shared."""
    output = tmp_path_factory.mktemp("language_model") / "rendered"
    done = cookiecutter(output, starter="language_model")
    assert done.returncode == 0, done.stderr
    (folder,) = output.iterdir()
    return Bake(folder)


BAD_TEXTS = {
    "a folder": (None, "cannot be read"),
    "not UTF-8": (b"\xff", "cannot be read"),
    "blank": (b"\n \n", "no text"),
}


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_bad_text_is_named_and_nothing_is_written(kind: str, project: Bake, tmp_path: Path) -> None:
    content, reason = BAD_TEXTS[kind]
    (tmp_path / "train.txt").write_text("A document.", encoding="utf-8")
    bad = tmp_path / "validation.txt"
    if content is None:
        bad.mkdir()
    else:
        bad.write_bytes(content)
    command = ("python", "prepare_data.py", f"--texts={tmp_path}", f"--records={tmp_path / 'records'}")
    done = run(*command, folder=project.folder)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"ERROR: {bad}")
    assert reason in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.txt", "validation.txt"]


def test_program_prints_the_command_that_trains_on_a_text(project: Bake, tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.txt").write_text("\n\n".join(["A document.", "Another one."] * 20), encoding="utf-8")
    made = tmp_path / "records"
    command = ("python", "prepare_data.py", f"--texts={tmp_path}", f"--records={made}", "--sequence-length=30")
    done = project.run(*command)
    # Each row contains both documents, of 12 and 13 tokens.
    assert "train: 500 tokens in 20 rows, 16.7 % padding" in done.stdout
    *_, last = done.stdout.splitlines()
    prefix, printed = last.split(": ")
    assert prefix == f"Made {made}, for"
    assert printed.endswith(f"--records {made} --sequence-length 30 --run-dir runs/records")
    project.run(*printed.split(), "--epochs=1", "--global-batch-size=10", "--layers=1", f"--run-dir={tmp_path / 'run'}")
    again = run(*command, folder=project.folder)
    assert again.stderr == f"ERROR: --records {made} exists already: remove it, or pass another folder\n"


# In one process, because each start of TensorFlow takes seconds.
USER_ERRORS = """
import contextlib, io, sys
import train

for flags in (["--sequence-length=64"], ["--records=elsewhere"], ["--width=36"], ["--dropout=1"], ["--temperature=-1"]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            train.main([*flags, f"--run-dir={sys.argv[1]}/run"])
        except SystemExit as ended:
            print(ended.code, errors.getvalue().splitlines()[-1])
"""


@pytest.mark.long
def test_user_errors_are_one_line(project: Bake, tmp_path: Path) -> None:
    if not (project.folder / "data/records").exists():
        project.run("python", "prepare_data.py")
    done = project.run("python", "-c", USER_ERRORS, tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("2 ERROR: ")]
    reasons = [
        "--sequence-length 64 does not fit data/records/train.tfrecord, whose rows have 128 tokens: ",
        "--records elsewhere has no train.tfrecord: ",
        "--width 36 must be a multiple of twice --heads, ",
        "--dropout 1.0 must be at least 0 and less than 1",
        "--temperature -1.0 must be at least 0",
    ]
    assert len(lines) == len(reasons), lines
    for line, reason in zip(lines, reasons, strict=True):
        assert line.startswith(f"2 ERROR: {reason}"), line
    assert not list(tmp_path.iterdir())


MAKE = """
import sys
from pathlib import Path
from prepare_data import Arguments, make_records
make_records(Arguments(records=Path(sys.argv[1])))
"""


@pytest.mark.long
def test_shipped_text_is_learnt_from_records_that_two_processes_make_at_once(project: Bake, tmp_path: Path) -> None:
    made = [
        subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path / "records")], cwd=project.folder) for _ in range(2)
    ]
    assert [each.wait() for each in made] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    done = project.run("python", "train.py", "--epochs=3", "--simulated-devices=2")
    assert done.stdout.count(" tokens/s, MFU ") == 3
    assert "on_report failed" not in done.stdout
    for path in (project.folder / "data/records").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "records" / path.name).read_bytes(), path.name
    # The frequencies of the bytes alone give 21.
    assert project.result("runs/default")["test/perplexity"] < 10
    samples = [(project.folder / f"runs/default/samples/epoch-000{epoch}.txt").read_text() for epoch in (1, 3)]
    assert samples[0] != samples[1]
    assert " the " in samples[1]


AGREE = """
import sys
import numpy as np
import task, train
from config import Config
from engine.cluster.strategy import create_strategy

create_strategy(Config(strategy="mirrored", simulated_devices=4))
weights, metrics = [], []
for replicas, micro_batches in ((1, 1), (2, 1), (4, 1), (2, 2)):
    flags = [f"--simulated-devices={replicas}", f"--micro-batches={micro_batches}", "--layers=1", "--width=32"]
    result = train.main([*flags, "--epochs=1", f"--run-dir={sys.argv[1]}/{replicas}-{micro_batches}"])
    assert train.strategy.num_replicas_in_sync == replicas
    metrics.append({name: value for name, value in result.items() if name.startswith("test/")})
    weights.append([variable.numpy() for variable in task.model.trainable_variables])
assert metrics[0].keys() == {"test/loss", "test/perplexity"}
for other_metrics, other_weights in zip(metrics[1:], weights[1:], strict=True):
    for name, value in metrics[0].items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-5, err_msg=name)
    for variable, one, other in zip(task.model.trainable_variables, weights[0], other_weights, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4 * np.abs(one).max(), rtol=0, err_msg=variable.path)
print("agree")
"""


@pytest.mark.long
def test_no_layout_of_replicas_and_micro_batches_changes_what_is_learnt(project: Bake, tmp_path: Path) -> None:
    assert "agree\n" in project.run("python", "-c", AGREE, tmp_path).stdout
