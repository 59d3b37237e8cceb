"""--jit is a plain switch, off by default, and the steps are given the settings as they are."""

import pytest

import task
import train
from config import Config, read_settings
from engine.errors import BadInput


def test_jit_is_off_unless_asked_for() -> None:
    assert read_settings([]).jit is False
    assert read_settings(["--jit"]).jit is True
    assert read_settings(["--jit", "--epochs", "3"]).jit is True
    for value in ("auto", "False"):
        with pytest.raises(BadInput, match="Unrecognized options"):
            read_settings(["--jit", value])


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
