"""The batches of every split, as the hooks of task.py give them; refuses splits that do not go together."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from engine.data.batches import Batches
from engine.data.element_spec import as_text
from engine.data.preparation import Preparation
from engine.data.sets import hook_of, loaders
from engine.errors import BadInput


def load_splits(
    splits: Sequence[str],
    task: ModuleType,
    settings: Any,
    strategy: tf.distribute.Strategy,
    pipelines: int = 1,
    pipeline: int = 0,
) -> dict[str, Batches]:
    """Returns the batches of every set: "train", "validation" or "validation/<set>", "test" or "test/<set>".

    A split without examples is left out. Raises BadInput if hooks, settings and replicas do not go together.

    Args:
        splits: names for task.load_examples, "train" among them.
        task: has load_examples and prepare_example.
        settings: has micro_batches, validate_every_steps, pad_to, eager, and what Batches need.
        strategy: its replicas share a global batch.
        pipelines: how many processes they are in.
        pipeline: the number of this one.
    """
    hook, options = task.prepare_example, {"pad_to": settings.pad_to, "eager": settings.eager}
    evaluating = Preparation(hook, training=False, **options)
    training = Preparation(hook, training=True, **options) if evaluating.depends_on_training else evaluating
    batches = {}
    for split in splits:
        preparation = training if split == "train" else evaluating
        for name, load in loaders(split, task.load_examples, pipelines).items():
            batches[name] = Batches(split, load, preparation, strategy, settings, pipelines, pipeline, name)
    check_same_structure(batches)
    if settings.validate_every_steps and not any(each.split == "validation" for each in batches.values()):
        raise BadInput(
            f"--validate-every-steps {settings.validate_every_steps}: task.load_examples('validation') returned None, "
            "so there is no validation: leave it out"
        )
    _check_micro_batches(settings.micro_batches, batches["train"].per_replica_batch_size)
    return batches


def check_same_structure(splits: dict[str, Batches]) -> None:
    """Raises BadInput if an example of one split has another structure, shape or dtype than one of "train"."""

    def structure(batches: Batches) -> Any:
        spec = batches.element_spec[:2]  # Of the size that batches of training have.
        return tf.nest.map_structure(lambda leaf: tf.TensorSpec([share, *leaf.shape[1:]], leaf.dtype), spec)

    share = splits["train"].per_replica_batch_size
    expected = structure(splits["train"])
    for name, batches in splits.items():
        if (found := structure(batches)) != expected:
            raise BadInput(
                f"{hook_of(name)} and task.prepare_example gave batches of {as_text(found)}, but those of "
                f"'train' are {as_text(expected)}: every split needs the same structure, shapes and dtypes"
            )


def _check_micro_batches(micro_batches: int, share: int) -> None:
    """Raises BadInput unless a replica's share can be computed in `micro_batches` equal parts."""
    if share % micro_batches:
        divisors = ", ".join(str(number) for number in range(1, share + 1) if share % number == 0)
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the {share} examples of a replica's share: "
            f"use one of {divisors}"
        )
