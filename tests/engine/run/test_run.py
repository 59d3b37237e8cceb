"""What a run decides in the loops of train.py, with made-up batches and losses: no model, no graph, no training."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_up_runs import STEPS, Batches, put_into_train_py
from short_runs import interrupted

import train
from engine.errors import BadInput, Diverged, Stopped
from engine.run.progress import Progress
from engine.run.resume import load_data_of
from engine.run.start import RunDirectory, saving_on_exit
from engine.run.training import Run


def run_epochs(run: Run, scores: list[float], *, names: tuple[str, ...] = ("validation",)) -> None:
    """Runs the epochs with the validation scores given, one of each dataset in turn."""
    run.objects.scores = iter(scores)
    put_into_train_py(run, Batches("train"), *(Batches(name, 4) for name in names))
    train.run_epochs()


def saved(run: Run) -> list[str]:
    run.checkpoints.writer.wait()
    return [path.name for path in run.checkpoints.paths()]


def test_saves_are_at_multiples_and_ends_of_epochs_whatever_the_chunks(begin: Callable[..., Run]) -> None:
    run = begin(epochs=3, checkpoint_every_steps=7, steps_per_execution=5, keep_checkpoints=20)
    run_epochs(run, [3.0, 2.0, 1.0])
    assert saved(run) == [f"step-{step:08d}" for step in (7, 14, 20, 21, 28, 35, 40, 42, 49, 56, 60)]
    for path in run.checkpoints.paths():
        values, record = run.checkpoints.read(path)
        assert float(values["weight"]) == record["step"] == int(path.name[-8:])
    # A run that was stopped where a save is due does not save again when it resumes.
    resumed = begin(checkpoint_every_steps=7)
    resumed.start(Progress(step=7, steps_of_pass={"train": 7}))
    training = resumed.start_pass(Batches("train"), 0)
    assert not resumed.save_is_due(training)
    resumed.progress.step = 14
    assert resumed.save_is_due(training)


@pytest.mark.parametrize(
    ("patience", "epochs", "best_epoch", "best_score"), [(None, 4, 4, 1.0), (1, 3, 2, 2.0), (2, 4, 4, 1.0)]
)
def test_patience_and_the_best(
    patience: int | None,
    epochs: int,
    best_epoch: int,
    best_score: float,
    begin: Callable[..., Run],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = begin(epochs=4, patience=patience)
    run_epochs(run, [3.0, 2.0, 4.0, 1.0])
    progress = run.progress
    assert (progress.epoch, progress.best_epoch, progress.best_score) == (epochs, best_epoch, best_score)
    run.objects.weight.assign(0.0)
    result = RunDirectory(run.settings, run.strategy).finish(run, lambda: {"test/loss": float(run.objects.weight)})
    assert result["test/loss"] == progress.best_step == best_epoch * STEPS  # The test is of the best weights.
    assert (result["epochs"], result["best_epoch"]) == (epochs, best_epoch)
    told = f"Stopped by --patience: validation/loss was best in epoch {best_epoch}." in capsys.readouterr().out
    assert told == (epochs - best_epoch == patience)
    # More patience continues the run.
    more = begin(epochs=4, patience=(patience or 0) + 1)
    more.start(progress)
    assert more.should_continue() == (epochs < 4)


def test_score_that_is_not_a_number_is_never_the_best(
    begin: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(epochs=4)
    run_epochs(run, [math.nan, 2.0, math.nan, 3.0])
    assert (run.progress.best_epoch, run.progress.best_score) == (2, 2.0)
    assert capsys.readouterr().out.count("validation/loss is NaN, so these weights cannot be the best") == 2
    never = begin(epochs=2)
    run_epochs(never, [math.nan, math.nan])
    with pytest.raises(Diverged, match="--monitor validation/loss was never a number"):
        RunDirectory(never.settings, never.strategy).finish(never, dict)


def test_validations_in_an_epoch_are_at_multiples_and_count_for_the_best_and_for_patience(
    begin: Callable[..., Run],
) -> None:
    run = begin(epochs=9, patience=1, validate_every_steps=10, steps_per_execution=100)
    # 5 in the middle and 4 at the end of the first epoch, 3 and 6 in the second, then 6 twice: that one had none.
    run_epochs(run, [5.0, 4.0, 3.0, 6.0, 6.0, 6.0])
    progress = run.progress
    assert (progress.epoch, progress.best_epoch, progress.best_step, progress.best_score) == (3, 2, 30, 3.0)
    assert "step-00000030" in saved(run)  # With the best weights, though no checkpoint was due.
    assert run.objects.evaluations == 6


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5, 7, 15])
def test_stopped_run_saves_and_goes_on_with_the_same_decisions(
    stop: int, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("validation/easy", "validation/hard")
    settings = {"epochs": 2, "validate_every_steps": 10, "steps_per_execution": 5, "keep_checkpoints": 20}
    settings["monitor"] = "validation/hard/loss"
    # The last set decides. What the first one gives is in the row with it, whether the run was stopped between or not.
    scores = [14.0, 5.0, 13.0, 4.0, 12.0, 3.0, 15.0, 6.0]
    run, rows = begin(**settings), []
    for kind in ("end_validation", "end_epoch"):
        end = getattr(Run, kind)
        monkeypatch.setattr(Run, kind, lambda run, metrics, end=end: (rows.append(metrics), end(run, metrics)))

    run.objects.scores = iter(scores)  # Also if the run is stopped before its epochs.
    with interrupted(stop, Stopped), pytest.raises(Stopped, match="the state is in"), saving_on_exit(run):
        run_epochs(run, scores, names=names)
    done = len(scores) - len(list(run.objects.scores))
    *_, newest = run.checkpoints.paths()

    resumed = begin(**settings)
    values, record = resumed.checkpoints.read(newest)
    resumed.checkpoints.state.assign(values)
    resumed.start(Progress(**record))
    run_epochs(resumed, scores[done:], names=names)
    assert (resumed.progress.step, resumed.progress.best_step, resumed.progress.best_score) == (40, 30, 3.0)
    assert float(resumed.objects.weight) == 40
    assert sorted(path.name for path in resumed.best.paths()) == ["step-00000010", "step-00000020", "step-00000030"]
    assert [row[f"{name}/loss"] for row in rows for name in names] == scores


RATES = {"learning_rate/head": [8.0, 4.0, 4.0, 2.0], "learning_rate/encoder": [3.0, 3.0, 1.5, 1.5]}
CHANGES = ["learning rate/head 8 -> 4", "learning rate/encoder 3 -> 1.5", "learning rate/head 4 -> 2"]


@pytest.mark.parametrize("place", ["train_epoch", "validate_and_keep_best", "end_epoch"])
@pytest.mark.parametrize("stop", [1, 3])
def test_rate_of_an_epoch_is_the_one_it_ended_with_and_a_change_is_printed_once(
    place: str, stop: int, begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The rates are changed after a place in run_epochs, for the next epoch, as variables, which a stop keeps."""
    rows, kept = [], {name: rates[0] for name, rates in RATES.items()}
    owner: Any = Run if place == "end_epoch" else train
    report = SimpleNamespace(epoch=lambda row, **_: rows.append(row), steps=lambda *_: None, end=lambda: None)

    unchanged = getattr(owner, place)

    def change(*arguments: Any) -> Any:
        epoch = train.run.epoch
        returned = unchanged(*arguments)
        kept.update((name, [*rates, 0.0][epoch + 1]) for name, rates in RATES.items() if epoch < 3)
        return returned

    def continue_run(progress: Progress) -> Run:
        run = begin(epochs=4, steps_per_execution=20)
        run.objects.rates, run.report = kept, report
        run.start(progress)
        return run

    monkeypatch.setattr(owner, place, change)
    run, scores = continue_run(Progress()), [4.0, 3.0, 2.0, 1.0]
    run.objects.scores = iter(scores)  # Also if the run is stopped before its epochs.
    with interrupted(stop, Stopped), pytest.raises(Stopped), saving_on_exit(run):
        run_epochs(run, scores)
    left_scores = list(run.objects.scores)
    record = run.checkpoints.read(run.checkpoints.paths()[-1])[1]
    run_epochs(continue_run(Progress(**record)), left_scores)
    assert {name: [row[name] for row in rows] for name in RATES} == RATES
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate")]
    assert printed == CHANGES


