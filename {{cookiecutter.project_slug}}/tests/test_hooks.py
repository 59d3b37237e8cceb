"""Rules that the hooks of task.py must keep."""

from config import Config

import numpy as np
import pytest
import tensorflow as tf

import task
import train
from engine.data.splits import named


@pytest.mark.parametrize("split", train.SPLITS)
def test_examples_come_in_the_same_order_every_time(split: str, settings: Config) -> None:
    task.config = settings
    once, again = (named(split, task.load_examples(split)) for _ in range(2))
    assert once.keys() == again.keys()
    for name in once:
        for first, second in zip(once[name].as_numpy_iterator(), again[name].as_numpy_iterator(), strict=True):
            for one, other in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("built")
def test_batches_are_prepared_the_same_way_every_time() -> None:
    once, again = (next(train.batches["train"].one_by_one(epoch=1)) for _ in range(2))
    for one, other in zip(tf.nest.flatten(once), tf.nest.flatten(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("built")
def test_every_variable_is_in_the_state() -> None:
    """Anything else that a step changes is lost at a resume: keep it in a model, an optimizer or a metric."""
    used = train.run_steps["train"].graph().variables
    known = {variable.ref() for variable in train.run.checkpoints.state.variables()}
    assert not [variable.name for variable in used if variable.ref() not in known]


@pytest.mark.usefixtures("built")
def test_predictions_have_a_row_for_each_example() -> None:
    """--export and predict.py need a dict of tensors by name."""
    if not hasattr(task, "predict_step"):
        pytest.skip("task.py has no predict_step, which --export and predict.py need")
    *_, last = train.batches.values()  # The test dataset, if there is one.
    features, _, weights = next(last.one_by_one())
    outputs = tf.function(task.predict_step)(features)
    assert {name: len(output) for name, output in outputs.items()} == dict.fromkeys(outputs, len(weights))


@pytest.mark.usefixtures("built")
def test_everything_is_traced_once() -> None:
    for epoch in range(3):
        train.train_epoch(epoch)
        train.evaluate_split("validation")
    train.evaluate_split("test")
    traces = {split: function.trace_count() for split, function in train.run_steps.items()}
    assert traces == dict.fromkeys(train.run_steps, 1)
