"""The checks of a task's hooks.

One replica and two simulated ones must get the same results for the same batches. Randomness inside the model is
switched off for that. An unsynchronized BatchNormalization is reported and then synchronized, so that it hides no other
cause.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.check import measure
from engine.check.causes import why_losses_differ
from engine.check.measure import Measured, close
from engine.cluster.strategy import create_strategy
from engine.data.examples import hook_of, sha256_of
from engine.data.records import Records
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.variables import by_name, is_seed, model_variables
from engine.protocols import Task
from engine.run.evaluation import Program
from engine.settings import Settings
from engine.tracing import unrepeatable_in_preparation, unrepeatable_in_step

EXAMPLES_READ_TWICE = 200
BATCHES_LOOKED_AT = 20
REPEATED_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a check. `where` is a hook or a setting; `text` is a fact, or a fault and how to fix it."""

    ok: bool
    where: str
    text: str


def run_checks(program: Program, task: Task, settings: Settings, global_batch_size: int) -> Iterator[Check]:
    """Yields the results of the checks; BadInput, and any exception of a hook, ends them.

    `global_batch_size` is the user's; the one in `settings` can be shared by two replicas.
    """
    create_strategy(settings)
    task.config = settings  # task.load_examples is called before anything is built.
    yield from _check_examples(program, task, settings, global_batch_size)
    yield from _check_batches(program, task)
    if hook := getattr(task, "predict_step", None):
        yield from _check_predictions(program, hook)
    with measure.few_examples(task, settings.global_batch_size):
        with measure.recording_optimizers(task):
            two = measure.measure(program, task, settings, 2)
            # A synchronized layer has the statistics of a micro-batch; all else must equal the complete batch.
            alone = settings if two.layers.synchronized else dataclasses.replace(settings, micro_batches=1)
            one = measure.measure(program, task, alone, 1)
        yield from _check_layers(program, task, one)
        compared = [] if one.layers.still_random else list(_check_same_results(program, task, one, two))
        yield from compared
        yield from _check_traces(program)
        yield from _check_evaluation(program, task, settings)
        # Steps that differ make the updates differ, too. That is one cause, so it is reported once.
        compare = not one.layers.still_random and all(each.ok for each in compared)
        yield from _check_training(program, task, settings, compare=compare)


def _check_repeats(hook: str, results: str, draws: list[str], python: list[str], *, repeats: bool) -> Iterator[Check]:
    """Raises BadInput if a hook draws its results again each time, because such results cannot be compared."""
    if draws:
        raise BadInput(f"task.{hook}: {draws[0]}")
    if python and not repeats:
        raise BadInput(f"task.{hook} returned other {results} the second time: {python[0]}")
    for text in python:
        yield Check(True, f"task.py {hook}", f"the same {results} twice, though {text}")


# --- The data ---------------------------------------------------------------------------------------------------------


def _check_examples(program: Program, task: Task, settings: Settings, global_batch_size: int) -> Iterator[Check]:
    for split in program.SPLITS:
        once, again = (each_dataset(task.load_examples(split), _fingerprint) for _ in range(2))
        if once != again:
            text = "returned other examples the second time: keep their order; the engine shuffles them"
            raise BadInput(f"task.load_examples({split!r}) {text}")
    program.build(dataclasses.replace(settings, simulated_devices=1))
    sizes = ", ".join(f"{name} {each.number_of_examples}" for name, each in program.batches.items())
    yield Check(True, "task.py load_examples", f"{sizes} examples of one structure, in the same order twice")
    divisors = (str(number) for number in range(1, global_batch_size + 1) if global_batch_size % number == 0)
    text = f"{global_batch_size} can be shared by {', '.join(divisors)} replicas"
    if settings.global_batch_size != global_batch_size:
        text += f"; one replica and two are compared with {settings.global_batch_size}"
    yield Check(True, "--global-batch-size", text)


def _fingerprint(examples: Any) -> str:
    """Returns a hash of the first examples; "" for what the engine rejects later."""
    examples = examples.dataset() if isinstance(examples, Records) else examples
    return sha256_of(examples.take(EXAMPLES_READ_TWICE)) if isinstance(examples, tf.data.Dataset) else ""


