"""sweep.py with a small program instead of train.py, and with train.py itself: killed, shared, pruned, failed."""

import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import optuna
import pytest
from processes import is_alive, until

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

from engine.trials import Trials

# Replaces train.py: a run has a row per epoch, whose score follows from its flags, and resumes after its last row. A
# file that is named as the run is makes it fail with that text. Every start is a line in "starts".
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
if pathlib.Path(run_dir.name).exists():
    if not pathlib.Path(run_dir.name).read_text():
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("ERROR: " + pathlib.Path(run_dir.name).read_text().replace("DIR", str(run_dir)))
run_dir.mkdir(parents=True, exist_ok=True)
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--parallel=0",), "ERROR: --parallel 0 must be at least 1\n"),
        (("--", "--monitor=validation/accuracy"), "needs --monitor-direction min or max: add it after --"),
        (("--", "--fresh"), "ERROR: each trial trains, and is resumed: remove --fresh, --check,"),
        (("--sweep-dir=file",), "ERROR: --sweep-dir file cannot be used (File exists): use another one"),
        (("--sweep-dir=lower", "--", "--monitor-direction=max"), "has scores to minimize, and"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Trials(Path("lower"), "min", "NopPruner")
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROJECT / "sweep.py"), run_name="__main__")
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


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
    for number, text in enumerate(("DIR: the loss is nan in step 1", "", "", ""), start=1):  # Three run out of memory.
        (project.folder / f"trial_{number:03}").write_text(text)
    out, err = project.run("--trials=9", "--", "--epochs=2", code=2)
    assert err == "ERROR: 3 trials in a row ended with: ended by SIGKILL\n"
    states = [(trial.state.name, trial.user_attrs.get("error")) for trial in project.trials()]
    nan = "ERROR: RUN_DIR: the loss is nan in step 1"
    assert states == [("COMPLETE", None), ("FAIL", nan), *[("FAIL", "ended by SIGKILL")] * 3]
    assert re.search(rf"(?m)^trial 1 +fail +{nan} \(best \d", out)
    # The cause is removed. The next trial runs, and the table has the failed ones, too.
    out, _ = project.run("--trials=6", "--", "--epochs=1")
    table = re.findall(r"(?m)^trial (\d+) +(\w+) +(\S+)", out.split("\n\n")[1])
    assert [state for _, state, _ in table] == ["complete"] * 2 + ["fail"] * 4
    # Whatever the arguments are now, the best trial is repeated with its own.
    assert table[0][0] == "0"
    assert re.search(r"again: python train\.py --epochs=2 --learning-rate=", out)


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
        project.run("--timeout=1", *flags, code=42)
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
