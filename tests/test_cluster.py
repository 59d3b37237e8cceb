"""Several processes that train one run: the same numbers, and an end in bounded time when one of them goes."""

import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import clusters
import numpy as np
import pytest
import tensorflow as tf
from clusters import (
    COUNTED,
    LOSSES,
    LOST,
    NORMALIZED,
    TWO_DEVICES,
    assert_same_numbers,
    outcome,
    project_with,
    wait_for,
    workers,
)
from processes import is_alive, until

from rendering import PROJECT, TASKS

# No batch divides the examples, of training or of evaluation; clipping, parts of a batch and an average of the weights.
NUMBERS = (
    *("--epochs=2", "--global-batch-size=24", "--global-clipnorm=0.5", "--micro-batches=2", "--ema-decay=0.9"),
    *("--keep-last-batch", "--validate-every-steps=20", "--profile"),
)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project with synchronized BatchNormalization, and a run of it on two replicas in one process."""
    folder = tmp_path_factory.mktemp("one_process")
    project = project_with(folder, NORMALIZED + LOSSES)
    clusters.train(project, folder / "run", 1, *NUMBERS, "--simulated-devices=2")
    return project, folder / "run"


@pytest.fixture(scope="session")
def two_workers(one_process: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of that project, with those settings, by two workers."""
    run_dir = tmp_path_factory.mktemp("two_workers") / "run"
    clusters.train(one_process[0], run_dir, 2, *NUMBERS)
    return run_dir


def test_two_workers_and_two_replicas_agree(one_process: tuple[Path, Path], two_workers: Path) -> None:
    assert_same_numbers(one_process[1], two_workers)
    assert_same_losses(one_process[1], two_workers, 2)
    # To train, the loop sums gradients; to validate and to test, no process waits for another at any step.
    training, *others = [int(line) for line in (two_workers / ".collectives-0").read_text("utf-8").splitlines()]
    assert (training > 0, others) == (True, [0, 0])


def assert_same_losses(one_process: Path, run_dir: Path, workers: int) -> None:
    """The losses of all steps agree to 1e-5, on each worker."""
    expected = np.loadtxt(one_process / ".losses-0")
    for index in range(workers):
        np.testing.assert_allclose(np.loadtxt(run_dir / f".losses-{index}"), expected, rtol=1e-5)


@pytest.mark.long
def test_two_workers_start_with_the_weights_of_another_run(one_process: tuple[Path, Path], tmp_path: Path) -> None:
    project, run_dir = one_process
    arguments = ("--evaluate-only", f"--init-from={run_dir}", f"--run-dir={tmp_path / 'run'}")
    with workers(project, tmp_path / "logs", 2, *arguments) as started:
        assert [each.wait(180) for each in started] == [0, 0], started[0].text
        found = re.search(r"test/loss +(\S+)", started[0].text)
    assert float(found[1]) == pytest.approx(outcome(run_dir)[1]["test/loss"], rel=1e-5)


@pytest.mark.long
def test_two_workers_cut_sequences_of_several_lengths_alike(tmp_path: Path) -> None:
    project = project_with(tmp_path, "")
    shutil.copy(TASKS / "tagging.py", project / "task.py")
    # One of the two has 4 examples of a batch, and the other 3 and padding.
    flags = ("--epochs=2", "--global-batch-size=7", "--learning-rate=0.1", "--keep-last-batch", "--global-clipnorm=0.5")
    flags = (*flags, "--validate-every-steps=7", "--pad-to", "8", "16", "64")
    for number in (1, 2):
        clusters.train(project, tmp_path / f"run-{number}", number, *flags)
    assert_same_numbers(tmp_path / "run-1", tmp_path / "run-2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "addition"),
    [
        pytest.param(2, TWO_DEVICES, id="2 workers of 2 replicas"),
        pytest.param(3, "", id="3 workers"),
    ],
)
def test_workers_and_replicas_agree(number: int, addition: str, one_process: tuple[Path, Path], tmp_path: Path) -> None:
    """Where workers have two replicas, a private method of TensorFlow is replaced: see TWO_DEVICES."""
    project, expected = one_process
    if addition:
        project = project_with(tmp_path, NORMALIZED + LOSSES + addition)
    clusters.train(project, tmp_path / "run", number, *NUMBERS)
    assert_same_numbers(expected, tmp_path / "run")
    assert_same_losses(expected, tmp_path / "run", number)
    replicas = json.loads((tmp_path / "run" / "config.json").read_text())["replicas"]
    assert replicas == number * (2 if addition else 1)


