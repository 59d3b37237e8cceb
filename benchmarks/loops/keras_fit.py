"""keras.Model.fit and evaluate, with steps_per_execution as given, and with Keras's own callbacks that save."""

import tempfile
import time

import keras
from common import Measured, create_datasets, create_strategy, read_arguments
from workloads import EPOCHS

options, workload = read_arguments()
strategy = create_strategy(options.replicas)
measured = Measured()
train, evaluation = create_datasets(workload)

keras.config.set_dtype_policy(options.precision)
with strategy.scope():
    model = workload.model(keras)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        steps_per_execution=options.steps_per_execution,
        jit_compile=options.jit,  # By default as all others here.
    )


class Timing(keras.callbacks.Callback):
    async_safe = True  # It does not look at the logs, so that no batch waits for those of the one before.

    def on_train_batch_end(self, batch, logs=None):
        measured.first_step_is_done()

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            measured.add("train", workload.steps, time.perf_counter() - self.began)


def savers(folder):
    """Saves the best weights, and everything that a training that was stopped needs, at the end of each epoch."""
    return [
        keras.callbacks.ModelCheckpoint(
            f"{folder}/best.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
    ]


with tempfile.TemporaryDirectory() as folder:
    # Timing is the last one, so that it counts the saves.
    model.fit(train, epochs=EPOCHS, verbose=0, callbacks=[*(savers(folder) if options.saves else []), Timing()])
model.evaluate(evaluation, verbose=0)
for _ in range(1, EPOCHS):
    with measured.timed("evaluation", workload.evaluation_steps * workload.batch_size):
        model.evaluate(evaluation, verbose=0)
measured.tell()
