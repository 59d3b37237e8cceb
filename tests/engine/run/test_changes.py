"""What may change when a run is resumed, what may not, and which words say so."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, rows, run, stop

import predict
import task
import train
from config import Config
from engine.cluster.launcher import START_ID
from engine.errors import BadInput
from engine.files import write_json
from engine.machine import data_files_sha256
from engine.run import resume as resume_module
from engine.run.agreement import check_files
from engine.run.directory import Directory
from engine.run.progress import Progress
from engine.run.resume import created_rates
from engine.run.start import RunDirectory
from engine.run.training import Run
from engine.settings import read_config

Ended = Callable[..., tuple[int, str]]
SGD = keras.optimizers.SGD


# --- Learning rates ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("linear")
def test_every_optimizer_takes_a_changed_rate_or_schedule_and_keeps_what_a_hook_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(learning_rate: float, last: float = 0.0) -> None:
        schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 40, last)

        def create_optimizer(total_steps: int) -> dict[str, keras.optimizers.Optimizer]:
            weights, biases = (SGD(factor * learning_rate, name=name) for factor, name in ((2, "weights"), (4, "bias")))
            several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(weights, {".*bias": biases}))
            return {"several": several, "own": SGD(0.5), "one": SGD(3 * learning_rate), "scheduled": SGD(schedule)}

        monkeypatch.setattr(task, "create_model", lambda: {name: linear() for name in create_optimizer(40)})
        monkeypatch.setattr(task, "create_optimizer", create_optimizer)
        # Those of the task take one model. They are traced, and not run.
        for step in ("train_step", "evaluation_step"):
            monkeypatch.setattr(task, step, lambda *batch: tf.reduce_mean(task.model["own"](batch[-1][0])))
        train.build(Config(run_dir=tmp_path, learning_rate=learning_rate, simulated_devices=1))

    def save(progress: Progress) -> None:
        for optimizer in task.optimizer.values():
            optimizer.iterations.assign(20)
        train.run.progress = progress
        train.run.save()

    def resume() -> tuple[Progress, str]:
        resumed = resume_module.resume(train.run)
        assert resumed is not None
        return resumed

    linear = task.create_model
    build(0.003)
    save(Progress(step=20, learning_rates=created_rates(train.run)))
    build(0.003)
    assert resume()[1] == "resumed from step-00000020"
    build(0.001, last=0.02)
    progress, message = resume()
    assert message == (
        "resumed from step-00000020; --learning-rate 0.003 -> 0.001; learning_rate/several/bias 0.012 -> 0.004; "
        "learning_rate/several/weights 0.006 -> 0.002; learning_rate/one 0.009 -> 0.003"
    )
    # A new schedule continues at the step that the run has reached.
    assert train.run.objects.learning_rates() == pytest.approx(
        {
            "learning_rate/several/bias": 0.004,
            "learning_rate/several/weights": 0.002,
            "learning_rate/own": 0.5,
            "learning_rate/one": 0.003,
            "learning_rate/scheduled": 0.06,
        }
    )
    task.optimizer["one"].learning_rate = 0.0007  # As a hook between epochs may.
    save(progress)
    build(0.001)
    assert resume()[1] == "resumed from step-00000020.1"
    assert train.run.objects.learning_rates()["learning_rate/one"] == pytest.approx(0.0007)


# --- Examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("linear")
def test_changed_examples_are_refused_and_used_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: Ended
) -> None:
    load_examples, flags = task.load_examples, (*ONE_REPLICA, "--epochs=3", "--steps-per-execution=1")

    def use(count: int) -> None:
        monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split).take(count))

    use(240)
    stop(1 + 4 + 3 + 1, tmp_path, *flags)  # After step 6, of which 4 are of epoch 1.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    use(180)
    code, line = ended(tmp_path, *flags)
    told = "the data of task.load_examples('train') differ from those that the run has used so far (240 examples then"
    assert (code, f"{told}, 180 now): restore them, use another --run-dir" in line) == (2, True), line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    capsys.readouterr()
    assert run(tmp_path, *flags, "--allow-changed-data", "--learning-rate=0.01")["step"] == 12
    assert (
        "resumed from step-00000006; --learning-rate 0.003 -> 0.01; 'train' has changed (240 examples then, 180 now); "
        "'test' has changed"
    ) in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path)] == ["4", "9", "12"]
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    counts = {name: each["examples"] for name, each in config["data"].items()}
    assert counts == {"train": 180, "validation": 179, "test": 180}
    assert [(start["step"], start["learning_rate"]) for start in config["starts"]] == [(0, 0.003), (6, 0.01)]


@pytest.mark.usefixtures("linear")
def test_other_files_of_the_task_are_named_and_refused_by_everything_that_uses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: Ended
) -> None:
    file, folder, flags = tmp_path / "items.jsonl", tmp_path / "run", (*ONE_REPLICA, "--limit-steps=1")
    file.write_bytes(b"ab")
    monkeypatch.setattr(task, "data_files", lambda: [file], raising=False)
    run(folder, *flags, "--epochs=1")
    assert read_config(folder)["files"] == {"items.jsonl": hashlib.sha256(b"ab").hexdigest()}
    # The folder may be another one, and the task may use more files than before.
    file = shutil.copytree(tmp_path, tmp_path / "moved") / file.name
    added = [shutil.copy(file, tmp_path / "more.txt"), str(shutil.copy(file, folder / file.name))]
    monkeypatch.setattr(task, "data_files", lambda: [file, added[0]])
    check_files(task.data_files, folder)

    same_name = [shutil.copytree(tmp_path / "moved", tmp_path / name) / file.name for name in ("a", "b")]
    same_name[0].write_bytes(b"c")
    assert data_files_sha256(lambda: same_name) == data_files_sha256(lambda: same_name[::-1])

    file.write_bytes(b"ba")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    others = f"the run in {folder} used other files of task.data_files (items.jsonl has changed): restore"
    so_far = "('train') differ from those that the run has used so far (items.jsonl has changed): restore them, use"
    for way, told in (
        ((*flags, "--epochs=2"), so_far),
        (("--evaluate-only",), others),
        (("--evaluate-continuously=9",), others),
        ((*flags, "--epochs=1", "--export"), others),
    ):
        code, line = ended(folder, *way)
        assert (code, told in line) == (2, True), (way, line)
    with pytest.raises(BadInput, match=r"\(items\.jsonl has changed\)"):
        predict.load(folder)
    for files, told in (
        ([], "(items.jsonl is gone)"),
        ([file, added[1]], "(items.jsonl has changed)"),  # Two of one name.
        ([tmp_path / "none.txt"], f"No such file or directory: '{tmp_path / 'none.txt'}': return a list of files"),
        (None, "task.data_files: TypeError: 'NoneType' object is not iterable: return a list of files"),
    ):
        with pytest.raises(BadInput, match=re.escape(told)):
            check_files(lambda files=files: files, folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    monkeypatch.setattr(task, "data_files", lambda: [file])
    capsys.readouterr()
    run(folder, *flags, "--epochs=2", "--allow-changed-data")
    assert "'train' has changed (items.jsonl has changed); 'validation' has changed (items" in capsys.readouterr().out
    check_files(task.data_files, folder)


# --- Runs that have ended, and --fresh --------------------------------------------------------------------------------


def test_finished_run_is_found_unless_more_is_asked_for_or_its_result_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = {"epochs": 4, "epochs_without_improvement": 2, "step": 80, "seconds": 1.0, "weights_sha256": "a"}

    def found(result: dict[str, Any], **settings: Any) -> dict[str, Any] | None:
        config = Config(run_dir=tmp_path, **settings)
        write_json(tmp_path / "config.json", {"settings": config.as_json()})
        write_json(tmp_path / "result.json", result)
        with RunDirectory(config, tf.distribute.get_strategy()) as directory:
            return directory.result()

    assert found(complete, epochs=4) == found(complete, epochs=9, patience=2) == complete
    assert "Finished already after 4 epochs (more --epochs would continue it" in capsys.readouterr().out
    for settings in ({"epochs": 9, "patience": 3}, {"epochs": 4, "fresh": True}):
        assert found(complete, **settings) is None
    for damaged in ({}, {**complete, "epochs": "4"}):
        assert found(damaged, epochs=4) is None


def test_fresh_begins_once_in_all_lives_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config(run_dir=tmp_path, epochs=4, fresh=True)
    write_json(tmp_path / "config.json", {"settings": settings.as_json(), "start_id": "first"})
    for start_id, is_fresh in (("first", False), ("second", True), ("", True)):
        monkeypatch.setenv(START_ID, start_id)
        assert Directory(settings).is_fresh == is_fresh


# --- What a checkpoint says -------------------------------------------------------------------------------------------


def resume(run: Run, progress: Progress, *names: str, data: dict[str, Any] | None = None) -> tuple[Progress, str]:
    """Resumes from a checkpoint with this progress; `names` are the datasets, and `data` has their fingerprints."""
    newest = (Path(f"step-{progress.step:08d}"), progress)
    run.batches = dict.fromkeys(names)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(resume_module, "restore_newest", lambda *_: newest)
        patching.setattr(resume_module, "same_data", lambda *_: data or {})
        resumed = resume_module.resume(run)
    assert resumed is not None
    return resumed


def test_fewer_epochs_than_were_begun_and_lost_checkpoints_are_refused(begin: Callable[..., Run]) -> None:
    progress = Progress(epoch=1, step=24, steps_of_pass={"train": 4})
    with pytest.raises(BadInput, match="--epochs 1: the run already reached epoch 2; pass at least 2"):
        resume(begin(epochs=1), progress, "train")
    assert resume(begin(epochs=2), progress, "train")[0] == progress
    run = begin()
    assert resume_module.resume(run) is None
    (run.settings.run_dir / "result.json").touch()
    with pytest.raises(BadInput, match="checkpoints is empty although the run has gone far"):
        resume_module.resume(run)


def fingerprint(count: int, file: str = "a") -> dict[str, Any]:
    spec = {"element_spec": "int32[]", "steps_per_epoch": count}
    return {"examples": count, "sha256": "a", "files": {"file": file}, **spec}


@pytest.mark.parametrize(
    ("steps", "ended", "changed", "left", "reset"),
    [
        # Within an epoch, and in a validation inside it, of which one dataset has ended.
        ({"train": 3}, [], "validation/a", ["train"], []),
        ({"train": 3, "validation/b": 1}, ["validation/a"], "train", [], ["train", "validation/b"]),
        # In the validation after an epoch, which is not trained again; between epochs.
        ({"validation/b": 1}, ["train", "validation/a"], "train", ["train"], ["validation/b"]),
        ({}, [], "train", [], []),
        # A file on which all datasets depend.
        ({"train": 3}, [], "file", [], ["train"]),
    ],
)
def test_passes_over_changed_examples_start_over_and_so_do_scores(
    steps: dict[str, int],
    ended: list[str],
    changed: str,
    left: list[str],
    reset: list[str],
    begin: Callable[..., Run],
) -> None:
    run = begin(epochs=3, allow_changed_data=True, monitor="validation/a/loss")
    before = {name: fingerprint(5) for name in ("train", "validation/a", "validation/b")}
    metrics = {name: {f"{name}/loss": 1.0} for name in ended}
    progress = Progress(1, 13, steps, metrics, best_epoch=0, best_step=10, best_score=0.5, data=before)
    data, texts = {**before, changed: fingerprint(4)}, [f"{changed!r} has changed (5 examples then, 4 now)"]
    if changed == "file":
        data, texts = (
            dict.fromkeys(before, fingerprint(5, "b")),
            [f"{name!r} has changed (file has changed)" for name in before],
        )
    progress, message = resume(run, progress, *before, data=data)
    assert [*progress.steps_of_pass, *progress.metrics] == left
    assert run.objects.resets == reset
    assert message == "; ".join(["resumed from step-00000013", *texts])
    # The scores of other examples cannot be compared, and --patience counts from here.
    is_monitored = changed in ("validation/a", "file")
    assert (progress.best_epoch, progress.best_score) == ((1, None) if is_monitored else (0, 0.5))


def test_sets_that_are_gone_are_forgotten_at_a_resume(begin: Callable[..., Run]) -> None:
    run = begin(epochs=2)
    scores = {"validation/older": {"validation/older/loss": 1.0}, "validation/kept": {"validation/kept/loss": 2.0}}
    progress = Progress(step=10, steps_of_pass={"train": 10, "validation/old": 3}, metrics=scores)
    progress, _ = resume(run, progress, "train", "validation/kept")
    run.start(progress)
    assert run.objects.resets == ["validation/old"]
    assert run.progress.steps_of_pass == {"train": 10}
    assert run.results("validation") == {"validation/kept/loss": 2.0}
