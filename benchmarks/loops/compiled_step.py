"""The compiled step alone: all replicas take it again and again on one batch, without input, metrics and saves."""

import keras
import tensorflow as tf
from common import Measured, create_datasets, create_strategy, read_arguments
from workloads import EPOCHS

options, workload = read_arguments()
measured = Measured()
if options.replicas == 1:
    strategy = create_strategy(1)
else:
    create_strategy(options.replicas)  # Makes the devices.
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(options.replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

keras.config.set_dtype_policy(options.precision)
with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = workload.model(keras)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(
            loss_object(labels, model(features, training=True)), global_batch_size=workload.batch_size
        )
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


if options.jit:
    train_step = tf.function(train_step, jit_compile=True)


@tf.function
def train_steps(batch, count):
    for _ in tf.range(count):
        strategy.run(train_step, args=(batch,))


train, _ = create_datasets(workload)
batch = next(iter(strategy.experimental_distribute_dataset(train.take(1))))
train_steps(batch, tf.constant(1))
measured.first_step_is_done()
train_steps(batch, tf.constant(workload.steps))
for _ in range(1, EPOCHS):
    with measured.timed("train", workload.steps):
        train_steps(batch, tf.constant(workload.steps))
measured.tell()
