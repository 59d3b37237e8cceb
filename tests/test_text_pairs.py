"""The starter text_pair_classification: its record files, where its encoder's weights come from, and what it learns."""

import subprocess
import sys
from pathlib import Path

import pytest

from rendering import Bake, cookiecutter, run


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The starter's project; shared."""
    output = tmp_path_factory.mktemp("pairs") / "rendered"
    done = cookiecutter(output, starter="text_pair_classification")
    assert done.returncode == 0, done.stderr
    (folder,) = output.iterdir()
    return Bake(folder)


GOOD = b"label\tsentence1\tsentence2\n1\tOne.\tTwo.\n"
BAD_ROWS = {
    "a folder": (None, "cannot be read"),
    "not UTF-8": (b"label\tsentence1\tsentence2\n1\t\xff\tTwo.\n", "cannot be read"),
    "no column": (b"label\tsentence1\tother\n", "row 1 names no column 'sentence2'"),
    "no rows": (b"label\tsentence1\tsentence2\n", "holds no pairs"),
    "a column too few": (GOOD + b"0\tThree.\n", "row 3 has 2 columns, not 3 as row 1"),
    "no label": (GOOD + b"\tThree.\tFour.\n", "row 3 has the label ''"),
    "a negative label": (GOOD + b"-1\tThree.\tFour.\n", "row 3 has the label '-1'"),
    "an empty sentence": (GOOD + b"0\t \tFour.\n", "row 3 has an empty sentence"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_row_is_named_and_nothing_is_written(kind: str, project: Bake, tmp_path: Path) -> None:
    rows, reason = BAD_ROWS[kind]
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_bytes(GOOD)
    bad = tmp_path / "validation.tsv"
    if rows is None:
        bad.mkdir()
    else:
        bad.write_bytes(rows)
    command = ("python", "prepare_data.py", f"--pairs={tmp_path}", f"--records={tmp_path / 'records'}")
    done = run(*command, folder=project.folder)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"ERROR: {bad}")
    assert reason in error
    assert sorted(path.name for path in tmp_path.iterdir() if path != bad) == ["test.tsv", "train.tsv"]


@pytest.mark.parametrize(("file", "reason"), [("pairs.txt", "no .tsv file"), ("new.tsv", "no train.tsv")])
def test_folder_without_pairs_to_make_a_vocabulary_of_is_refused(
    file: str, reason: str, project: Bake, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(GOOD)
    done = run("python", "prepare_data.py", f"--pairs={tmp_path}", "--records=new", folder=project.folder)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"ERROR: --pairs {tmp_path} holds {reason}")


# In one process, because each start of TensorFlow takes seconds.
WEIGHTS_AND_MISTAKES = """
import contextlib, dataclasses, io, sys
from pathlib import Path
import keras_hub, numpy as np, tensorflow as tf
import task, train
from config import Config
from prepare_data import Arguments, create_tokenizer, make_records, read_pairs

folder = Path(sys.argv[1])
task.config = Config()
encoder = task.create_encoder()
random = np.random.default_rng(1)
for variable in encoder.weights:
    variable.assign(random.normal(size=variable.shape))
encoder.save_weights(folder / "encoder.weights.h5")
tf.train.Checkpoint(encoder=encoder).write(str(folder / "encoder"))
encoder.save_to_preset(folder / "preset")
create_tokenizer(Arguments(), read_pairs(Path("data/train.tsv"))).save_to_preset(folder / "preset")
make_records(Arguments(preset=str(folder / "preset"), records=folder / "records"))

preset = [f"--preset={folder / 'preset'}", f"--records={folder / 'records'}"]
for name in ("encoder.weights.h5", "encoder", "preset"):
    if name == "preset":
        train.build(Config(preset=str(folder / "preset"), records=folder / "records"))
    else:
        train.build(Config(encoder_weights=folder / name))
    loaded = task.model.get_layer("bert_backbone")
    assert len(loaded.weights) == len(encoder.weights) > 30
    for one, other in zip(encoder.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=f"{name}: {other.path}")
    print("equal", name)

for flags in (
    ["--sequence-length=64"],
    ["--vocabulary-size=300"],
    ["--classes=1"],
    ["--records=elsewhere"],
    ["--preset=bert_base_en_uncased"],
    [preset[0], preset[1], "--vocabulary-size=30522"],
    ["--preset=no_such_preset", preset[1]],
):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            train.main([*flags, f"--run-dir={folder / 'run'}"])
        except SystemExit as ended:
            print(ended.code, errors.getvalue().splitlines()[-1])
assert not (folder / "run").exists()
"""


@pytest.mark.long
def test_encoder_weights_are_those_of_the_file_and_mistakes_are_one_line(project: Bake, tmp_path: Path) -> None:
    done = project.run("python", "-c", WEIGHTS_AND_MISTAKES, tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("equal ", "2 ERROR: "))]
    assert lines[:3] == ["equal encoder.weights.h5", "equal encoder", "equal preset"]
    reasons = [
        "--sequence-length 64 does not fit data/records/train.tfrecord, which holds 128 tokens for a pair: ",
        "--vocabulary-size 300 does not fit data/records/train.tfrecord, which holds ",
        "--classes 1 does not fit data/records/train.tfrecord, which holds 1: ",
        "--records elsewhere has no train.tfrecord: ",
        "--preset bert_base_en_uncased needs --records of its tokens: ",
        f"--preset {tmp_path / 'preset'} needs --vocabulary-size 1200",
        "--preset no_such_preset cannot be loaded (",
    ]
    assert len(lines) == 3 + len(reasons), lines
    for line, reason in zip(lines[3:], reasons, strict=True):
        assert line.startswith(f"2 ERROR: {reason}"), line


@pytest.mark.long
def test_shipped_pairs_are_learnt_from_records_that_two_processes_make_at_once(project: Bake, tmp_path: Path) -> None:
    folder = project.folder / "data"
    before = {path.name for path in folder.iterdir()} - {"records"}
    made = [
        subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path / "records")], cwd=project.folder) for _ in range(2)
    ]
    assert [each.wait() for each in made] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    project.run("python", "train.py")
    assert {path.name for path in folder.iterdir()} == before | {"records"}
    for path in (folder / "records").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "records" / path.name).read_bytes(), path.name
    # Half of the pairs have label 1.
    assert project.result("runs/default")["test/accuracy"] > 0.8


MAKE = """
import sys
from pathlib import Path
from prepare_data import Arguments, make_records
make_records(Arguments(records=Path(sys.argv[1])))
"""
