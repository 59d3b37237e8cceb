"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy": one call of a compiled step per batch.

With the optimizer built before the first step, without which it fails on several replicas with Keras 3.
"""

import tempfile

import keras
import tensorflow as tf
from common import Measured, create_datasets, create_strategy, read_arguments
from workloads import EPOCHS

options, workload = read_arguments()
strategy = create_strategy(options.replicas)
measured = Measured()
train, evaluation = (strategy.experimental_distribute_dataset(each) for each in create_datasets(workload))

keras.config.set_dtype_policy(options.precision)
with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy()
    test_loss, test_accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    model = workload.model(keras)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions), global_batch_size=workload.batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    return strategy.run(test_step, args=(inputs,))


def train_epoch() -> float:
    total_loss, batches = 0.0, 0
    for batch in train:
        total_loss += distributed_train_step(batch)
        measured.first_step_is_done()
        batches += 1
    for metric in (train_accuracy, test_loss, test_accuracy):
        metric.reset_state()
    return float(total_loss) / batches


def evaluate() -> float:
    for batch in evaluation:
        distributed_test_step(batch)
    return float(test_accuracy.result())


checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
manager = tf.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3)
train_epoch()
evaluate()
for _ in range(1, EPOCHS):
    with measured.timed("train", workload.steps):
        train_epoch()
        if options.saves:
            manager.save()
    with measured.timed("evaluation", workload.evaluation_steps * workload.batch_size):
        evaluate()
measured.tell()
