"""The console: lines of epochs, the live line, the panel at the end, and the table of --check."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import engine.console
from config import Config
from engine import console as live
from engine.check.command import print_checks
from engine.check.comparison import Check
from engine.console import LiveLine, print_result
from engine.model.metrics import ResultNames
from engine.report.report import Report

MODULES = ("engine.console", "engine.check.command", "engine.report.report")


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


Output = Callable[[], str]
Make = Callable[..., Output]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Gives all modules a console of a width: a terminal or not. Returns what reads its output."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)

    def make(width: int | None = None, *, terminal: bool = True, **environment: str) -> Output:
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        file = Terminal() if terminal else io.StringIO()
        made = type(engine.console.console)(
            soft_wrap=True, highlight=False, markup=False, force_jupyter=False, width=width, file=file
        )
        for module in MODULES:
            monkeypatch.setattr(f"{module}.console", made)
        return file.getvalue

    return make


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)


# --- Lines of epochs --------------------------------------------------------------------------------------------------


def line_report(run_dir: Path, monitor: str) -> Report:
    names = ResultNames({"train": {}, "validation": {}}, ["train", "validation"])
    names.arrays = {f"validation/f1/{index}": "validation/f1" for index in range(3)}
    return Report(Config(run_dir=run_dir, monitor=monitor), names, "min", {"epochs": 0, "validation": 0, "step": 0}, [])


def test_epoch_line_groups_the_datasets_and_explains_them_once(console: Make, tmp_path: Path) -> None:
    output = console(80)
    report = line_report(tmp_path, "validation/loss")
    numbers = {"train/loss": 1.98524, "validation/loss": 0.97771, "train/accuracy": 0.25, "validation/accuracy": 1.0}
    for epoch, is_best in ((1, True), (2, False)):
        report._print(f"epoch {epoch}/9", numbers, "0.3 s", "  5,244 examples/s", is_best=is_best)
    shown = plain(output()).splitlines()
    assert shown == [
        "Each metric as train / validation",
        "epoch 1/9  loss  1.985 / 0.9777  accuracy 0.2500 /  1.000  0.3 s    5,244 examples/s  best",
        "epoch 2/9  loss  1.985 / 0.9777  accuracy 0.2500 /  1.000  0.3 s    5,244 examples/s",
    ]
    assert re.search(r"\x1b\[1;32m *best", output())


def test_monitored_result_and_losses_come_before_what_does_not_fit(console: Make, tmp_path: Path) -> None:
    output = console(120)
    scores = {f"validation/f1/{index}": index / 4 for index in range(3)}
    numbers = {f"train/metric_{letter}": 0.125 for letter in "abcdef"}
    shown = {**numbers, "train/d_loss": 3.0, "validation/d_loss": 4.0, **scores}
    line_report(tmp_path, "validation/f1/2")._print("epoch 1/9", shown, is_best=False)
    assert plain(output()).splitlines() == [
        "Each metric as train / validation",
        "epoch 1/9  f1/2      - / 0.5000  d_loss  3.000 /  4.000  metric_a 0.1250 /      -",
    ]


# --- The live line ----------------------------------------------------------------------------------------------------


def test_live_line_shows_the_pass_fits_and_is_gone_before_an_error(
    console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS_BETWEEN_REFRESHES", -1.0)
    output = console(120)
    line = LiveLine(epochs=3)
    with pytest.raises(RuntimeError), contextlib.closing(line):
        line.begin("train", 0, done=0, steps=4000)
        for loss in (1.0, 2.0, 6.0):
            line.took(np.full(1000, loss), 1000)
        raise RuntimeError("a hook failed")
    shown = plain(output()).replace("\r", "\n").splitlines()
    assert any("epoch 1/3  train  0 %  0/4,000" in each for each in shown)
    assert all(len(each) < 120 for each in shown)
    last = next(each for each in shown if "3,000/4,000" in each)
    assert re.search(r"train  75 %  3,000/4,000 steps  00:00 left  \S+ steps/s  loss 3.000$", last)
    # The last thing on the screen is an erased line.
    assert output().endswith("\x1b[2K")
    assert "\x1b[?25l" not in output()  # The cursor stays.


def test_without_a_terminal_a_long_pass_prints_lines(console: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    output = console(terminal=False, FORCE_COLOR="1")
    line = LiveLine(epochs=3)
    with contextlib.closing(line):
        line.begin("test", 0, done=0, steps=100)
        line.took(np.ones(10), 10)
        assert output() == ""  # It has not been minutes.
        monkeypatch.setattr(live, "SECONDS_BETWEEN_LINES", -1.0)
        line.took(np.full(10, 2.0), 10)
        line.took(np.ones(80), 80)
    assert re.fullmatch(r"test  20 %  20/100 steps  \S+ left  \S+ steps/s  loss 1.500\n", output())


# --- Panels and tables ------------------------------------------------------------------------------------------------


def test_panel_has_the_test_the_files_and_what_to_type(console: Make) -> None:
    result = {"test/[b]f1": 0.25, "test/f1/0": 0.1, "epochs": 3, "step": 1234, "best_epoch": 2, "seconds": 3723.4}
    result |= {"best_validation/loss": 0.70243394, "weights_sha256": "0123456789abcdef" * 4}
    result["goodput"] = {"fraction": 0.75, "starts": 2, "seconds": {"training": 30.0, "saving": 10.0}}
    output = console(80)
    print_result(result, Config(run_dir=Path("runs/a b")))
    shown = plain(output())
    assert all(len(line) <= 80 for line in shown.splitlines())
    for name, value in (
        ("test/[b]f1", "0.2500"),
        ("best epoch", "2 of 3, validation/loss 0.7024"),
        ("trained", "1,234 steps in 1:02:03"),
        ("goodput", "75 % of 40.0 s in 2 starts were training steps that count"),
        ("next: export", "python train.py --export --run-dir 'runs/a b'"),
        ("next: curves", "tensorboard --logdir runs"),
    ):
        assert re.search(rf"│ {re.escape(name)} +{re.escape(value)} +│", shown), name
    output = console(terminal=False)
    result["goodput"]["starts"] = 1
    print_result(result, Config(export=True))
    assert "0123456789abcdef" * 4 in output()
    assert "\x1b" not in output()
    assert "train.py --export" not in output()
    assert "goodput" not in output()


def test_table_of_checks_wraps_its_texts_in_a_terminal_only(console: Make) -> None:
    good, bad = "the same gradients " * 5, "[red]not a style[/red]"
    not_compared = Check(True, "settings", "no reason", compared=False)
    checks = [Check(True, "task.py train_step", good), Check(False, "task.py compute_loss", bad)]
    output = console(80)
    print_checks(checks)
    shown = [line.rstrip() for line in plain(output()).splitlines()]
    assert all(len(line) <= 80 for line in shown)
    assert shown[-2:] == [f"FAIL  task.py compute_loss  {bad}", "1 of 2 checks failed"]
    output = console(terminal=False)
    print_checks(checks)
    assert output().splitlines()[0] == f"ok    task.py train_step    {good}"
    output = console(terminal=False)
    print_checks([checks[0], checks[0], not_compared])
    assert output().splitlines()[2:] == [
        "not compared  settings            no reason",
        "2 checks passed, 1 not compared",
    ]
    output = console(80)
    print_checks([*checks, not_compared])
    assert plain(output()).splitlines()[-1] == "1 of 3 checks failed, 1 not compared"
