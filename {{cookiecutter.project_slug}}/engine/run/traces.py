"""The traced steps of a run: they may change nothing that no checkpoint contains."""

from collections.abc import Collection, Mapping

import tensorflow as tf

from engine.data.stacks import CompiledSteps
from engine.errors import BadInput
from engine.model.variables import is_seed
from engine.tracing import Traced

# On several replicas an unseeded generator fails, because Keras makes one in each replica's thread.
UNSEEDED = (
    "task.train_step draws from keras.random without a seed, which fails on several replicas: draw from a seed of each "
    "example, see docs/steps.md, or give a layer a keras.random.SeedGenerator and pass it as seed"
)


def graph_of(steps: CompiledSteps) -> tf.Graph | None:
    """Returns the graph of steps, traced now if it was not before; None if none runs in this process."""
    try:
        return steps.graph()
    except Exception as problem:
        if "seed_generator_state" in str(problem):
            raise BadInput(UNSEEDED) from problem
        raise


def check_changes(traced: Mapping[str, Traced], saved: Collection[int]) -> None:
    """Raises BadInput if steps change anything besides the variables whose handles' ids are `saved`."""
    for split, step in traced.items():
        hook = "train_step" if split == "train" else "evaluation_step"
        lost = [name for handle, name in step.changed.items() if name and handle not in saved]
        if lost and is_seed(lost[0]):
            raise BadInput(UNSEEDED)
        if lost:
            raise BadInput(
                f"task.{hook} changes the variable {lost[0]}, which no checkpoint contains: make it in a create_* "
                "hook, not elsewhere"
            )
        if step.table_changes:
            raise BadInput(
                f"task.{hook} changes a lookup table, which no checkpoint contains: {step.table_changes[0]}: fill it "
                "in a create_* hook, or use a tf.Variable instead"
            )
