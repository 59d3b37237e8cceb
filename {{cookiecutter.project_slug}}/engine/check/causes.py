"""Why the losses of one replica and of two differ."""

from typing import Any

import keras

from engine.check.results import close
from engine.errors import BadInput
from engine.protocols import Task
from engine.run.evaluation import Program


def why_losses_differ(program: Program, task: Task, one: float, two: float) -> tuple[str, str]:
    """Returns the hook to look at, and the likely cause, from the losses of one replica and of two."""
    batch = next(program.batches["train"].one_by_one())
    shape = _shape_of_losses(task, batch)
    if len(shape) != 1:  # The metrics differ for the same reason.
        raise BadInput(f"task.compute_loss returned a per-example loss of shape {shape}: return one value per example")
    weights, activities = _losses_of_model(task.model, batch)
    if weights and close(two - one, weights):
        why = "it adds model.losses once per replica; use tf.nn.scale_regularization_loss(model.losses)"
    elif activities and close(one - two, activities / 2):
        why = "a layer's add_loss adds a sum over one replica's batch; add the mean over the examples"
    elif close(two, 2 * one):
        why = "it is divided by the per-replica batch size; divide by config.global_batch_size"
    elif close(two, one / 2):
        why = "it is divided by the number of replicas a second time; remove that division"
    elif hidden := [name.removeprefix("hidden/") for name in program.run.hidden.changed()]:
        why = f"the steps change {', '.join(hidden)}, which is per-replica: to keep it equal on all replicas, "
        return "create_model", why + "assign what tf.distribute.get_replica_context().all_reduce returns"
    else:
        why = "the ratio matches no known cause: look for a mean taken over one replica's batch"
    return "compute_loss", why


def _shape_of_losses(task: Any, batch: Any) -> tuple[int, ...]:
    features, labels, sample_weights = batch
    try:
        _, per_example_loss = task.compute_loss(labels, task.model(features), sample_weights)
    except Exception:  # noqa: BLE001 - The steps of this task may pass it other arguments.
        return tuple(sample_weights.shape)
    return tuple(per_example_loss.shape)


def _losses_of_model(model: Any, batch: Any) -> tuple[float, float]:
    """Returns two sums of model.losses for a batch: the regularizers of weights, and all other losses."""
    if not isinstance(model, keras.Model) or not model.losses:
        return 0.0, 0.0
    model(batch[0], training=True)
    weights = sum(float(each.regularizer(each)) for each in model.trainable_variables if each.regularizer)
    return weights, float(sum(model.losses)) - weights
