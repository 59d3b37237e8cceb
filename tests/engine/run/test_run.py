"""What a run decides in the loops of train.py, with made-up batches and losses: no model, no graph, no training."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import train
from config import Config
from engine.cluster.workers import Workers
from engine.errors import BadInput, Diverged, InterruptedStep, Stopped
from engine.model.averages import MovingAverage
from engine.run import saving_on_exit, start
from engine.run.progress import Progress
from engine.run.run import Run
from engine.run.signals import signals

STEPS = 20


class Batches:
    """Batches of one set that are nothing but their numbers."""

    def __init__(self, name: str, steps: int = STEPS, unreadable: int | None = None) -> None:
        self.name, self.split, self.steps_per_epoch = name, name.split("/")[0], steps
        self.global_batch_size = 10
        self.seconds_waited = 0.0
        self._unreadable = unreadable

    def examples_in(self, epoch: int, first_step: int = 0, steps: int | None = None) -> int:
        return self.global_batch_size * (self.steps_per_epoch if steps is None else steps)

    def iterator(self, epoch: int, first_step: int) -> "Batches":
        self._next = first_step
        return self

    def take(self, count: int) -> Iterator[tuple[str, int, int]]:
        while count:
            taken = min(count, 3)  # A stack ends in the middle of a chunk.
            if self._unreadable is not None and self._next + taken > self._unreadable:
                raise BadInput("unreadable")
            yield "stack", self._next, taken
            self._next, count = self._next + taken, count - taken


class Objects:
    """What a task's objects are to a run: a weight, which counts steps, and the next validation's score."""

    def __init__(self) -> None:
        self.weight = tf.Variable(0.0)
        self.weights, self.average, self.monitor_direction = {"weight": self.weight}, MovingAverage({}, {}, None), "min"
        self.averaged, self.on_report, self.rates = 0, None, {}
        self.scores: Iterator[float] = iter(())

    def mirrored(self) -> dict[str, tf.Variable]:
        return self.weights

    per_replica = changed = used_in_evaluation = lambda self: {}
    check_loss_scales = reset = lambda self, _: None

    def seeds(self, listed: dict[str, tf.Variable]) -> list[tf.Variable]:
        return []

    def average_statistics(self) -> None:
        self.averaged += 1

    def learning_rates(self) -> dict[str, float]:
        return dict(self.rates)

    def results(self, name: str) -> dict[str, float]:
        return {f"{name}/loss": 0.0 if name == "train" else next(self.scores)}


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    def begin(**settings: Any) -> Run:
        (tmp_path / "run").mkdir(exist_ok=True)
        config = Config(run_dir=tmp_path / "run", **settings)
        objects, strategy = Objects(), tf.distribute.get_strategy()
        return Run(config, strategy, Workers(strategy), objects, objects)

    return begin


def put_into_train_py(
    run: Run, *batches: Batches, losses: Callable[[int], float] = lambda step: 0.0
) -> list[tuple[str, int, int]]:
    """Makes a run and its batches the global objects of train.py, whose loops then use them.

    Returns a list that gets, for each call of a compiled function, its split, the first step, and how many it takes.
    """
    calls: list[tuple[str, int, int]] = []

    def steps_of(split: str) -> Callable[..., np.ndarray]:
        def steps(stack: str, first: int, count: int) -> np.ndarray:
            calls.append((split, first, count))
            run.objects.weight.assign_add(count if split == "train" else 0)
            return np.array([losses(step) for step in range(first, first + count)], np.float32)

        return steps

    train.run, train.batches = run, {each.name: each for each in batches}
    train.run_steps = {split: steps_of(split) for split in train.SPLITS}
    return calls


def executions(run: Run, batches: Batches, epoch: int = 0) -> list[int]:
    """Takes the steps that are left of a pass, as train.py does; returns how many there were in each execution."""
    calls, counts = put_into_train_py(run, batches), []
    record = run.record_losses

    def recorded(steps: Any, losses: Any) -> None:
        counts.append(sum(count for *_, count in calls))
        calls.clear()
        record(steps, losses)

    run.record_losses = recorded
    try:
        train.train_epoch(epoch) if batches.split == "train" else train.evaluate_split(batches.split, epoch)
    finally:
        del run.record_losses
    return counts


def run_epochs(run: Run, scores: list[float], *, names: tuple[str, ...] = ("validation",)) -> None:
    """Runs the epochs with the validation scores given, one of each dataset in turn."""
    run.objects.scores = iter(scores)
    put_into_train_py(run, Batches("train"), *(Batches(name, 4) for name in names))
    train.run_epochs()


def saved(run: Run) -> list[str]:
    return [path.name for path in run.checkpoints.paths()]


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_saves_are_at_multiples_and_ends_of_epochs_whatever_the_chunks(chunk: int, begin: Callable[..., Run]) -> None:
    run = begin(epochs=3, checkpoint_every_steps=7, steps_per_execution=chunk, keep_checkpoints=20)
    run_epochs(run, [3.0, 2.0, 1.0])
    assert saved(run) == [f"step-{step:08d}" for step in (7, 14, 20, 21, 28, 35, 40, 42, 49, 56, 60)]
    for path in run.checkpoints.paths():
        values, record = run.checkpoints.read(path)
        assert float(values["weight"]) == record["step"] == int(path.name[-8:])


def test_executions_end_at_multiples_and_continue_from_a_position(begin: Callable[..., Run]) -> None:
    run = begin(checkpoint_every_steps=8, steps_per_execution=5)
    assert executions(run, Batches("train")) == [5, 3, 5, 3, 4]
    assert run.progress.metrics["train"] == {"train/loss": 0.0}
    assert run.progress.step == STEPS
    assert executions(run, Batches("train")) == []  # This epoch has been trained.
    assert executions(run, Batches("train"), epoch=1) == [4, 5, 3, 5, 3]
    run = begin(steps_per_execution=5)
    run.progress.steps_of_pass, run.objects.scores = {"validation": 7}, iter([1.0])
    assert executions(run, Batches("validation")) == [5, 5, 3]


def test_run_stopped_inside_a_validation_continues_there_and_saves_nothing_twice(begin: Callable[..., Run]) -> None:
    """The training must not overtake the validation, and the checkpoint of this step exists already."""
    run = begin(validate_every_steps=10, checkpoint_every_steps=10, steps_per_execution=5, epochs=1)
    run.start(Progress(step=10, steps_of_pass={"train": 10, "validation": 2}))
    run.objects.scores = iter([1.0, 2.0])
    calls = put_into_train_py(run, Batches("train"), Batches("validation", 4))
    train.run_epochs()
    assert calls[0] == ("validation", 2, 2)
    assert next((first, count) for split, first, count in calls if split == "train") == (10, 3)
    assert saved(run) == ["step-00000010", "step-00000020"]  # The first one with the best weights.


@pytest.mark.parametrize(
    ("patience", "scores", "epochs", "best_epoch", "best_score"),
    [
        (None, [3.0, 2.0, 4.0, 1.0], 4, 4, 1.0),
        (1, [3.0, 2.0, 4.0, 1.0], 3, 2, 2.0),
        (2, [3.0, 2.0, 4.0, 1.0], 4, 4, 1.0),
        (1, [3.0, 3.0], 2, 1, 3.0),
        (1, [float("nan"), 3.0, 4.0], 3, 2, 3.0),
    ],
)
def test_patience_and_the_best(patience, scores, epochs, best_epoch, best_score, begin: Callable[..., Run]) -> None:
    run = begin(epochs=4, patience=patience)
    run_epochs(run, scores)
    progress = run.progress
    assert (progress.epoch, progress.best_epoch, progress.best_score) == (epochs, best_epoch, best_score)
    run.objects.weight.assign(0.0)
    run.best.restore(run.best.path(progress.best_step))
    assert float(run.objects.weight) == progress.best_step == best_epoch * STEPS


def test_validations_in_an_epoch_are_at_multiples_and_count_for_the_best_and_for_patience(
    begin: Callable[..., Run],
) -> None:
    run = begin(epochs=9, patience=1, validate_every_steps=10, steps_per_execution=100)
    # 5 in the middle and 4 at the end of the first epoch, 3 and 6 in the second, then 6 twice: that one had none.
    run_epochs(run, [5.0, 4.0, 3.0, 6.0, 6.0, 6.0])
    progress = run.progress
    assert (progress.epoch, progress.best_epoch, progress.best_step, progress.best_score) == (3, 2, 30, 3.0)
    assert "step-00000030" in saved(run)  # With the best weights, though no checkpoint was due.
    assert run.objects.averaged == 6


@pytest.mark.parametrize(("sets", "stop"), [*((1, stop) for stop in range(12)), *((2, stop) for stop in range(16))])
def test_stopped_run_saves_and_goes_on_with_the_same_decisions(
    sets: int, stop: int, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("validation",) if sets == 1 else ("validation/easy", "validation/hard")
    settings = {"epochs": 2, "validate_every_steps": 10, "steps_per_execution": 5, "keep_checkpoints": 20}
    settings["monitor"] = f"{names[-1]}/loss"
    # The last set decides. What the first one gives is in the row with it, whether the run was stopped between or not.
    scores = [score for score in (5.0, 4.0, 3.0, 6.0) for score in [9.0 + score] * (sets - 1) + [score]]
    run, left = begin(**settings), iter(range(stop))
    rows = []
    for kind in ("end_validation", "end_epoch"):
        end = getattr(Run, kind)
        monkeypatch.setattr(Run, kind, lambda run, metrics, end=end: (rows.append(metrics), end(run, metrics)))

    def check(_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped")

    run.objects.scores = iter(scores)  # Also if the run is stopped before its epochs.
    with monkeypatch.context() as stopping:
        stopping.setattr(signals, "check", check)
        with pytest.raises(Stopped, match="the state is in"), saving_on_exit(run):
            run_epochs(run, scores, names=names)
    done = len(scores) - len(list(run.objects.scores))
    *_, newest = run.checkpoints.paths()

    resumed = begin(**settings)
    values, record = resumed.checkpoints.read(newest)
    resumed.checkpoints.state.assign(values)
    del record["step"]
    resumed.progress = type(run.progress)(**record, step=run.progress.step)
    run_epochs(resumed, scores[done:], names=names)
    assert (resumed.progress.step, resumed.progress.best_step, resumed.progress.best_score) == (40, 30, 3.0)
    assert float(resumed.objects.weight) == 40
    # Statistics are averaged once for each validation: the mean of equal numbers may be another number.
    assert run.objects.averaged + resumed.objects.averaged == 4
    assert sorted(path.name for path in resumed.best.paths()) == ["step-00000010", "step-00000020", "step-00000030"]
    if sets == 2:
        of_sets = [(row["validation/easy/loss"], row["validation/hard/loss"]) for row in rows]
        assert of_sets == [(14.0, 5.0), (13.0, 4.0), (12.0, 3.0), (15.0, 6.0)]


def test_evaluation_that_has_ended_starts_over_the_next_time(begin: Callable[..., Run]) -> None:
    run = begin(steps_per_execution=5)
    run.objects.scores = iter([1.0, 2.0, 3.0, 4.0])
    calls = put_into_train_py(run, Batches("test/a", 7), Batches("test/b", 7))
    for expected in ((1.0, 2.0), (3.0, 4.0)):
        assert train.test() == dict(zip(("test/a/loss", "test/b/loss"), expected, strict=True))
    assert sum(count for *_, count in calls) == 4 * 7
    assert (run.results("test"), run.progress.steps_of_pass, run.progress.metrics) == ({}, {}, {})


RATES = {"learning_rate/head": [8.0, 4.0, 4.0, 2.0], "learning_rate/encoder": [3.0, 3.0, 1.5, 1.5]}
CHANGES = ["learning rate/head 8 -> 4", "learning rate/encoder 3 -> 1.5", "learning rate/head 4 -> 2"]


@pytest.mark.parametrize("place", ["train_epoch", "validate_and_keep_best", "end_epoch"])
@pytest.mark.parametrize("stop", [None, *range(8)])
def test_rate_of_an_epoch_is_the_one_it_ended_with_and_a_change_is_printed_once(
    place: str, stop: int | None, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The rates are changed after a place in run_epochs, for the next epoch, as variables, which a stop keeps."""
    rows, kept, left = [], {name: rates[0] for name, rates in RATES.items()}, iter(range(99 if stop is None else stop))
    owner: Any = Run if place == "end_epoch" else train
    report = SimpleNamespace(epoch=lambda row, **_: rows.append(row), steps=lambda *_: None, end=lambda: None)

    unchanged = getattr(owner, place)

    def change(*arguments: Any) -> Any:
        epoch = train.run.epoch
        returned = unchanged(*arguments)
        kept.update((name, [*rates, 0.0][epoch + 1]) for name, rates in RATES.items() if epoch < 3)
        return returned

    def check(_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped")

    def continue_run(progress: Progress) -> Run:
        run = begin(epochs=4, steps_per_execution=20)
        run.objects.rates, run.report = kept, report
        run.start(progress)
        return run

    monkeypatch.setattr(owner, place, change)
    monkeypatch.setattr(signals, "check", check)
    run, scores = continue_run(Progress()), [4.0, 3.0, 2.0, 1.0]
    run.objects.scores = iter(scores)  # Also if the run is stopped before its epochs.
    try:
        with saving_on_exit(run):
            run_epochs(run, scores)
    except Stopped:
        left = iter(range(99))
        left_scores = list(run.objects.scores)
        record = run.checkpoints.read(run.checkpoints.paths()[-1])[1]
        run_epochs(continue_run(Progress(**record)), left_scores)
    assert {name: [row[name] for row in rows] for name in RATES} == RATES
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate")]
    assert printed == CHANGES


def test_state_of_the_user_is_saved_and_restored(begin: Callable[..., Run]) -> None:
    run = begin(epochs=2)
    run.user_state["plateau"] = {"best": float("nan"), "names": ["a", None], "on": True}
    _, record = run.checkpoints.read(run.save())
    resumed = begin(epochs=2)
    resumed.start(Progress(**record))
    assert repr(resumed.user_state) == repr(run.user_state)
    with pytest.raises(AttributeError):
        run.user_state = {}


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, np.float32(1.0), np.float64(1.0), {1}, Exception], ids=repr)
def test_state_that_a_resume_would_change_is_rejected(value: Any, begin: Callable[..., Run]) -> None:
    run = begin()
    run.user_state["mine"] = value
    with pytest.raises(BadInput, match=r"run\.user_state \{'mine': .* would not be the same after a resume: use"):
        run.save()
    assert not saved(run)


