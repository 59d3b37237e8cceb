"""Several processes that train one run: the same numbers, one that dies, and workers that differ."""

import json
import re
from pathlib import Path

import clusters
import pytest
from clusters import LOST, NORMALIZED, NUMBERS, SLOW, TWO_DEVICES, assert_same_numbers, outcome, project_with, workers
from processes import until


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project with synchronized BatchNormalization, and a run of it on two replicas in one process."""
    folder = tmp_path_factory.mktemp("one_process")
    project = project_with(folder, NORMALIZED + SLOW)
    clusters.train(project, folder / "run", 1, *NUMBERS, "--simulated-devices=2")
    return project, folder / "run"


def test_lost_worker_is_named_within_a_minute_and_the_cluster_then_has_the_numbers_of_one_process(
    one_process: tuple[Path, Path], tmp_path: Path
) -> None:
    (project, expected), run_dir = one_process, tmp_path / "run"
    with workers(project, tmp_path / "logs", 2, *NUMBERS, f"--run-dir={run_dir}") as (first, second):
        until(lambda: list(run_dir.glob("checkpoints/step-*")) or first.process.poll() is not None)
        second.process.kill()
        assert first.wait(60) == LOST
        assert second.address in first.last_line()
        assert "check its log" in first.last_line()
    clusters.train(project, run_dir, 2, *NUMBERS)
    assert "resumed from step-" in (tmp_path / "run-logs" / "worker-0.log").read_text(encoding="utf-8")
    assert_same_numbers(expected, run_dir)
    # To train, the loop sums gradients; to validate and to test, no process waits for another at any step.
    training, *others = [int(line) for line in (run_dir / ".collectives-0").read_text("utf-8").splitlines()[-3:]]
    assert (training > 0, others) == (True, [0, 0])


# Two sets to validate, none to test.
SETS = """

_all_examples = load_examples


def load_examples(split: str):
    examples = _all_examples(split)
    sets = {"easy": examples.take(50), "hard": examples.skip(50)}
    return {"train": examples, "validation": sets, "test": None}[split]
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
    flags = (*flags, "--monitor=validation/hard/loss")
    projects = []
    for number, addition in ((1, ""), (2, FAILING_ONCE + TWO_DEVICES)):
        (tmp_path / str(number)).mkdir()
        projects.append(project_with(tmp_path / str(number), NORMALIZED + SLOW + SETS + addition))
    clusters.train(projects[0], tmp_path / "one", 1, *flags, "--simulated-devices=2")
    clusters.train(projects[1], tmp_path / "two", 2, *flags)
    assert "trying again in 1 s" in (tmp_path / "two-logs" / "worker-1.log").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "two" / "config.json").read_text(encoding="utf-8"))["replicas"] == 4
    assert_same_numbers(tmp_path / "one", tmp_path / "two")
    rows, result = outcome(tmp_path / "two")
    assert (rows[-1]["step"], result["test"]) == ("60", None)
    assert {"validation/easy/loss", "validation/hard/accuracy"} <= rows[0].keys()


@pytest.mark.long
def test_decision_of_one_worker_ends_all_with_a_line(tmp_path: Path) -> None:
    project = project_with(tmp_path, "")
    program = (project / "train.py").read_text(encoding="utf-8")
    is_second = "__import__('json').loads(__import__('os').environ['TF_CONFIG'])['task']['index'] == 1"
    alone = program.replace("run.end_epoch(", f"if {is_second}:\n            return\n        run.end_epoch(", 1)
    assert alone != program
    (project / "train.py").write_text(alone, encoding="utf-8")
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=3") as started:
        codes = [each.wait(120) for each in started]
        lines = [each.last_line() for each in started]
    # Where TensorFlow notices it, one worker gets its error, and the other that this one is gone.
    assert sorted(codes) in ([2, 2], [2, LOST]), lines
    for code, line in zip(codes, lines, strict=True):
        assert line.startswith("ERROR: ")
        assert ("the workers no longer do the same" in line and "run.on_any_worker" in line) or code == LOST, line


UNSEEDED = """

_create_model = create_model


def create_model() -> keras.Model:
    model = _create_model()
    # A permutation of the same numbers, as an index in the order of a set gives it.
    model.layers[-1].kernel.assign(np.arange(240.0)[np.random.default_rng().permutation(240)].reshape(24, 10) / 1e4)
    return model
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
        (DRIFT, r"1 of \d+ variables \(model/\S+bias\) differ from those of worker 0: something in the hooks"),
    ],
    ids=["other weights", "another step"],
)
def test_workers_with_another_state_are_named_and_save_nothing(addition: str, told: str, tmp_path: Path) -> None:
    project = project_with(tmp_path, NORMALIZED + SLOW + addition)
    with workers(project, tmp_path / "logs", 2, f"--run-dir={tmp_path / 'run'}", "--epochs=1") as started:
        assert [each.wait(180) for each in started] == [2, 2], started[0].text
        for each in started:
            assert re.search(f"worker 1: {told}", each.last_line()), each.last_line()
            assert "Traceback" not in each.text
    assert not list((tmp_path / "run").glob("*/step-*"))
