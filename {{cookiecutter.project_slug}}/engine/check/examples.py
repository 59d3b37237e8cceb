"""Checks of the examples, of the batches made of them, and of the predictions."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from engine.check.comparison import Check, check_repeats
from engine.cluster.strategy import create_strategy
from engine.data.batches import Batches
from engine.data.element_spec import batched, encode, sha256_of
from engine.data.examples import hook_of
from engine.data.records import Records
from engine.data.splits import each_dataset, load_splits
from engine.errors import BadInput
from engine.model.build import set_up
from engine.model.rejections import check_outputs
from engine.run.endpoints import NO_TENSORS, examples_endpoint, predict_endpoint, tensor_spec
from engine.settings import Settings
from engine.tracing import Traced

EXAMPLES_READ_TWICE = 64
BATCHES_LOOKED_AT = 20


def read_examples(program: Any, load_examples: Callable[[str], Any], hashes: dict[str, Any]) -> None:
    """Reads the first examples of each split twice, and adds their hashes to `hashes`.

    Raises BadInput if they differ from each other, or from those of an earlier call.
    """

    def hash_of(examples: Any) -> str:
        examples = examples.dataset() if isinstance(examples, Records) else examples
        # Anything else is rejected later.
        return sha256_of(examples.take(EXAMPLES_READ_TWICE)) if isinstance(examples, tf.data.Dataset) else ""

    for split in program.SPLITS:
        loaded = load_examples(split)
        for _ in range(2):
            read = each_dataset(loaded, hash_of)
            if hashes.setdefault(split, read) != read:
                raise BadInput(
                    f"task.load_examples({split!r}) returned other examples the second time: keep their order; the "
                    "engine shuffles them"
                )


def check_examples(program: Any, task: Any, settings: Settings) -> Iterator[Check]:
    """Loads the examples of one replica and checks its batches."""
    alone = dataclasses.replace(settings, simulated_devices=1)
    set_up(task, alone)
    splits = load_splits(program.SPLITS, task, alone, create_strategy(alone))
    sizes = ", ".join(f"{name} {batches.number_of_examples}" for name, batches in splits.items())
    yield Check(True, "task.py load_examples", f"{sizes} examples of one structure, in the same order twice")
    if "reload" in program.run_epochs.__code__.co_names:
        text = "run.reload loads other examples later: only those of a new run are checked here"
        yield Check(True, "train.py run_epochs", text, compared=False)
    for name, batches in splits.items():
        yield from _check_batches(name, batches)
    yield Check(True, "task.py prepare_example", "finite features, and the same batches twice")


def _check_batches(name: str, batches: Batches) -> Iterator[Check]:
    assert batches.traced is not None  # --check excludes --eager.
    looked_at = list(itertools.islice(batches.one_by_one(), BATCHES_LOOKED_AT))
    pairs = zip(tf.nest.flatten(looked_at[0]), tf.nest.flatten(next(batches.one_by_one())), strict=True)
    repeats = all(np.array_equal(first, second, equal_nan=first.dtype.is_floating) for first, second in pairs)
    yield from check_repeats("prepare_example", f"batches of {name!r}", batches.traced, repeats=repeats)
    for features, labels, sample_weights in looked_at:
        if tf.is_tensor(labels) and labels.dtype == tf.string:
            raise BadInput(f"task.prepare_example returned text labels for {name!r}: map them to numbers")
        floats = (part for part in tf.nest.flatten(features) if part.dtype.is_floating)
        if not all(bool(tf.reduce_all(tf.math.is_finite(part))) for part in floats):
            raise BadInput(f"task.prepare_example: features of {name!r} are not finite: fix or drop them")
        for weight in sample_weights.numpy():
            if not 0.0 <= weight < math.inf:
                text = f"or task.prepare_example returned a sample weight of {weight:g}: it must be finite, not below 0"
                raise BadInput(f"{hook_of(name)} {text}")


def check_predictions(program: Any, task: Any) -> Iterator[Check]:
    """Checks predictions and what would serve them: faults would otherwise show after the training."""
    if not hasattr(task, "predict_step"):
        return
    *_, last = program.batches.values()  # The test dataset, if there is one.
    features, _, sample_weights = next(last.one_by_one())
    serve, where = predict_endpoint(task, batched(last.features_spec)), "task.py predict_step"
    outputs = serve.function(features)
    check_outputs(outputs, len(sample_weights))
    for name, output in outputs.items():
        # A softmax rounds to 1 minus a bit on some CPUs.
        if output.dtype.is_floating and np.allclose(tf.cast(output, tf.float32), 1.0):
            yield Check(False, where, f"{name!r} is 1 everywhere, like a softmax of one number: use a sigmoid")
        else:
            yield Check(True, where, f"{name!r}, {output.dtype.name}{list(output.shape[1:])} of each example")
    endpoints, example_spec = {"serve": serve}, tensor_spec(encode(last.examples.element_spec))
    if example_spec:
        endpoints["serve_examples"] = examples_endpoint(task, program.config, serve, example_spec)
    else:
        yield Check(True, where, f"serve_examples cannot be exported: {NO_TENSORS}", compared=False)
    for name, endpoint in endpoints.items():
        graph = tf.function(endpoint.by_name, autograph=False).get_concrete_function(**endpoint.inputs).graph
        if calls := ", ".join(Traced(graph).python_calls):
            text = f"{name} cannot be exported: no file can contain the Python function of {calls}"
            yield Check(True, where, text, compared=False)
