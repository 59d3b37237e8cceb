"""The starter language_model: its record files, and what it learns."""

import subprocess
import sys
from pathlib import Path

import pytest

from rendering import Bake, rendered


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The starter's project; shared."""
    return rendered(tmp_path_factory.mktemp("language_model"), starter="language_model")


BAD_TEXTS = {
    "a folder": (None, "cannot be read"),
    "not UTF-8": (b"\xff", "cannot be read"),
    "blank": (b"\n \n", "no text"),
}
USER_ERRORS = {
    "--sequence-length=64": "--sequence-length 64 does not fit data/records/train.tfrecord, whose rows have 128 ",
    "--records=elsewhere": "--records elsewhere has no train.tfrecord: ",
    "--width=36": "--width 36 must be a multiple of twice --heads, ",
    "--dropout=1": "--dropout 1.0 must be at least 0 and less than 1",
    "--temperature=-1": "--temperature -1.0 must be at least 0",
}


def test_bad_text_is_named_and_nothing_is_written(project: Bake, tmp_path: Path) -> None:
    calls = []
    for kind, (content, _) in BAD_TEXTS.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "train.txt").write_text("A document.", encoding="utf-8")
        bad = tmp_path / kind / "validation.txt"
        if content is None:
            bad.mkdir()
        else:
            bad.write_bytes(content)
        calls.append(["prepare_data", f"--texts={bad.parent}", f"--records={bad.parent / 'records'}"])
    for (code, (line,)), (kind, (_, reason)) in zip(project.call(*calls), BAD_TEXTS.items(), strict=True):
        assert code == 2
        assert line.startswith(f"ERROR: {tmp_path / kind / 'validation.txt'}")
        assert reason in line
    assert {path.name for path in tmp_path.glob("*/*")} == {"train.txt", "validation.txt"}


def test_program_prints_the_command_that_trains_and_user_errors_are_one_line(tmp_path: Path) -> None:
    project = rendered(tmp_path, starter="language_model")
    for split in ("train", "validation", "test"):
        text = "\n\n".join(["A document.", "Another one."] * 200)
        (project.folder / f"data/{split}.txt").write_text(text, encoding="utf-8")
    made = tmp_path / "records"
    prepare = ["prepare_data", f"--records={made}", "--sequence-length=30"]
    train = (["train", flag, f"--run-dir={tmp_path / 'run'}"] for flag in USER_ERRORS)
    (code, lines), again, _, *errors = project.call(prepare, prepare, ["prepare_data"], *train)
    assert code == 0
    # Each row contains both documents, of 12 and 13 tokens.
    assert "train: 5,000 tokens in 200 rows, 16.7 % padding" in lines
    command = f"python train.py --records {made} --sequence-length 30 --run-dir runs/records"
    assert lines[-1] == f"Made {made}, for: {command}"
    assert again == (2, [f"ERROR: --records {made} exists already: remove it, or pass another folder"])
    for (code, lines), reason in zip(errors, USER_ERRORS.values(), strict=True):
        assert code == 2
        assert lines[-1].startswith(f"ERROR: {reason}")
    assert not (tmp_path / "run").exists()


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
