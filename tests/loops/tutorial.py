"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", on the data of tests/tasks/tutorial_cnn.

Names and order of tensorflow.org/tutorials/distribute/custom_training, with its L2 penalty and both denominators.
What had to be fixed before it runs is marked; docs/porting.md says why.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits


def read(split):
    """Returns the images and labels of a split."""
    digits = load_digits()
    first, end = {"train": (0, 360), "validation": (360, 400), "test": (400, 450)}[split]
    return digits.images[first:end], digits.target[first:end].astype("int32")


def run(task, settings, strategy, train_datasets, evaluation_datasets):
    """Returns each step's loss as (1, loss), the metrics of each epoch, and the model."""
    GLOBAL_BATCH_SIZE = settings.global_batch_size
    test_dist_dataset = strategy.experimental_distribute_dataset(evaluation_datasets["validation"].map(scaled))

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def compute_loss(labels, predictions, model_losses):
            per_example_loss = loss_object(labels, predictions)
            size = None if task.divides_by_examples else GLOBAL_BATCH_SIZE  # None: what there is.
            loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=size)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = task.create_model()
        optimizer = keras.optimizers.Adam(learning_rate=settings.learning_rate)
        optimizer.build(model.trainable_variables)  # FIXED: before a compiled step.

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
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
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    losses, rows = [], []
    for train_dataset in train_datasets:  # One for each epoch.
        for x in strategy.experimental_distribute_dataset(train_dataset.map(scaled)):
            losses.append((1, float(distributed_train_step(x))))
        for x in test_dist_dataset:
            distributed_test_step(x)
        measured = {
            "train/accuracy": train_accuracy,
            "validation/loss": test_loss,
            "validation/accuracy": test_accuracy,
        }
        rows.append({name: float(metric.result()) for name, metric in measured.items()})
        for metric in measured.values():
            metric.reset_state()  # FIXED: not reset_states.
    return losses, rows, model


def scaled(images, labels):
    return tf.cast(images[..., None], tf.float32) / 16.0, labels
