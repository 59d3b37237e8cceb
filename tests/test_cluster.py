"""Several processes that train one run: the same numbers, workers that differ, and one that dies or freezes."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import clusters
import numpy as np
import pytest
from clusters import (
    COUNTED,
    LOST,
    NORMALIZED,
    NUMBERS,
    RECORDED,
    TWO_DEVICES,
    assert_same_numbers,
    outcome,
    project_with,
    wait_for,
    workers,
)
from processes import until

from rendering import PROJECT, TASKS


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project with synchronized BatchNormalization, and a run of it on two replicas in one process."""
    folder = tmp_path_factory.mktemp("one_process")
    project = project_with(folder, NORMALIZED + RECORDED)
    clusters.train(project, folder / "run", 1, *NUMBERS, "--simulated-devices=2")
    return project, folder / "run"


@pytest.fixture(scope="session")
def killed(one_process: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of that project by two workers, of which the second one was killed, and how the first one ended."""
    folder = tmp_path_factory.mktemp("killed")
    with workers(one_process[0], folder / "logs", 2, *NUMBERS, f"--run-dir={folder / 'run'}") as (first, second):
        until(lambda: list(folder.glob("run/checkpoints/step-*")) or first.process.poll() is not None)
        second.process.kill()
        return SimpleNamespace(folder=folder, code=first.wait(60), line=first.last_line(), lost=second.address)


def test_lost_worker_is_named_by_the_other_within_a_minute(killed: SimpleNamespace) -> None:
    assert killed.code == LOST
    assert killed.lost in killed.line
    assert "check its log" in killed.line


def test_killed_cluster_has_the_numbers_of_one_process(
    one_process: tuple[Path, Path], killed: SimpleNamespace, tmp_path: Path
) -> None:
    project, expected = one_process
    run_dir = shutil.copytree(killed.folder / "run", tmp_path / "run")
    clusters.train(project, run_dir, 2, *NUMBERS)
    assert "resumed from step-" in (tmp_path / "run-logs" / "worker-0.log").read_text(encoding="utf-8")
    assert_same_numbers(expected, run_dir)
    for index in range(2):
        np.testing.assert_allclose(losses(run_dir, index), losses(expected, 0), rtol=1e-5)
    # To train, the loop sums gradients; to validate and to test, no process waits for another at any step.
    training, *others = [int(line) for line in (run_dir / ".collectives-0").read_text("utf-8").splitlines()[-3:]]
    assert (training > 0, others) == (True, [0, 0])


def losses(run_dir: Path, index: int) -> list[float]:
    """Returns the loss of each training step; where some were computed again, the last."""
    lines = map(str.split, (run_dir / f".losses-{index}").read_text(encoding="utf-8").splitlines())
    return [loss for _, loss in sorted({(int(epoch), int(step)): float(loss) for epoch, step, loss in lines}.items())]


@pytest.mark.long
def test_run_of_two_workers_goes_on_in_one_process(
    one_process: tuple[Path, Path], killed: SimpleNamespace, tmp_path: Path
) -> None:
    project, expected = one_process
    run_dir = shutil.copytree(killed.folder / "run", tmp_path / "run")
    clusters.train(project, run_dir, 1, *NUMBERS, "--simulated-devices=2")
    assert_same_numbers(expected, run_dir)


# Two sets to validate, none to test, and a metric of each class.
SETS = """

_all_examples, _create_metrics, _update_metrics = load_examples, create_metrics, update_metrics


def load_examples(split: str):
    examples = _all_examples(split)
    sets = {"easy": examples.take(50), "hard": examples.skip(50)}
    return {"train": examples, "validation": sets, "test": None}[split]


def create_metrics(split: str):
    return {**_create_metrics(split), "f1": keras.metrics.F1Score(average=None)}


def update_metrics(split, labels, predictions, per_example_loss, weights):
    _update_metrics(split, labels, predictions, per_example_loss, weights)
    metrics[split]["f1"].update_state(tf.one_hot(labels, 10), tf.nn.softmax(predictions), sample_weight=weights)
"""
# The second worker meets an error of its file system, which passes, in the middle of an epoch.
FAILING_ONCE = """

_prepare_example, _calls = prepare_example, []


def _read(features):
    _calls.append(None)
    if len(_calls) == 400 and _index == 1:
        raise OSError(5, "Input/output error")
    return features


def prepare_example(features, labels, *, training, seed):
    features = tf.ensure_shape(tf.numpy_function(_read, [features], features.dtype), features.shape)
    return _prepare_example(features, labels, training=training, seed=seed)
"""


@pytest.mark.long
def test_two_workers_of_two_replicas_and_one_process_agree_on_all_options(
    one_process: tuple[Path, Path], tmp_path: Path
) -> None:
    """Initial weights, sets, epochs that are no passes, and a worker that reads again; see TWO_DEVICES."""
    flags = (*NUMBERS, f"--init-from={one_process[1]}", "--steps-per-epoch=30", "--evaluation-batch-size=10")
    flags = (*flags, "--monitor=validation/hard/f1/3", "--profile")
    projects = []
    for number, addition in ((1, ""), (2, FAILING_ONCE + TWO_DEVICES)):
        (tmp_path / str(number)).mkdir()
        projects.append(project_with(tmp_path / str(number), NORMALIZED + RECORDED + SETS + addition))
    clusters.train(projects[0], tmp_path / "one", 1, *flags, "--simulated-devices=2")
    clusters.train(projects[1], tmp_path / "two", 2, *flags)
    assert "trying again in 1 s" in (tmp_path / "two-logs" / "worker-1.log").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "two" / "config.json").read_text(encoding="utf-8"))["replicas"] == 4
    assert_same_numbers(tmp_path / "one", tmp_path / "two")
    rows, result = outcome(tmp_path / "two")
    assert (rows[-1]["step"], result["test"]) == ("60", None)
    assert {"train/f1/0", "validation/easy/f1/9", "validation/hard/accuracy"} <= rows[0].keys()


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


# The second worker computes longer in each step, and at last the loss is not finite.
SLOW = """

_compute_loss = compute_loss


def compute_loss(*arguments):
    loss, per_example_loss = _compute_loss(*arguments)
    if _index == 1:
        matrix = tf.fill([400, 400], 0.0 * loss + 1e-4)
        for _ in range(20):
            matrix = tf.matmul(matrix, matrix) + 1e-4
        loss += 1e-30 * tf.reduce_sum(matrix)
    return loss, per_example_loss


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([80], [0.01, 1e30]))
"""


@pytest.mark.long
def test_slow_worker_is_in_steps_csv_and_a_loss_that_is_not_finite_ends_all_alike(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=9", "--steps-per-execution=5")
    project = project_with(tmp_path, NORMALIZED + RECORDED + SLOW)
    with workers(project, tmp_path / "logs", 2, *arguments) as started:
        assert [each.wait(180) for each in started] == [3, 3]
        assert "the loss of train step" in started[1].last_line()
        assert started[0].last_line() == started[1].last_line()
    rows = list(csv.DictReader((tmp_path / "run/steps.csv").read_text(encoding="utf-8").splitlines()))
    slowest = [row["slowest_worker"] for row in rows]
    assert slowest[0] == ""  # It has no execution before it.
    assert slowest.count("1") == sum(map(bool, slowest)) > 1
    assert "draws different numbers" not in started[0].text  # The clock in the graph is not a random operation.


# --- A worker that is missing, or freezes -----------------------------------------------------------------------------


def test_missing_worker_is_named(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--cluster-timeout=2")
    with workers(PROJECT, tmp_path / "logs", 2, *arguments) as started:
        started[1].process.kill()
        assert started[0].wait(120) == COUNTED
        assert f"worker 1 ({started[1].address}) did not join within 2 s" in started[0].last_line()
        assert "Traceback" not in started[0].text
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_frozen_chief_is_named_within_a_minute_and_one_end_is_counted(tmp_path: Path) -> None:
    arguments = (f"--run-dir={tmp_path / 'run'}", "--epochs=500", "--global-batch-size=30")
    project = project_with(tmp_path, NORMALIZED + RECORDED)
    with workers(project, tmp_path / "logs", 3, *arguments) as (chief, *others):
        wait_for("epoch   2/500", chief)
        chief.process.send_signal(signal.SIGSTOP)
        assert [each.wait(60) for each in others] == [COUNTED, LOST]
        for each in others:
            assert chief.address in each.last_line()
            assert "check its log" in each.last_line()
        chief.process.send_signal(signal.SIGCONT)
        assert chief.wait(60) in (LOST, COUNTED)  # It finds that the others are gone.


# --- Workers that differ ----------------------------------------------------------------------------------------------

UNSEEDED = """

