"""The moving average of the weights and statistics: --ema-decay; and networks that follow another in a step."""

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.step import current_step
from engine.model.variables import Variables, is_seed


class MovingAverage:
    """average <- decay * average + (1 - decay) * variable, for some variables.

    After n updates the decay is at most (1 + n) / (10 + n), as tf.train.ExponentialMovingAverage has it with
    num_updates. Otherwise the initial weights would count for long: with 0.999, a third after 1,000 steps. Of a
    variable that differs between replicas each replica averages its own value. All is kept in float64: in float32 an
    average stops where a step is rounded to nothing, with a decay of 0.9999 up to 6e-4 of a weight away.

    Attributes:
        variables: the variables that are averaged, by name; none without a decay.
        averages: their averages, under the same names.
        state: the averages and what else a checkpoint needs, by name.
    """

    def __init__(self, variables: Variables, decay: float | None) -> None:
        """Starts with the variables' values; averages nothing without a decay. Make it inside the strategy's scope."""
        self._strategy = tf.distribute.get_strategy()
        self.variables, self._decay = (variables, decay) if decay else ({}, 0.0)
        self.averages = {
            name: tf.Variable(tf.cast(variable, tf.float64), trainable=False)
            for name, variable in self.variables.items()
        }
        self.state = {**self.averages}
        if self.variables:
            self._updates = self.state["updates"] = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Moves the averages by one step; outside the replicas, in the graph."""
        if not self.variables:
            return
        updates = self._updates.read_value()
        self._updates.assign(updates + 1.0)
        rate = 1.0 - tf.minimum(tf.constant(self._decay, tf.float64), (1.0 + updates) / (10.0 + updates))
        for name, average in self.averages.items():
            self._strategy.extended.update(average, _move, args=(self.variables[name], rate))


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
    followers, models = (
        [variable for variable in network.variables if not is_seed(variable.path)] for network in (follower, model)
    )
    if [tuple(variable.shape) for variable in followers] != [tuple(variable.shape) for variable in models]:
        raise BadInput(
            "engine.model.follow got a follower whose variables have other shapes than those of the model: make both "
            "by the same function"
        )
    if current_step().is_last:
        for variable, goal in zip(followers, models, strict=True):
            kept = tf.cast(decay, variable.dtype)
            moved = kept * variable.value + (1.0 - kept) * goal.value
            variable.assign(moved if tf.as_dtype(variable.dtype).is_floating else goal.value)


def _move(average: tf.Variable, variable: tf.Variable, rate: tf.Tensor) -> None:
    value = tf.cast(variable, tf.float64)
    # The distance of two infinite numbers, as in a mask, is not a number.
    change = tf.where(average == value, tf.zeros_like(value), rate * (average - value))
    average.assign_sub(change)
