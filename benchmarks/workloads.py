"""What every loop trains: data, model and batch size, the same for all.

The functions take the keras module, because Orbit is measured with Keras 3 and with tf-keras.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table. `examples(count)` returns features [count, ...] and labels (int32, [count])."""

    model: Callable[[Any], Any]
    examples: Callable[[int], tuple[np.ndarray, np.ndarray]]
    steps: int
    """Training steps in an epoch."""
    evaluation_steps: int
    """Batches in an evaluation."""
    batch_size: int = 64
    steps_per_execution: int = 50
    """What loops in the graph run per call, where they take a number."""

    def data(self, batches: int) -> tuple[np.ndarray, np.ndarray]:
        return self.examples(batches * self.batch_size)


def mlp(keras: Any) -> Any:
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(CLASSES)], name="mlp"
    )


def cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES),
        ],
        name="cnn",
    )


def encoder(keras: Any, *, vocabulary: int, length: int, depth: int, width: int, heads: int) -> Any:
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    hidden = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(depth):
        attended = layers.MultiHeadAttention(heads, width // heads)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
        transformed = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(hidden))
        hidden = layers.LayerNormalization()(layers.Add()([hidden, transformed]))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(hidden)))


def transformer(keras: Any) -> Any:
    return encoder(keras, vocabulary=1000, length=32, depth=4, width=64, heads=4)


def bert(keras: Any) -> Any:
    """BERT-Mini's sizes (Turc et al. 2019, arXiv:1908.08962) on sequences of 64 tokens."""
    return encoder(keras, vocabulary=30522, length=64, depth=4, width=256, heads=4)


def resnet(keras: Any) -> Any:
    """ResNet-50 (He et al. 2015, arXiv:1512.03385) on images of 224 x 224: batches that take long to copy to a GPU."""
    return keras.applications.ResNet50(weights=None, classes=CLASSES, classifier_activation=None)


def _numbers(*shape: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        return random.random((count, *shape), np.float32), random.integers(0, CLASSES, count, np.int32)

    return examples


def _tokens(vocabulary: int, length: int) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        return random.integers(0, vocabulary, (count, length), np.int32), random.integers(0, CLASSES, count, np.int32)

    return examples


WORKLOADS = {
    "mlp": Workload(mlp, _numbers(8), steps=1200, evaluation_steps=200),
    "cnn": Workload(cnn, _numbers(28, 28, 1), steps=150, evaluation_steps=50, steps_per_execution=20),
    "transformer": Workload(transformer, _tokens(1000, 32), steps=30, evaluation_steps=10, steps_per_execution=20),
    # For GPUs.
    "resnet": Workload(
        resnet, _numbers(224, 224, 3), steps=6, evaluation_steps=2, batch_size=128, steps_per_execution=2
    ),
    "bert": Workload(bert, _tokens(30522, 64), steps=16, evaluation_steps=4, batch_size=32, steps_per_execution=4),
}
EPOCHS = 3
"""Of which the first one, in which everything is compiled, is not counted."""
