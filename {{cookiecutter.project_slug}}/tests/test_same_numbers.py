"""The number of replicas changes no number: metrics and weights agree to 1e-5 relative."""

import dataclasses

import numpy as np
import pytest

import task
import train
from config import Config
from engine.objects import by_name, model_variables


def trained(settings: Config) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Returns the metrics and the weights after one epoch, one validation and one test."""
    train.build(settings)
    metrics = {**train.train_epoch(0), **train.validate(), **train.test()}
    return metrics, {name: variable.numpy() for name, variable in model_variables(task.model).items()}


@pytest.mark.parametrize("keep_last_batch", [False, True], ids=["whole batches", "padded last batch"])
def test_one_two_and_four_replicas_agree(settings: Config, keep_last_batch: bool) -> None:
    settings = dataclasses.replace(settings, keep_last_batch=keep_last_batch)
    metrics, weights = trained(settings)
    for replicas in (2, 4):
        other_metrics, other_weights = trained(dataclasses.replace(settings, simulated_devices=replicas))
        assert train.strategy.num_replicas_in_sync == replicas
        assert other_metrics == pytest.approx(metrics, rel=1e-5)
        assert other_weights.keys() == weights.keys()
        for name, weight in weights.items():
            # Relative to the variable's largest value: single values near zero carry rounding only.
            np.testing.assert_allclose(
                other_weights[name], weight, rtol=0, atol=1e-5 * np.abs(weight).max(), err_msg=name
            )


def test_training_changes_every_trainable_variable(settings: Config) -> None:
    train.build(settings)
    before = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    train.train_epoch(0)
    trainable = {
        id(variable.value) for model in by_name(task.model, "model").values() for variable in model.trainable_variables
    }
    for name, variable in model_variables(task.model).items():
        if id(variable) in trainable:
            assert not np.array_equal(variable.numpy(), before[name]), f"{name} was not trained"
