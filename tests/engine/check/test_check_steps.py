"""--check finds faults in the steps by the results of one replica and of two, and names the hook and the cause."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from planted import (
    L2,
    ORIGINAL,
    Fault,
    assert_found,
    average,
    cases,
    few_examples,
    label_losses,
    linear_model,
    loss_of,
    plain_rate,
)

import task
import train
from engine import errors
from engine.check.comparison import Measured, differing_gradients
from engine.data import CompiledSteps
from engine.model import apply_gradients

COMPILE_STEPS = train.compile_steps
OUTSIDE = {}  # Objects that are made before the scope of the strategy is entered.


def replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


def rank_trap(labels, predictions, weights):
    per_example_loss = tf.abs(tf.cast(labels, tf.float32) - predictions[:, :1])  # [share] - [share, 1]
    return average(per_example_loss, weights), per_example_loss


def counting_step(batch):
    OUTSIDE["counter"].assign_add(1)
    return ORIGINAL["train_step"](batch)


def of_loss(total: Callable, text: str, *, long: bool = False, **hooks: Callable) -> Fault:
    return Fault({"compute_loss": loss_of(total), **hooks}, "compute_loss", text, long=long)


def regularized_model():
    return linear_model(regularizer=L2)


def noisy_loss(labels, predictions, weights):
    noise = 0.1 * tf.random.normal(tf.shape(predictions))
    return ORIGINAL["compute_loss"](labels, predictions + noise, weights)


def loss_with_numpy(labels, predictions, weights):
    noise = tf.numpy_function(lambda: np.random.normal(size=(1, 10)).astype("float32"), [], tf.float32)
    return ORIGINAL["compute_loss"](labels, predictions + tf.ensure_shape(noise, (1, 10)), weights)


def shifted_labels(shift: int) -> Callable:
    return lambda split: few_examples(split).map(lambda features, label: (features, label + shift))


class RunningMean(keras.layers.Layer):
    """Keeps a mean in a variable that Keras lists or does not list."""

    def __init__(self, *, listed):
        super().__init__()
        self.is_listed = listed

    def build(self, shape):
        if self.is_listed:
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        else:
            self.mean = tf.Variable(tf.zeros(shape[1:]), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(inputs, axis=0))
        return inputs - self.mean


class AddedLoss(keras.layers.Layer):
    """Adds the sum over a replica's share to the loss, not the mean."""

    def call(self, inputs):
        self.add_loss(1e-3 * tf.reduce_sum(tf.square(inputs)))
        return inputs


def compile_without_signature(split, step):
    compiled = COMPILE_STEPS(split, step)
    without = CompiledSteps(tf.function(compiled.function.python_function))  # Each size of a stack is traced.
    without.__dict__["graph"] = compiled.graph
    return without


def loss_with_a_term_without_weights(labels, predictions, weights):
    """The second term depends on no label, as the divergence of a variational autoencoder."""
    per_example_loss = label_losses(labels, predictions)
    squares = tf.nn.compute_average_loss(
        tf.reduce_mean(predictions**2, axis=-1), global_batch_size=task.config.global_batch_size
    )
    return average(per_example_loss, weights) + squares, per_example_loss


def loss_wrong_for_padding(labels, predictions, weights):
    """The gradient of a padded batch, and of no other, depends on the replica's batch; the loss does not."""
    per_example_loss = label_losses(labels, predictions)
    filled = tf.reduce_mean(weights)
    grown = predictions * filled + tf.stop_gradient(predictions * (1.0 - filled))
    return average(label_losses(labels, grown), weights), per_example_loss


def updated(update: Callable[[tf.GradientTape, tf.Tensor], Any]) -> Callable:
    """Returns a step that updates in this way."""

    def train_step(batch):
        features, labels, weights = batch
        with tf.GradientTape() as tape:
            predictions = task.model(features, training=True)
            loss, per_example_loss = task.compute_loss(labels, predictions, weights)
        update(tape, loss)
        task.update_metrics("train", labels, predictions, per_example_loss, weights)
        return loss

    return train_step


def summed_twice(tape, loss):
    gradients = tape.gradient(loss, task.model.trainable_variables)
    gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))


def with_rate_of_the_loss(tape, loss):
    task.optimizer.learning_rate.assign(0.01 * loss)
    apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables)


