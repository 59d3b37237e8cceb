"""The article's template with its Todos filled in for tests/tasks/tabular_regression.py.

Names and order of github.com/phrasenmaeher/distributed_template, distributed_training_template.py. What had to be fixed
before it runs is marked; docs/porting.md says why.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_diabetes

model: keras.Model
optimizer: keras.optimizers.Optimizer
train_loss_object1: keras.losses.Loss
metrics: dict[str, dict[str, keras.metrics.Metric]]
GLOBAL_BATCH_SIZE: int
strategy: tf.distribute.Strategy


@tf.function
def train_step(inputs):
    features, labels, weights = unpack(inputs)
    with tf.GradientTape() as tape:
        model_output = model(features, training=True)
        loss = compute_loss(labels, model_output, weights)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    update_metrics("train", labels, model_output, weights)
    return loss


@tf.function
def distributed_train_step(dataset_inputs):
    loss = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)


def validation_step(inputs):
    features, labels, weights = unpack(inputs)
    update_metrics("validation", labels, model(features, training=False), weights)


@tf.function
def distributed_validation_step(dataset_inputs):
    strategy.run(validation_step, args=(dataset_inputs,))


@tf.function
def test_step(inputs):
    features, labels, weights = unpack(inputs)
    update_metrics("test", labels, model(features, training=False), weights)


@tf.function
def distributed_test_step(dataset_inputs):
    strategy.run(test_step, args=(dataset_inputs,))


def unpack(inputs):
    columns, labels, weights = inputs
    return {name: column * 20.0 for name, column in columns.items()}, labels[:, None], weights


def compute_loss(ground_truth, predictions, weights):
    per_replica_loss = train_loss_object1(ground_truth, predictions)
    scaled = tf.nn.compute_average_loss(per_replica_loss, sample_weight=weights, global_batch_size=GLOBAL_BATCH_SIZE)
    return scaled + tf.nn.scale_regularization_loss(model.losses)


def update_metrics(split, labels, model_output, weights):
    metrics[split]["loss"].update_state(train_loss_object1(labels, model_output), weights)
    metrics[split]["error"].update_state(labels, model_output, weights)


def create_loss_objects(strategy):
    with strategy.scope():
        return keras.losses.Huber(reduction="none")


def create_metrics(strategy):
    with strategy.scope():
        return {
            split: {"loss": keras.metrics.Mean(), "error": keras.metrics.MeanSquaredError()}
            for split in ("train", "validation", "test")
        }


def create_model_and_optimizer(strategy, task, one_batch):
    with strategy.scope():
        model = task.create_model()
        model(unpack(one_batch)[0])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)  # FIXED: before a compiled step.
    return model, optimizer


def results(split):
    values = {f"{split}/{name}": float(metric.result()) for name, metric in metrics[split].items()}
    for metric in metrics[split].values():
        metric.reset_state()  # FIXED: of the metrics; a loss has nothing to reset.
    return values


def train(datasets, validation_dataset):
    losses, rows = [], []
    for dataset in datasets:  # One for each epoch.
        for elem in strategy.experimental_distribute_dataset(dataset):
            losses.append((1, float(distributed_train_step(elem))))
        for elem in validation_dataset:
            distributed_validation_step(elem)  # FIXED: it takes no strategy.
        rows.append(results("train") | results("validation"))
    return losses, rows


def test(test_dataset):
    for elem in test_dataset:
        distributed_test_step(elem)
    return results("test")


def read(split):
    """Returns the examples of a split, in columns."""
    columns, target = load_diabetes(return_X_y=True)
    first, end = {"train": (0, 300), "validation": (300, 350), "test": (350, 442)}[split]
    columns, labels = columns[first:end].astype("float32"), (target[first:end].astype("float32") - 150.0) / 77.0
    return {"body": columns[:, :4], "blood": columns[:, 4:]}, labels, np.where(labels > 0, 2.0, 1.0).astype("float32")


def run(task, settings, strategy_, train_datasets, evaluation_datasets):
    """Returns each step's loss as (1, loss), the metrics of each epoch, and the model."""
    global strategy, train_loss_object1, metrics, model, optimizer, GLOBAL_BATCH_SIZE
    strategy, GLOBAL_BATCH_SIZE = strategy_, settings.global_batch_size
    train_loss_object1 = create_loss_objects(strategy)
    metrics = create_metrics(strategy)
    model, optimizer = create_model_and_optimizer(strategy, task, next(iter(train_datasets[0])))
    distributed = {
        split: strategy.experimental_distribute_dataset(dataset) for split, dataset in evaluation_datasets.items()
    }
    losses, rows = train(train_datasets, distributed["validation"])
    rows[-1] |= test(distributed["test"])
    return losses, rows, model
