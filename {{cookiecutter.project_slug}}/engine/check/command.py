"""python train.py --check: runs the checks one after the other, and prints a table of their results.

One replica and two simulated ones must get the same results for the same batches. Randomness inside the model is
switched off for that. An unsynchronized BatchNormalization is reported and then synchronized, so that it hides no other
cause.
"""

import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.text import Text

from engine.check import measure, steps
from engine.check.comparison import Arrays, Check, Measured, differing_arrays
from engine.check.examples import check_examples, check_predictions, read_examples
from engine.check.recording import move_weights, recording_gradients
from engine.cluster.environment import reject_cluster
from engine.cluster.strategy import create_strategy
from engine.console import columns, console
from engine.errors import BadInput, Diverged, first_line, where_raised
from engine.model.optimizers import inner_optimizers
from engine.model.variables import by_name, is_random_state, layers_of, trainable_variables
from engine.settings import Settings

PARTS = ("examples", "results", "evaluation", "updates")
COMPARING = {"results", "updates"}  # The parts that need two replicas.
REPEATED_STEPS = 40


def check_task(program: Any, task: Any, settings: Settings, only: Collection[str] = PARTS) -> bool:
    """Prints a table of checks of task.py, with the settings of training; returns whether all passed. Saves nothing.

    `only` names the PARTS to run: a test of one hook needs one of them.
    """
    reject_cluster("--check")
    tf.get_logger().setLevel("ERROR")  # Otherwise it warns of the many functions that are compiled here.
    checks: list[Check] = []
    with tempfile.TemporaryDirectory() as folder, _graphs_as_traced():
        comparable = _comparable_settings(settings, Path(folder))
        try:
            checks.extend(_run_checks(program, task, comparable, only, checks))
        except BadInput as problem:
            # It names a line of a file, a hook, or a setting.
            found = re.search(r"^\S+\.py:\d+ \S+(?=: )|\btask\.(?!py\b)\w+", str(problem))
            where = re.sub(r"^task\.(?!py\b)", "task.py ", found[0]) if found else "settings"
            checks.append(Check(False, where, str(problem).removeprefix(f"{found[0]}: " if found else "")))
        except Diverged as problem:
            text = f"{problem}: a batch may be padding alone, so divide with tf.math.divide_no_nan"
            checks.append(Check(False, "task.py compute_loss", text))
        except Exception as problem:  # noqa: BLE001 - Whatever the hooks raise is a failed check.
            checks.append(Check(False, where_raised(problem), f"raised {first_line(problem)}"))
    print_checks(checks)
    return all(check.ok for check in checks)


