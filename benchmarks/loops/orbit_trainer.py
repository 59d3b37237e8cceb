"""Orbit's StandardTrainer and StandardEvaluator under a Controller, both with loops in the graph."""

import tempfile
import time

import orbit
import tensorflow as tf
from common import Measured, create_datasets, create_strategy, read_arguments
from workloads import EPOCHS

options, workload = read_arguments()
keras = tf.keras  # Keras 3, or tf-keras with TF_USE_LEGACY_KERAS=1.
strategy = create_strategy(options.replicas)
measured = Measured()
train, evaluation = create_datasets(workload)

with strategy.scope():
    model = workload.model(keras)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    train_loss, train_accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    test_loss, test_accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()


def mean_loss(labels, predictions):
    return tf.nn.compute_average_loss(loss_object(labels, predictions), global_batch_size=workload.batch_size)


global_step = tf.Variable(0, dtype=tf.int64)


class Trainer(orbit.StandardTrainer):
    def train_loop_begin(self):
        for metric in (train_loss, train_accuracy):
            metric.reset_state()

    def train_step(self, iterator):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                predictions = model(features, training=True)
                loss = mean_loss(labels, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            train_loss.update_state(loss * strategy.num_replicas_in_sync)
            train_accuracy.update_state(labels, predictions)

        strategy.run(step_fn, args=(next(iterator),))
        global_step.assign_add(1)  # The task counts, not Orbit.

    def train_loop_end(self):
        measured.first_step_is_done()
        return {"loss": train_loss.result(), "accuracy": train_accuracy.result()}


class Evaluator(orbit.StandardEvaluator):
    def eval_begin(self):
        for metric in (test_loss, test_accuracy):
            metric.reset_state()

    def eval_step(self, iterator):
        def step_fn(inputs):
            features, labels = inputs
            predictions = model(features, training=False)
            test_loss.update_state(mean_loss(labels, predictions) * strategy.num_replicas_in_sync)
            test_accuracy.update_state(labels, predictions)

        strategy.run(step_fn, args=(next(iterator),))

    def eval_end(self):
        return {"loss": test_loss.result(), "accuracy": test_accuracy.result()}


manager = None
if options.saves:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=global_step)
    manager = tf.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3, step_counter=global_step)
controller = orbit.Controller(
    strategy=strategy,
    global_step=global_step,
    trainer=Trainer(strategy.experimental_distribute_dataset(train.repeat())),
    # Its default takes the steps of an evaluation one by one.
    evaluator=Evaluator(
        strategy.experimental_distribute_dataset(evaluation),
        options=orbit.StandardEvaluatorOptions(use_tf_while_loop=True),
    ),
    steps_per_loop=lambda step: 1 if step == 0 else options.steps_per_execution,
    checkpoint_manager=manager,
)
for epoch in range(EPOCHS):
    started = time.perf_counter()
    controller.train(steps=(epoch + 1) * workload.steps, checkpoint_at_completion=bool(options.saves))
    if epoch:
        measured.add("train", workload.steps, time.perf_counter() - started)
    started = time.perf_counter()
    controller.evaluate(steps=workload.evaluation_steps)
    if epoch:
        seconds = time.perf_counter() - started
        measured.add("evaluation", workload.evaluation_steps * workload.batch_size, seconds)
measured.tell()
