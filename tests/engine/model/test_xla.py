"""--jit is a plain switch, off by default, and the steps are given the settings as they are."""

import pytest

import task
import train
from config import Config
from engine.settings import read_settings


def test_jit_is_off_unless_asked_for() -> None:
    assert read_settings(Config, []).jit is False
    assert read_settings(Config, ["--jit"]).jit is True
    assert read_settings(Config, ["--jit", "--epochs", "3"]).jit is True


@pytest.mark.parametrize("jit", [False, True])
def test_steps_are_given_the_settings_as_they_are(jit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    in_micro_batches = task.in_micro_batches

    def noted(*arguments, **options):
        given.append(options["jit"])
        return in_micro_batches(*arguments, **options)

    monkeypatch.setattr(task, "in_micro_batches", noted)
    settings = Config(simulated_devices=2, jit=jit)
    train.build(settings)
    assert task.config is train.config is settings
    train.run_steps["train"].get_concrete_function()
    assert set(given) == {jit}
