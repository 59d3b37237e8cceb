"""The number of replicas changes no result: loss, gradients and metrics agree.

Randomness inside the model (dropout, noise) is switched off, because each replica draws its own. A layer whose
randomness cannot be switched off skips the comparison. The loss must agree in every batch; the gradient of a batch
fails only if it differs with two sets of weights, because rounding can switch a ReLU with one of them.

If one of these tests fails, `python train.py --check` says which hook is the cause.
"""

import dataclasses

from config import Config

import numpy as np
import pytest

import task
import train
from engine.check.comparison import differing_gradients
from engine.check.measure import measure
from engine.check.recording import recording_gradients
from engine.errors import BadInput
from engine.model.variables import model_variables

REPLICAS = 4
# Without clipping, which makes a gradient that is too large look right.
OPTIONS = {"keep_last_batch": True, "ema_decay": 0.9, "micro_batches": 2}


def test_one_and_four_replicas_agree(settings: Config) -> None:
    with_options = dataclasses.replace(settings, **OPTIONS)
    with recording_gradients(task):
        try:
            several = measure(train, task, with_options, REPLICAS)
        except BadInput as refused:
            if "--micro-batches" not in str(refused):
                raise
            with_options = settings  # The step updates in a way of its own, which these options exclude.
            several = measure(train, task, with_options, REPLICAS)
        assert train.strategy.num_replicas_in_sync == REPLICAS
        # A synchronized layer has the statistics of a micro-batch; all else must equal the complete batch.
        alone = with_options if several.layers.synchronized else dataclasses.replace(with_options, micro_batches=1)
        one = measure(train, task, alone, 1)
    if one.layers.still_random:
        pytest.skip(f"{one.layers.still_random} cannot be switched off; augment in prepare_example to be compared")
    assert not one.layers.unsynchronized, "These layers normalize each per-replica batch by itself."
    assert not one.without_gradient, "These variables get no gradient."
    assert several.losses == pytest.approx(one.losses, rel=1e-5)
    for name in one.metrics.keys() & several.metrics.keys():  # Only one of them may have a result of 0 or 1.
        assert several.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name
    assert not differing_gradients(one, several)


@pytest.mark.usefixtures("built")
def test_evaluation_changes_nothing() -> None:
    before = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
    first = evaluate()
    assert evaluate() == first, "call the model with training=False"
    for name, variable in model_variables(task.model).items():
        assert np.array_equal(variable.numpy(), before[name]), name


@pytest.mark.usefixtures("built")
def test_padding_does_not_count(settings: Config) -> None:
    results = evaluate()
    train.build(dataclasses.replace(settings, evaluation_batch_size=20))
    assert evaluate() == pytest.approx(results, rel=1e-5)


def evaluate() -> dict[str, float]:
    return train.evaluate_split("validation") | train.evaluate_split("test")