_create_model = create_model


def create_model() -> keras.Model:
    model = _create_model()
    # A permutation of the same numbers, as an index in the order of a set gives it.
    model.layers[-1].kernel.assign(np.arange(240.0)[np.random.default_rng().permutation(240)].reshape(24, 10) / 1e4)
    return model
"""
RATE = """


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01 * (1 + _index), 10, 0.9))
"""
DRIFT = """

_train_step = train_step


def train_step(batch):
    loss = _train_step(batch)
    model.layers[-1].bias.assign_add([float(_index)] * 10)
    return loss
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("addition", "told"),
    [
        (UNSEEDED, r"1 of \d+ variables \(model/\S+kernel\) differ from those of worker 0: .* task\.create_model"),
        (RATE, r"task\.create_optimizer returned another optimizer than in the first process"),
        (DRIFT, r"1 of \d+ variables \(model/\S+bias\) differ from those of worker 0: something in the hooks"),
    ],
    ids=["other weights", "other rates", "another step"],
)
def test_workers_with_another_state_are_named_and_save_nothing(addition: str, told: str, tmp_path: Path) -> None:
    project = project_with(tmp_path, NORMALIZED + RECORDED + addition)
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=1") as started:
        assert [each.wait(180) for each in started] == [2, 2], started[0].text
        for each in started:
            assert re.search(f"worker 1: {told}", each.last_line()), each.last_line()
            assert "Traceback" not in each.text
    assert not list((tmp_path / "run").glob("*/step-*"))


