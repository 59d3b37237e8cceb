"""--check finds faults of metrics, of the evaluation and of the updates; and several faults in one check."""

import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from planted import (
    DATASETS,
    ORIGINAL,
    Fault,
    assert_found,
    assert_sound,
    average,
    averaged,
    cases,
    linear_model,
    noise_of_the_step,
    noisy_evaluation,
    update_by_class,
)

import task


def metrics_of_the_scaled_loss(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(average(per_example_loss, weights))
    task.metrics[split]["accuracy"].update_state(labels, predictions, sample_weight=weights)


def metrics_without_weights(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)
    task.metrics[split]["accuracy"].update_state(labels, predictions)


class HitsPerLoss(keras.metrics.Metric):
    """Has a maximum, which is not a sum; the result of a model that hits nothing does not show it."""

    def __init__(self):
        super().__init__()
        self.hits = self.add_variable(shape=(), initializer="zeros", name="hits")
        self.largest = self.add_variable(shape=(), initializer="zeros", name="largest")

    def update_state(self, per_example_loss, sample_weight):
        largest = tf.cast(tf.reduce_max(per_example_loss * sample_weight), tf.float64)
        self.largest.assign(tf.maximum(self.largest.value, largest))

    def result(self):
        return tf.math.divide_no_nan(self.hits.value, self.largest.value)


def metrics_with_precision(split):
    """Has a threshold that no prediction of an untrained model reaches."""
    return {**ORIGINAL["create_metrics"](split), "precision": keras.metrics.Precision(0.99)}


def update_with_precision(split, labels, predictions, per_example_loss, weights):
    ORIGINAL["update_metrics"](split, labels, predictions, per_example_loss, weights)
    probability = tf.nn.softmax(predictions)[:, 3]
    task.metrics[split]["precision"].update_state(labels == 3, probability, sample_weight=weights)


def metrics_that_are_zero_or_nan(split):
    zero = {"recall": keras.metrics.Recall(0.99), "hits": HitsPerLoss()}
    return {**ORIGINAL["create_metrics"](split), **zero, "nan": keras.metrics.Mean()}


def update_metrics_that_are_zero_or_nan(split, labels, predictions, per_example_loss, weights):
    ORIGINAL["update_metrics"](split, labels, predictions, per_example_loss, weights)
    task.metrics[split]["recall"].update_state(labels == 3, tf.nn.softmax(predictions)[:, 3])
    task.metrics[split]["nan"].update_state(per_example_loss * float("nan"))
    task.metrics[split]["hits"].update_state(per_example_loss, weights)


def evaluation_in_training_mode(split, batch):
    features, labels, weights = batch
    loss, per_example_loss = task.compute_loss(labels, task.model(features, training=True), weights)
    task.update_metrics(split, labels, task.model(features, training=True), per_example_loss, weights)
    return loss


def metrics_that_lack_one(split, labels, predictions, per_example_loss, weights):
    task.metrics[split]["loss"].update_state(per_example_loss, sample_weight=weights)


def metrics_of_the_training(split, labels, predictions, per_example_loss, weights):
    ORIGINAL["update_metrics"]("train", labels, predictions, per_example_loss, weights)


class NeverReset(keras.metrics.Mean):
    def reset_state(self):
        pass


def metrics_without_reset(split):
    return {**ORIGINAL["create_metrics"](split), "loss": NeverReset()}


class AveragingOptimizer(keras.optimizers.SGD):
    """Divides by the number of replicas in its own apply."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(averaged(grads), trainable_variables)


class CountingSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Counts in Python how often it is traced."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.01 * self.calls


def optimizers_by_path(total_steps):
    by_path = {"stemm.*": keras.optimizers.SGD(0.01)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(AveragingOptimizer(0.1), by_path))


EVALUATION = ("results", "evaluation")
FAULTS = {
    "prediction of a batch": Fault(
        {"predict_step": lambda features: {"mean": tf.reduce_mean(task.model(features))}},
        "predict_step",
        "a row per example",
        only=("evaluation",),
    ),
    "softmax of one number": Fault(
        {"predict_step": lambda features: {"probability": tf.nn.softmax(task.model(features)[:, :1])}},
        "predict_step",
        "use a sigmoid",
    ),
    "scaled metric": Fault({"update_metrics": metrics_of_the_scaled_loss}, "update_metrics", "train/loss is"),
    "training in validation": Fault(
        {"evaluation_step": evaluation_in_training_mode}
        | {"create_model": lambda: linear_model(keras.layers.Dropout(0.3))},
        "evaluation_step",
        "training=False",
        only=("evaluation",),
    ),
    "unweighted metric": Fault({"update_metrics": metrics_without_weights}, "update_metrics", "padding"),
    "metric that is never updated": Fault(
        {"update_metrics": metrics_that_lack_one}, "update_metrics", "train/accuracy is never updated"
    ),
    "metrics of another split": Fault(
        {"update_metrics": metrics_of_the_training},
        "update_metrics",
        "the validation steps update metrics['train']['loss']: update metrics['validation'] there",
        only=EVALUATION,
        long=True,
    ),
    "metric that is never reset": Fault(
        {"create_metrics": metrics_without_reset}, "create_metrics", "reset_state of train/loss", long=True
    ),
    "random numbers from the step's number in evaluation": Fault(
        {"evaluation_step": noisy_evaluation(noise_of_the_step)},
        "evaluation_step",
        "draw them from a seed of each example, see docs/reproducibility.md",
        only=EVALUATION,
        long=True,
    ),
    "averaging in apply": Fault(
        {"create_optimizer": optimizers_by_path},
        "create_optimizer",
        "the gradients agree",
        only=("updates",),
    ),
    "optimizer of no variable": Fault(
        {"create_optimizer": optimizers_by_path},
        "create_optimizer",
        "in a MultiOptimizer trains no variable: its pattern must match paths like 'sequential/dense/kernel'",
        only=("updates",),
    ),
    "schedule that counts": Fault(
        {"create_optimizer": lambda total_steps: keras.optimizers.SGD(CountingSchedule())},
        "create_optimizer",
        "the gradients agree",
        only=("updates",),
        long=True,
    ),
    "rising loss": Fault(
        {"create_optimizer": lambda total_steps: keras.optimizers.SGD(-0.1)},
        "create_optimizer",
        "it must fall",
        only=("updates",),
        long=True,
    ),
}
TOGETHER = (("unweighted metric", "softmax of one number"), ("averaging in apply", "optimizer of no variable"))
ZERO_OR_NAN = {
    "create_metrics": metrics_that_are_zero_or_nan,
    "update_metrics": update_metrics_that_are_zero_or_nan,
}


@pytest.mark.parametrize("fault", cases({name: FAULTS[name] for name in FAULTS if name not in sum(TOGETHER, ())}))
def test_fault_is_found_and_the_hook_named(fault: Fault, check: Any) -> None:
    assert_found(check, fault)


@pytest.mark.parametrize(("names", "only"), zip(TOGETHER, (("results", "evaluation"), ("updates",)), strict=True))
def test_faults_of_one_check_are_all_found(names: tuple[str, ...], only: tuple[str, ...], check: Any) -> None:
    assert_found(check, *(FAULTS[name] for name in names), only=only)


def test_metrics_that_are_zero_or_nan_are_compared_by_their_variables(check: Any) -> None:
    found = (
        "train/nan is NaN: look for 0/0, for which tf.math.divide_no_nan",
        "train/nan (its variables) depends on examples of weight 0",
        "train/recall (its variables) depends on examples of weight 0",
        "train/hits (its variables) is 3.",
    )
    assert_found(check, *(Fault(ZERO_OR_NAN, "update_metrics", text) for text in found))


def test_metric_that_counts_nothing_is_not_compared_and_init_from_is_used(check: Any, tmp_path: Path) -> None:
    """With weights of 0 all ten classes are equally probable."""
    zeros = linear_model()
    zeros.set_weights([0.0 * weight for weight in zeros.get_weights()])
    zeros.save_weights(tmp_path / "zeros.weights.h5")
    hooks = {"create_metrics": metrics_with_precision, "update_metrics": update_with_precision}
    lines = assert_sound(check(hooks, only=("results",), init_from=tmp_path / "zeros.weights.h5"))
    assert any(line.endswith("loss 2.30259 on one replica and on two") for line in lines)
    (line,) = [line for line in lines if line.startswith("not compared")]
    assert re.fullmatch(
        r"not compared  task\.py update_metrics +train/precision \(its variables\) stays 0 for this model: .*", line
    )


class Undefined(keras.metrics.Mean):
    """Is NaN for one of two classes, as without any example of it."""

    def result(self):
        return tf.stack([super().result(), float("nan")])


def frozen_and_trained() -> keras.Model:
    model = linear_model()
    model.layers[-1].trainable = False
    return keras.Sequential([*model.layers, keras.layers.Dense(10)])


def optimizers_for_both(total_steps: int) -> keras.optimizers.Optimizer:
    others = keras.optimizers.SGD(0.1)
    frozen = {".*/dense/.*": keras.optimizers.SGD(0.01)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(others, frozen))


def test_rate_in_micro_batches_a_class_without_examples_and_frozen_layers_are_no_faults(check: Any) -> None:
    def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
        more = {"rate": keras.metrics.Mean(), "of_class": Undefined()}
        return {**ORIGINAL["create_metrics"](split), **more}

    def update_metrics(split, labels, predictions, per_example_loss, weights):
        ORIGINAL["update_metrics"](split, labels, predictions, per_example_loss, weights)
        task.metrics[split]["rate"].update_state(1.0)
        task.metrics[split]["of_class"].update_state(per_example_loss, sample_weight=weights)

    hooks = {"create_metrics": create_metrics, "update_metrics": update_metrics}
    hooks |= {"create_model": frozen_and_trained, "create_optimizer": optimizers_for_both}
    lines = assert_sound(check(hooks, only=("results", "updates"), micro_batches=2))
    skipped = "\n".join(line for line in lines if line.startswith("not compared"))
    assert "train/of_class is NaN" in skipped
    assert "in a MultiOptimizer trains no variable" in skipped


@pytest.mark.long
def test_array_that_counts_padding_fails_once_for_each_dataset(check: Any) -> None:
    passed, lines = check({**DATASETS, "update_metrics": update_by_class(weighted=False)}, only=EVALUATION)
    found = [re.search(r"(\S+)/\d+ depends", line)[1] for line in lines if "depends on examples of weight 0" in line]
    assert not passed
    assert found == ["validation/easy/by_class", "validation/hard/by_class", "train/by_class"]