def without_the_first_layer(tape, loss):
    apply_gradients(task.optimizer, tape, loss, task.model.trainable_variables[2:])


class DrawingOptimizer(keras.optimizers.SGD):
    """Adds noise to the gradients in its own apply."""

    def build(self, variables):
        super().build(variables)
        self.generator = keras.random.SeedGenerator(1)

    def apply(self, grads, trainable_variables=None):
        seed = tf.cast(self.generator.next(), "int32")
        noisy = [gradient + 0.001 * tf.random.stateless_normal(gradient.shape, seed) for gradient in grads]
        return super().apply(noisy, trainable_variables)


class ModelWithUnusedLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.network, self.unused = linear_model(), keras.layers.Dense(4, name="unused")

    def build(self, shape):
        self.unused.build((None, 64))
        self.built = True

    def call(self, features, training=False):
        return self.network(features)


def optimizer_of_kernels(total_steps):
    kernels = {".*kernel": keras.optimizers.SGD(0.05)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), kernels))


FAULTS = {
    "model outside the scope": Fault({"create_model": lambda: OUTSIDE["model"]}, "create_model", "outside"),
    "optimizer outside the scope": Fault(
        {"create_optimizer": lambda total_steps: OUTSIDE["optimizer"]},
        *("create_optimizer", "the variable sgd/iteration, which was made outside"),
        only=("updates",),
    ),
    "metric outside the scope": Fault({"create_metrics": OUTSIDE.get}, "create_metrics", "outside"),
    "local batch": of_loss(lambda losses, weights: tf.reduce_mean(losses * weights), "by config.global_batch_size"),
    "divided twice": of_loss(lambda losses, weights: average(losses, weights) / replicas(), "a second time", long=True),
    "regularization": of_loss(
        lambda losses, weights: average(losses, weights) + tf.add_n(task.model.losses),
        "tf.nn.scale_regularization_loss",
        long=True,
        create_model=regularized_model,
    ),
    "variable outside the scope": Fault({"train_step": counting_step}, "train_step", "steps_seen"),
    "rank trap": Fault({"compute_loss": rank_trap}, "compute_loss", "(32, 32)"),
    "NaN loss": of_loss(lambda losses, weights: average(tf.math.log(losses * 0.0 - 1.0), weights), "the loss is nan"),
    "NaN gradient": of_loss(
        lambda losses, weights: average(losses + tf.sqrt(losses * 0.0), weights), "is not finite", long=True
    ),
    "NaN loss of padding": of_loss(
        lambda losses, weights: average(losses / weights, weights),
        "the loss is nan on a batch, padded or not",
        long=True,
    ),
    "unsynchronized BatchNorm": Fault(
        {"create_model": lambda: linear_model(keras.layers.BatchNormalization(name="bn"))}, "create_model", "'bn'"
    ),
    "own sum": Fault({"train_step": updated(summed_twice)}, "train_step", "without a sum of your own"),
    "tf.random in the step": Fault(
        {"compute_loss": noisy_loss}, "train_step", "RandomStandardNormal (test_check_steps.py:"
    ),
    "NumPy in the step": Fault(
        {"compute_loss": loss_with_numpy}, "train_step", "PyFunc (test_check_steps.py:", long=True
    ),
    "each replica's mean": Fault(
        {"create_model": lambda: linear_model(RunningMean(listed=False))},
        "create_model",
        "running_mean/Variable, which is per-replica",
        long=True,
    ),
    "each replica's mean in a weight of a layer": Fault(
        {"create_model": lambda: linear_model(RunningMean(listed=True))},
        "create_model",
        "running_mean/mean, which is per-replica",
    ),
    "gradient of a padded batch": Fault(
        {"compute_loss": loss_wrong_for_padding},
        "train_step",
        "the loss agrees, and the gradient of",
        {"keep_last_batch": True},
        long=True,
    ),
    "added loss": Fault(
        {"create_model": lambda: linear_model(AddedLoss())},
        "compute_loss",
        "add_loss adds a sum over one replica's batch",
        long=True,
    ),
    "steps that are traced again": Fault(
        {"compile_steps": compile_without_signature}, "compile_steps", "steps were traced more than once", long=True
    ),
    "loss without sample weights": of_loss(
        lambda losses, weights: average(losses, None),
        "the loss depends on examples of weight 0, such as padding: pass sample_weight=sample_weights",
    ),
    "loss that only masks": of_loss(
        lambda losses, weights: average(losses, tf.cast(weights > 0.0, tf.float32)),
        "the same with sample weights of 1 and of 0.5",
        long=True,
    ),
    "term without weights": Fault(
        {"compute_loss": loss_with_a_term_without_weights},
        "compute_loss",
        "the loss depends on examples of weight 0",
        long=True,
    ),
    "loss weighted twice": of_loss(
        lambda losses, weights: average(losses * weights, weights), "once, not twice", long=True
    ),
    "regularizer that is not added": of_loss(
        average,
        "dense/kernel: add tf.nn.scale_regularization_loss(model.losses)",
        long=True,
        create_model=regularized_model,
    ),
    "activity regularizer that is not added": of_loss(
        average,
        "does not contain the regularization of activity",
        long=True,
        create_model=lambda: linear_model(keras.layers.ActivityRegularization(l2=0.1, name="activity")),
    ),
    "labels too high": Fault({"load_examples": shifted_labels(1)}, "compute_loss", "Received a label value of 10"),
    "labels too low": Fault(
        {"load_examples": shifted_labels(-1)}, "compute_loss", "Received a label value of -1", long=True
    ),
    "learning rate of one replica's loss": Fault(
        {"train_step": updated(with_rate_of_the_loss), "create_optimizer": plain_rate},
        "train_step",
        "assigns a value of one replica to sgd/learning_rate",
        long=True,
    ),
    "layer that is never trained": Fault(
        {"create_model": lambda: linear_model(keras.layers.Dense(4)), "train_step": updated(without_the_first_layer)},
        "train_step",
        "dense/kernel, model/sequential/dense/bias: pass it to apply_gradients",
        long=True,
    ),
    "layer that several optimizers never train": Fault(
        {
            "create_model": ModelWithUnusedLayer,
            "create_optimizer": optimizer_of_kernels,
        },
        "train_step",
        "unused/kernel, model/model_with_unused_layer/unused/bias: pass it to apply_gradients",
        long=True,
    ),
    "mean of a replica beside an optimizer that draws": of_loss(
        lambda losses, weights: tf.reduce_mean(losses * weights),
        "it is divided by what one replica's batch contains",
        create_optimizer=lambda total_steps: DrawingOptimizer(0.1),
    ),
}


