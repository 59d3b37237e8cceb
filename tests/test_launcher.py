"""launch.py with a small program instead of train.py: starts, ends, restarts, passes on, and leaves nothing."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_alive, until

from rendering import PROJECT

# Replaces train.py: it records its start, prints its name, and follows its arguments, as "worker0=42once" (at the first
# start only) or "all=2of3" (only of three workers).
PROGRAM = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
name, first = f"{config['task']['type']} {config['task']['index']}", True
with open(f"started-{name}", "a") as started:
    first = started.tell() == 0
    started.write(" ".join([*sys.argv[1:], os.environ["TRAINING_START_ID"]]) + "\\n")
open(f"pid-{os.getpid()}", "w").close()
with open(f"sees-{name}", "w") as seen:
    seen.write(os.environ.get("CUDA_VISIBLE_DEVICES", "what there is"))
for argument in sys.argv[1:]:
    who, _, what = argument.partition("=")
    what, _, workers = what.partition("of")
    if who not in (name.replace(" ", ""), "all") or (what.endswith("once") and not first):
        continue
    if workers and int(workers) != len(config["cluster"]["worker"]):
        continue
    what = what.removesuffix("once")
    if what == "save":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("saved"), sys.exit(42)))
    print("here is", name, flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({"wait": 60, "save": 60, "serve": 2, "late": 1}.get(what, 0))
    sys.exit({"serve": 0, "late": 1}.get(what) if what.isalpha() else int(what))
print("here is", name, *sys.argv[1:])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(PROJECT / "launch.py", tmp_path)
    (tmp_path / "engine/cluster").mkdir(parents=True)
    ground = ("__init__.py", "errors.py")
    for name in (*ground, "cluster/__init__.py", "cluster/environment.py", "cluster/launcher.py"):
        shutil.copy(PROJECT / "engine" / name, tmp_path / "engine" / name)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


@pytest.fixture
def launching(project: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def launch(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "launch.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=project, **pipes))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def launched(launching: Callable[..., subprocess.Popen]) -> Callable[..., tuple[int, str]]:
    """Runs launch.py to its end; returns its exit code, and what it printed."""

    def launch(*arguments: str) -> tuple[int, str]:
        process = launching(*arguments)
        out, err = process.communicate(timeout=50)
        return process.returncode, out + err

    return launch


def starts(project: Path, process: str) -> list[str]:
    return (project / f"started-{process}").read_text(encoding="utf-8").splitlines()


def alive(project: Path) -> list[int]:
    started = [int(path.name.removeprefix("pid-")) for path in project.glob("pid-*")]
    return [process for process in started if is_alive(process)]


def test_every_line_has_its_process_and_arguments_are_passed_on(launched: Callable) -> None:
    code, printed = launched("--workers=2", "--", "--epochs=5", "--run-dir", "x y")
    assert code == 0, printed
    assert sorted(printed.splitlines()) == [
        f"[worker {index}] here is worker {index} --epochs=5 --run-dir x y" for index in range(2)
    ]


def test_code_of_the_cause_is_returned_without_a_restart_that_fixes_nothing(launched: Callable, project: Path) -> None:
    code, printed = launched("--workers=2", "--", "worker1=kill", "worker0=wait")
    assert code == 128 + signal.SIGKILL
    assert "[launcher] worker 1 was ended by SIGKILL" in printed
    assert not alive(project)
    # One that is stopped before the rendezvous, where the other waits for it.
    assert launched("--workers=2", "--", "worker1=42", "worker0=save")[0] == 42
    for final in (2, 3):
        code, printed = launched("--workers=2", "--max-restarts=5", "--", f"all={final}")
        assert (code, "restarting" in printed) == (final, False)


def test_cluster_continues_without_lost_workers_down_to_the_minimum(launched: Callable) -> None:
    code, printed = launched(
        "--workers=4", "--min-workers=2", "--max-restarts=1", "--", "worker3=kill", "worker2=42", "worker0=0"
    )
    assert code == 0, printed
    announced = re.findall(r"(?m)^\[launcher\] .*(restarting|resuming with \d)", printed)
    assert announced == ["restarting", "resuming with 3", "resuming with 2"]
    assert launched("--workers=2", "--min-workers=2", "--", "worker1=1")[0] == 1
    # Three workers cannot share the batch, but two can. A first start that is rejected is final.
    code, printed = launched("--workers=4", "--min-workers=1", "--", "worker3=kill", "worker2=2of3")
    assert code == 0
    assert "[launcher] worker 3 is lost: resuming with 3 worker(s)" in printed
    assert "[launcher] 3 workers ended with 2: resuming with 2 worker(s)" in printed
    assert "resuming" not in launched("--workers=2", "--min-workers=1", "--", "all=2")[1]


def test_lost_worker_is_the_one_that_failed_or_does_not_end(launched: Callable, project: Path) -> None:
    """Not the first to end, which may have lost another one and ends with 43."""
    module = project / "engine/cluster/launcher.py"
    text = module.read_text(encoding="utf-8")
    assert "SECONDS_OF_THE_CAUSE = 20.0" in text
    module.write_text(text.replace("SECONDS_OF_THE_CAUSE = 20.0", "SECONDS_OF_THE_CAUSE = 2.0"), encoding="utf-8")
    assert launched("--workers=2", "--", "worker0=43", "worker1=late")[0] == 1
    code, printed = launched("--workers=2", "--min-workers=1", "--", "worker0=44of2", "worker1=waitof2")
    assert code == 0, printed
    assert "[launcher] worker 1 did not end within 2 s of the others\n[launcher] worker 1 is lost: resu" in printed
    # All say that another one is gone, as after a fault of the network.
    code, printed = launched("--workers=2", "--max-restarts=1", "--", "all=43")
    assert (code, printed.count("ended with 43: restarting")) == (43, 1)


def test_cluster_is_started_again_as_the_same_start(launched: Callable, project: Path) -> None:
    code, printed = launched("--workers=2", "--max-restarts=2", "--", "--fresh", "worker1=42once", "worker0=0")
    assert code == 0, printed
    assert printed.count("restarting (restarts left: ") == printed.count("restarting (restarts left: 1)") == 1
    # The same flags and the same id, by which the second start knows the run of the first one.
    first, second = starts(project, "worker 1")
    assert first == second
    assert first.startswith("--fresh ")
    # Another start has another id, and no more restarts than it is allowed.
    assert launched("--workers=2", "--max-restarts=1", "--", "--fresh", "all=42")[0] == 42
    *_, third, fourth = starts(project, "worker 0")
    assert third == fourth
    assert third.split()[-1] != first.split()[-1]


@pytest.mark.parametrize(
    ("processes", "saved", "arguments"),
    [
        (2, 2, ("--workers=2", "--max-restarts=5", "--", "all=save")),
        (1, 0, ("--workers=1", "--", "all=wait")),
        (3, 1, ("--workers=1", "--parameter-servers=1", "--", "chief0=save", "worker0=wait", "ps0=wait")),
    ],
    ids=["to all", "before they handle it", "to the chief"],
)
def test_signal_to_the_launcher_is_passed_on_and_starts_nothing(
    processes: int, saved: int, arguments: tuple[str, ...], launching: Callable, project: Path
) -> None:
    launcher = launching(*arguments)
    for _ in range(processes):
        launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 42
    assert launcher.stdout.read().count("] saved\n") == saved
    assert len(starts(project, "worker 0")) == 1
    assert not alive(project)


def test_no_process_outlives_a_killed_launcher(launching: Callable, project: Path) -> None:
    launcher = launching("--workers=3", "--", "all=wait")
    until(lambda: len(alive(project)) == 3, 20)
    launcher.kill()
    until(lambda: not alive(project), 10)


def test_beside_a_chief_a_dead_worker_is_started_again_alone_and_a_dead_server_with_all(
    launched: Callable, project: Path
) -> None:
    flags = ("--workers=2", "--parameter-servers=1", "--max-restarts=1", "--", "chief0=serve", "worker0=wait")
    code, printed = launched(*flags, "worker1=killonce", "worker1=1", "ps0=wait")
    assert code == 0, printed
    assert "worker 1 was ended by SIGKILL: restarting (restarts left: 0)" in printed
    assert "worker 1 ended with exit code 1: the others continue" in printed
    assert [len(starts(project, name)) for name in ("worker 1", "chief 0")] == [2, 1]
    assert starts(project, "chief 0")[0].startswith("--strategy=parameter_server ")
    (project / "started-ps 0").unlink()
    code, printed = launched(*flags, "worker1=wait", "ps0=killonce", "ps0=wait")
    assert code == 0, printed
    assert "[launcher] ended with 137: restarting (restarts left: 0)" in printed
    assert [len(starts(project, name)) for name in ("ps 0", "chief 0")] == [2, 3]


def test_bad_numbers_are_refused(launched: Callable) -> None:
    for arguments, reason in (
        (("--workers=0",), "--workers 0 must be from 1 to 1000"),
        (("--workers=99999999",), "--workers 99999999 must be from 1 to 1000"),
        (("--workers=2", "--min-workers=3"), "--min-workers 3 must be from 1 to the number of --workers"),
        (("--workers=2", "--epochs", "5"), "unrecognized arguments: --epochs"),
    ):
        code, printed = launched(*arguments)
        assert code == 2
        assert reason in printed


def test_workers_share_the_gpus_and_nobody_else_gets_one(
    launched: Callable, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ("--parameter-servers=1", "--", "chief0=late", "worker0=wait", "worker1=wait", "ps0=wait")
    for visible, arguments, expected in (
        ("2, GPU-a,1,0,-1,7", (), {"worker 0": "2,GPU-a", "worker 1": "1,0"}),
        ("0,1", served, {"chief 0": "-1", "worker 0": "0", "worker 1": "1", "ps 0": "-1"}),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launched("--workers=2", *arguments)
        seen = {path.name.removeprefix("sees-"): path.read_text(encoding="utf-8") for path in project.glob("sees-*")}
        assert seen == expected


def test_child_of_a_process_that_outlives_it_is_ended_too(launched: Callable, project: Path) -> None:
    leaves_a_child = "import subprocess\nprint('pid', subprocess.Popen(['sleep', '45']).pid)\n"
    (project / "train.py").write_text(leaves_a_child, encoding="utf-8")
    code, printed = launched("--workers=1", "--")
    assert code == 0
    (project / f"pid-{printed.split()[-1]}").touch()
    until(lambda: not alive(project), 10)
