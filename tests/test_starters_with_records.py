"""The starters that make record files: their programs, what they reject, what they learn, and what their pages say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rendering import Bake, rendered, run

ROWS = b"label\tsentence1\tsentence2\n1\tOne.\tTwo.\n"
# Starter and flag -> files of a folder, and what is said of it.
BAD_DATA = {
    ("language_model", "texts"): [
        ({"validation.txt": b"\xff"}, "{}/validation.txt cannot be read"),
        ({"validation.txt": b"\n \n"}, "{}/validation.txt contains no text"),
        ({"test.txt": b"Text.", "a\udcff.txt": b"Text."}, "{}/a\udcff.txt cannot be read ('utf-8' codec can't encode"),
    ],
    ("text_pair_classification", "pairs"): [
        ({"train.tsv": ROWS, "new.tsv": ROWS + b"1\t\xff\tTwo.\n"}, "{}/new.tsv cannot be read"),
        ({"train.tsv": b"label\tsentence1\tother\n"}, "{}/train.tsv, row 1 names no column 'sentence2'"),
        ({"train.tsv": b"label\tsentence1\tsentence2\n"}, "{}/train.tsv holds no pairs"),
        ({"train.tsv": ROWS + b"0\tThree.\n"}, "{}/train.tsv, row 3 has 2 columns, not 3 as row 1"),
        ({"train.tsv": ROWS + b"-1\tThree.\tFour.\n"}, "{}/train.tsv, row 3 has the label '-1'"),
        ({"train.tsv": ROWS + b"0\t \tFour.\n"}, "{}/train.tsv, row 3 has an empty sentence"),
        ({"pairs.txt": ROWS}, "--pairs {} holds no .tsv file"),
        ({"new.tsv": ROWS}, "--pairs {} holds no train.tsv"),
        ({"a\udcff.tsv": ROWS}, "{}/a\udcff.tsv cannot be read ('utf-8' codec can't encode"),
    ],
}


@pytest.mark.parametrize(("starter", "flag"), BAD_DATA)
def test_bad_data_are_named_and_nothing_is_written(starter: str, flag: str, tmp_path: Path) -> None:
    cases = {tmp_path / str(number): case for number, case in enumerate(BAD_DATA[starter, flag])}
    for folder, (files, _) in cases.items():
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    project = rendered(tmp_path / "rendered", starter=starter)
    calls = (["prepare_data", f"--{flag}={folder}", f"--records={folder / 'records'}"] for folder in cases)
    for (folder, (files, reason)), (code, (line,)) in zip(cases.items(), project.call(*calls), strict=True):
        assert code == 2
        assert line.startswith(f"ERROR: {reason.format(folder)}")
        assert {path.name for path in folder.iterdir()} == files.keys()


# What prepare_data.py, then train.py, are given, and what they say of it.
USER_ERRORS = {
    "language_model": (
        {
            "--sequence-length=1": "--sequence-length 1 must be at least 2",
            "--sequence-len=5": "Unrecognized options: --sequence-len=5: use --sequence-length INT",
            "--texts=a\udcff": "--texts a\udcff must be text in UTF-8 without null characters",
        },
        {
            "--sequence-length=64": "--sequence-length 64 does not fit data/records/train.tfrecord, whose rows have ",
            "--records=elsewhere": "--records elsewhere has no train.tfrecord: ",
            "--width=36": "--width 36 must be a multiple of twice --heads, ",
            "--dropout=1": "--dropout 1.0 must be at least 0 and less than 1",
        },
    ),
    "recommendation": (
        {
            "--users=0": "--users 0 must be at least 1: pass --users 1 or more",
            "--items=10": "--items 10 must be at least 11: pass --items 11 or more",
            f"--items={2**63}": f"--items {2**63} must fit into 64 bits",
        },
        {
            "--records=elsewhere": "--records elsewhere has no users.jsonl: make it as docs/starter.md shows",
            "--best=101": "--best 101 must be at most the number of items in data/records: pass 100",
            "--micro-batches=2": "--micro-batches is 2, and task.train_step calls engine.model.gather_batch: ",
            "--hidden=0": "--hidden 0 must be at least 1",
        },
    ),
}
SMALL = ("--users=300", "--items=100")


@pytest.mark.parametrize("starter", USER_ERRORS)
def test_records_are_the_same_again_the_command_is_printed_and_user_errors_are_one_line(
    starter: str, tmp_path: Path
) -> None:
    project, made = rendered(tmp_path, starter=starter), tmp_path / "records"
    small, flags = SMALL if starter == "recommendation" else (), ""
    if starter == "language_model":
        for split in ("train", "validation", "test"):
            text = "\n\n".join(["A document.", "Another one."] * 200)
            (project.folder / f"data/{split}.txt").write_text(text, encoding="utf-8")
        small, flags = (), " --sequence-length 30"
    prepare = ["prepare_data", f"--records={made}", *small, *flags.split()]
    of_data, of_training = USER_ERRORS[starter]
    wrong = [["prepare_data", f"--records={tmp_path / 'bad'}", flag] for flag in of_data]
    wrong += [["train", flag, f"--run-dir={tmp_path / 'run'}"] for flag in of_training]
    ended = project.call(prepare, ["prepare_data", *small], prepare, *wrong)
    (code, (*lines, last)), _, again, *errors = ended
    assert code == 0
    assert last == f"Made {made}, for: python train.py --records {made}{flags} --run-dir runs/records"
    assert again == (2, [f"ERROR: --records {made} exists already: remove it, or pass another folder"])
    for (code, said), reason in zip(errors, [*of_data.values(), *of_training.values()], strict=True):
        assert code == 2
        assert said[-1].startswith(f"ERROR: {reason}")
    assert {path.name for path in tmp_path.glob("[!.]*")} == {project.folder.name, "records"}
    if starter == "language_model":
        # Each row contains both documents, of 12 and 13 tokens.
        assert "train: 5,000 tokens in 200 rows, 16.7 % padding" in lines
    else:
        found = json.loads((made / "recall.json").read_text(encoding="utf-8"))
        assert lines == [f"{name}: {value:.4f}" for name, value in found.items()]
        for path in made.iterdir():  # The same seed gives the same bytes.
            assert path.read_bytes() == (project.folder / "data/records" / path.name).read_bytes(), path.name


# The last argument is what happens while the first record file is written.
ENDED = """
import resource, signal
import tensorflow as tf

