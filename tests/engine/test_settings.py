"""Settings: their rules, the command line, and how a recorded run's are read back."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from config import Config
from engine.command_line import read_settings, settings_of_run
from engine.errors import BadInput
from engine.settings import ChangeableOnResume, Settings
from predict import Options
from rendering import PROJECT

# --- Rules ------------------------------------------------------------------------------------------------------------


# One for each rule, and for each place where a rule is applied.
REJECTED = {
    "--epochs=0": "--epochs 0 must be from 1 to 2147483647",
    "--seed=-1": "--seed -1 must be from 0 to 2147483647",
    "--pad-to 8 8": "--pad-to 8 8 must be positive integers in increasing order",
    "--pad-to": "--pad-to  needs at least one value",
    "--learning-rate=1e400": "--learning-rate inf must be a positive number of float32, from 1.2e-38 to 3.4e+38",
    "--cluster-timeout=1e10": "--cluster-timeout 10000000000.0 must be at most 1e9",
    "--monitor=\udcff": "--monitor \udcff must be text in UTF-8",
    "--run-dir=a\0b": "--run-dir a\0b must be text in UTF-8 without null characters",
    "--ema-decay=1": "--ema-decay 1.0 must be between 0 and 1",
    "--compare ~/r": f"--compare ~/r starts with ~, which only a shell expands: pass {os.path.expanduser('~')}/r",
    f"--init-from=r/{'n' * 256}": f"--init-from contains a name of more than 255 bytes ({'n' * 20}...): shorten it",
    "--init-from=s3:/b/r": "--init-from s3://b/r is a bucket URL, not a local path: mount the bucket",
    "--init-partial": "--init-partial needs --init-from",
    "--fresh --evaluate-only": "--fresh leaves no run to evaluate",
    "--settings-from=runs/none": "--settings-from runs/none contains no settings: restore it, or pass another",
    # What tyro prints as a box.
    "--epochz 3": "Unrecognized options: --epochz, 3: use --epochs INT",
    "--epochs=two": "--epochs: invalid literal for int() with base 10: 'two': use --epochs INT",
    "--seed": "Missing value for argument '--seed'. Expected 1 values: see --help",
    "--check --evaluate-only": "--check and --evaluate-only are not allowed together",
}


@pytest.mark.parametrize("arguments", REJECTED)
def test_bad_setting_is_rejected_in_one_line(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(BadInput) as rejected:
        read_settings(Config, arguments.split())
    assert REJECTED[arguments] in str(rejected.value)
    assert not re.search(r"\n|---|──|helptext|Perhaps|Value error", str(rejected.value))
    assert capsys.readouterr() == ("", "")


def test_setting_of_your_own_that_no_run_can_have_is_rejected() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Config):
        temperature: object = 1.0

    assert Mine(temperature=float("inf")).as_json()["temperature"] == float("inf")
    for value, rule in ((2**63, "must fit into 64 bits"), (float("nan"), "must not be NaN")):
        with pytest.raises(BadInput, match=f"--temperature .*{rule}"):
            Mine(temperature=value)


def test_address_of_a_bucket_is_rejected_where_pathlib_would_change_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Config):
        images: Path | str = "gs://b/images"

    assert Mine().images == "gs://b/images"
    assert Mine(images=Path("/data/a:b/c")).images == Path("/data/a:b/c")
    with pytest.raises(
        BadInput, match=r"--images gs://b/images is a bucket URL.* must be declared as str, because path"
    ):
        Mine(images=Path("gs://b/images"))
    with pytest.raises(BadInput, match="hdfs:/h/r contains no run"):
        settings_of_run(Config, Path("hdfs://h/r"))
    with pytest.raises(BadInput, match=r"--output gs://b/p.csv is a bucket URL, not a local path"):
        Options(run_dir=Path(), input=Path(), output=Path("gs://b/p.csv"))


def test_setting_with_a_wrong_default_or_a_name_of_the_engine_is_rejected() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(Config):
        depth: int = "three"
        rate: float = 1

    @dataclasses.dataclass(frozen=True)
    class Reserved(Config):
        as_json: bool = False

    with pytest.raises(BadInput, match=r"--as-json False needs another name in config.py"):
        Reserved()
    assert Wrong(depth=3).rate == 1
    with pytest.raises(BadInput, match=r"--depth three must be of the type that it has in config.py, int"):
        Wrong()
    with pytest.raises(BadInput, match="--epochs 3 must be of the type"):
        Config(epochs="3")

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithSteps(Config):
        steps_per_epoch: int = 20

    assert WithSteps(steps_per_epoch=None).steps_per_epoch is None  # As --check needs it.


# --- The command line -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inner:
    decay: float = 0.9
    names: tuple[str, ...] = ()
    nesterov: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Config):
    """Trains mine."""

    data_dir: Path
    """Where the images are."""
    training: ChangeableOnResume[str] = "long"
    layers: tuple[int, ...] = (64, 64)
    scales: dict[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)
    steps: Literal["auto"] | int = "auto"
    limit: float | None = 1.0
    unread: complex = 1j
    epochs: int = 5
    """Not many."""


def test_help_has_own_settings_first_and_a_text_for_each(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # With more there are two columns.
    with pytest.raises(SystemExit) as ended:
        read_settings(Mine, ["--help"])
    assert not ended.value.code
    # Without the boxes and line breaks.
    printed = " ".join(re.sub("[│─╭╮╰╯|+]|--+ ", " ", capsys.readouterr().out).split())
    expected = (
        *("Trains mine.", "--data-dir PATH Where the images are. (required)", "inner options --inner.decay FLOAT"),
        *("Run options --run-dir PATH", "Instead of training", "--check", "--evaluate-only"),
        *("Training options --epochs INT Not many. (default: 5)", "Validation options --monitor"),
        *("Data options --keep-last-batch", "Device options", "--strategy {auto,", "Arithmetic options --precision"),
    )
    places = [printed.find(text) for text in expected]
    assert min(places) > -1
    assert places == sorted(places)
    for each in dataclasses.fields(Settings):
        flag = "--" + each.name.replace("_", "-")
        texts = re.findall(rf" {flag} ((?:(?!\(default).)*)\(default: ", printed)
        assert len(texts[0]) > len("INT Not many"), flag


def test_settings_without_a_default_are_required() -> None:
    with pytest.raises(BadInput, match=r"Missing .*: --data-dir PATH Where the images are"):
        read_settings(Mine, [])
    found = read_settings(
        Mine, ["--data-dir=/data", "--scales", "x", "0.1", "--inner.decay=0.5", "--global-clipnorm=3"]
    )
    assert found == Mine(data_dir=Path("/data"), scales={"x": 0.1}, inner=Inner(decay=0.5), global_clipnorm=3.0)
    assert found.epochs == 5


def test_help_and_user_errors_end_before_tensorflow_is_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow is imported')")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    for argument, code, output in (
        ("--help", 0, "--global-batch-size"),
        ("--epochs=0", 2, "ERROR: --epochs 0 must be"),
        ("--epochz=3", 2, "--epochz"),
        ("--epochs=1", 1, "tensorflow is imported"),
    ):
        command = [sys.executable, "train.py", argument]
        done = subprocess.run(command, check=False, cwd=PROJECT, env=environment, capture_output=True, text=True)
        assert (done.returncode, output in done.stdout + done.stderr) == (code, True), done
        assert "Traceback" not in done.stderr


# --- The settings of a run --------------------------------------------------------------------------------------------


WRITTEN = Mine(
    data_dir=Path("a b"),
    training="short",
    layers=(3,),
    scales={"x": 0.1, "y": -2.0},
    inner=Inner(0.5, ("a", "b"), nesterov=False),
    steps=7,
    limit=None,
    learning_rate=1e-5,
    keep_last_batch=True,
    pad_to=(64, 128),
    evaluation_batch_size=48,
    monitor="-loss",
    patience=3,
    # These are not read back.
    init_from=Path("weights.h5"),
    strategy="mirrored",
    profile=True,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"settings": WRITTEN.as_json()}))
    return tmp_path


@pytest.mark.parametrize(("way", "value"), [("evaluate_only", True), ("evaluate_continuously", 9.0)])
def test_evaluation_is_with_the_settings_of_the_run(way: str, value: bool | float, run_dir: Path) -> None:
    flags = [f"--{way.replace('_', '-')}", *([] if value is True else [str(value)]), f"--run-dir={run_dir}"]
    launch = {"run_dir": run_dir, "strategy": "auto", "profile": False, way: value}
    found = read_settings(Mine, flags)
    assert found == dataclasses.replace(WRITTEN, **launch, init_from=None)
    assert found.differences(WRITTEN.as_json()) == []
    # The metrics do not depend on it, and other replicas may need another one.
    found = read_settings(Mine, [*flags, "--evaluation-batch-size=9"])
    assert (found.evaluation_batch_size, found.differences(WRITTEN.as_json())) == (9, [])
    # A switch may be taken back; this and any other change is a difference.
    found = read_settings(Mine, [*flags, "--no-keep-last-batch", "--seed=1", "--strategy=tpu"])
    assert found.differences(WRITTEN.as_json()) == [
        "--seed 0 there and 1 now",
        "--keep-last-batch True there and False now",
    ]


def test_export_is_with_the_settings_of_the_run_as_if_it_were_resumed(run_dir: Path) -> None:
    found = read_settings(Mine, ["--export", f"--run-dir={run_dir}"])
    assert found == dataclasses.replace(WRITTEN, run_dir=run_dir, strategy="auto", profile=False, export=True)
    assert found.differences(WRITTEN.as_json()) == []
    # Neither a new run nor other weights have the settings of the run.
    for flags in (["--export", "--fresh"], ["--evaluate-only", "--init-from=other"]):
        assert read_settings(Mine, [*flags, f"--run-dir={run_dir}", "--data-dir=mine"]).training == "long"


def test_resumed_run_may_differ_in_what_is_marked_only(run_dir: Path) -> None:
    same = dataclasses.replace(WRITTEN, run_dir=run_dir, epochs=9, learning_rate=0.1, patience=1, training="longer")
    assert same.differences(WRITTEN.as_json()) == []
    other = dataclasses.replace(same, init_from=None, limit=2.0, evaluation_batch_size=9)
    assert other.differences(WRITTEN.as_json()) == [
        "--init-from weights.h5 there and None now",
        "--evaluation-batch-size 48 there and 9 now",
        "--limit None there and 2.0 now",
    ]
    recorded = {**WRITTEN.as_json(), "gone": 1}
    del recorded["seed"]
    assert same.differences(recorded) == ["--gone 1 there and no setting now", "--seed not recorded there and 0 now"]


# --- Settings from another run ----------------------------------------------------------------------------------------


def test_settings_from_a_run_or_file_are_defaults_and_flags_win(run_dir: Path, tmp_path: Path) -> None:
    found = read_settings(Mine, [f"--settings-from={run_dir}", "--seed=7", "--no-keep-last-batch"])
    # Launch settings are not copied.
    own = {"run_dir": Path("runs/default"), "settings_from": run_dir, "strategy": "auto", "profile": False}
    assert found == dataclasses.replace(WRITTEN, seed=7, keep_last_batch=False, init_from=None, **own)
    file = tmp_path / "mine.json"
    file.write_text('{"epochs": 5, "global_clipnorm": 0.25}', encoding="utf-8")
    found = read_settings(Config, [f"--settings-from={file}", "--global-clipnorm=1"])
    assert (found.epochs, found.global_clipnorm) == (5, 1.0)
    with pytest.raises(BadInput, match="cannot be combined with --export, --evaluate-only or"):
        read_settings(Config, [f"--settings-from={file}", "--export"])


DEFAULTS_REJECTED = {
    '{"epochs": 5, "dropout": 0.5, "depth": 3}': "this project has no setting depth, dropout, or it belongs",
    '{"run_dir": "runs/b"}': "no setting run_dir, or it belongs to a single launch: remove it",
    '{"epochs": 0}': "--epochs 0 must be from 1 to 2147483647",
    '{"epochs": "many"}': "mine.json: --epochs cannot be 'many': correct it there",
    '{"settings": []}': "mine.json contains no settings: restore it, or pass another run or file",
}


def test_settings_that_cannot_be_used_are_rejected(tmp_path: Path) -> None:
    for text, reason in DEFAULTS_REJECTED.items():
        (tmp_path / "mine.json").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput) as rejected:
            read_settings(Config, [f"--settings-from={tmp_path / 'mine.json'}"])
        assert reason in str(rejected.value)
    for text in ('{"settings"', "[]", "{}", '{"settings": {"seed": 1}, "starts": {}}', "[" * 100_000 + "]" * 100_000):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=r"config.json .*: restore (it|the file), or start a new run"):
            read_settings(Config, ["--evaluate-only", f"--run-dir={tmp_path}"])
    # In a file it would be an unknown setting.
    (tmp_path / "config.json").write_text('{"versions": {}}', encoding="utf-8")
    with pytest.raises(BadInput, match=r"--settings-from .*config.json contains no settings: restore it"):
        read_settings(Config, [f"--settings-from={tmp_path}"])
