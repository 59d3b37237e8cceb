"""sweep.py with a small program instead of train.py, and with train.py itself: killed, shared, pruned, failed."""

import importlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import optuna
import pytest
from processes import is_alive, until

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

from engine.trials import Trials, _failure

# Replaces train.py: a run has a row per epoch, whose score follows from its flags, and resumes after its last row. A
# file that is named as the run is has Python code that it executes first. Every start is a line in "starts".
PROGRAM = """
import json, math, os, pathlib, signal, sys, time
import filelock
if sys.argv[1] == "--compare":
    pathlib.Path("compared").write_text(" ".join(sys.argv[2:]))
    sys.exit()
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
run_dir = pathlib.Path(flags["run-dir"])
with open("starts", "a") as starts:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "what there is")
    starts.write(json.dumps([os.getpid(), os.getppid(), run_dir.name, visible, sys.argv[1:]]) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
run_dir.mkdir(parents=True, exist_ok=True)
def end(code, text):
    print(text.replace("DIR", str(run_dir)), file=sys.stderr, flush=True)
    sys.exit(code)
if pathlib.Path(run_dir.name).exists():
    exec(pathlib.Path(run_dir.name).read_text())
try:
    lock = filelock.FileLock(run_dir / ".lock")
    lock.acquire(timeout=0)
except filelock.Timeout:
    print(f"ERROR: --run-dir {run_dir} is in use by another run: wait, or use another one")
    sys.exit(2)
rows, epochs = run_dir / "metrics.csv", int(flags.get("epochs", 4))
if not rows.exists():
    rows.write_text("epoch,validation/loss\\n")
scores = [(math.log10(float(flags["learning-rate"])) + 2.5) ** 2 + 1 / epoch for epoch in range(1, epochs + 1)]
for epoch in range(len(rows.read_text().splitlines()), epochs + 1):
    time.sleep(SECONDS)
    with rows.open("a") as file:
        file.write(f"{epoch},{scores[epoch - 1]}\\n")
(run_dir / "result.json").write_text(json.dumps({"best_validation/loss": min(scores)}))
"""


class Project:
    """A folder with sweep.py and what it needs."""

    def __init__(self, folder: Path, seconds: float = 0.05) -> None:
        """`seconds` is the time that the small program takes for an epoch; 0 is for train.py itself."""
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "starters", "runs", ".*_cache")
        shutil.copytree(PROJECT, folder, ignore=ignored)
        self.started: list[subprocess.Popen] = []
        if seconds:
            (folder / "train.py").write_text(PROGRAM.replace("SECONDS", str(seconds)), encoding="utf-8")
            code = (folder / "sweep.py").read_text(encoding="utf-8")
            quick = re.sub("(?m)^SECONDS_BETWEEN_ATTEMPTS = 10$", "SECONDS_BETWEEN_ATTEMPTS = 0.5", code)
            assert quick != code
            (folder / "sweep.py").write_text(quick, encoding="utf-8")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "sweep.py", *arguments]
        environment = {**os.environ, **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env=environment, **pipes))
        return self.started[-1]

    def run(self, *arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
        """Runs sweep.py to its end; returns its output. Fails unless it ends with `code`."""
        out, err = self.start(*arguments, **environment).communicate(timeout=400)
        assert self.started[-1].returncode == code, (out, err)
        return out, err

    def starts(self) -> list[tuple[int, int, str, str, list[str]]]:
        """Returns the process, its parent, the run, the visible GPUs and the arguments of each start."""
        file = self.folder / "starts"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def trials(self, sweep_dir: str = "runs/sweep") -> list[optuna.trial.FrozenTrial]:
        backend = optuna.storages.journal.JournalFileBackend(str(self.folder / sweep_dir / "journal.log"))
        return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend)).trials


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def create(name: str = "project", **options: Any) -> Project:
        made.append(Project(tmp_path / name, **options))
        return made[-1]

    yield create
    for project in made:
        for process in project.started:
            process.kill()
            process.communicate()


