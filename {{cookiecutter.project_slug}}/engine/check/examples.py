"""Checks of the examples, of the batches made of them, and of the predictions."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.check.results import Check, check_repeats
from engine.data.element_spec import sha256_of
from engine.data.examples import hook_of
from engine.data.records import Records
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.step import step_on
from engine.settings import Settings
from engine.tracing import unrepeatable

EXAMPLES_READ_TWICE = 200
BATCHES_LOOKED_AT = 20


def read_examples(program: Any, load_examples: Callable[[str], Any]) -> dict[str, Any]:
    """Returns hashes of the first examples of each split. Raises BadInput if they differ when they are read again."""
    hashes = {}
    for split in program.SPLITS:
        examples = load_examples(split)
        hashes[split] = each_dataset(examples, _fingerprint)
        _compare(split, hashes[split], each_dataset(examples, _fingerprint))
    check_unchanged(hashes, load_examples)
    return hashes


def check_unchanged(hashes: dict[str, Any], load_examples: Callable[[str], Any]) -> None:
    """Raises BadInput if examples that are loaded now have other hashes."""
    for split, expected in hashes.items():
        _compare(split, expected, each_dataset(load_examples(split), _fingerprint))


def _compare(split: str, expected: Any, found: Any) -> None:
    if found != expected:
        text = "returned other examples the second time: keep their order; the engine shuffles them"
        raise BadInput(f"task.load_examples({split!r}) {text}")


def check_examples(program: Any, settings: Settings, global_batch_size: int) -> Iterator[Check]:
    program.build(dataclasses.replace(settings, simulated_devices=1))
    sizes = ", ".join(f"{name} {each.number_of_examples}" for name, each in program.batches.items())
    yield Check(True, "task.py load_examples", f"{sizes} examples of one structure, in the same order twice")
    divisors = (str(number) for number in range(1, global_batch_size + 1) if global_batch_size % number == 0)
    text = f"{global_batch_size} can be shared equally by {', '.join(divisors)} replicas"
    if settings.global_batch_size != global_batch_size:
        text += f"; one replica and two are compared with {settings.global_batch_size}"
    yield Check(True, "--global-batch-size", text)


def _fingerprint(examples: Any) -> str:
    """Returns a hash of the first examples; "" for what the engine rejects later."""
    examples = examples.dataset() if isinstance(examples, Records) else examples
    return sha256_of(examples.take(EXAMPLES_READ_TWICE)) if isinstance(examples, tf.data.Dataset) else ""


def check_batches(program: Any, task: Any) -> Iterator[Check]:
    predict = tf.function(lambda features: task.model(features, training=False), autograph=False)
    for name, batches in program.batches.items():
        assert batches.traced is not None  # --check excludes --eager.
        draws, python = unrepeatable(batches.traced, "prepare_example")
        looked_at = itertools.islice(batches.one_by_one(), BATCHES_LOOKED_AT)
        first_batch = next(looked_at)
        pairs = zip(tf.nest.flatten(first_batch), tf.nest.flatten(next(batches.one_by_one())), strict=True)
        repeats = all(np.array_equal(one, two, equal_nan=one.dtype.is_floating) for one, two in pairs)
        yield from check_repeats("prepare_example", f"batches of {name!r}", draws, python, repeats=repeats)
        for batch in itertools.chain([first_batch], looked_at):
            floats = (part for part in tf.nest.flatten(batch[0]) if part.dtype.is_floating)
            if not all(bool(tf.reduce_all(tf.math.is_finite(part))) for part in floats):
                raise BadInput(f"task.prepare_example: features of {name!r} are not finite: fix or drop them")
            for weight in batch[2].numpy():
                if not 0.0 <= weight < math.inf:
                    problem = f"or task.prepare_example returned a sample weight of {weight:g}"
                    raise BadInput(f"{hook_of(name)} {problem}: it must be finite, and not below 0")
            _check_labels(task, name, batch, predict)
    yield Check(True, "task.py prepare_example", "finite features, and labels that the model can predict")


def _check_labels(task: Any, name: str, batch: Any, predict: Callable[[Any], Any]) -> None:
    features, labels, sample_weights = batch
    predictions: Any = None
    if tf.is_tensor(labels) and labels.dtype == tf.string:
        raise BadInput(f"task.prepare_example returned text labels for {name!r}: map them to numbers")
    are_integers = tf.is_tensor(labels) and labels.dtype.is_integer
    if are_integers and isinstance(task.model, keras.Model):
        with contextlib.suppress(Exception):  # A step may call it on something else.
            predictions = predict(features)
    if not tf.is_tensor(predictions) or predictions.shape.rank != labels.shape.rank + 1:
        return
    classes, low, high = predictions.shape[-1], int(tf.reduce_min(labels)), int(tf.reduce_max(labels))
    if classes == 1 or 0 <= low <= high < classes:
        return
    # Labels may mark padding, or may not be classes at all: only the loss knows.
    with contextlib.suppress(tf.errors.InvalidArgumentError), step_on(batch):
        if math.isfinite(float(task.compute_loss(labels, predictions, sample_weights)[0])):
            return
    text = f"returned labels from {low} to {high}, and the model predicts {classes} classes, 0 to {classes - 1}"
    raise BadInput(f"{hook_of(name)} {text}: fix the labels or the model's last layer")


def check_predictions(program: Any, predict_step: Callable[[Any], Any]) -> Iterator[Check]:
    """Checks the predictions, whose faults would otherwise show after the training, in --export or predict.py."""
    *_, last = program.batches.values()  # The test dataset, if there is one.
    features, _, sample_weights = next(last.one_by_one())
    outputs, where = tf.function(predict_step)(features), "task.py predict_step"
    if not isinstance(outputs, dict) or not all(map(tf.is_tensor, outputs.values())):
        yield Check(False, where, f"returned {type(outputs).__name__}: return a dict of tensors by name")
        return
    for name, output in outputs.items():
        if output.shape[:1] != sample_weights.shape:
            yield Check(False, where, f"{name!r} has shape {output.shape}: return a row for each example")
        # A softmax rounds to 1 minus a bit on some CPUs.
        elif output.dtype.is_floating and np.allclose(tf.cast(output, tf.float32), 1.0):
            yield Check(False, where, f"{name!r} is 1 everywhere, like a softmax of one number: use a sigmoid")
        else:
            yield Check(True, where, f"{name!r}, {output.dtype.name}{list(output.shape[1:])} of each example")