# Two sets to validate, none to test, and a metric of each class.
SETS = """

_load_examples, _create_metrics, _update_metrics = load_examples, create_metrics, update_metrics


def load_examples(split: str):
    examples = _load_examples(split)
    sets = {"easy": examples.take(50), "hard": examples.skip(50)}
    return {"train": examples, "validation": sets, "test": None}[split]


def create_metrics(split: str):
    return {**_create_metrics(split), "f1": keras.metrics.F1Score(average=None)}


def update_metrics(split, labels, predictions, per_example_loss, weights):
    _update_metrics(split, labels, predictions, per_example_loss, weights)
    metrics[split]["f1"].update_state(tf.one_hot(labels, 10), tf.nn.softmax(predictions), sample_weight=weights)
"""


@pytest.mark.long
def test_two_workers_and_one_process_agree_on_several_sets_and_epochs_that_are_no_passes(tmp_path: Path) -> None:
    project = project_with(tmp_path, NORMALIZED + SETS)
    flags = (*NUMBERS, "--steps-per-epoch=70", "--evaluation-batch-size=10", "--monitor=validation/hard/f1/3")
    clusters.train(project, tmp_path / "one", 1, *flags, "--simulated-devices=2")
    clusters.train(project, tmp_path / "two", 2, *flags)
    assert_same_numbers(tmp_path / "one", tmp_path / "two")
    rows, result = outcome(tmp_path / "two")
    assert (rows[-1]["step"], result["test"]) == ("140", None)
    assert {"train/f1/0", "validation/easy/f1/9", "validation/hard/accuracy"} <= rows[0].keys()


def test_missing_worker_is_named(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--cluster-timeout=2")
    with workers(PROJECT, tmp_path / "logs", 2, *arguments) as started:
        started[1].process.kill()
        assert started[0].wait(120) == COUNTED
        assert f"worker 1 ({started[1].address}) did not join within 2 s" in started[0].last_line()
        assert "Traceback" not in started[0].text
    assert not (tmp_path / "run").exists()


# One worker gets a signal before or after TensorFlow's start, which the other one begins at the same time.
SIGNALLED_AT_THE_START = """

import json, os, signal

_start = tf.distribute.MultiWorkerMirroredStrategy


def start(**options):
    started = [] if {before} else [_start(**options)]
    os.kill(os.getpid(), signal.{sent})
    return (started or [_start(**options)])[0]


if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == {victim}:
    tf.distribute.MultiWorkerMirroredStrategy = start
"""


@pytest.mark.long
def test_death_while_tensorflow_starts_ends_the_other(tmp_path: Path) -> None:
    """TensorFlow itself waits for ever here, deaf to signals."""
    victim = 0
    project = project_with(tmp_path, SIGNALLED_AT_THE_START.format(before=True, sent="SIGKILL", victim=victim))
    arguments = (f"--run-dir={tmp_path / 'run'}", "--cluster-timeout=4")
    with workers(project, tmp_path / "logs", 2, *arguments) as started:
        assert started[1 - victim].wait(60) == LOST
        line = f"ERROR: TensorFlow did not start on all of worker 0, worker 1 within 4 s (worker {victim} (127.0.0.1:"
        assert line in started[1 - victim].text
        assert "is gone): check its log" in started[1 - victim].last_line()


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False])
def test_signal_while_tensorflow_starts_is_obeyed(before: bool, tmp_path: Path) -> None:
    """TensorFlow's own handler would swallow it, and the run would train to its end."""
    project = project_with(tmp_path, SIGNALLED_AT_THE_START.format(before=before, sent="SIGTERM", victim=1))
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=500", "--cluster-timeout=20")
    with workers(project, tmp_path / "logs", 2, *arguments) as started:
        assert started[1].wait(60) == 42
        assert "stopped by SIGTERM; nothing was lost" in started[1].last_line()
        assert started[0].wait(60) == LOST
        assert started[1].address in started[0].last_line()


