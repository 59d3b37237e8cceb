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

# Replaces train.py: it prints its name, records that it was started, and follows its arguments.
PROGRAM = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name, first = f"{task['type']} {task['index']}", True
with open(f"started-{task['type']}-{task['index']}", "a") as started:
    first = started.tell() == 0
    started.write(" ".join([*sys.argv[1:], os.environ["TRAINING_START_ID"]]) + "\\n")
open(f"pid-{os.getpid()}", "w").close()
with open(f"sees-{name}", "w") as seen:
    seen.write(os.environ.get("CUDA_VISIBLE_DEVICES", "what there is"))
print("here is", name, *sys.argv[1:])
for argument in sys.argv[1:]:
    who, _, what = argument.partition("=")
    if who not in (name.replace(" ", ""), "all") or (what.endswith("once") and not first):
        continue
    what = what.removesuffix("once")
    what, _, workers = what.partition("of")
    if workers and int(workers) != len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]):
        continue
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "wait":
        time.sleep(60)
    elif what == "serve":
        time.sleep(2)
    elif what == "late":
        time.sleep(1)
        sys.exit(1)
    elif what == "save":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        print("waiting", flush=True)
        time.sleep(60)
    else:
        sys.exit(int(what))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(PROJECT / "launch.py", tmp_path)
    (tmp_path / "engine/cluster").mkdir(parents=True)
    ground = ("__init__.py", "errors.py", "quiet_start.py")
    for name in (*ground, "cluster/__init__.py", "cluster/environment.py", "cluster/launcher.py", "cluster/nvidia.py"):
        shutil.copy(PROJECT / "engine" / name, tmp_path / "engine" / name)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


@pytest.fixture
def launched(project: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "launch.py", *arguments]
        return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=50, check=False)

    return launch


@pytest.fixture
def launching(project: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def launch(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "launch.py", *arguments]
        started.append(subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def starts(project: Path, process: str) -> list[str]:
    return (project / f"started-{process}").read_text(encoding="utf-8").splitlines()


def alive(project: Path) -> list[int]:
    started = [int(path.name.removeprefix("pid-")) for path in project.glob("pid-*")]
    return [process for process in started if is_alive(process)]


def test_every_line_has_its_process_and_arguments_are_passed_on(launched: Callable, project: Path) -> None:
    done = launched("--workers=3", "--", "--epochs=5", "--run-dir", "x y")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {index}] here is worker {index} --epochs=5 --run-dir x y" for index in range(3)
    ]
    assert not alive(project)


def test_code_of_the_cause_is_returned_without_a_restart_that_fixes_nothing(launched: Callable, project: Path) -> None:
    done = launched("--workers=2", "--", "worker1=kill", "worker0=wait")
    assert done.returncode == 128 + signal.SIGKILL
    assert "[launcher] worker 1 was ended by SIGKILL" in done.stdout
    assert not alive(project)
    for code in (2, 3):
        done = launched("--workers=2", "--max-restarts=5", "--", f"all={code}")
        assert (done.returncode, "restarting" in done.stdout) == (code, False)


def test_cluster_continues_without_lost_workers_down_to_the_minimum(launched: Callable, project: Path) -> None:
    flags = ("--workers=4", "--min-workers=2", "--max-restarts=1", "--")
    done = launched(*flags, "worker3=kill", "worker2=42")
    assert done.returncode == 0, done.stdout
    announced = re.findall(r"(?m)^\[launcher\] .*(restarting|resuming with \d)", done.stdout)
    assert announced == ["restarting", "resuming with 3", "resuming with 2"]
    last_start = done.stdout.rpartition(" is lost: ")[2].splitlines()[1:]
    assert sorted(last_start) == [
        f"[worker {index}] here is worker {index} worker3=kill worker2=42" for index in (0, 1)
    ]
    assert launched("--workers=2", "--min-workers=2", "--", "worker1=1").returncode == 1
    # Three workers cannot share the batch, but two can. A first start that is rejected is final.
    done = launched("--workers=4", "--min-workers=1", "--", "worker3=kill", "worker2=2of3")
    assert done.returncode == 0
    assert "[launcher] worker 3 is lost: resuming with 3 worker(s)" in done.stdout
    assert "[launcher] 3 workers ended with 2: resuming with 2 worker(s)" in done.stdout
    assert "resuming" not in launched("--workers=2", "--min-workers=1", "--", "all=2").stdout
    for bad in ("0", "3"):
        refused = launched("--workers=2", f"--min-workers={bad}")
        assert refused.returncode == 2
        assert f"--min-workers {bad} must be from 1 to the number of --workers" in refused.stderr


def test_lost_worker_is_the_one_that_failed_or_does_not_end(launched: Callable, project: Path) -> None:
    """Not the first to end, which may have lost another one and ends with 43."""
    module = project / "engine/cluster/launcher.py"
    text = module.read_text(encoding="utf-8")
    assert "SECONDS_OF_THE_CAUSE = 20.0" in text
    module.write_text(text.replace("SECONDS_OF_THE_CAUSE = 20.0", "SECONDS_OF_THE_CAUSE = 2.0"), encoding="utf-8")
    assert launched("--workers=2", "--", "worker0=43", "worker1=late").returncode == 1
    flags = ("--workers=3", "--min-workers=2", "--", "worker0=44of3", "worker2=43of3")
    for end, why in (("late", "ended with exit code 1"), ("wait", "did not end within 2 s of the others")):
        done = launched(*flags, f"worker1={end}of3")
        assert done.returncode == 0, done.stdout
        assert f"[launcher] worker 1 {why}\n[launcher] worker 1 is lost: resuming with 2" in done.stdout
    # All say that another one is gone, as after a fault of the network.
    done = launched("--workers=2", "--max-restarts=1", "--", "all=43")
    assert done.returncode == 43
    assert done.stdout.count("ended with 43: restarting") == 1


