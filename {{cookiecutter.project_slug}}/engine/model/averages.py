"""The moving average of the weights: --ema-decay."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


class MovingAverage:
    """average <- decay * average + (1 - decay) * variable, for some variables."""

    def __init__(self, variables: dict[str, tf.Variable], decay: float | None) -> None:
        """Starts with the variables' values; averages nothing without a decay. Make it inside the strategy's scope."""
        self._strategy = tf.distribute.get_strategy()
        self._variables, self._decay = (variables, decay) if decay else ({}, 0.0)
        self.averages = {name: tf.Variable(variable, trainable=False) for name, variable in self._variables.items()}

    def start_over(self) -> None:
        """Sets the averages to the variables' values."""
        for name, variable in self._variables.items():
            self.averages[name].assign(tf.identity(variable))

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages by one step; outside the replicas, in the graph."""
        for name, average in self.averages.items():
            self._strategy.extended.update(average, self._move, args=(self._variables[name],))

    def _move(self, average: tf.Variable, variable: tf.Variable) -> tf.Operation:
        return average.assign_sub((1.0 - self._decay) * (average - variable))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in the place of the variables' values for a while."""
        trained = {name: tf.identity(variable) for name, variable in self._variables.items()}
        for name, variable in self._variables.items():
            variable.assign(tf.identity(self.averages[name]))
        try:
            yield
        finally:
            for name, variable in self._variables.items():
                variable.assign(trained[name])