@pytest.mark.long
@pytest.mark.parametrize(("victim", "launched"), [(0, False), (1, True)], ids=["by hand", "launch.py"])
def test_survivor_of_a_death_in_the_first_seconds_ends_with_a_line(victim: int, launched: bool, tmp_path: Path) -> None:
    moment = random.Random(victim + 2 * launched).uniform(1, 8)
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=500", "--cluster-timeout=5")
    if launched:
        command = [sys.executable, "launch.py", "--workers=2", "--", *arguments]
        launcher = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        try:
            time.sleep(moment)
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split()
            of_train = [each for each in children if "train.py" in Path(f"/proc/{each}/cmdline").read_text()]
            os.kill(int(of_train[victim]), signal.SIGKILL)
            assert f"[launcher] worker {victim} was ended by SIGKILL" in launcher.communicate(timeout=60)[0]
            assert launcher.returncode == 128 + signal.SIGKILL
        finally:
            launcher.kill()
            launcher.communicate()
        return
    with workers(PROJECT, tmp_path / "logs", 2, *arguments) as started:
        time.sleep(moment)
        started[victim].process.kill()
        assert started[1 - victim].wait(60) in (COUNTED, LOST)  # Counted in the rendezvous.
        assert f"worker {victim} ({started[victim].address})" in started[1 - victim].last_line()


@pytest.mark.parametrize(
    ("number", "victim", "sent"),
    [
        pytest.param(2, 1, signal.SIGKILL, id="worker killed"),
        pytest.param(3, 0, signal.SIGSTOP, id="chief silent", marks=pytest.mark.long),
    ],
)
def test_lost_worker_is_named_by_the_others_within_a_minute(
    number: int, victim: int, sent: signal.Signals, tmp_path: Path
) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=500", "--global-batch-size=30")
    with workers(PROJECT, tmp_path / "logs", number, *arguments) as started:
        wait_for("epoch   2/500", started[0])
        started[victim].process.send_signal(sent)
        for index, each in enumerate(started):
            if index != victim:
                is_counted = sent == signal.SIGSTOP and index == 1  # The first one that is left.
                assert each.wait(60) == (COUNTED if is_counted else LOST)
                assert started[victim].address in each.last_line()
                assert "check its log" in each.last_line()


# One example has a label that is no class: the worker whose share it is in fails, and the others learn nothing of it.
MISLABELLED = """

_load_examples = load_examples


def load_examples(split: str) -> tf.data.Dataset:
    examples = _load_examples(split)
    if split != "train":
        return examples
    return examples.enumerate().map(lambda number, it: (it[0], tf.where(number == 30, 11, it[1])))
"""


@pytest.mark.long
def test_mistake_that_one_worker_meets_ends_it_with_its_line_and_the_other_as_for_a_lost_peer(tmp_path: Path) -> None:
    project = project_with(tmp_path, MISLABELLED)
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=2") as started:
        codes = [each.wait(180) for each in started]
        assert sorted(codes) == [2, LOST]
        failed, other = started[codes.index(2)], started[codes.index(LOST)]
        assert re.match(r"ERROR: task\.py:\d+ compute_loss: InvalidArgumentError: Received a label", failed.last_line())
        assert "(in train step" in failed.last_line()
        assert failed.address in other.last_line()
        assert "Traceback" not in failed.text + other.text


# The second worker meets an error of its file system, which passes, in the middle of an epoch.
FAILING_ONCE = """

_prepare_example, _calls = prepare_example, []


def _read(features):
    import os

    _calls.append(None)
    if len(_calls) == 900 and '"index": 1' in os.environ["TF_CONFIG"]:
        raise OSError(5, "Input/output error")
    return features


def prepare_example(features, labels, *, training, seed):
    features = tf.ensure_shape(tf.numpy_function(_read, [features], features.dtype), features.shape)
    return _prepare_example(features, labels, training=training, seed=seed)
"""


