"""Keras 3, or tf-keras with TF_USE_LEGACY_KERAS=1, on a large table: a compiled loop around `apply_gradients`.

It takes its batches out of a tensor in memory, and has no metric. Keras 3 gets the gradient as slices, as every loop of
its users does; its Adagrad squares the slices of a repeated id one by one, so it trains differently from the others.
"""

import tensorflow as tf
from common import create_strategy
from table_common import BATCH_SIZE, IDS, create_model, create_optimizer, examples, measure, read_arguments

options = read_arguments()
strategy = create_strategy(options.replicas)
keras = tf.keras
shape = [options.batches, options.replicas, BATCH_SIZE // options.replicas]
all_ids, all_labels = examples(options.rows, options.batches)
all_ids, all_labels = tf.reshape(all_ids, [*shape, IDS]), tf.reshape(all_labels, [*shape, 1])

with strategy.scope():
    model = create_model(keras, options.rows)
    optimizer = create_optimizer(keras, options.optimizer)
    if hasattr(optimizer, "build"):  # Older ones of tf-keras build themselves in the first step.
        optimizer.build(model.trainable_variables)


def train_step(index):
    place = tf.stack([index % options.batches, tf.distribute.get_replica_context().replica_id_in_sync_group])
    ids, labels = tf.gather_nd(all_ids, place), tf.gather_nd(all_labels, place)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(ids, training=True) - labels)) / BATCH_SIZE
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_steps(first, count):
    loss = 0.0
    for index in tf.range(first, first + count):
        loss = strategy.reduce("SUM", strategy.run(train_step, args=(index,)), axis=None)
    return loss


done = 0


def run_steps(count):
    global done
    loss = float(train_steps(tf.constant(done), tf.constant(count)))
    done += count
    return loss


measure(run_steps, options.seconds)
