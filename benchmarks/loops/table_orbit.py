"""Orbit's StandardTrainer under a Controller on a large table, with its loop in the graph and without saves."""

import orbit
import tensorflow as tf
from common import create_strategy
from table_common import BATCH_SIZE, create_model, create_optimizer, examples, measure, read_arguments

options = read_arguments()
strategy = create_strategy(options.replicas)
keras = tf.keras
all_ids, all_labels = map(tf.constant, examples(options.rows, options.batches))
count_of_examples = options.batches * BATCH_SIZE
numbers = tf.data.Dataset.from_tensors(tf.range(count_of_examples)).map(tf.random.shuffle).repeat()
batches = numbers.rebatch(BATCH_SIZE).map(lambda chosen: (tf.gather(all_ids, chosen), tf.gather(all_labels, chosen)))

with strategy.scope():
    model = create_model(keras, options.rows)
    optimizer = create_optimizer(keras, options.optimizer)
    optimizer.build(model.trainable_variables)
    last_loss = tf.Variable(
        0.0, aggregation=tf.VariableAggregation.SUM, synchronization=tf.VariableSynchronization.ON_READ
    )
global_step = tf.Variable(0, dtype=tf.int64)


class Trainer(orbit.StandardTrainer):
    def train_step(self, iterator):
        def step_fn(inputs):
            ids, labels = inputs
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(ids, training=True) - labels)) / BATCH_SIZE
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            last_loss.assign(loss)

        strategy.run(step_fn, args=(next(iterator),))
        global_step.assign_add(1)  # The task counts, not Orbit.

    def train_loop_end(self):
        return {"loss": last_loss.read_value()}


controller = orbit.Controller(
    strategy=strategy,
    global_step=global_step,
    trainer=Trainer(strategy.experimental_distribute_dataset(batches.prefetch(tf.data.AUTOTUNE))),
    steps_per_loop=2**30,  # So each call of `train` is one loop.
)


def run_steps(count):
    controller.train(steps=int(global_step) + count, checkpoint_at_completion=False)
    return float(last_loss.read_value())


measure(run_steps, options.seconds)
