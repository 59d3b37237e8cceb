"""The limit on a large table: a loop in the graph that reads and changes only the rows of the batch, without Keras.

It takes its batches out of a tensor in memory, and has no metric. The formulas are Keras's.
"""

import tensorflow as tf
from table_common import (
    BATCH_SIZE,
    IDS,
    INITIAL_SUM,
    LEARNING_RATE,
    WIDTH,
    examples,
    initial_table,
    measure,
    read_arguments,
)

options = read_arguments()
all_ids, all_labels = examples(options.rows, options.batches)
all_ids = tf.reshape(all_ids, [options.batches, BATCH_SIZE, IDS])
all_labels = tf.reshape(all_labels, [options.batches, BATCH_SIZE, 1])
table = tf.Variable(initial_table([options.rows, WIDTH]))
dense = [tf.Variable(tf.fill([WIDTH, 1], 0.1)), tf.Variable([0.0])]
if options.optimizer == "adagrad":
    table_sums = tf.Variable(tf.fill([options.rows, WIDTH], INITIAL_SUM))
    dense_sums = [tf.Variable(tf.fill(each.shape, INITIAL_SUM)) for each in dense]


def step_of(gradient, sums):
    return LEARNING_RATE * gradient / tf.sqrt(sums + 1e-7)


def train_step(index):
    ids, labels = tf.gather(all_ids, index % options.batches), tf.gather(all_labels, index % options.batches)
    with tf.GradientTape() as tape:
        kernel, bias = dense
        predictions = tf.reduce_mean(tf.gather(table, ids), axis=1) @ kernel + bias
        loss = tf.reduce_sum(tf.square(predictions - labels)) / BATCH_SIZE
    slices, *gradients = tape.gradient(loss, [table, *dense])
    if options.optimizer == "adagrad":
        # A row that occurs several times in the batch is updated once, with its complete gradient.
        rows, places = tf.unique(slices.indices)
        summed = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
        # Only rows of the sums are read: reading all of them would copy the table when the rows are written.
        sums = tf.gather(table_sums, rows) + tf.square(summed)
        table_sums.scatter_update(tf.IndexedSlices(sums, rows))
        table.scatter_sub(tf.IndexedSlices(step_of(summed, sums), rows))
        for variable, its_sums, gradient in zip(dense, dense_sums, gradients, strict=True):
            variable.assign_sub(step_of(gradient, its_sums.assign_add(tf.square(gradient))))
    else:
        table.scatter_sub(tf.IndexedSlices(LEARNING_RATE * slices.values, slices.indices))
        for variable, gradient in zip(dense, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
    return loss


@tf.function
def train_steps(first, count):
    loss = 0.0
    for index in tf.range(first, first + count):
        loss = train_step(index)
    return loss


done = 0


def run_steps(count):
    global done
    loss = float(train_steps(tf.constant(done), tf.constant(count)))
    done += count
    return loss


measure(run_steps, options.seconds)
