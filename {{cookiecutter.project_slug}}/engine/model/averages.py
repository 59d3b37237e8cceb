"""The moving average of the weights and statistics: --ema-decay; and networks that follow another in a step."""

import contextlib
from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.gradients import is_last_micro_batch
from engine.model.moments import kept_by, moves_by_momentum
from engine.model.variables import is_seed


class MovingAverage:
    """average <- decay * average + (1 - decay) * variable, for some variables.

    After n updates the decay is at most (1 + n) / (10 + n), as tf.train.ExponentialMovingAverage has it with
    num_updates. Otherwise the initial weights would count for long: with 0.999, a third after 1,000 steps.

    Statistics are moving averages themselves, of what each step has measured. Of these the average is taken, with the
    same decay, so that it counts the same steps as the averages of the weights, and no initial value. Of a variable
    that differs between replicas each replica averages its own value. All is kept in float64: in float32 an average
    stops where a step is rounded to nothing, with a decay of 0.9999 up to 6e-4 of a weight away.

    Attributes:
        averages: variable -> its average.
        state: the averages and what else a checkpoint needs, by name.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        statistics: Mapping[str, tuple[tf.Variable, keras.layers.Layer]],
        decay: float | None,
    ) -> None:
        """Starts with the variables' values; averages nothing without a decay. Make it inside the strategy's scope.

        `statistics` are variables that layers change, with their layers.
        """
        self._strategy = tf.distribute.get_strategy()
        layers = {name: layer for name, (_, layer) in statistics.items()} if decay else {}
        variables = {**weights, **{name: variable for name, (variable, _) in statistics.items()}}
        self._variables, self._decay = (variables, decay) if decay else ({}, 0.0)
        self.averages = {name: _copy(variable) for name, variable in self._variables.items()}
        self._before = {name: _copy(self._variables[name]) for name in layers}  # Before the next step.
        self._weight = {name: tf.Variable(0.0, dtype=tf.float64, trainable=False) for name in layers}
        self._kept = {name: kept_by(layer) for name, layer in layers.items() if moves_by_momentum(layer)}
        self.state = {**self.averages}
        if self._variables:
            self._updates = self.state["updates"] = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        for part, by_name in (("before", self._before), ("weight", self._weight), ("kept", self._kept)):
            self.state |= {f"{name}/{part}": variable for name, variable in by_name.items()}

    def start_over(self) -> None:
        """Sets the averages to the variables' values, as if there had been no update."""
        if self._variables:
            self._updates.assign(0.0)
        for name, variable in self._variables.items():
            self.averages[name].assign(tf.cast(variable, tf.float64))
        for name, before in self._before.items():
            before.assign(tf.cast(self._variables[name], tf.float64))
            self._weight[name].assign(0.0)

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages by one step; outside the replicas, in the graph."""
        if not self._variables:
            return
        updates = self._updates.read_value()
        self._updates.assign(updates + 1.0)
        rate = 1.0 - tf.minimum(tf.constant(self._decay, tf.float64), (1.0 + updates) / (10.0 + updates))
        for name, average in self.averages.items():
            variable, update = self._variables[name], self._strategy.extended.update
            if name in self._before:
                parts = self._before[name], self._weight[name], self._kept.get(name)
                update(average, _move_statistic, args=(variable, rate, *parts))
            else:
                update(average, _move, args=(variable, rate))

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


@tf.autograph.experimental.do_not_convert
def follow(follower: keras.Model, model: keras.Model, decay: float | tf.Tensor) -> None:
    """Moves each variable of a follower: follower <- decay * follower + (1 - decay) * model.

    A follower is a mean teacher, a momentum encoder or a target network; a decay of 0 makes it a copy. Call it in
    task.train_step after apply_gradients, on every replica; in micro-batches it moves once, after the update. It
    follows statistics, such as those of BatchNormalization, as it does weights, and the states of random generators
    not. The follower has no optimizer: freeze it (follower.trainable = False).

    In float32 a weight stops following where (1 - decay) times its distance is less than its rounding: with a decay of
    0.999 at a distance of 0.006 % of the weight, with 0.9999 at 0.06 %.

    Args:
        follower: has the same variables as `model`, in the same order.
        model: the model that is trained.
        decay: from 0 to 1 (scalar); one that changes over the steps follows from optimizer.iterations.

    Raises BadInput if the variables of the two differ in number or shape.
    """
    pairs = [[each for each in one.variables if not is_seed(each.path)] for one in (follower, model)]
    shapes = [[tuple(each.shape) for each in variables] for variables in pairs]
    if shapes[0] != shapes[1]:
        problem = "engine.model.follow got a follower whose variables have other shapes than those of the model"
        raise BadInput(f"{problem}: make both by the same function")
    if is_last_micro_batch():
        for one, other in zip(*pairs, strict=True):
            value = tf.cast(decay, one.dtype) * one.value + (1.0 - tf.cast(decay, one.dtype)) * other.value
            one.assign(value if tf.as_dtype(one.dtype).is_floating else other.value)


def _copy(variable: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.cast(variable, tf.float64), trainable=False)


def _move(average: tf.Variable, value: tf.Variable, rate: tf.Tensor) -> None:
    average.assign_sub(rate * (average - tf.cast(value, tf.float64)))


def _move_statistic(
    average: tf.Variable,
    variable: tf.Variable,
    rate: tf.Tensor,
    before: tf.Variable,
    weight: tf.Variable,
    kept: tf.Variable | None,
) -> None:
    """Averages what the step has measured, which is the statistic without what is kept of the one before.

    Both have a part in the statistic. The average is divided by the sum of these parts.
    """
    now, part_kept = tf.cast(variable, tf.float64), tf.constant(0.0, tf.float64) if kept is None else kept.read_value()
    # What no call of the layer has moved, but `follow` has, is averaged as it is.
    part_kept = tf.where((part_kept == 1.0) & tf.reduce_any(now != before), tf.zeros_like(part_kept), part_kept)
    part, measured = 1.0 - part_kept, now - part_kept * before
    rate = tf.where(weight > 0.0, rate, 1.0)  # What the first step measures stands for the initial weights, too.
    weight.assign(weight - rate * (weight - part))
    average.assign_add(tf.math.divide_no_nan(rate * (measured - part * average), weight.read_value()))
    before.assign(now)
    if kept is not None:
        kept.assign(1.0)