@contextlib.contextmanager
def _graphs_as_traced() -> Iterator[None]:
    """Lets graphs run as they were traced: to optimize them takes longer than it saves in so few steps."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def print_checks(checks: Sequence[Check]) -> None:
    """Prints the checks, then how many failed or compared nothing. A terminal wraps long texts."""
    styles = {"ok": "green", "FAIL": "bold red", "not compared": "yellow"}
    marks = ["FAIL" if not check.ok else "ok" if check.compared else "not compared" for check in checks]
    rows = [(mark, check.where, check.text) for mark, check in zip(marks, checks, strict=True)]
    if console.is_terminal:
        texts = [(Text(mark, styles[mark]), Text(where), Text(text)) for mark, where, text in rows]
        console.print(columns(texts), soft_wrap=False)
    else:
        first, second = max(4, *map(len, marks)), max(len(check.where) for check in checks)
        for mark, where, text in rows:
            console.print(f"{mark:<{first}}  {where:<{second}}  {text}")
    failed, rest = marks.count("FAIL"), marks.count("not compared")
    text = f"{failed} of {len(checks)} checks failed" if failed else f"{marks.count('ok')} checks passed"
    text = f"{text}, {rest} not compared" if rest else text if failed else f"All {text}."
    console.print(text, style=styles["FAIL" if failed else "not compared" if rest else "ok"])


def _comparable_settings(settings: Settings, folder: Path) -> Settings:
    """Returns settings for two simulated replicas, without the options that hide a fault or cannot cause one."""
    unit = 2 * settings.micro_batches  # Two replicas must be able to share a batch, in micro-batches.
    evaluated = settings.evaluation_batch_size
    return dataclasses.replace(
        settings,
        run_dir=folder,
        strategy="auto",
        simulated_devices=2,
        precision="float32",
        jit=False,
        all_reduce="auto",
        profile=False,
        global_clipnorm=None,  # Clipping makes a gradient that is too large look right.
        global_batch_size=max(unit, settings.global_batch_size // unit * unit),
        evaluation_batch_size=evaluated and max(2, evaluated // 2 * 2),
        steps_per_epoch=None,
        limit_steps=None,
        epochs=math.ceil(REPEATED_STEPS / measure.BATCHES),  # A schedule ends within these steps.
        checkpoint_every_steps=None,
        validate_every_steps=None,
        steps_per_execution=measure.BATCHES - 1,  # Executions of unequal length show whether they share a trace.
    )


def _run_checks(
    program: Any, task: Any, settings: Settings, only: Collection[str], checks: list[Check]
) -> Iterator[Check]:
    """Yields the results of the checks, which the caller adds to `checks`; any exception of a hook ends them.

    Tracing takes most of the time, so the evaluation is checked with the program whose results are compared.
    """
    create_strategy(settings)
    task.config, task.user_state = settings, {}  # task.load_examples is called before anything is built.
    load_examples = task.load_examples  # `few_examples` replaces it below, and the hashes need all examples.
    hashes: dict[str, str] = {}
    read_examples(program, load_examples, hashes)
    if "examples" in only:
        yield from check_examples(program, task, settings)
    with measure.few_examples(task, settings.global_batch_size), recording_gradients(task):
        two = measure.measure(program, task, settings, 2) if COMPARING & {*only} else None
        updates = _updates(program, task, two) if two and "updates" in only else None
        # A synchronized layer has the statistics of a micro-batch; else all results must be of the complete batch.
        alone = settings if not two or two.layers.synchronized else dataclasses.replace(settings, micro_batches=1)
        program.build(dataclasses.replace(alone, simulated_devices=1))
        if "evaluation" in only:
            with measure.state_restored(program):
                yield from check_predictions(program, task)
            yield from _check_evaluation(program, task)
        one = measure.results(program, task) if two else None
        read_examples(program, load_examples, hashes)
        if one and two and "results" in only:
            micro_batches = settings.micro_batches if alone.micro_batches == 1 else 1
            yield from _check_results(program, task, one, two, micro_batches)
        if one and "updates" in only:
            # Steps that differ make the updates differ, too. That is one cause, so it is reported once.
            compares = all(check.ok for check in checks) and not one.layers.still_random
            compares = compares and not measure.drawn_by_optimizers(program)
            if compares and isinstance(updates, Exception):
                raise updates
            yield from _check_updates(program, task, one, updates if compares else None)


def _updates(program: Any, task: Any, measured: Measured) -> Any:
    """Returns the updates of a program, or the exception that they end with: the results may tell its cause."""
    try:
        return measure.measure_updates(program, task, measured.stacks[:-1])
    except Exception as problem:  # noqa: BLE001
        return problem


def _check_results(program: Any, task: Any, one: Measured, two: Measured, micro_batches: int) -> Iterator[Check]:
    """Checks losses, gradients and metrics of one replica, whose program this is, and of two."""
    yield from steps.check_layers(program, task, one)
    yield from steps.check_same_results(program, task, one, two, micro_batches)
    yield from steps.check_updated_metrics(program, task, one.metrics)
    yield from steps.check_metrics(program, task, program.batches["train"], one.stacks)
    yield from steps.check_loss(program, task, one)
    retraced = ", ".join(split for split, compiled in program.run_steps.items() if compiled.trace_count() != 1)
    text = f"the {retraced} steps were traced more than once: use stacks.compile"
    text = text if retraced else "every split's steps were traced once"
    yield Check(not retraced, "train.py compile_steps", text)


def _check_evaluation(program: Any, task: Any) -> Iterator[Check]:
    """Checks that validation and test leave the model unchanged, draw nothing, and count no examples of weight 0.

    The program is a new one on one replica, whose random layers are as the hooks made them.
    """
    where = "task.py evaluation_step"
    for split in ("validation", "test"):
        if split not in program.run_steps:
            continue
        changed = measure.changed_by(program, split).keys() & program.run.objects.weights.keys()
        if weights := [name for name in sorted(changed) if not is_random_state(name)]:
            # The metrics of changed weights cannot be compared.
            yield Check(False, where, f"{split} changes {weights[0]}: call the model with training=False")
            continue
        yield Check(True, where, f"{split} changes nothing")
        layers = measure.drawing(program, task, split)
        if layers and measure.depends_on_seeds(program, split):
            # A layer of Keras draws in training only, unlike one that is written to sample.
            is_of_keras = any(type(layer).__module__.startswith("keras.") for layer in layers.values())
            text = f"random in {split}, so not the same on one replica and two: {', '.join(layers)}: "
            text += "call the model with training=False, or draw from a seed of each example, see "
            text += "docs/reproducibility.md"
            yield Check(not is_of_keras, where, text, compared=False)
        for name, batches in program.batches.items():
            if batches.split == split:
                yield from steps.check_metrics(program, task, batches, measure.first_stacks(program, name))


def _check_updates(program: Any, task: Any, one: Measured, two: Arrays | None) -> Iterator[Check]:
    """Checks that the loss falls, and that one replica, whose program this is, updates as two did."""
    stacks = one.stacks[:-1]
    for outer in by_name(task.optimizer, "optimizer").values():
        # The last one is for variables that no pattern matches, and may have none.
        for inner in (inner for inner in inner_optimizers(outer)[:-1] if not inner.built):
            path = next(iter(trainable_variables(task.model))).split("/", 1)[1]
            text = f"{inner.name!r} in a MultiOptimizer trains no variable: its pattern must match paths like {path!r}"
            # It may be for frozen layers, which have no variables to train.
            has_frozen = not all(layer.trainable for layer in layers_of(task.model))
            yield Check(has_frozen, "task.py create_optimizer", text, compared=False)
    if two is not None:
        exact = measure.measure_updates(program, task, stacks)
        rounding = measure.rounding_of([exact], program, task, lambda: [measure.measure_updates(program, task, stacks)])
        if differing := differing_arrays(exact, two, rounding):
            text = f"the gradients agree, and two replicas change {differing[0]} by another amount than one: look for "
            text += "an optimizer that changes a replica's gradients or counts in Python, and pass epsilon=1e-5 if it "
            text += "has a smaller one, with which rounding may decide the update where a gradient is almost 0"
            yield Check(False, "task.py create_optimizer", text)
    move_weights(program)
    stack, first, _ = stacks[0]
    losses = [float(program.run_steps["train"](stack, first, 1)[0]) for _ in range(REPEATED_STEPS)]
    # Opposing losses, as in a GAN, need not decrease; that of a batch whose weights are all 0 cannot.
    cannot_fall = len(by_name(task.optimizer, "optimizer")) > 1 or not np.any(stack[measure.SAMPLE_WEIGHTS][first])
    falls = cannot_fall or bool(np.mean(losses[-5:]) < losses[0])
    text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {REPEATED_STEPS} steps on one batch"
    rule = ": it must fall; check --learning-rate, and how task.create_optimizer uses it"
    rule = ", and need not fall: there are several losses, or no weights" if cannot_fall else rule * (not falls)
    yield Check(falls, "task.py create_optimizer", text + rule, compared=not cannot_fall)