def _check_batches(program: Program, task: Task) -> Iterator[Check]:
    predict = tf.function(lambda features: task.model(features, training=False), autograph=False)
    for name, batches in program.batches.items():
        assert batches.traced is not None  # --check excludes --eager.
        draws, python = unrepeatable_in_preparation(batches.traced)
        same_batch = (tf.nest.flatten(next(batches.one_by_one())) for _ in range(2))
        repeats = not python or all(map(np.array_equal, *same_batch))
        yield from _check_repeats("prepare_example", f"batches of {name!r}", draws, python, repeats=repeats)
        for batch in itertools.islice(batches.one_by_one(), BATCHES_LOOKED_AT):
            floats = (part for part in tf.nest.flatten(batch[0]) if part.dtype.is_floating)
            if not all(bool(tf.reduce_all(tf.math.is_finite(part))) for part in floats):
                raise BadInput(f"task.prepare_example: features of {name!r} are not finite: fix or drop them")
            _check_labels(task, name, batch, predict)
    yield Check(True, "task.py prepare_example", "finite features, and labels that the model can predict")


def _check_labels(task: Any, name: str, batch: Any, predict: Callable[[Any], Any]) -> None:
    features, labels, sample_weights = batch
    if tf.is_tensor(labels) and labels.dtype == tf.string:
        raise BadInput(f"task.prepare_example returned text labels for {name!r}: map them to numbers")
    are_integers = tf.is_tensor(labels) and labels.dtype.is_integer
    predictions: Any = predict(features) if are_integers and isinstance(task.model, keras.Model) else None
    if not tf.is_tensor(predictions) or predictions.shape.rank != labels.shape.rank + 1:
        return
    classes, low, high = predictions.shape[-1], int(tf.reduce_min(labels)), int(tf.reduce_max(labels))
    if classes == 1 or 0 <= low <= high < classes:
        return
    # Labels may mark padding, or may not be classes at all: only the loss knows.
    with contextlib.suppress(tf.errors.InvalidArgumentError):
        if math.isfinite(float(task.compute_loss(labels, predictions, sample_weights)[0])):
            return
    text = f"returned labels from {low} to {high}, and the model predicts {classes} classes, 0 to {classes - 1}"
    raise BadInput(f"{hook_of(name)} {text}: fix the labels or the model's last layer")


def _check_predictions(program: Program, predict_step: Callable[[Any], Any]) -> Iterator[Check]:
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


# --- The steps, on one replica and on two -----------------------------------------------------------------------------


def _check_layers(program: Program, task: Task, one: Measured) -> Iterator[Check]:
    layers, step = one.layers, program.run.hidden.training
    assert step is not None  # It is None only beside other processes.
    if layers.unsynchronized:
        names = ", ".join(map(repr, layers.unsynchronized))
        text = f"the statistics of {names} are of one replica's batch: use BatchNormalization(synchronized=True)"
        yield Check(False, "task.py create_model", text)
    if layers.random:
        text = f"random in training, so not the same on one replica and two: {', '.join(layers.random)}"
        yield Check(True, "task.py create_model", text)
    for name in one.without_gradient:
        text = f"{name} gets no gradient: use it in the loss, or set its layer's trainable = False"
        yield Check(False, "task.py train_step", text)
    draws, python = unrepeatable_in_step(step)
    again, _ = measure.losses_and_gradients(program, task, measure.first_stacks(program))
    yield from _check_repeats("train_step", "losses", draws, python, repeats=close(one.losses, again))
    if layers.still_random:
        names = ", ".join(layers.still_random)
        text = f"not compared, because {names} cannot be switched off: augment in task.prepare_example instead"
        yield Check(True, "task.py train_step", text)


def _check_same_results(program: Program, task: Task, one: Measured, two: Measured) -> Iterator[Check]:
    gradients = measure.differing_gradients(one, two)
    if not gradients:
        yield Check(True, "task.py train_step", f"the same gradients of {len(one.rounding)} variables")
    loss, other = min(zip(one.losses, two.losses, strict=True), key=lambda pair: close(*pair))  # First that differ.
    # If the loss differs, gradients and metrics differ for the same reason.
    if not close(one.losses, two.losses):
        hook, why = why_losses_differ(program, task, loss, other)
        yield Check(False, f"task.py {hook}", f"the loss is {loss:.6g} on one replica and {other:.6g} on two: {why}")
        return
    yield Check(True, "task.py compute_loss", f"loss {loss:.6g} on one replica and on two")
    if gradients:
        text = f"the loss agrees, and the gradient of {gradients[0]} differs: update with apply_gradients, without "
        text += "a sum of your own, and look for values that depend on the replica or on the size of its batch"
        yield Check(False, "task.py train_step", text)
    names = program.run.objects.names
    metrics = measure.differing_metrics(names, one.metrics, two.metrics)
    for name in metrics:
        text = f"{name} is {one.metrics[name]:.6g} on one replica and {two.metrics[name]:.6g} on two: "
        text += "update it with unscaled values per example, and sample_weight=sample_weights"
        yield Check(False, _hook_of_metrics(task, name.split("/")[0]), text)
    if not metrics:
        arrays = dict.fromkeys(names.arrays.values())
        yield Check(True, "task.py create_metrics", f"the same {', '.join([*names.lines(one.metrics), *arrays])}")


