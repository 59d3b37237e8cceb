"""Models that train in a moment."""

import keras


def linear_model(*more: keras.layers.Layer) -> keras.Model:
    """Two variables, for tests that do not depend on the model: every variable adds to the time of a trace."""
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10), *more])


def small_model(*more: keras.layers.Layer, without_last: bool = False) -> keras.Model:
    """A layer of every kind that a resume has to keep."""
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10),
        *more,
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *(layers[:-1] if without_last else layers)])