def test_state_of_the_user_is_saved_and_restored_or_rejected(begin: Callable[..., Run]) -> None:
    run = begin(epochs=2)
    run.user_state["plateau"] = {"best": float("nan"), "names": ["a", None], "on": True}
    arrays = {"file": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.array("ü"), "a.npy": np.zeros(0), "/": None}
    run.user_state.update(arrays, last=1)
    _, record = run.checkpoints.read(run.save())
    resumed = begin(epochs=2)
    load_data_of(resumed, Progress(**record))
    assert repr(resumed.user_state) == repr(run.user_state)
    with pytest.raises(AttributeError):
        run.user_state = {}
    before = saved(run)
    circle: list[Any] = []
    circle.append(circle)
    odd = (np.array([None]), np.array([1.0], tf.bfloat16.as_numpy_dtype), np.ma.masked_array([1], [True]), [np.ones(1)])
    for value in ((1, 2), {1: 2}, np.float64(1.0), {1}, circle, *odd):
        run.user_state["mine"] = value
        with pytest.raises(BadInput, match=r"run\.user_state .*'mine': .* would not be the same after a resume: use"):
            run.save()
    del run.user_state["mine"]
    run.user_state[7] = np.ones(1)
    with pytest.raises(BadInput, match="would not be the same after a resume"):
        run.save()
    assert saved(run) == before


def test_loss_that_is_not_finite_ends_the_run_with_the_step(begin: Callable[..., Run]) -> None:
    for every, advice in ((None, "Nothing was saved. Start over with --fresh"), (5, "The last good checkpoint is ")):
        run = begin(steps_per_execution=10, checkpoint_every_steps=every)
        put_into_train_py(run, Batches("train"), losses=lambda step: np.inf if step == 13 else 0.0)
        told = rf"step 14 of epoch 3 is inf\. {advice}"
        with pytest.raises(Diverged, match=told) as ending, saving_on_exit(run):
            train.train_epoch(2)
        assert run.progress.step == 10
    assert saved(run) == ["step-00000005", "step-00000010"][-run.settings.keep_checkpoints :]
    assert "step-00000010; nothing later was saved. Start a new --run-dir with --init-from " in str(ending.value)


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