module, case = sys.argv.pop(1), sys.argv.pop()
writer = tf.io.TFRecordWriter


def interrupted(path):
    if case == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, 2**10))
    elif case.startswith("SIG"):
        assert os.path.exists(os.path.dirname(path))
        os.kill(os.getpid(), getattr(signal, case))
    return writer(path)


tf.io.TFRecordWriter = interrupted
program = __import__(module)
program.main(*[sys.argv[1:]] * (module == "train"))
"""
STOPPED = "nothing was lost: start the same command again"
MEMORY = r"ERROR: prepare_data\.py:\d+ \w+: MemoryError: Unable to allocate 7\.28 TiB"
# Starter -> module, arguments and what happens; then the exit code and the line.
ENDS: dict[str, list[tuple[list[str], int, str]]] = {
    "recommendation": [
        (["prepare_data", *SMALL, "SIGTERM"], 42, f"stopped by SIGTERM; {STOPPED}"),
        (["prepare_data", *SMALL, "SIGINT"], 130, f"stopped by SIGINT; {STOPPED}"),
        (["prepare_data", *SMALL, "full disk"], 1, r"ERROR: data/records cannot be written \(.*File too large\): free"),
        (["prepare_data", f"--users={10**12}", ""], 2, MEMORY),
    ],
    "language_model": [
        (["train", "full disk"], 1, r"ERROR: data/records cannot be written \(.*File too large\): free disk space"),
    ],
}


@pytest.mark.parametrize("starter", ENDS)
def test_making_records_ends_with_a_line_and_leaves_nothing(starter: str, tmp_path: Path) -> None:
    project, program = rendered(tmp_path / "rendered", starter=starter), tmp_path / "program.py"
    program.write_text(f"import os, sys\nsys.path.insert(0, os.getcwd())\n{ENDED}", encoding="utf-8")
    files = {path.name for path in (project.folder / "data").iterdir()}
    for arguments, code, line in ENDS[starter]:
        done = run("python", program, *arguments, folder=project.folder)
        *_, last = done.stderr.splitlines()
        assert (done.returncode, bool(re.match(line, last))) == (code, True), done.stderr
        assert {path.name for path in (project.folder / "data").iterdir()} == files


MAKE = """
import sys
from pathlib import Path
from prepare_data import Arguments, make_records
make_records(Arguments(records=Path(sys.argv[1])))
"""
# Flags of a training, and what its result must be.
LEARNT = {
    "text_pair_classification": ([], lambda result: result["test/accuracy"] > 0.8),  # Half of the pairs have label 1.
    # The frequencies of the bytes alone give 21.
    "language_model": (["--epochs=3", "--simulated-devices=2"], lambda result: result["test/perplexity"] < 10),
}


@pytest.mark.long
@pytest.mark.parametrize("starter", LEARNT)
def test_shipped_texts_are_learnt_from_records_that_two_processes_make_at_once(starter: str, tmp_path: Path) -> None:
    project, records = rendered(tmp_path / "rendered", starter=starter), tmp_path / "made/records"
    command = [sys.executable, "-c", MAKE, str(records)]
    made = [subprocess.Popen(command, cwd=project.folder) for _ in range(2)]
    assert [each.wait() for each in made] == [0, 0]
    assert [path.name for path in records.parent.iterdir()] == ["records"]
    flags, is_learnt = LEARNT[starter]
    done = project.run("python", "train.py", *flags)
    assert "on_report failed" not in done.stdout
    for path in (project.folder / "data/records").glob("*.tfrecord"):
        assert path.read_bytes() == (records / path.name).read_bytes(), path.name
    assert is_learnt(project.result("runs/default"))
    if starter == "language_model":
        assert done.stdout.count(" tokens/s, MFU ") == 3
        first, last = (project.read(f"runs/default/samples/epoch-000{epoch}.txt") for epoch in (1, 3))
        assert first != last
        assert " the " in last


# --- Weights of text_pair_classification's encoder --------------------------------------------------------------------

# Saves them in three ways, and builds the program with each.
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
def test_encoder_weights_are_those_of_the_file_and_user_errors_are_one_line(tmp_path: Path) -> None:
    project = rendered(tmp_path / "rendered", starter="text_pair_classification")
    project.run_code(WEIGHTS, tmp_path)
    preset, records = f"--preset={tmp_path / 'preset'}", f"--records={tmp_path / 'records'}"
    reasons = {
        ("--sequence-length=64",): "--sequence-length 64 does not fit data/records/train.tfrecord, which holds 128 ",
        ("--vocabulary-size=300",): "--vocabulary-size 300 does not fit data/records/train.tfrecord, which holds ",
        ("--classes=1",): "--classes 1 does not fit data/records/train.tfrecord, which holds 1: ",
        ("--preset=bert_base_en_uncased",): "--preset bert_base_en_uncased needs --records of its tokens: ",
        (preset, records, "--vocabulary-size=30522"): f"--preset {tmp_path / 'preset'} needs --vocabulary-size 1200",
        ("--preset=no_such_preset", records): "--preset no_such_preset cannot be loaded (",
    }
    ended = project.call(*(["train", *flags, f"--run-dir={tmp_path / 'run'}"] for flags in reasons))
    for (code, lines), reason in zip(ended, reasons.values(), strict=True):
        assert code == 2
        assert lines[-1].startswith(f"ERROR: {reason}")
    assert not (tmp_path / "run").exists()


# --- The page of recommendation ---------------------------------------------------------------------------------------


@pytest.fixture
def recommendation(tmp_path: Path) -> Bake:
    return rendered(tmp_path, starter="recommendation")


@pytest.mark.long
def test_small_data_are_learnt_better_than_popularity(recommendation: Bake) -> None:
    recommendation.run("python", "prepare_data.py", "--users=4000", "--items=500")
    recommendation.run("python", "train.py", "--epochs=2", "--global-batch-size=256")
    found = recommendation.result("runs/default")["test/recall_at_10"]
    recall = json.loads(recommendation.read("data/records/recall.json"))
    assert 1.3 * recall["popularity_recall_at_10"] < found < 1.02 * recall["ceiling_recall_at_10"]


@pytest.mark.long
def test_column_is_added_as_the_page_says(recommendation: Bake) -> None:
    page = recommendation.read("docs/starter.md")
    (made, used) = re.findall(r'`"device": "phone"`|`USER_COLUMNS = {..., ("device": 4)}`', page)
    assert (made, used) == ("", '"device": 4')
    country, age = '"country": f"country_{country:02d}"', '"age_group": 8'
    recommendation.replace("prepare_data.py", country, f'{country}, "device": "phone"')
    recommendation.replace("task.py", age, f"{age}, {used}")
    recommendation.run("python", "prepare_data.py", *SMALL)
    recommendation.run("python", "train.py", "--epochs=1", "--global-batch-size=32", "--limit-steps=2", "--export")
    code, _ = re.findall(r"(?s)```python\n(.*?)```", page)
    assert "item_0" in recommendation.run_code(code.replace("country=", 'device="phone", country='))
    recommendation.run("python", "-m", "pytest", "-q", "tests/test_task.py", "-k", "not written")


@pytest.mark.long
def test_movielens_is_read_as_the_page_says(recommendation: Bake, tmp_path: Path) -> None:
    page = recommendation.read("docs/starter.md")
    _, program = re.findall(r"(?s)```python\n(.*?)```", page)
    (recommendation.folder / "movielens.py").write_text(program, encoding="utf-8")
    for columns in ("USER_COLUMNS", "ITEM_COLUMNS"):
        (said,) = re.findall(rf"`({columns} = {{[^.`]*}})`", page)
        (there,) = re.findall(rf"(?m)^{columns} = .*$", recommendation.read("task.py"))
        recommendation.replace("task.py", f"\n{there}\n", f"\n{said}\n")
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
    recommendation.run("python", "movielens.py", folder)
    flags = ("--epochs=1", "--global-batch-size=60", "--new-items-only")
    recommendation.run("python", "train.py", f"--records={folder / 'records'}", *flags)
    (recommendation.folder / "some.jsonl").write_text('{"user_id": "7"}\n')
    recommendation.run("python", "predict.py", "runs/default", "some.jsonl", "--output=predictions.npz")
    best = np.load(recommendation.folder / "predictions.npz")["items"][0].astype(str)
    mine = sorted((int(row.split(",")[3]), row.split(",")[1]) for row in rows if row.startswith("7,"))
    assert len({*best}) == 10
    assert not {movie for _, movie in mine[:-2]} & {*best}