@pytest.mark.long
def test_worker_that_reads_again_takes_the_same_steps_as_the_other(two_workers: Path, tmp_path: Path) -> None:
    project, run_dir = project_with(tmp_path, NORMALIZED + FAILING_ONCE), tmp_path / "run"
    with workers(project, tmp_path / "logs", 2, f"--run-dir={run_dir}", *NUMBERS) as started:
        assert [each.wait(120) for each in started] == [0, 0]
        assert "trying again in 1 s" in started[1].text
    assert outcome(run_dir)[1]["weights_sha256"] == outcome(two_workers)[1]["weights_sha256"]


# The second worker computes longer in each step.
SLOW = """

_compute_loss = compute_loss


def compute_loss(*arguments):
    import json
    import os

    loss, per_example_loss = _compute_loss(*arguments)
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        matrix = tf.fill([400, 400], 0.0 * loss + 1e-4)
        for _ in range(20):
            matrix = tf.matmul(matrix, matrix) + 1e-4
        loss += 1e-30 * tf.reduce_sum(matrix)
    return loss, per_example_loss
"""


@pytest.mark.long
def test_slow_worker_is_named_in_steps_csv(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=4", "--steps-per-execution=13")
    with workers(project_with(tmp_path, SLOW), tmp_path / "logs", 2, *arguments) as started:
        assert [each.wait(120) for each in started] == [0, 0]
    rows = list(csv.DictReader((tmp_path / "run/steps.csv").read_text(encoding="utf-8").splitlines()))
    slowest = [row["slowest_worker"] for row in rows]
    assert slowest[0] == ""  # It has no execution before it.
    assert slowest.count("1") == sum(map(bool, slowest)) > 1
    assert "draws different numbers" not in started[0].text  # The clock in the graph is not a random operation.


@pytest.mark.long
def test_loss_that_is_not_finite_ends_all_alike(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=5", "--learning-rate=1e30")
    with workers(PROJECT, tmp_path / "logs", 2, *arguments) as started:
        assert [each.wait(180) for each in started] == [3, 3]
        assert "the loss of train step" in started[1].last_line()
        assert started[0].last_line() == started[1].last_line()


@pytest.mark.long
def test_signal_to_one_worker_saves_once_and_a_resume_ends_bit_equal(tmp_path: Path) -> None:
    # BatchNormalization's own statistics and dropout's seeds differ between workers, and have to be restored so.
    own = NORMALIZED.replace("synchronized=True", "synchronized=False").replace(
        "*layers]", "*layers[:-1], keras.layers.Dropout(0.3), layers[-1]]"
    )
    project = project_with(tmp_path, own)
    flags = ("--epochs=12", "--steps-per-execution=7")
    clusters.train(project, tmp_path / "whole", 2, *flags)
    with workers(project, tmp_path / "logs", 2, *flags, f"--run-dir={tmp_path / 'stopped'}") as started:
        wait_for("epoch  2/12", started[0])
        started[1].process.terminate()
        assert [each.wait(60) for each in started] == [42, 42]
        assert "stopped by a signal to worker 1, the state is in" in started[0].last_line()
        assert "stopped by SIGTERM" in started[1].last_line()
    assert not (tmp_path / "stopped" / "result.json").exists()
    clusters.train(project, tmp_path / "stopped", 2, *flags)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@pytest.mark.long
def test_run_of_two_workers_goes_on_in_one_process(one_process: tuple[Path, Path], tmp_path: Path) -> None:
    project, _ = one_process
    for name, number, layout in (("workers", 2, ()), ("alone", 1, ("--simulated-devices=2",))):
        clusters.train(project, tmp_path / name, number, *NUMBERS, "--epochs=1", *layout)
        clusters.train(project, tmp_path / name, 1, *NUMBERS, "--simulated-devices=2")
    assert_same_numbers(tmp_path / "alone", tmp_path / "workers")


# --- Under the launcher -----------------------------------------------------------------------------------------------


class Launched:
    """launch.py, and the processes that it has started."""

    def __init__(self, project: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as output:
            command = [sys.executable, "launch.py", *arguments]
            self.process = subprocess.Popen(command, cwd=project, stdout=output, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> dict[str, int]:
        """Returns the id of each process that is alive, by name."""
        number = self.process.pid
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for child in Path(f"/proc/{number}/task/{number}/children").read_text(encoding="utf-8").split():
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                for each in variables:
                    if each.startswith(b"TF_CONFIG="):
                        task = json.loads(each.removeprefix(b"TF_CONFIG="))["task"]
                        found[f"{task['type']} {task['index']}"] = int(child)
        return found

    def send(self, number: signal.Signals, names: str, draw: random.Random) -> bool:
        """Sends a signal to one of the processes whose names start with `names`; returns whether there was one."""
        candidates = [process for name, process in sorted(self.processes().items()) if name.startswith(names)]
        if candidates:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(candidates), number)
                return True
        return False

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(*arguments: str, project: Path = PROJECT) -> Launched:
        started.append(Launched(project, tmp_path / f"launched-{len(started)}.log", *arguments))
        return started[-1]

    yield launch
    for each in started:
        processes = each.processes()
        each.process.kill()
        each.process.wait()
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


# Frequent saves and short executions, so that the ends fall on many kinds of moments.
OFTEN = ("--checkpoint-every-steps=10", "--steps-per-execution=5")


def test_cluster_that_is_killed_once_ends_bit_equal(
    one_process: tuple[Path, Path], two_workers: Path, launched: Callable[..., Launched], tmp_path: Path
) -> None:
    flags = (*NUMBERS, *OFTEN, f"--run-dir={tmp_path / 'killed'}")
    launcher = launched("--workers=2", "--max-restarts=1", "--", *flags, project=one_process[0])
    until(lambda: launcher.has_ended() or list(tmp_path.glob("killed/checkpoints/step-*")))
    assert launcher.send(signal.SIGKILL, "worker", random.Random(0))
    assert launcher.wait(300) == 0, launcher.text
    assert "restarting (restarts left: 0)" in launcher.text
    assert "resumed from step-" in launcher.text
    assert outcome(tmp_path / "killed") == outcome(two_workers)


@pytest.mark.long
def test_two_of_three_workers_are_lost_for_good_and_the_numbers_stay(
    one_process: tuple[Path, Path], launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project, expected = one_process
    run_dir, draw = tmp_path / "run", random.Random(0)
    launcher = launched(
        "--workers=3", "--min-workers=1", "--", *NUMBERS, *OFTEN, f"--run-dir={run_dir}", project=project
    )
    saved = []
    for lost in (1, 2):
        before = newest_step(run_dir)
        until(lambda before=before: launcher.has_ended() or newest_step(run_dir) > before)
        saved.append(newest_step(run_dir))
        assert launcher.send(signal.SIGKILL, "worker", draw), launcher.text
        until(lambda lost=lost: launcher.has_ended() or launcher.text.count(" is lost: resuming with") == lost)
    assert launcher.wait(300) == 0, launcher.text
    assert " is lost: resuming with 1 worker(s)" in launcher.text
    # At most one interval between checkpoints is computed again.
    resumed = re.findall(r"resumed from step-(\d+)", launcher.text)
    assert len(resumed) == 2
    assert all(int(each) >= step for each, step in zip(resumed, saved, strict=True))
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["replicas"] == 1
    assert_same_numbers(expected, run_dir)


def newest_step(run_dir: Path) -> int:
    return max((int(path.name[5:13]) for path in run_dir.glob("checkpoints/step-*")), default=0)


@pytest.mark.long
def test_cluster_that_is_killed_often_ends_bit_equal(launched: Callable[..., Launched], tmp_path: Path) -> None:
    times = 5
    flags = (*OFTEN, f"--epochs={5 * times}")
    clusters.train(PROJECT, tmp_path / "whole", 2, *flags)
    seed = int(time.time())
    draw = random.Random(seed)
    run_dir = tmp_path / f"killed-by-{seed}"
    launcher = launched("--workers=2", "--max-restarts=20", "--", *flags, f"--run-dir={run_dir}")
    for _ in range(times):
        # At a random moment, after every second restart only when training has started.
        if draw.random() < 0.5:
            starts = launcher.text.count("run directory") + 1
            until(lambda starts=starts: launcher.has_ended() or launcher.text.count("run directory") == starts)
        time.sleep(draw.uniform(0, 2))
        restarts = launcher.text.count(": restarting (")
        while not launcher.has_ended() and not launcher.send(signal.SIGKILL, "worker", draw):
            time.sleep(0.05)
        until(
            lambda restarts=restarts: launcher.has_ended() or launcher.text.count(": restarting (") > restarts,
            seconds=60,
        )
    assert launcher.wait(1200) == 0, launcher.text
    assert launcher.text.count(": restarting (") >= 0.7 * times
    assert outcome(run_dir) == outcome(tmp_path / "whole")


def test_worker_that_is_stopped_before_it_joins_ends_the_others(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    project = project_with(tmp_path, "")
    stop = 'import os\nif \'"index": 1\' in os.environ["TF_CONFIG"]:\n    os.kill(os.getpid(), 15)\n'
    (project / "config.py").write_text((project / "config.py").read_text() + stop)
    launcher = launched("--workers=2", "--", f"--run-dir={tmp_path / 'run'}", project=project)
    assert launcher.wait(60) == 42  # Not after --cluster-timeout.
    # The other one has no line if the signal comes before it listens.
    assert "[worker 1] stopped by SIGTERM" in launcher.text


@pytest.mark.long
def test_no_worker_outlives_a_killed_launcher(launched: Callable[..., Launched], tmp_path: Path) -> None:
    launcher = launched("--workers=2", "--", "--epochs=500", f"--run-dir={tmp_path / 'run'}")
    until(lambda: "epoch   2/500" in launcher.text)
    processes = launcher.processes().values()
    assert len(processes) == 2
    launcher.process.kill()
    launcher.wait(10)
    until(lambda: not any(is_alive(process) for process in processes), seconds=10)


def test_refusal_that_only_the_chief_can_see_ends_all_alike_for_good(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("not a run's")
    launcher = launched("--workers=2", "--max-restarts=3", "--", f"--run-dir={tmp_path / 'run'}", "--epochs=1")
    assert launcher.wait(120) == 2
    refusals = [line.partition("] ")[2] for line in launcher.text.splitlines() if "] ERROR: " in line]
    assert len(refusals) == 2
    assert refusals[0] == refusals[1]
    assert "is not empty and contains no run" in refusals[0]
    assert ": restarting (" not in launcher.text


# --- Parameter servers ------------------------------------------------------------------------------------------------

SERVED = ("--workers=2", "--parameter-servers=1")


@pytest.mark.long
def test_asynchronous_training_learns_and_survives_the_death_of_a_worker(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    launcher = launched(*SERVED, "--", f"--run-dir={tmp_path / 'run'}")
    until(lambda: "epoch  3/30" in launcher.text)
    assert launcher.send(signal.SIGKILL, "worker", random.Random(0))
    assert launcher.wait(400) == 0, launcher.text
    rows, result = outcome(tmp_path / "run")
    assert result["test/accuracy"] >= 0.95
    assert (len(rows), result["step"]) == (30, 30 * 39)
    # The chief started once, and every step was counted, by the workers as by the chief.
    assert launcher.text.count("starts  ") == 1
    reader = tf.train.load_checkpoint(str(newest(tmp_path / "run") / "state"))
    (counted,) = [name for name in reader.get_variable_to_shape_map() if name.endswith("/iteration")]
    # A piece of an execution that the dead worker had started is done again by another.
    assert 30 * 39 <= reader.get_tensor(counted) <= 30 * 39 + 40


@pytest.mark.long
def test_death_of_a_parameter_server_is_survived_by_a_restart(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    launcher = launched(*SERVED, "--max-restarts=2", "--", f"--run-dir={tmp_path / 'run'}")
    until(lambda: "epoch  3/30" in launcher.text)
    assert launcher.send(signal.SIGKILL, "ps", random.Random(0))
    assert launcher.wait(400) == 0, launcher.text
    assert "resumed from step-" in launcher.text
    assert outcome(tmp_path / "run")[1]["test/accuracy"] >= 0.95


@pytest.mark.long
def test_signal_to_the_chief_of_parameter_servers_saves(launched: Callable[..., Launched], tmp_path: Path) -> None:
    launcher = launched(*SERVED, "--", f"--run-dir={tmp_path / 'run'}")
    until(lambda: "epoch  3/30" in launcher.text)
    assert launcher.send(signal.SIGTERM, "chief", random.Random(0))
    assert launcher.wait(120) == 42, launcher.text
    assert newest(tmp_path / "run").is_dir()


@pytest.mark.long
def test_chief_of_parameter_servers_ends_when_no_worker_is_left(tmp_path: Path) -> None:
    arguments = ("--strategy=parameter_server", "--epochs=500", f"--run-dir={tmp_path / 'run'}")
    jobs = {"chief": 1, "worker": 1, "ps": 1}
    with clusters.cluster(PROJECT, tmp_path / "logs", jobs, *arguments) as (chief, worker, server):
        wait_for("epoch   2/500", chief)
        worker.process.kill()
        assert chief.wait(120) == LOST
        assert chief.last_line() == "ERROR: all workers are gone: check their logs, then restart the cluster"
        assert server.wait(60) == 0
    assert newest(tmp_path / "run").is_dir()


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


# --- Workers that differ ----------------------------------------------------------------------------------------------

UNSEEDED = """

_create_model = create_model


def create_model() -> keras.Model:
    model = _create_model()
    table = model.layers[-1].kernel
    # A permutation of the same numbers, as an index in the order of a set gives it.
    table.assign(np.arange(640.0).reshape(64, 10)[np.random.default_rng({seed}).permutation(64)] / 1e4)
    return model
"""
RATE = """

import json, os

_create_optimizer = create_optimizer


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01 * (1 + index), 10, 0.9))
"""
DRIFT = """

import json, os

_train_step = train_step


def train_step(batch):
    loss = _train_step(batch)
    model.layers[-1].bias.assign_add([float(json.loads(os.environ["TF_CONFIG"])["task"]["index"])] * 10)
    return loss
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("addition", "told"),
    [
        (
            UNSEEDED.format(seed=""),
            r"worker 1: 1 of \d+ variables \(model/\S+kernel\) differ from those of worker 0: .* task\.create_model",
        ),
        (RATE, "worker 1: task.create_optimizer returned another optimizer than in the first process"),
        (
            DRIFT,
            r"worker 1: 1 of \d+ variables \(model/\S+bias\) differ from those of worker 0: something in the hooks",
        ),
    ],
    ids=["other weights", "other rates", "another step"],
)
def test_workers_with_another_state_are_named_and_save_nothing(addition: str, told: str, tmp_path: Path) -> None:
    project = project_with(tmp_path, addition)
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=2") as started:
        assert [each.wait(180) for each in started] == [2, 2], started[0].text
        for each in started:
            assert re.search(told, each.last_line()), each.last_line()
            assert "Traceback" not in each.text
    assert not list((tmp_path / "run").glob("*/step-*"))


# What one of two workers does alone, in place of the lines of train.py that all do together.
ALONE = {
    "ends": ("run.end_epoch(", "if 1 == INDEX:\n            return\n        run.end_epoch("),
    "saves": ("run.stop_if_asked()  # By a signal.", "if 1 == INDEX:\n            run.save()"),
}


@pytest.mark.long
@pytest.mark.parametrize(("deed", "culprit"), [("ends", 1), ("saves", 1)])
def test_decision_of_one_worker_ends_all_with_a_line(deed: str, culprit: int, tmp_path: Path) -> None:
    project = project_with(tmp_path, "")
    program = (project / "train.py").read_text(encoding="utf-8")
    index = f"int(__import__('json').loads(__import__('os').environ['TF_CONFIG'])['task']['index'] == {culprit})"
    line, alone = ALONE[deed]
    assert line in program
    (project / "train.py").write_text(program.replace(line, alone.replace("INDEX", index), 1), encoding="utf-8")
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=3") as started:
        codes = [each.wait(120) for each in started]
        lines = [each.last_line() for each in started]
        # Where TensorFlow notices it, one worker gets its error, and the others that this one is gone.
        assert sorted(codes) in ([2, 2], [2, LOST]), lines
        for each, code, line in zip(started, codes, lines, strict=True):
            assert ("the workers no longer do the same" in line and "run.on_any_worker" in line) or code == LOST, line
            assert line.startswith("ERROR: ")
            assert "Traceback" not in each.text