@pytest.mark.long
def test_refusal_that_only_the_chief_can_see_ends_all_alike(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("not a run's")
    with workers(PROJECT, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}") as started:
        assert [each.wait(120) for each in started] == [2, 2]
        assert started[0].last_line() == started[1].last_line()
        assert "is not empty and contains no run" in started[0].last_line()


@pytest.mark.long
def test_decision_of_one_worker_ends_all_with_a_line(tmp_path: Path) -> None:
    """It ends an epoch without the lines of train.py that all do together."""
    project = project_with(tmp_path, NORMALIZED + RECORDED)
    program, line = (project / "train.py").read_text(encoding="utf-8"), "        run.end_epoch("
    assert line in program
    alone = f"        if task._index == 1:\n            return\n{line}"
    (project / "train.py").write_text(program.replace(line, alone, 1), encoding="utf-8")
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=3") as started:
        codes = [each.wait(120) for each in started]
        lines = [each.last_line() for each in started]
        # Where TensorFlow notices it, one worker gets its error, and the others that this one is gone.
        assert sorted(codes) in ([2, 2], [2, LOST]), lines
        for each, code, line in zip(started, codes, lines, strict=True):
            assert ("the workers no longer do the same" in line and "run.on_any_worker" in line) or code == LOST, line
            assert line.startswith("ERROR: ")
            assert "Traceback" not in each.text
