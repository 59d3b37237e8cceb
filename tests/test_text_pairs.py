"""The starter text_pair_classification: its record files, where its encoder's weights come from, and what it learns."""

import subprocess
import sys
from pathlib import Path

import pytest

from rendering import Bake, rendered


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The starter's project; shared."""
    return rendered(tmp_path_factory.mktemp("pairs"), starter="text_pair_classification")


GOOD = b"label\tsentence1\tsentence2\n1\tOne.\tTwo.\n"
BAD_ROWS = {
    "a folder": (None, "cannot be read"),
    "not UTF-8": (b"label\tsentence1\tsentence2\n1\t\xff\tTwo.\n", "cannot be read"),
    "no column": (b"label\tsentence1\tother\n", "row 1 names no column 'sentence2'"),
    "no rows": (b"label\tsentence1\tsentence2\n", "holds no pairs"),
    "a column too few": (GOOD + b"0\tThree.\n", "row 3 has 2 columns, not 3 as row 1"),
    "a negative label": (GOOD + b"-1\tThree.\tFour.\n", "row 3 has the label '-1'"),
    "an empty sentence": (GOOD + b"0\t \tFour.\n", "row 3 has an empty sentence"),
}
WITHOUT_VOCABULARY = {"pairs.txt": "no .tsv file", "new.tsv": "no train.tsv"}


def test_bad_pairs_are_named_and_nothing_is_written(project: Bake, tmp_path: Path) -> None:
    calls, expected = [], []
    for kind, (rows, reason) in BAD_ROWS.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "train.tsv").write_bytes(GOOD)
        bad = folder / "validation.tsv"
        if rows is None:
            bad.mkdir()
        else:
            bad.write_bytes(rows)
        calls.append(["prepare_data", f"--pairs={folder}", f"--records={folder / 'records'}"])
        expected.append((f"ERROR: {bad}", reason))
    for file, reason in WITHOUT_VOCABULARY.items():
        folder = tmp_path / file.replace(".", "_")
        folder.mkdir()
        (folder / file).write_bytes(GOOD)
        calls.append(["prepare_data", f"--pairs={folder}", f"--records={folder / 'records'}"])
        expected.append((f"ERROR: --pairs {folder} holds ", reason))
    for (code, (line,)), (start, reason) in zip(project.call(*calls), expected, strict=True):
        assert code == 2
        assert line.startswith(start)
        assert reason in line
    assert {path.name for path in tmp_path.glob("*/*")} == {"train.tsv", "validation.tsv", *WITHOUT_VOCABULARY}


# Saves an encoder's weights in three ways, and builds the program with each.
WEIGHTS = """
from pathlib import Path
import numpy as np, tensorflow as tf
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
for name in ("encoder.weights.h5", "encoder", "preset"):
    if name == "preset":
        train.build(Config(preset=str(folder / "preset"), records=folder / "records"))
    else:
        train.build(Config(encoder_weights=folder / name))
    loaded = task.model.get_layer("bert_backbone")
    assert len(loaded.weights) == len(encoder.weights) > 30
    for one, other in zip(encoder.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=f"{name}: {other.path}")
"""


@pytest.mark.long
def test_encoder_weights_are_those_of_the_file_and_user_errors_are_one_line(project: Bake, tmp_path: Path) -> None:
    project.run_code(WEIGHTS, tmp_path)
    preset, records = f"--preset={tmp_path / 'preset'}", f"--records={tmp_path / 'records'}"
    reasons = {
        ("--sequence-length=64",): "--sequence-length 64 does not fit data/records/train.tfrecord, which holds 128 ",
        ("--vocabulary-size=300",): "--vocabulary-size 300 does not fit data/records/train.tfrecord, which holds ",
        ("--classes=1",): "--classes 1 does not fit data/records/train.tfrecord, which holds 1: ",
        ("--records=elsewhere",): "--records elsewhere has no train.tfrecord: ",
        ("--preset=bert_base_en_uncased",): "--preset bert_base_en_uncased needs --records of its tokens: ",
        (preset, records, "--vocabulary-size=30522"): f"--preset {tmp_path / 'preset'} needs --vocabulary-size 1200",
        ("--preset=no_such_preset", records): "--preset no_such_preset cannot be loaded (",
    }
    ended = project.call(*(["train", *flags, f"--run-dir={tmp_path / 'run'}"] for flags in reasons))
    for (code, lines), reason in zip(ended, reasons.values(), strict=True):
        assert code == 2
        assert lines[-1].startswith(f"ERROR: {reason}")
    assert not (tmp_path / "run").exists()


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