def _hook_of_metrics(task: Task, split: str) -> str:
    if hasattr(task, "update_metrics"):
        return "task.py update_metrics"
    return "task.py train_step" if split == "train" else "task.py evaluation_step"


def _check_traces(program: Program) -> Iterator[Check]:
    retraced = ", ".join(split for split, each in program.run_steps.items() if each.trace_count() != 1)
    fault = f"the {retraced} steps were traced more than once: use stacks.compile"
    yield Check(not retraced, "train.py compile_steps", fault if retraced else "every split's steps were traced once")


def _check_evaluation(program: Program, task: Task, settings: Settings) -> Iterator[Check]:
    """Checks that validation and test leave the model unchanged, and do not count padding."""
    size = settings.evaluation_batch_size or settings.global_batch_size
    program.build(dataclasses.replace(settings, simulated_devices=1, evaluation_batch_size=measure.BATCHES * size))
    padded = {**program.validate(), **program.test()}  # The same examples, with more padding in the last batch.
    program.build(dataclasses.replace(settings, simulated_devices=1))
    variables = model_variables(task.model)
    for split, evaluate in (("validation", program.validate), ("test", program.test)):
        before = {name: variable.numpy() for name, variable in variables.items()}
        results = evaluate()
        if not results:  # The split has no dataset.
            continue
        changed = [name for name, each in variables.items() if not np.array_equal(before[name], each.numpy())]
        # Recurrent layers advance their seeds in evaluation too, and draw nothing.
        if changed and not (all(map(is_seed, changed)) and evaluate() == results):
            fault = f"{split} changes {changed[0]}: call the model with training=False"
            yield Check(False, "task.py evaluation_step", fault)
            return  # The metrics of changed weights cannot be compared.
        yield Check(True, "task.py evaluation_step", f"{split} changes nothing")
        for name in measure.differing_metrics(program.run.objects.names, results, padded):
            text = f"{name} depends on how much padding the last batch has: pass sample_weight=sample_weights to it"
            yield Check(False, _hook_of_metrics(task, split), text)


def _check_training(program: Program, task: Task, settings: Settings, *, compare: bool) -> Iterator[Check]:
    """Checks that one replica and two make the same updates, that a checkpoint restores, and that the loss falls."""
    epochs = math.ceil(REPEATED_STEPS / measure.BATCHES)  # A schedule ends within these steps.
    program.build(dataclasses.replace(settings, simulated_devices=2, epochs=epochs))
    two, _ = measure.measure_updates(program, task)
    yield _check_checkpoint(program)
    program.build(dataclasses.replace(settings, simulated_devices=1, epochs=epochs))
    one, rounding = measure.measure_updates(program, task)
    differing = measure.differing_arrays(one, two, rounding)
    if compare and differing:
        text = f"the gradients agree, and two replicas change {differing[0]} by another amount than one: look for "
        text += "an optimizer that changes a replica's gradients, or counts in Python"
        yield Check(False, "task.py create_optimizer", text)
    stack, first, _ = measure.first_stacks(program)[0]
    losses = [float(program.run_steps["train"](stack, first, 1)[0]) for _ in range(REPEATED_STEPS)]
    # Opposing losses, as in a GAN, need not decrease.
    falls = len(by_name(task.optimizer, "optimizer")) > 1 or bool(np.mean(losses[-5:]) < losses[0])
    text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {REPEATED_STEPS} steps on one batch"
    rule = ": it must fall; check --learning-rate, and how task.create_optimizer uses it"
    yield Check(falls, "task.py create_optimizer", text if falls else text + rule)


def _check_checkpoint(program: Program) -> Check:
    checkpoints, state = program.run.checkpoints, program.run.checkpoints.state
    saved = state.values()
    path = checkpoints.save(1, {})
    state.assign({name: np.zeros_like(value) for name, value in saved.items()})
    checkpoints.restore(path)
    lost = [name for name, value in state.values().items() if not np.array_equal(value, saved[name])]
    fault = f"{', '.join(lost)} differ from the saved values"
    return Check(not lost, "checkpoint", fault if lost else f"{len(saved)} variables saved and restored")