def test_loss_that_is_not_finite_ends_the_run_with_the_step(begin: Callable[..., Run]) -> None:
    run = begin(steps_per_execution=10)
    put_into_train_py(run, Batches("train"), losses=lambda step: np.inf if step == 13 else 0.0)
    with (
        pytest.raises(Diverged, match=r"step 14 of epoch 3 is inf\. Nothing was saved\. Start over with --fresh"),
        saving_on_exit(run),
    ):
        train.train_epoch(2)
    assert run.progress.step == 10
    assert saved(run) == []


def test_steps_before_what_cannot_be_read_count(begin: Callable[..., Run]) -> None:
    run = begin(steps_per_execution=10)
    put_into_train_py(run, Batches("train", unreadable=17))
    message = r"unreadable; the same command, .* resumes from .*step-000000"
    with pytest.raises(BadInput, match=message), saving_on_exit(run):
        train.train_epoch()
    assert (run.progress.step, run.progress.steps_of_pass) == (16, {"train": 16})
    assert float(run.checkpoints.read(run.checkpoints.paths()[-1])[0]["weight"]) == 16


def test_same_step_saved_again_has_a_second_name_and_the_newest_is_found(begin: Callable[..., Run]) -> None:
    run = begin(keep_checkpoints=2)
    for value in (1.0, 2.0, 3.0):
        run.objects.weight.assign(value)
        run.save()
    assert saved(run) == ["step-00000000.1", "step-00000000.2"]
    assert float(run.checkpoints.read(run.checkpoints.paths()[-1])[0]["weight"]) == 3.0