@pytest.mark.parametrize("end", ["kill", "1", "42"])
def test_cluster_is_started_again_as_the_same_start(launched: Callable, project: Path, end: str) -> None:
    done = launched("--workers=2", "--max-restarts=2", "--", "--fresh", f"worker1={end}once", "worker0=0")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": restarting (") == done.stdout.count("restarting (restarts left: 1)") == 1
    # The same flags and the same id, by which the second start knows the run of the first one.
    first, second = starts(project, "worker-1")
    assert first == second
    assert first.startswith("--fresh ")
    if end == "42":  # Another start has another id, and no more restarts than it is allowed.
        assert launched("--workers=2", "--max-restarts=1", "--", "--fresh", "all=42").returncode == 42
        *_, third, fourth = starts(project, "worker-0")
        assert third == fourth
        assert third.split()[-1] != first.split()[-1]


def test_signal_to_the_launcher_is_passed_on_and_starts_nothing(launching: Callable, project: Path) -> None:
    launcher = launching("--workers=2", "--max-restarts=5", "--", "all=save")
    for _ in range(4):
        launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 42
    assert len(starts(project, "worker-0")) == 1
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
    done = launched(*flags, "worker1=killonce", "worker1=0", "ps0=wait")
    assert done.returncode == 0, done.stdout
    assert "worker 1 was ended by SIGKILL: restarting (restarts left: 0)" in done.stdout
    assert [len(starts(project, name)) for name in ("worker-1", "chief-0")] == [2, 1]
    assert starts(project, "chief-0")[0].startswith("--strategy=parameter_server ")
    (project / "started-ps-0").unlink()
    done = launched(*flags, "worker1=wait", "ps0=killonce", "ps0=wait")
    assert done.returncode == 0, done.stdout
    assert "[launcher] ended with 137: restarting (restarts left: 0)" in done.stdout
    assert [len(starts(project, name)) for name in ("ps-0", "chief-0")] == [2, 3]


def test_others_continue_without_workers_that_end_beside_a_chief(launched: Callable, project: Path) -> None:
    ends = {1: "was ended by SIGKILL", **{i: f"ended with exit code {code}" for i, code in enumerate((0, 1, 2, 42), 2)}}
    codes = [f"worker{index}={end.split()[-1].replace('SIGKILL', 'kill')}" for index, end in ends.items()]
    done = launched("--workers=6", "--parameter-servers=1", "--", *codes, "chief0=serve", "worker0=wait", "ps0=wait")
    assert done.returncode == 0, done.stdout
    for index, end in ends.items():
        assert f"worker {index} {end}: the others continue" in done.stdout


def test_signal_before_the_processes_handle_it_is_a_stop_too(launching: Callable, project: Path) -> None:
    launcher = launching("--workers=1", "--", "worker0=wait")  # It has no handler.
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 42


def test_bad_numbers_are_refused(launched: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for arguments, reason in (
        (("--workers=0",), "--workers 0 must be 1 or more"),
        (("--workers=two",), "invalid int value: 'two'"),
        (("--workers=2", "--max-restarts=-1"), "--max-restarts -1 must be 0 or more"),
        (("--workers=2", "--epochs", "5"), "--epochs is not a flag of launch.py: pass the arguments of train.py"),
        (("--workers=3",), "cannot share 4 GPU(s) (0, 1, 2, 3) equally: use 1 or 2 or 4 worker(s), or choose the GPUs"),
    ):
        done = launched(*arguments)
        assert done.returncode == 2
        assert reason in done.stderr


def test_workers_share_the_gpus_and_nobody_else_gets_one(
    launched: Callable, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ("--parameter-servers=1", "--", "chief0=serve", "worker0=wait", "worker1=wait", "ps0=wait")
    for visible, arguments, expected in (
        ("2, GPU-a,1,0,-1,7", (), {"worker 0": "2,GPU-a", "worker 1": "1,0"}),
        ("0,1", ("--", "--simulated_devices", "1"), {"worker 0": "-1", "worker 1": "-1"}),
        ("0,1", served, {"chief 0": "-1", "worker 0": "0", "worker 1": "1", "ps 0": "-1"}),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        done = launched("--workers=2", *arguments)
        assert done.returncode == 0, done.stderr
        seen = {path.name.removeprefix("sees-"): path.read_text(encoding="utf-8") for path in project.glob("sees-*")}
        assert seen == expected


def test_child_of_a_process_that_outlives_it_is_ended_too(launched: Callable, project: Path) -> None:
    leaves_a_child = "import subprocess\nprint('pid', subprocess.Popen(['sleep', '45']).pid)\n"
    (project / "train.py").write_text(leaves_a_child, encoding="utf-8")
    done = launched("--workers=1", "--")
    assert done.returncode == 0
    (project / f"pid-{done.stdout.split()[-1]}").touch()
    until(lambda: not alive(project), 10)


def test_signal_beside_parameter_servers_goes_to_the_chief(launching: Callable, project: Path) -> None:
    launcher = launching("--workers=1", "--parameter-servers=1", "--", "chief0=save", "worker0=wait", "ps0=wait")
    for _ in range(4):
        launcher.stdout.readline()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 42
    assert not alive(project)