@pytest.mark.parametrize("fault", cases(FAULTS))
def test_fault_is_found_and_the_hook_named(fault: Fault, check: Any) -> None:
    OUTSIDE.update(counter=tf.Variable(0, name="steps_seen"), model=linear_model(), optimizer=keras.optimizers.SGD(0.1))
    OUTSIDE.update({split: ORIGINAL["create_metrics"](split) for split in train.SPLITS})
    assert_found(check, fault)


def test_gradient_that_differs_with_weights_nearby_too_is_a_fault_and_else_rounding() -> None:
    def measured(gradients: list[float], nearby: list[float]) -> Measured:
        at, near = ([{"kernel": np.array([each, 1.0])} for each in gradients] for gradients in (gradients, nearby))
        rest: dict[str, Any] = {field: [] for field in Measured._fields}
        return Measured(**{**rest, "batches": at, "nearby": near, "rounding": {"kernel": 0.0}})

    one = measured([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.5, 3.6])) == ["kernel"]
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.5, 3.5])) == []
    assert differing_gradients(one, measured([1.0, 2.0, 3.1], [1.5, 2.6, 3.5])) == []
    assert differing_gradients(one, measured([1.0, 2.0, 3.000003], [1.5, 2.5, 3.500003])) == []


def example_without_label(features, labels):
    raise ValueError("no label")


@pytest.mark.parametrize(
    ("hooks", "only", "line"),
    [
        (
            {"compute_loss": loss_with_numpy, "create_loss_objects": dict},
            "results",
            "with_numpy  raised KeyError: 'label'",
        ),
        ({"prepare_example": example_without_label}, "examples", "example_without_label  ValueError: no label"),
    ],
)
def test_exception_in_a_hook_is_named_by_line_with_what_it_says(
    hooks: dict[str, Any], only: str, line: str, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "PROJECT", Path(__file__).parent)
    passed, lines = check(hooks, only=(only,))
    assert not passed
    (failed,) = [line for line in lines if line.startswith("FAIL")]
    assert re.match(rf"FAIL  test_check_steps\.py:\d+ \w*{line}", failed), failed
