"""Why the losses of one replica and of two differ, as far as the numbers tell."""

import contextlib
import math
from typing import Any

import keras
import tensorflow as tf

from engine.check.measure import LOSS, Measured, changed_unlisted
from engine.check.results import MARGIN, PROMISE, close
from engine.check.steps import draws
from engine.errors import BadInput
from engine.model.step import step_on


def why_losses_differ(
    program: Any, task: Any, padded: str, one: float, two: float, *, doubled: bool
) -> tuple[str, str]:
    """Returns the hook to look at, and the likely cause, from the losses of one replica and of two.

    `padded` says of which batch they are, if it is padded; `doubled`, whether the loss of a batch whose second half is
    padding is twice as large on two replicas.
    """
    batch = features, labels, sample_weights = next(program.batches["train"].one_by_one())
    shape, graph = sample_weights.shape, program.run_steps["train"].graph()
    with contextlib.suppress(Exception), step_on(batch):  # The steps of this task may pass it other arguments.
        shape = task.compute_loss(labels, task.model(features), sample_weights)[1].shape
    # The metrics differ for the same reason. A loss of each token has the shape of its labels.
    if shape.rank != 1 and not (tf.is_tensor(labels) and shape == labels.shape):
        raise BadInput(f"task.compute_loss returned a per-example loss of shape {shape}: return one value per example")
    weights, activities = losses_of_model(task.model, features)
    if math.isnan(two):
        why = "a replica whose examples are all padding divides by 0: use tf.math.divide_no_nan"
    elif padded:
        why = "it is divided by what one replica's batch contains: divide by a sum of engine.model.sum_over_batch"
    elif weights and close(two - one, weights):
        why = "it adds model.losses once per replica; use tf.nn.scale_regularization_loss(model.losses)"
    elif activities and close(one - two, activities / 2):
        why = "a layer's add_loss adds a sum over one replica's batch; add the mean over the examples"
    elif close(two, 2 * one) and doubled:
        why = "it is divided by the per-replica batch size; divide by config.global_batch_size"
    elif close(two, one / 2):
        why = "it is divided by the number of replicas a second time; remove that division"
    elif hidden := changed_unlisted(program):
        why = f"the steps change {', '.join(hidden)}, which is per-replica: to keep it equal on all replicas, "
        return "create_model", why + "assign what tf.distribute.get_replica_context().all_reduce returns"
    elif graph is not None and (places := draws(graph)):
        return "train_step", draws_of_replicas(places)
    else:
        why = "the ratio matches no known cause: look for a mean taken over one replica's batch, which a sum of "
        why += "engine.model.sum_over_batch makes right, and for examples that are compared only with others of their "
        why += "replica, and not with the result of engine.model.gather_batch"
    return "compute_loss", why


def draws_of_replicas(places: str) -> str:
    """Returns the fault of draws at these places of the hooks, and what to do."""
    text = f"random numbers are drawn{places}, and those of an example depend on its replica: "
    return text + "draw them from a seed of each example, see docs/steps.md"


def losses_of_model(model: Any, features: Any) -> tuple[float, float]:
    """Returns two sums of model.losses: the regularizers of weights, and all other losses."""
    if not isinstance(model, keras.Model) or not model.losses:
        return 0.0, 0.0
    with contextlib.suppress(Exception):  # A step may call it on something else.
        model(features, training=True)
    weights = sum(float(each.regularizer(each)) for each in model.trainable_variables if each.regularizer)
    return weights, float(sum(model.losses)) - weights


def differing_losses(one: Measured, two: Measured) -> tuple[str, float, float] | None:
    """Returns the first loss that differs by more than rounding, on one replica and on two, after its kind of batch."""
    pairs = [("", *each) for each in zip(one.losses, two.losses, strict=True)]
    pairs.append((" of a batch whose second half is padding", one.half_padded, two.half_padded))
    floor = MARGIN * one.rounding[LOSS]
    differing = (each for each in pairs if not close(*each[1:], tolerance=PROMISE, floor=floor))
    return next(differing, None)
