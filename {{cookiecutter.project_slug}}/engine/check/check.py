"""python train.py --check: runs the hooks on a few batches and tells what would go wrong, before it does.

One replica and two simulated ones compute the same batches, and have to come to the same numbers. Randomness inside
the model is switched off for that comparison, and unsynchronized BatchNormalization is reported and then synchronized,
so that one cause does not hide another.
"""

import dataclasses
import itertools
import math
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.check.measure import (
    BATCHES,
    DRAWS,
    Measured,
    close,
    differing_gradients,
    differing_updates,
    drawing_layers,
    few_examples,
    layers_of_task,
    measure,
    measure_updates,
    recording_optimizers,
    switch_off,
)
from engine.cluster.environment import refuse_cluster
from engine.cluster.strategy import create_strategy
from engine.console import console
from engine.data.feed import stack_sizes
from engine.errors import BadInput
from engine.mistakes import first_line, where_raised
from engine.model.objects import by_name, model_variables
from engine.model.replicas import is_seed
from engine.run.program import Program
from engine.tracing import draws_in_preparation, draws_in_step, python_in_preparation, python_in_step

EXAMPLES_READ_TWICE = 1000
REPEATED_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing examined: where (a hook, by file and function), whether it holds, and what was found or is to do."""

    where: str
    holds: bool
    text: str


def check_task(program: Program, task: ModuleType, settings: Any) -> bool:
    """Prints a table of findings; returns whether all hold. Trains nothing that is kept, and writes nothing.

    Args:
        program: the module train.py.
        task: the module task.py.
        settings: the settings that training would have.
    """
    refuse_cluster("--check")
    tf.get_logger().setLevel("ERROR")  # It warns of the many functions that are compiled here.
    # One and two replicas have to be able to share a batch, in the micro-batches asked for.
    unit = 2 * settings.micro_batches
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(
            settings,
            run_dir=Path(folder),
            strategy="auto",
            simulated_devices=2,
            precision="float32",
            jit=False,
            all_reduce="auto",
            profile=False,
            clip_norm=None,  # Clipping makes a gradient that is too large look right.
            global_batch_size=max(unit, settings.global_batch_size // unit * unit),
            checkpoint_every_steps=None,
            async_checkpoints=False,
            steps_per_execution=BATCHES - 1,  # Two calls of unequal length in an epoch show whether both share a trace.
        )
        create_strategy(settings)
        task.config = settings  # The examples are read before anything is built.
        findings: list[Finding] = []
        try:
            for examine in (_examine_data, _examine_replicas, _examine_evaluation):
                examine(program, task, settings, findings.append)
            # One cause does not show as several: what the steps do differently, the optimizer does too.
            agree = all(finding.holds for finding in findings)
            _examine_training(program, task, settings, findings.append, compare=agree)
        except BadInput as problem:
            findings.append(Finding(_hook_in(str(problem)), False, str(problem)))
        except Exception as problem:  # noqa: BLE001 - Whatever the hooks raise is a finding.
            findings.append(Finding(where_raised(problem), False, f"raised {first_line(problem)}"))
    width = max(len(finding.where) for finding in findings)
    for finding in findings:
        console.print(f"{'ok ' if finding.holds else 'FIX'}  {finding.where:<{width}}  {finding.text}")
    broken = sum(not finding.holds for finding in findings)
    console.print(f"{broken} of {len(findings)} findings to fix" if broken else f"All {len(findings)} hold.")
    return not broken


Add = Callable[[Finding], None]

# --- What is examined -------------------------------------------------------------------------------------------------


def _examine_data(program: Program, task: ModuleType, settings: Any, add: Add) -> None:
    """The examples: structure, length, order, finite values, labels in range."""
    for split in program.SPLITS:
        once, again = (_fingerprints(task.load_examples(split)) for _ in range(2))
        if once != again:
            differing = (index for index, (one, other) in enumerate(zip(once, again, strict=False)) if one != other)
            raise BadInput(
                f"task.load_examples({split!r}) gave another example number {next(differing, len(again))} the second "
                "time: return them in the same order every time; they are shuffled for you"
            )
    program.build(dataclasses.replace(settings, simulated_devices=1))
    sizes = ", ".join(f"{split} {batches.number_of_examples}" for split, batches in program.batches.items())
    add(Finding("task.py load_examples", True, f"{sizes} examples of one structure, in the same order twice"))
    batch_size = settings.global_batch_size
    shares = [str(number) for number in range(1, batch_size + 1) if batch_size % number == 0]
    add(Finding("--global-batch-size", True, f"{batch_size} can be shared by {', '.join(shares)} replicas"))

    _examine_preparation(program, add)
    predict = tf.function(lambda features: task.model(features, training=False), autograph=False)
    for split in program.SPLITS:
        for batch in itertools.islice(program.batches[split].one_by_one(), 20):
            _examine_batch(task, split, batch, predict)
    add(Finding("task.py prepare_example", True, "finite features, and labels that the model can predict"))


def _examine_preparation(program: Program, add: Add) -> None:
    """What prepare_example draws. Nothing can be compared if it draws something else each time."""
    for split, batches in program.batches.items():
        for text in draws_in_preparation(batches.preparation):
            raise BadInput(f"task.prepare_example: {text}")
        for text in python_in_preparation(batches.preparation):
            once, again = (tf.nest.flatten(next(batches.one_by_one())) for _ in range(2))
            if not all(np.array_equal(one, other) for one, other in zip(once, again, strict=True)):
                raise BadInput(f"task.prepare_example gave other batches of {split!r} the second time: {text}")
            add(Finding("task.py prepare_example", True, f"{split} is the same twice, though {text}"))


def _examine_batch(task: ModuleType, split: str, batch: Any, predict: Callable[[Any], Any]) -> None:
    features, labels, weights = batch
    for part in tf.nest.flatten(features):
        if part.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(part))):
            raise BadInput(
                f"task.prepare_example returned features that are not finite for {split!r}: mend or drop them"
            )
    if not isinstance(task.model, keras.Model) or not isinstance(labels, tf.Tensor) or not labels.dtype.is_integer:
        return
    predictions = predict(features)
    if not isinstance(predictions, tf.Tensor) or predictions.shape.rank != labels.shape.rank + 1:
        return
    classes = predictions.shape[-1]
    low, high = int(tf.reduce_min(labels)), int(tf.reduce_max(labels))
    # Such labels may mark padding, or be no classes at all: the loss knows.
    loss_fails = False
    if classes > 1 and (low < 0 or high >= classes):
        try:
            loss_fails = not math.isfinite(float(task.compute_loss(labels, predictions, weights)[0]))
        except tf.errors.InvalidArgumentError:
            loss_fails = True
    if loss_fails:
        raise BadInput(
            f"task.load_examples({split!r}) returned labels from {low} to {high}, and the model predicts {classes} "
            f"classes, 0 to {classes - 1}: mend the labels or the model's last layer"
        )


def _examine_replicas(program: Program, task: ModuleType, settings: Any, add: Add) -> None:
    """Loss, gradients and metrics: the same on one replica and on two."""
    with few_examples(task, settings.global_batch_size), recording_optimizers(task):
        one = measure(program, task, dataclasses.replace(settings, micro_batches=1), 1)
        if one.synchronized and settings.micro_batches > 1:  # Whose statistics are those of a micro-batch.
            one = measure(program, task, settings, 1)
        two = measure(program, task, settings, 2)

    for name in one.unsynchronized:
        text = f"layer {name!r} normalizes each replica's share by itself: use BatchNormalization(synchronized=True)"
        add(Finding("task.py create_model", False, text))
    if one.random_layers:
        text = f"random in training, so not the same on one replica and two: {', '.join(one.random_layers)}"
        add(Finding("task.py create_model", True, text))
    for name in two.without_gradient:
        text = f"{name} gets no gradient: use it in the loss, or set its layer's trainable = False"
        add(Finding("task.py train_step", False, text))

    # Nothing can be compared of what is drawn anew each time.
    for text in draws_in_step(one.step):
        raise BadInput(f"task.train_step: {text}")
    for text in python_in_step(one.step):
        if not close(one.losses, one.losses_again):
            raise BadInput(f"task.train_step gave another loss for the same batch and weights: {text}")
        add(Finding("task.py train_step", True, f"the same loss twice, though {text}"))
    if one.still_random:
        text = f"not compared, because {', '.join(one.still_random)} cannot be switched off: rather augment in"
        add(Finding("task.py train_step", True, f"{text} task.prepare_example"))
        return

    losses_agree = close(one.losses, two.losses)
    if losses_agree:
        add(Finding("task.py compute_loss", True, f"loss {one.loss:.6g} on one replica and on two"))
    else:
        where, why = _why(one, two)
        text = f"the loss is {one.loss:.6g} on one replica and {two.loss:.6g} on two: {why}"
        add(Finding(f"task.py {where}", False, text))
    differing = differing_gradients(one, two)
    if not differing:
        add(Finding("task.py train_step", True, f"the same gradients of {len(one.gradients[0])} variables"))
    elif losses_agree:
        text = f"the loss agrees, and the gradient of {differing[0]} {_how_gradients_differ(one, two, differing[0])}"
        add(Finding("task.py train_step", False, text))
    # Where the loss differs, metrics do so for the same reason.
    metrics_differ = [name for name in one.metrics if losses_agree and not close(one.metrics[name], two.metrics[name])]
    for name in metrics_differ:
        where = f"task.py {_feeds_metrics(task, name.split('/')[0])}"
        text = f"{name} is {one.metrics[name]:.6g} on one replica and {two.metrics[name]:.6g} on two: "
        add(Finding(where, False, text + "feed it values per example, unscaled, with sample_weight=weights"))
    if losses_agree and not metrics_differ:
        add(Finding("task.py create_metrics", True, f"the same {', '.join(one.metrics)}"))
    retraced = {split: count for split, count in two.traces.items() if count != 1}
    for split, count in retraced.items():
        text = f"the {split} steps were traced {count} times: keep the input_signature of the compiled function, "
        add(Finding("train.py compile_steps", False, text + "and give it tensors, not Python numbers"))
    if not retraced:
        add(Finding("train.py compile_steps", True, "every compiled function was traced once"))


def _examine_evaluation(program: Program, task: ModuleType, settings: Any, add: Add) -> None:
    """Validation and test leave the model as it is, and count no padding."""
    batch_size = settings.global_batch_size
    with few_examples(task, batch_size):
        # The same examples, with more padding in the last batch.
        larger = {"global_batch_size": BATCHES * batch_size, "keep_last_batch": True}
        program.build(dataclasses.replace(settings, simulated_devices=1, **larger))
        padded = {**program.validate(), **program.test()}
        program.build(dataclasses.replace(settings, simulated_devices=1))
        leaves_all = True
        for split, evaluate in (("validation", program.validate), ("test", program.test)):
            before = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
            results = evaluate()
            after = {name: variable.numpy() for name, variable in model_variables(task.model).items()}
            changed = [name for name in before if not np.array_equal(before[name], after[name])]
            # Recurrent layers count their seeds on in evaluation too, and draw nothing.
            if all(map(is_seed, changed)) and changed and evaluate() == results:
                changed = []
            text = f"{split} changes {changed[0]}: call the model with training=False" if changed else "changes nothing"
            add(Finding(f"task.py {split}_step", not changed, text))
            leaves_all = leaves_all and not changed
            for name in (name for name in results if leaves_all and not close(results[name], padded[name])):
                text = f"{name} depends on how much padding the last batch has: pass sample_weight=weights to it"
                add(Finding(f"task.py {_feeds_metrics(task, split)}", False, text))


def _examine_training(program: Program, task: ModuleType, settings: Any, add: Add, *, compare: bool) -> None:
    """The real optimizers do the same on one replica and on two, and the loss falls; what is saved is restored."""
    # As many epochs as let a schedule run through in the steps there are.
    settings = dataclasses.replace(settings, epochs=math.ceil(REPEATED_STEPS / BATCHES))
    with few_examples(task, settings.global_batch_size):
        program.build(settings)
        switch_off(layers_of_task(task))
        on_two, _ = measure_updates(program, task)
        _examine_state(program, add)
        program.build(dataclasses.replace(settings, simulated_devices=1))
        switch_off(layers_of_task(task))
        on_one, rounding = measure_updates(program, task, draws=DRAWS)
        batch = next(program.batches["train"].one_by_one())
    differing = differing_updates(on_one, on_two, rounding)
    if compare and differing and not drawing_layers(program, layers_of_task(task)):
        text = (
            f"the gradients agree, and {differing[0]} changes in {BATCHES} steps by other amounts on one replica and "
        )
        text += "on two: look for what the optimizer does to a replica's gradients, or for what it counts in Python"
        add(Finding("task.py create_optimizer", False, text))
    _examine_learning(program, task, settings, batch, add)


def _examine_learning(program: Program, task: ModuleType, settings: Any, batch: Any, add: Add) -> None:
    """The loss falls on one repeated batch; how long an epoch would take."""
    steps = max(1, int(task.load_examples("train").cardinality()) // settings.global_batch_size)
    sizes, _ = stack_sizes(REPEATED_STEPS, 0, sum(part.numpy().nbytes for part in tf.nest.flatten(batch)))
    losses, started = np.empty(0), 0.0
    for size in sizes:
        stack = tf.nest.map_structure(lambda part, size=size: tf.stack([part] * size), batch)
        losses = np.append(losses, program.run_steps["train"](stack, 0, size))
        started = started or time.monotonic()  # The first one is compiled.
    seconds = (time.monotonic() - started) / (REPEATED_STEPS - 1)
    text = f"from {losses[0]:.4g} to {losses[-1]:.4g} in {REPEATED_STEPS} steps on one batch"
    several = len(by_name(task.optimizer, "optimizer")) > 1  # Which work against each other in a GAN.
    falls = bool(losses[-5:].mean() < losses[0])
    if not falls and not several:
        text += ": it has to fall; look at --learning-rate, and at what task.create_optimizer makes of it"
    add(Finding("task.py create_optimizer", falls or several, f"the loss goes {text}"))
    text = f"about {steps * seconds:.0f} s on one CPU device without input, {1 / seconds:.0f} steps/s"
    add(Finding("one epoch", True, f"{text}{_peak_memory()}"))


def _examine_state(program: Program, add: Add) -> None:
    """What is saved is what is restored."""
    state = program.run.checkpoints.state
    saved = state.values()
    path = program.run.checkpoints.save(1, {})
    state.assign({name: np.zeros_like(value) for name, value in saved.items()})
    program.run.checkpoints.restore(path)
    restored = state.values()
    lost = [name for name, value in saved.items() if not np.array_equal(restored[name], value)]
    text = f"{lost[0]} is not what was saved" if lost else f"{len(saved)} variables saved and restored"
    add(Finding("checkpoint", not lost, text))


# --- How it is examined -----------------------------------------------------------------------------------------------


def _fingerprints(examples: tf.data.Dataset) -> list[bytes]:
    """Returns the bytes of the first examples, or nothing where the engine will refuse what the hook returned."""
    if not isinstance(examples, tf.data.Dataset):
        return []
    first = examples.take(EXAMPLES_READ_TWICE).as_numpy_iterator()
    # Texts are objects, whose bytes are addresses; pickle takes any value.
    return [pickle.dumps([np.asarray(part).tolist() for part in tf.nest.flatten(example)]) for example in first]


def _feeds_metrics(task: ModuleType, split: str) -> str:
    return "update_metrics" if hasattr(task, "update_metrics") else f"{split}_step"


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows does not tell.
        return ""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return f"; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB of memory at the most so far"


def _why(one: Measured, two: Measured) -> tuple[str, str]:
    """Returns the hook to look at, and what the losses of one and of two replicas say about how they came about."""
    if one.weight_losses and close(two.loss - one.loss, one.weight_losses):
        why = "it adds model.losses once per replica; use tf.nn.scale_regularization_loss(model.losses)"
    elif one.added_losses and close(one.loss - two.loss, one.added_losses / 2):
        why = "a layer's add_loss adds up a replica's share; let it be the mean over the examples"
    elif close(two.loss, 2 * one.loss):
        why = "it is divided by a replica's share; divide by config.global_batch_size"
    elif close(two.loss, one.loss / 2):
        why = "it is divided by the number of replicas a second time; leave that division out"
    elif one.hidden:
        return "create_model", (
            f"the steps change {', '.join(one.hidden)}, of which each replica has its own: if it is to be the same on "
            "all, assign what tf.distribute.get_replica_context().all_reduce makes of it"
        )
    else:
        why = "by no factor that the replicas explain: look for what is computed over a replica's share, such as a mean"
    return "compute_loss", why


def _how_gradients_differ(one: Measured, two: Measured, name: str) -> str:
    """Returns in which way the gradients of a variable differ, and what to do about it."""
    of_one, of_two = (np.stack([gradients[name] for gradients in each.gradients]) for each in (one, two))
    if close(of_two, 2 * of_one):
        return "is twice as large on two replicas: update with apply_gradients, without a sum of your own"
    if close(of_two, of_one / 2):
        return "is half as large on two replicas: apply_gradients sums over the replicas; leave a mean of your own out"
    differ = np.abs(of_two - of_one).max() / np.abs(of_one).max()
    return (
        f"differs by up to {differ:.1g} of its largest value between one replica and two, and more than rounding "
        "explains: look in the step for what depends on the replica or on the size of its share"
    )


def _hook_in(message: str) -> str:
    """Returns "task.py <function>" for a message that names "task.<function>", or begins with a line of a file."""
    if line := re.match(r"\S+\.py:\d+ \S+(?=: )", message):
        return line[0]
    named = re.search(r"\btask\.(?!py\b)(\w+)", message)
    return f"task.py {named[1]}" if named else "settings"
