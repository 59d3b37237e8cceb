"""The moving average of the weights and statistics: --ema-decay."""

import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf


class MovingAverage:
    """average <- decay * average + (1 - decay) * variable, for some variables.

    Statistics are moving averages themselves, of each step's own statistic: of these the average is taken, so that it
    counts the same steps as the averages of the weights, and no initial value. Of a variable that differs between
    replicas each replica averages its own value. All is kept in float64: in float32 an average stops where a step is
    rounded to nothing, with a decay of 0.9999 up to 6e-4 of a weight away.

    Attributes:
        averages: variable -> its average.
        state: the averages and what else a checkpoint needs, by name.
    """

    def __init__(
        self, variables: Mapping[str, tf.Variable], momentum: Mapping[str, float], decay: float | None
    ) -> None:
        """Starts with the variables' values; averages nothing without a decay. Make it inside the strategy's scope.

        `momentum` has the variables that are statistics: a step changes them by
        statistic <- momentum * statistic + (1 - momentum) * statistic of the step.
        """
        self._strategy = tf.distribute.get_strategy()
        self._variables, self._decay = (variables, decay) if decay else ({}, 0.0)
        self._momentum = {name: value for name, value in momentum.items() if name in self._variables}
        self.averages = {name: _copy(variable) for name, variable in self._variables.items()}
        self._before = {name: _copy(self._variables[name]) for name in self._momentum}  # Before the next step.
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.state = {**self.averages, **{f"{name}/before": each for name, each in self._before.items()}}
        if self._momentum:
            self.state["updates"] = self._updates

    def start_over(self) -> None:
        """Sets the averages to the variables' values."""
        for name, variable in self._variables.items():
            self.averages[name].assign(tf.cast(variable, tf.float64))
        for name, before in self._before.items():
            before.assign(tf.cast(self._variables[name], tf.float64))
        self._updates.assign(0)

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages by one step; outside the replicas, in the graph."""
        rate = tf.constant(1.0 - self._decay, tf.float64)
        update = self._strategy.extended.update
        if self._momentum:
            # The first step's statistic stands for the initial weights, too.
            rate_of_statistics = tf.where(tf.equal(self._updates, 0), tf.ones_like(rate), rate)
            self._updates.assign_add(1)
        for name, average in self.averages.items():
            if name in self._momentum:
                arguments = self._variables[name], self._before[name], self._momentum[name], rate_of_statistics
                update(average, _move_statistic, args=arguments)
            else:
                update(average, _move, args=(self._variables[name], rate))

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


def _copy(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.cast(variable, tf.float64), trainable=False)


def _move(average: tf.Variable, value: tf.Variable | tf.Tensor, rate: tf.Tensor) -> tf.Operation:
    return average.assign_sub(rate * (average - tf.cast(value, tf.float64)))


def _move_statistic(
    average: tf.Variable, variable: tf.Variable, before: tf.Variable, momentum: float, rate: tf.Tensor
) -> tf.Operation:
    now = tf.cast(variable, tf.float64)
    of_this_step = (now - momentum * before) / (1.0 - momentum)
    with tf.control_dependencies([of_this_step]):
        before.assign(now)
    return _move(average, of_this_step, rate)
