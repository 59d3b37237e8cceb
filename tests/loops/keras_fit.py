"""A Keras script with `compile` and `fit`, on one device: two inputs, two outputs, weights by output, callbacks.

It is written as Keras's guides write one; docs/from_keras_fit.md of the rendered project names what its port in
tests/tasks/keras_fit.py does instead. It takes the model of the port.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

UNMEASURED = 0  # The images of this digit have no label for the ink.


def arrays(split):
    """Returns inputs, targets and sample weights, each as a dictionary by name."""
    images, digits = load_digits(return_X_y=True)
    images, digits = images.astype("float32") / 16.0, digits.astype("int32")
    last = np.arange(len(images)) % 10
    chosen = {"train": (last != 7) & (last != 0), "validation": last == 7, "test": last == 0}[split]
    images, digits = images[chosen], digits[chosen]
    inputs = {"top": images[:, :32], "bottom": images[:, 32:]}
    targets = {"digit": digits, "ink": images.sum(axis=1, keepdims=True) / 20.0}
    weights = {
        "digit": np.where(digits >= 8, 2.0, 1.0).astype("float32"),
        "ink": (digits != UNMEASURED).astype("float32"),
    }
    return inputs, targets, weights


def batches_in_order(order, batch_size):
    """Yields full batches of the training examples, each epoch in the order of its numbers."""
    columns = arrays("train")
    for numbers in order:
        for end in range(batch_size, len(numbers) + 1, batch_size):
            chosen = numbers[end - batch_size : end]
            yield tuple({name: column[chosen] for name, column in each.items()} for each in columns)


class KeepWeights(keras.callbacks.Callback):
    """Keeps the weights after the last epoch, which EarlyStopping replaces by the best ones."""

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()


def run(create_model, order, *, epochs, batch_size, learning_rate, min_delta, patience):
    """Returns the history, the evaluation on the test examples, the last and the best weights, and the last rate."""
    model = create_model()
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, weight_decay=0.01, epsilon=1e-5, global_clipnorm=0.5),
        loss={"digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "ink": keras.losses.Huber()},
        loss_weights={"digit": 1.0, "ink": 0.5},
        metrics={"digit": ["accuracy"]},
        weighted_metrics={"ink": ["mae"]},
    )
    kept = KeepWeights()
    history = model.fit(
        batches_in_order(order, batch_size),
        epochs=epochs,
        steps_per_epoch=len(order[0]) // batch_size,
        validation_data=arrays("validation"),
        validation_batch_size=batch_size,
        callbacks=[
            kept,
            keras.callbacks.EarlyStopping(min_delta=min_delta, patience=patience, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=3, min_delta=min_delta),
        ],
        shuffle=False,  # As a generator yields them.
        verbose=0,
    )
    inputs, targets, weights = arrays("test")
    test = model.evaluate(inputs, targets, sample_weight=weights, batch_size=batch_size, return_dict=True, verbose=0)
    return history.history, test, kept.weights, model.get_weights(), float(model.optimizer.learning_rate)