def test_disk_that_fails_leaves_what_was_there(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin()
    run.save()
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with contextlib.suppress(Exception):
        run.save()
    monkeypatch.undo()
    assert saved(run) == ["step-00000000"]
    assert [path.name for path in run.checkpoints.directory.iterdir()] == ["step-00000000"]


def test_steps_that_were_not_counted_are_not_saved(begin: Callable[..., Run]) -> None:
    run = begin(steps_per_execution=10, checkpoint_every_steps=10)

    def fail(step: int) -> float:
        if step == 15:
            raise BadInput("a mistake beside the steps")
        return 0.0

    put_into_train_py(run, Batches("train"), losses=fail)
    with pytest.raises(BadInput, match=r"a mistake .* resumes from .*step-00000010"), saving_on_exit(run):
        train.train_epoch()
    assert float(run.objects.weight) > 10
    assert saved(run) == ["step-00000010"]


def test_user_error_after_a_validation_does_not_restart_it(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(epochs=2)

    def fail(_: Any) -> None:
        raise InterruptedStep("a hook failed")

    monkeypatch.setattr(run, "end_epoch", fail)

    with pytest.raises(InterruptedStep), saving_on_exit(run):
        run_epochs(run, [1.0, 2.0])
    assert run.progress.steps_of_pass == {}


@pytest.mark.parametrize(("shards_by_file", "steps_per_epoch"), [(True, None), (True, 7), (False, 7)])
def test_end_of_an_epoch_that_is_no_pass_is_a_position_of_its_number_of_workers(
    shards_by_file: bool, steps_per_epoch: int | None, monkeypatch: pytest.MonkeyPatch, begin: Callable[..., Run]
) -> None:
    run = begin(epochs=2, steps_per_epoch=steps_per_epoch)
    progress = Progress(epoch=1, step=7, workers=2)
    newest = (Path("step-00000007"), {"weight": np.float32(7.0)}, progress)
    monkeypatch.setattr(start, "read_newest", lambda *_: newest)
    run.objects.optimizers = {}
    batches = {"train": SimpleNamespace(shards_by_file=shards_by_file)}
    if shards_by_file and steps_per_epoch:
        with pytest.raises(BadInput, match=r"pass on 2 worker\(s\), and there are 1 \(.*\): resume with 2$"):
            start._resume(run, batches, {})
    else:
        assert start._resume(run, batches, {}) == (progress, "resumed from step-00000007")


def fingerprint(count: int) -> dict[str, Any]:
    return {"examples": count, "element_spec": "int32[]", "sha256": "a", "steps_per_epoch": count}


@pytest.mark.parametrize(
    ("steps", "ended", "changed", "left", "reset", "end"),
    [
        # Within an epoch, and in a validation inside it, of which one dataset has ended.
        ({"train": 3}, [], ["train"], [], ["train"], 13 + 2 * 4),
        ({"train": 3}, [], ["validation/a"], ["train"], [], None),
        ({"train": 3, "validation/b": 1}, ["validation/a"], ["train"], [], ["train", "validation/b"], 13 + 2 * 4),
        ({"train": 3, "validation/b": 1}, ["validation/a"], ["validation/a"], ["train"], ["validation/b"], None),
        # In the validation after an epoch, which is not trained again; between epochs.
        ({"validation/b": 1}, ["train", "validation/a"], ["train"], ["train"], ["validation/b"], 13 + 4),
        ({"validation/b": 1}, ["train", "validation/a"], ["validation/b"], ["train"], ["validation/b"], None),
        ({}, [], ["train"], [], [], 13 + 2 * 4),
    ],
)
def test_passes_over_changed_examples_start_over(
    steps: dict[str, int],
    ended: list[str],
    changed: list[str],
    left: list[str],
    reset: list[str],
    end: int | None,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[..., Run],
) -> None:
    run, found = begin(epochs=3, allow_changed_data=True, monitor="validation/a/loss"), []
    before = {name: fingerprint(5) for name in ("train", "validation/a", "validation/b")}
    metrics = {name: {f"{name}/loss": 1.0} for name in ended}
    progress = Progress(1, 13, steps, metrics, best_epoch=1, best_step=10, best_score=0.5, data=before)
    monkeypatch.setattr(start, "read_newest", lambda *_: (Path("step-00000013"), {"weight": np.float32(0.0)}, progress))
    run.objects.optimizers, run.objects.reset = {}, found.append
    batches = {name: SimpleNamespace(shards_by_file=False) for name in before}
    progress, message = start._resume(run, batches, {**before, **{name: fingerprint(4) for name in changed}})
    assert [*progress.steps_of_pass, *progress.metrics] == left
    assert found == reset
    assert message == f"resumed from step-00000013; {changed[0]!r} has changed (5 examples then, 4 now)" + (
        "; 5 steps per epoch then, 4 now: the learning-rate schedule spans 12 steps instead of 15, and the training "
        f"ends after step {end}"
        if end
        else ""
    )
    assert (progress.best_step, progress.best_score) == (10, None if changed == ["validation/a"] else 0.5)


def test_score_of_other_examples_is_forgotten_and_patience_starts_over_if_an_epoch_follows(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., Run]
) -> None:
    for epochs, expected in ((6, (None, 0)), (5, (0.5, 3))):
        run = begin(epochs=epochs, allow_changed_data=True, monitor="validation/a/loss")
        before = {name: fingerprint(5) for name in ("train", "validation/a")}
        progress = Progress(5, 25, best_epoch=2, best_step=10, best_score=0.5, data=before)
        newest = Path("step-00000025"), {"weight": np.float32(0.0)}, progress
        monkeypatch.setattr(start, "read_newest", lambda *_, newest=newest: newest)
        run.objects.optimizers = {}
        batches = {name: SimpleNamespace(shards_by_file=False) for name in before}
        resumed, _ = start._resume(run, batches, {**before, "validation/a": fingerprint(4)})
        assert (resumed.best_score, resumed.epochs_without_improvement()) == expected


def test_sets_that_are_gone_are_forgotten_at_a_resume(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., Run]
) -> None:
    """What was counted of the pass that was under way is of no other set."""
    run, reset = begin(epochs=2), []
    steps = {"train": 10, "validation/old": 3}
    scores = {"validation/older": {"validation/older/loss": 1.0}, "validation/kept": {"validation/kept/loss": 2.0}}
    newest = (Path("step-00000010"), {"weight": np.float32(10.0)}, Progress(steps_of_pass=steps, metrics=scores))
    monkeypatch.setattr(start, "read_newest", lambda *_: newest)
    run.objects.optimizers, run.objects.reset = {}, reset.append
    names = ("train", "validation/kept", "validation/new")
    data = {"train": fingerprint(4)}  # The checkpoint is of a version that recorded none.
    progress, _ = start._resume(run, {name: SimpleNamespace(shards_by_file=False) for name in names}, data)
    run.start(progress)
    assert reset == ["validation/old"]
    assert run.progress.steps_of_pass == {"train": 10}
    assert run.results("validation") == {"validation/kept/loss": 2.0}


def test_run_without_a_best_says_what_is_missing(begin: Callable[..., Run]) -> None:
    with pytest.raises(BadInput, match=r"--monitor validation/loss was never measured: call run\.save_if_best"):
        begin().finish(dict)
