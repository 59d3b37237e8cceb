"""How a run ends before its time: the exit code, the line, and what is kept; and what a run may do beside."""

import contextlib
import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from short_runs import ONE_REPLICA, run
from small_states import read_checkpoint

import task
import train
from config import Config
from engine.errors import Stopped, end_at_signals
from engine.model.build import set_up
from engine.signals import Signals, signals

Ended = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.usefixtures("linear")


def test_deleted_directory_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    evaluate = train.evaluate_split

    def move_and_evaluate(*arguments: Any) -> dict[str, float]:
        train.run.checkpoints.writer.wait()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        return evaluate(*arguments)

    monkeypatch.setattr(train, "evaluate_split", move_and_evaluate)
    code, line = ended(tmp_path / "run", *ONE_REPLICA, "--epochs=2", "--checkpoint-every-steps=10")
    assert code == 1
    assert "cannot be written" in line
    assert "restore the directory" in line
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    assert read_checkpoint(tmp_path / "elsewhere" / "checkpoints" / "step-00000010")[1]["step"] == 10


def test_gradients_that_are_never_finite_end_a_float16_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    compute_loss = task.compute_loss

    def without_slope(labels, predictions, weights):
        loss, per_example_loss = compute_loss(labels, predictions, weights)
        return loss + tf.sqrt(0.0 * tf.reduce_sum(task.model.trainable_variables[0])), per_example_loss

    monkeypatch.setattr(task, "compute_loss", without_slope)
    flags = ("--epochs=1", "--steps-per-epoch=40", "--precision=mixed_float16", "--steps-per-execution=4")
    code, line = ended(tmp_path, *ONE_REPLICA, *flags)
    assert (code, "the loss scale at step 28 is down to" in line) == (3, True), line


# --- Signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Handles signals as the program does. One more, while it ends, must not take the exit code away."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    end_at_signals()
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    for number, handler in before.items():
        signal.signal(number, handler)


def test_run_that_was_stopped_before_its_first_step_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended
) -> None:
    load_splits, flags = train.load_splits, (*ONE_REPLICA, "--epochs=1", "--limit-steps=1")

    def load_and_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # As `timeout` does.
        return load_splits(*arguments, **options)

    with monkeypatch.context() as signalling, ended_by_signals():
        signalling.setattr(train, "load_splits", load_and_signal)
        code, line = ended(tmp_path, *flags)
    assert code == 42
    assert line.startswith(f"stopped by SIGTERM, the state is in {tmp_path / 'checkpoints' / 'step-00000000'}")
    assert run(tmp_path, *flags)["step"] == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # The handlers of a notebook come back.


def test_own_signal_after_the_stop_of_a_peer_does_not_end_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: Any = SimpleNamespace(names_where=lambda flag: ["worker 1"])
    # The name of the module belongs to an object, too.
    monkeypatch.setattr(importlib.import_module("engine.signals"), "SECONDS_AS_ONE", 0.05)
    with ended_by_signals(), (own := Signals()).listening():
        with pytest.raises(Stopped, match="stopped by a signal to worker 1"):
            own.check(workers.names_where)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


def test_processes_that_a_hook_forks_do_not_listen() -> None:
    reading, writing = os.pipe()

    def fork() -> int:
        if process := os.fork():
            os.read(reading, 1)
            return process
        os.write(writing, b"1")
        time.sleep(60)
        os._exit(0)

    with signals.listening():
        first, second = fork(), fork()
        os.kill(first, signal.SIGTERM)  # As the end of a multiprocessing.Pool does.
        assert os.WTERMSIG(os.waitpid(first, 0)[1]) == signal.SIGTERM
        assert signals.signal is None
    # The listening has ended, though another one still runs.
    os.close(reading)
    os.close(writing)
    os.kill(second, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(second, 0)[1]) == signal.SIGTERM


# --- Beside the training ----------------------------------------------------------------------------------------------


def test_deterministic_operations_are_used_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for name in ("enable_op_determinism", "enable_tensor_float_32_execution"):
        monkeypatch.setattr(tf.config.experimental, name, lambda *value, name=name: asked.append((name, *value)))
    for deterministic in (False, True):
        assert not asked
        set_up(task, Config(deterministic=deterministic))
    assert asked == [("enable_op_determinism",), ("enable_tensor_float_32_execution", False)]


@pytest.mark.long
def test_profile_is_written_and_changes_no_number(tmp_path: Path) -> None:
    flags = (*ONE_REPLICA, "--epochs=1", "--steps-per-execution=1")
    plain, profiled = run(tmp_path / "plain", *flags), run(tmp_path / "profiled", *flags, "--profile")
    assert profiled["weights_sha256"] == plain["weights_sha256"]
    assert list((tmp_path / "profiled" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))


@pytest.mark.long
def test_waiting_for_batches_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_example = task.prepare_example

    def slow(features, labels, *, training, seed):
        features, labels = prepare_example(features, labels, training=training, seed=seed)
        pause = tf.py_function(lambda label: time.sleep(0.003) or label, [labels], labels.dtype)
        return features, tf.ensure_shape(pause, [])

    monkeypatch.setattr(task, "prepare_example", slow)
    run(tmp_path, *ONE_REPLICA, "--epochs=2")
    assert json.loads((tmp_path / "goodput.json").read_text())["seconds"]["waiting"] > 0.5
