"""Two models with two optimizers, as in a GAN."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from config import Config
from engine.model.variables import model_variables


@pytest.mark.long
def test_two_models_agree_on_one_replica_and_on_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tasks"))
    import gan

    load_examples = gan.load_examples
    monkeypatch.setattr(gan, "load_examples", lambda split: load_examples(split).take(160))
    monkeypatch.setattr(train, "task", gan)

    def trained(**settings: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        train.build(Config(ema_decay=0.9, global_clipnorm=0.1, **settings))
        metrics = train.train_epoch(0)
        with train.run.evaluation_weights():
            metrics |= train.validate()
        return {name: variable.numpy() for name, variable in model_variables(gan.model).items()}, metrics

    expected, expected_metrics = trained()
    found, metrics = trained(simulated_devices=4, micro_batches=2)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        atol = 1e-5 * max(np.abs(weight).max(), 1e-3)
        np.testing.assert_allclose(found[name], weight, rtol=1e-5, atol=atol, err_msg=name)