def outcomes(trials: list[optuna.trial.FrozenTrial]) -> list[tuple]:
    return [(each.number, each.state.name, each.params, each.value, each.intermediate_values) for each in trials]


def test_without_optuna_the_error_names_the_extra(make: Callable[..., Project], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['optuna'] = None\n", encoding="utf-8")
    ended = make().run(code=2, PYTHONPATH=str(tmp_path))
    assert ended == ("", 'ERROR: Optuna is not installed: pip install -e ".[sweep]"\n')


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., tuple[int, str]]:
    """Runs sweep.py in this process, with some `space`; returns its exit code and what it prints on stderr."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("sweep")

    def run(*arguments: str, space: Callable | None = None) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
        monkeypatch.setattr(module, "space", space or module.space)
        with pytest.raises(SystemExit) as ended:
            module.main()
        return ended.value.code, capsys.readouterr().err

    return run


HEAD = '{"op_code":0,"worker_id":"a","study_name":"sweep","directions":[1]}\n'
EACH = "each trial trains in a directory of its own, and is resumed: remove --help, --run-dir, --fresh, --check, "
TRIAL = '{"op_code":4,"worker_id":"a","study_id":0,"datetime_start":"2026-01-01T00:00:00+00:00"}\n'


@pytest.mark.parametrize(
    ("arguments", "journal", "line"),
    [
        ("--epochs=5", None, "ERROR: --epochs=5 is not a flag of sweep.py: pass the arguments of train.py after --\n"),
        ("--parallel=0", None, "ERROR: --parallel 0 must be from 1 to 1000\n"),
        ("--trials=-1", None, "ERROR: --trials -1 must be from 0 to 1000000\n"),
        ("--timeout=nan", None, "ERROR: --timeout nan must be from 0 to inf\n"),
        ("-- --monitor=validation/accuracy", None, "needs --monitor-direction min or max: add it after --\n"),
        ("-- --fresh", None, EACH),
        ("-- --help", None, EACH),
        ("-- --run-dir=x", None, EACH),
        ("--sweep-dir=file", None, "ERROR: --sweep-dir file cannot be used (File exists): use another one\n"),
        ("--sweep-dir=~/x", None, "ERROR: --sweep-dir ~/x starts with ~, which only a shell expands: pass /"),
        ("--sweep-dir=gs://x", None, "ERROR: --sweep-dir gs://x is a bucket URL, not a local path"),
        ("-- --monitor-direction=max", HEAD, "ERROR: --sweep-dir s has no sweep with --monitor-direction max"),
        ("", "1 is mine\n2 is h", "ERROR: --sweep-dir s has no sweep with --monitor-direction min: use another\n"),
        (
            "",
            HEAD.replace("sweep", "other"),
            "ERROR: --sweep-dir s has no sweep with --monitor-direction min: use another\n",
        ),
        ("", HEAD + "x\n" + TRIAL, "ERROR: s/journal.log is damaged (JSONDecodeError: Expecting value:"),
        ("", f"{HEAD}{'[' * 99999}\n{TRIAL}", "ERROR: s/journal.log is damaged (RecursionError: "),
        ("", HEAD + TRIAL.replace("study_id", "study"), "ERROR: s/journal.log is damaged (KeyError: "),
        (
            "",
            HEAD.replace("[1]", "[1,1]"),
            "ERROR: --sweep-dir s has no sweep with --monitor-direction min: use another\n",
        ),
        ("", HEAD + TRIAL, "ERROR: --sweep-dir s: trial 0 is not of sweep.py: use another one\n"),
    ],
)
def test_bad_input_is_one_line(arguments: str, journal: str | None, line: str, sweep: Callable) -> None:
    Path("file").touch()
    if journal is not None:
        Path("s").mkdir()
        Path("s/journal.log").write_text(journal, encoding="utf-8")
        arguments = f"--sweep-dir=s {arguments}"
    code, err = sweep(*arguments.split())
    assert line in err
    assert (code, err.count("\n")) == (2, 1)
    if journal is not None:  # Optuna adds a line when it opens a study.
        assert Path("s/journal.log").read_text(encoding="utf-8").startswith(journal)
        assert not journal.startswith("1") or Path("s/journal.log").read_text(encoding="utf-8") == journal


def test_cluster_or_folders_of_other_trials_are_refused(sweep: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    with monkeypatch.context() as context:
        context.setenv("TF_CONFIG", json.dumps(cluster))
        line = "ERROR: sweep.py is for one process, but TF_CONFIG describes a cluster: start it elsewhere\n"
        assert sweep() == (2, line)
    Path("s/trial_000").mkdir(parents=True)
    code, err = sweep("--sweep-dir=s")
    assert (
        code,
        err.startswith("ERROR: --sweep-dir s has no sweep with --monitor-direction min: use another\n"),
    ) == (2, True)
    Path("s/journal.log").write_text(HEAD, encoding="utf-8")
    line = "ERROR: s/trial_000 belongs to no trial: move it away, or use another --sweep-dir\n"
    assert sweep("--sweep-dir=s") == (2, line)


def fails(trial: optuna.Trial) -> list[str]:
    raise LookupError("no such table")


def changed(trial: optuna.Trial) -> list[str]:
    return [f"--epochs={trial.suggest_categorical('epochs', [1, 3])}"]


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (
            lambda trial: None,
            "it returned None, and not a list of texts, such as ['--learning-rate=0.01']; after a change",
        ),
        (lambda trial: "--learning-rate=0.1", "it returned '--learning-rate=0.1', and not a list of texts"),
        (lambda trial: ["--learning-rate", 0.1], "it returned ['--learning-rate', 0.1], and not a list of texts"),
        (lambda trial: ["--init-from=a\0b"], "--init-from a\0b must be text in UTF-8 without null characters;"),
        (lambda trial: ["--learning-rate=-1"], "--learning-rate -1.0 must be a positive number of float32"),
        (lambda trial: ["--momentum=1"], "Unrecognized options: --momentum"),
        (lambda trial: ["--check"], EACH),
        (lambda trial: ["--help"], EACH),
        (lambda trial: sys.exit(0), "SystemExit: 0;"),
        (lambda trial: [str(trial.suggest_categorical("path", [Path("a")]))], "TypeError: Object of type PosixPath"),
        (lambda trial: [str(trial.suggest_categorical("pair", [(1, 2)]))], "CategoricalDistribution does not support"),
        (fails, "LookupError: no such table;"),
        (
            changed,
            "ValueError: CategoricalDistribution does not support dynamic value space; after a change of",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
def test_space_is_checked_before_a_trial_is_recorded(space: Callable, line: str, sweep: Callable) -> None:
    epochs = optuna.distributions.CategoricalDistribution([1, 2])
    first = {"params": {"epochs": 1}, "distributions": {"epochs": epochs}, "user_attrs": {"flags": [], "arguments": []}}
    Trials(Path("runs/sweep"), "min", "NopPruner")._study.add_trial(optuna.create_trial(value=1.0, **first))
    before = Path("runs/sweep/journal.log").read_bytes().count(b'"op_code":4')
    code, err = sweep(space=space)
    assert err.startswith("ERROR: space in sweep.py: ")
    assert line in err
    assert (code, err.count("\n"), before) == (2, 1, 1)
    assert Path("runs/sweep/journal.log").read_bytes().count(b'"op_code":4') == 1


def test_slashes_and_spaces_reach_train_as_they_are_and_trials_share_the_gpus(make: Callable[..., Project]) -> None:
    project = make()
    choices = "trial.suggest_categorical('head/init from', ['runs/a b/c'])"
    space = f"return ['--learning-rate=0.01', '--init-from=' + {choices}]"
    code = (project.folder / "sweep.py").read_text(encoding="utf-8")
    code = re.sub(r"# TODO\(you\)", lambda found: f"{space}\n    {found[0]}", code, count=1)
    (project.folder / "sweep.py").write_text(code, encoding="utf-8")
    flags = ("--trials=3", "--parallel=3", "--sweep-dir=my sweeps/a/b", "--", "--epochs=2", "--seed", "3")
    out, _ = project.run(*flags, CUDA_VISIBLE_DEVICES="4,5")
    starts = sorted(project.starts(), key=lambda start: start[2])
    for number, (_, _, name, _, arguments) in enumerate(starts):
        assert name == f"trial_{number:03}"
        run_dir = f"--run-dir=my sweeps/a/b/{name}"
        assert arguments == ["--epochs=2", "--seed", "3", "--learning-rate=0.01", "--init-from=runs/a b/c", run_dir]
    assert sorted(visible for _, _, _, visible, _ in starts) == ["4", "4", "5"]
    assert [trial.params for trial in project.trials("my sweeps/a/b")] == [{"head/init from": "runs/a b/c"}] * 3
    best = "python train.py --epochs=2 --seed 3 --learning-rate=0.01 '--init-from=runs/a b/c' --run-dir=runs/best"
    assert f"again: {best}\n" in out
    assert (project.folder / "my sweeps/a/b/compared").read_text() == "trial_000 trial_001 trial_002"


def test_failed_trial_is_recorded_and_three_alike_end_the_sweep(make: Callable[..., Project]) -> None:
    project = make()
    diverged = "end(3, 'ERROR: DIR: the loss is nan in step 1')"
    # Three trials diverge in a row, which is no reason to end the sweep; three fail alike, but for their values.
    alike = "end(2, 'ERROR: task.py:12 step: ' + flags['learning-rate'] + ' is odd')"
    for number, text in enumerate((*[diverged] * 3, *[alike] * 3), start=1):
        (project.folder / f"trial_{number:03}").write_text(text)
    out, err = project.run("--trials=9", "--", "--epochs=2", code=2)
    assert re.fullmatch(r"ERROR: 3 trials in a row ended with: task.py:12 step: [\d.]+ is odd\n", err)
    states = [(trial.state.name, trial.user_attrs.get("error")) for trial in project.trials()]
    nan = "RUN_DIR: the loss is nan in step 1"
    assert states[:4] == [("COMPLETE", None), *[("FAIL", nan)] * 3]
    assert [state for state, _ in states[4:]] == ["FAIL"] * 3
    assert re.search(rf"(?m)^trial 1 +fail +{nan} \(best \d", out)
    # The cause is removed. The next trial runs, and the table has the failed ones, too.
    out, _ = project.run("--trials=8", "--", "--epochs=1")
    table = re.findall(r"(?m)^trial (\d+) +(\w+) +(\S+)", out.split("\n\n")[1])
    assert [state for _, state, _ in table] == ["complete"] * 2 + ["fail"] * 6
    # Whatever the arguments are now, the best trial is repeated with its own.
    assert table[0][0] == "0"
    assert re.search(r"again: python train\.py --epochs=2 --learning-rate=", out)


def test_values_of_a_trial_are_left_out_of_its_error_as_words_only() -> None:
    distribution = optuna.distributions.CategoricalDistribution(["x", "e"])
    errors = [
        _failure(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL,
                params={"data": value},
                distributions={"data": distribution},
                user_attrs={"error": f"the text {value} does not exist in 0.5"},
            ),
            with_values=False,
        )
        for value in ("x", "e")
    ]
    assert errors == ["the text  does not exist in "] * 2


def test_ending_that_is_not_the_trials_releases_it(make: Callable[..., Project]) -> None:
    project = make()
    first = project.folder / "trial_000"
    flags = ("--trials=3", "--pruner=none", "--", "--epochs=1")
    first.write_text("end(1, 'ERROR: DIR/x cannot be written (No space left on device): free disk space')")
    _, err = project.run(*flags, code=1)
    cause = "RUN_DIR/x cannot be written (No space left on device): free disk space"
    assert err == f"ERROR: runs/sweep/trial_000 ended with: {cause}; then start the same sweep again\n"
    first.write_text("os._exit(44)")  # The log is on a full disk, too, and the line above is of another start.
    _, err = project.run(*flags, code=44)
    assert err == "ERROR: runs/sweep/trial_000 ended with: exit code 44; then start the same sweep again\n"
    assert [trial.state.name for trial in project.trials()] == ["RUNNING"]
    # A signal stops it, and then a file is damaged.
    first.write_text(
        "rows = run_dir / 'metrics.csv'\n"
        "rows.touch() if not rows.exists() else rows.write_text('epoch,validation/loss\\nx,y\\n')\n"
        "end(42, 'saved')"
    )
    process = project.start(*flags)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert out.startswith("trial 0 is tried again in 0.5 s: saved (")
    damaged = (
        "runs/sweep/trial_000/metrics.csv is damaged: restore it, or remove runs/sweep/trial_000 to start its run over"
    )
    assert err == f"ERROR: {damaged}\n"
    shutil.rmtree(project.folder / "runs/sweep/trial_000")
    # Unexpected errors and results without a score are the trial's own.
    first.write_text("raise RuntimeError('out of memory')")
    (project.folder / "trial_001").write_text("sys.exit()")
    (project.folder / "trial_002").write_text(
        "(run_dir / 'result.json').write_text('{\"best_validation/loss\": NaN}'); sys.exit()"
    )
    out, err = project.run(*flags, code=2)
    assert err == "ERROR: no trial has completed: correct the causes in the table, then use another --sweep-dir\n"
    score = "its best score in result.json is"
    errors = [trial.user_attrs["error"] for trial in project.trials()]
    assert errors == ["unexpected RuntimeError: out of memory", f"{score} None", f"{score} nan"]
    assert re.findall(r"(?m)^trial (\d) +fail", out.split("\n\n")[1]) == ["0", "1", "2"]


def test_signals_pipes_and_full_disks_end_it_with_a_line(make: Callable[..., Project]) -> None:
    project = make()
    (project.folder / "trial_000").write_text(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path('ignores').touch(); time.sleep(60)"
    )
    process = project.start("--trials=1")
    until((project.folder / "ignores").exists, 100)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline().startswith("SIGTERM: the running steps end, then the program; a second signal")
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    until(lambda: not is_alive(project.starts()[0][0]), 10)
    assert process.stderr.read() == ""

    (project.folder / "trial_000").unlink()
    process = project.start("--trials=2", "--pruner=none", "--", "--epochs=1")
    process.stdout.close()  # As of "| head -1".
    assert (process.wait(100), process.stderr.read()) == (0, "")

    command = ["bash", "-c", f"ulimit -f 1; exec {sys.executable} sweep.py --sweep-dir runs/full -- --epochs=30"]
    ended = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=100, check=False)
    line = "ERROR: runs/full cannot be written (File too large): free disk space, then start the same command "
    assert (ended.returncode, ended.stderr) == (1, f"{line}again\n")

    config = project.folder / "config.py"
    config.write_text("import pathlib, time; pathlib.Path('importing').touch(); time.sleep(60)", encoding="utf-8")
    process = project.start()
    until((project.folder / "importing").exists, 100)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert process.stderr.read() == "stopped by SIGINT; nothing was lost: start the same command again\n"


def test_half_a_line_of_another_program_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "journal.log").touch()  # As of a program that was killed before it wrote its first line.
    trials = Trials(tmp_path, "min", "NopPruner")
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    trial = trials.take(lambda trial: [], lambda words, run_dir: None, 1, [])
    assert trial is not None
    trials.end(trial, 1.0)
    assert [trial.value for trial in Trials(tmp_path, "min", "NopPruner").ranked()] == [1.0]


@pytest.mark.long
def test_sweep_that_is_killed_ends_as_one_left_alone(make: Callable[..., Project]) -> None:
    """The trials and scores, and what was pruned when, are the same; no train.py outlives a kill."""
    alone, killed = make("alone"), make("killed")
    flags = ("--trials=6", "--", "--epochs=5")
    left_alone = alone.start(*flags)
    for count in (1, 3):
        process = killed.start(*flags)
        until(lambda count=count: len(killed.starts()) > count, 100)
        process.kill()
        process.wait()
        until(lambda: not any(is_alive(pid) for pid, *_ in killed.starts()), 100)
    # As a full disk cuts the study.
    with (killed.folder / "runs/sweep/journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    out, _ = killed.run(*flags)
    left_alone.communicate(timeout=300)
    trials = killed.trials()
    assert outcomes(trials) == outcomes(alone.trials())
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}
    assert len({trial.params["learning_rate"] for trial in trials}) == 6
    assert len(alone.starts()) == 6 < len(killed.starts())
    best = min((trial for trial in trials if trial.state.name == "COMPLETE"), key=lambda trial: trial.value)
    assert best.value == pytest.approx((math.log10(best.params["learning_rate"]) + 2.5) ** 2 + 1 / 5)
    assert f"again: python train.py --epochs=5 --learning-rate={best.params['learning_rate']} " in out


@pytest.mark.long
def test_programs_share_the_trials_and_take_over_from_a_killed_one(make: Callable[..., Project]) -> None:
    project = make(seconds=0.2)
    flags = ("--trials=5", "--pruner=none", "--", "--epochs=4")
    first, second = project.start(*flags), project.start(*flags)
    until(lambda: sum(parent == first.pid for _, parent, *_ in project.starts()) == 2, 100)
    first.kill()  # In its second trial, which takes almost a second.
    first.wait()
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    names = [name for _, _, name, *_ in project.starts()]
    # Only the trial that the killed program was in is started twice.
    assert sorted(set(names)) == [f"trial_{number:03}" for number in range(5)]
    assert len(names) == 6
    assert all(trial.state.name == "COMPLETE" for trial in project.trials())


def test_stopped_sweep_ends_with_42_and_continues_when_nobody_uses_the_run(make: Callable[..., Project]) -> None:
    """Where a run is in use, train.py ends with 2, as with bad input. A text of the engine tells them apart."""
    text = "is in use by another run"
    assert text in (PROJECT / "engine/run/directory.py").read_text(encoding="utf-8")
    assert text in (PROJECT / "sweep.py").read_text(encoding="utf-8")
    project = make(seconds=0.3)
    flags = ("--trials=1", "--", "--epochs=4")
    process = project.start(*flags)
    metrics = project.folder / "runs/sweep/trial_000/metrics.csv"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, 100)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 42, err
    assert err.startswith("The sweep was stopped; to continue, start the same command again")
    with filelock.FileLock(project.folder / "runs/sweep/trial_000/.lock"):
        out, _ = project.run("--timeout=2", *flags, code=42)
        assert 1 < out.count("trial 0 is tried again in 0.5 s: --run-dir RUN_DIR is in use by another run") < 6
        assert [trial.state.name for trial in project.trials()] == ["RUNNING"]
    project.run(*flags)
    assert [len(trial.intermediate_values) for trial in project.trials()] == [4]


def test_pruners_are_those_of_optuna() -> None:
    names = runpy.run_path(str(PROJECT / "sweep.py"))["PRUNERS"].values()
    assert all(issubclass(getattr(optuna.pruners, name), optuna.pruners.BasePruner) for name in names)


@pytest.mark.long
def test_killed_sweep_of_real_runs_ends_bit_equal(make: Callable[..., Project]) -> None:
    alone, killed = make("alone", seconds=0), make("killed", seconds=0)
    flags = ("--trials=1", "--", "--epochs=2", "--limit-steps=10", "--checkpoint-every-steps=5")
    printed, _ = alone.run(*flags)
    process = killed.start(*flags)
    until(lambda: list(killed.folder.glob("runs/sweep/trial_000/checkpoints/step*")), 200)
    assert process.poll() is None
    process.kill()
    process.wait()
    killed.run(*flags)
    assert outcomes(killed.trials()) == outcomes(alone.trials())
    names = [project.folder / "runs/sweep/trial_000/result.json" for project in (alone, killed)]
    one, other = (json.loads(name.read_text(encoding="utf-8"))["weights_sha256"] for name in names)
    assert one == other
    assert re.search(r"(?m)^state +finished *$", printed)
