"""The moving average of the weights and statistics: --ema-decay."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


class MovingAverage:
    """average <- decay * average + (1 - decay) * variable, for some variables.

    It is kept in float64: in float32 it stops where a step is rounded to nothing, with a decay of 0.9999 up to 6e-4 of
    a weight away. Of a variable that differs between replicas each replica averages its own value.
    """

    def __init__(self, variables: dict[str, tf.Variable], decay: float | None) -> None:
        """Starts with the variables' values; averages nothing without a decay. Make it inside the strategy's scope."""
        self._strategy = tf.distribute.get_strategy()
        self._variables, self._decay = (variables, decay) if decay else ({}, 0.0)
        self.averages = {
            name: tf.Variable(tf.cast(variable, tf.float64), trainable=False)
            for name, variable in self._variables.items()
        }

    def start_over(self) -> None:
        """Sets the averages to the variables' values."""
        for name, variable in self._variables.items():
            self.averages[name].assign(tf.cast(variable, tf.float64))

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages by one step; outside the replicas, in the graph."""
        for name, average in self.averages.items():
            self._strategy.extended.update(average, self._move, args=(self._variables[name],))

    def _move(self, average: tf.Variable, variable: tf.Variable) -> tf.Operation:
        return average.assign_sub((1.0 - self._decay) * (average - tf.cast(variable, tf.float64)))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in the place of the variables' values for a while, on each replica its own."""
        local = self._strategy.experimental_local_results
        pairs = [
            pair
            for name, variable in self._variables.items()
            for pair in zip(local(variable), local(self.averages[name]), strict=True)
        ]
        trained = [tf.identity(variable) for variable, _ in pairs]
        for variable, average in pairs:
            variable.assign(tf.cast(average, variable.dtype))
        try:
            yield
        finally:
            for (variable, _), value in zip(pairs, trained, strict=True):
                variable.assign(value)
