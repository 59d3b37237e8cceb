"""What --check finds out about the hooks of a task.

One replica and two simulated ones compute the same batches, and have to get the same numbers. Randomness inside the
model is switched off for that. An unsynchronized BatchNormalization is reported and then synchronized, so that one
cause does not hide another.
"""

import contextlib
import dataclasses
import itertools
import math
import pickle
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from engine.check.measure import (
    BATCHES,
    Measured,
    close,
    differing_arrays,
    differing_gradients,
    few_examples,
    first_stacks,
    losses_and_gradients,
    measure,
    measure_updates,
    recording_optimizers,
)
from engine.cluster.strategy import create_strategy
from engine.data.examples import hook_of
from engine.data.splits import each_dataset
from engine.errors import BadInput
from engine.model.objects import by_name, model_variables
from engine.model.replicas import is_seed
from engine.run.program import Program
from engine.tracing import draws_in_preparation, draws_in_step, python_in_preparation, python_in_step

EXAMPLES_READ_TWICE = 200
REPEATED_STEPS = 40


class Findings:
    """Checks the hooks one after the other. BadInput, and whatever a hook raises, ends that."""

    def __init__(self, program: Program, task: ModuleType, settings: Any, steps_per_epoch: int | None) -> None:
        self.program, self.task, self.settings = program, task, settings
        self.steps_per_epoch = steps_per_epoch
        self.table: list[tuple[str, str, str]] = []  # "ok" or "FIX", file and hook, what was found or is to do

    def ok(self, where: str, text: str) -> None:
        self.table.append(("ok", where, text))

    def fix(self, where: str, text: str) -> None:
        self.table.append(("FIX", where, text))

    @property
    def to_fix(self) -> int:
        return sum(verdict == "FIX" for verdict, _, _ in self.table)

    def build(self, replicas: int, **settings: Any) -> None:
        self.program.build(dataclasses.replace(self.settings, simulated_devices=replicas, **settings))

    def collect(self) -> None:
        create_strategy(self.settings)
        self.task.config = self.settings  # The examples are read before anything is built.
        self.examples()
        self.preparation()
        self.batches()
        self.predictions()
        with few_examples(self.task, self.settings.global_batch_size):
            self.replicas()
            self.evaluation()
            self.training()

    def examples(self) -> None:
        for split in self.program.SPLITS:
            once, again = (each_dataset(self.task.load_examples(split), _fingerprints) for _ in range(2))
            if once != again:
                text = "gave other examples the second time: keep their order; they are shuffled for you"
                raise BadInput(f"task.load_examples({split!r}) {text}")
        self.build(1)
        # Those that training would have; here an epoch is always a pass.
        self.steps_per_epoch = self.steps_per_epoch or self.program.batches["train"].steps_per_pass
        sizes = ", ".join(f"{name} {its.number_of_examples}" for name, its in self.program.batches.items())
        self.ok("task.py load_examples", f"{sizes} examples of one structure, in the same order twice")
        size = self.settings.global_batch_size
        replicas = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        self.ok("--global-batch-size", f"{size} can be shared by {replicas} replicas")

    def preparation(self) -> None:
        """Nothing can be compared if prepare_example draws something else each time."""
        for split, batches in self.program.batches.items():
            for text in draws_in_preparation(batches.traced):
                raise BadInput(f"task.prepare_example: {text}")
            for text in python_in_preparation(batches.traced):
                once, again = (tf.nest.flatten(next(batches.one_by_one())) for _ in range(2))
                if not all(map(np.array_equal, once, again)):
                    raise BadInput(f"task.prepare_example gave other batches of {split!r} the second time: {text}")
                self.ok("task.py prepare_example", f"{split} is the same twice, though {text}")

    def batches(self) -> None:
        predict = tf.function(lambda features: self.task.model(features, training=False), autograph=False)
        for name, batches in self.program.batches.items():
            for batch in itertools.islice(batches.one_by_one(), 20):
                floats = (part for part in tf.nest.flatten(batch[0]) if part.dtype.is_floating)
                if not all(bool(tf.reduce_all(tf.math.is_finite(part))) for part in floats):
                    text = f"task.prepare_example returned features that are not finite for {name!r}: fix or drop them"
                    raise BadInput(text)
                self.labels(name, batch, predict)
        self.ok("task.py prepare_example", "finite features, and labels that the model can predict")

    def labels(self, name: str, batch: Any, predict: Callable[[Any], Any]) -> None:
        """Raises BadInput for labels that are no classes of the model's."""
        features, labels, weights = batch
        if tf.is_tensor(labels) and labels.dtype == tf.string:
            raise BadInput(f"task.prepare_example returned texts as labels for {name!r}: map them to numbers")
        if not (isinstance(self.task.model, keras.Model) and tf.is_tensor(labels) and labels.dtype.is_integer):
            return
        predictions = predict(features)
        if not tf.is_tensor(predictions) or predictions.shape.rank != labels.shape.rank + 1:
            return
        classes, low, high = predictions.shape[-1], int(tf.reduce_min(labels)), int(tf.reduce_max(labels))
        if classes == 1 or 0 <= low <= high < classes:
            return
        # They may mark padding, or be no classes at all: the loss knows.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            if math.isfinite(float(self.task.compute_loss(labels, predictions, weights)[0])):
                return
        raise BadInput(
            f"{hook_of(name)} returned labels from {low} to {high}, and the model predicts {classes} "
            f"classes, 0 to {classes - 1}: fix the labels or the model's last layer"
        )

    def predictions(self) -> None:
        """What --export and predict.py need, which otherwise shows when the training is over."""
        if not hasattr(self.task, "predict_step"):
            return
        *_, last = self.program.batches.values()  # The test's, if there is one.
        features, _, weights = next(last.one_by_one())
        outputs = tf.function(self.task.predict_step)(features)
        if not isinstance(outputs, dict) or not all(map(tf.is_tensor, outputs.values())):
            self.fix("task.py predict_step", f"returned {type(outputs).__name__}: return a dict of tensors by name")
            return
        for name, output in outputs.items():
            if output.shape[:1] != weights.shape:
                self.fix("task.py predict_step", f"{name!r} is {output.shape}: it needs a row for each example")
            elif output.dtype.is_floating and bool(tf.reduce_all(output == 1.0)):
                self.fix("task.py predict_step", f"{name!r} is 1 everywhere, as a softmax of one number: use a sigmoid")
            else:
                self.ok(
                    "task.py predict_step", f"{name!r}, {output.dtype.name}{list(output.shape[1:])} of each example"
                )

    def replicas(self) -> None:
        with recording_optimizers(self.task):
            two = measure(self.program, self.task, self.settings, 2)
            # A synchronized layer has the statistics of a micro-batch; all else is to equal the whole batch.
            alone = self.settings if two.layers.synchronized else dataclasses.replace(self.settings, micro_batches=1)
            one = measure(self.program, self.task, alone, 1)
        self.layers(one)
        self.randomness(one)
        self.comparable = not one.layers.still_random
        if self.comparable:
            self.same_numbers(one, two)
        self.traces()

    def layers(self, one: Measured) -> None:
        for name in one.layers.unsynchronized:
            text = f"layer {name!r} normalizes each replica's share alone: use BatchNormalization(synchronized=True)"
            self.fix("task.py create_model", text)
        if one.layers.random:
            text = f"random in training, so not the same on one replica and two: {', '.join(one.layers.random)}"
            self.ok("task.py create_model", text)
        for name in one.without_gradient:
            text = f"{name} gets no gradient: use it in the loss, or set its layer's trainable = False"
            self.fix("task.py train_step", text)

    def randomness(self, one: Measured) -> None:
        """Nothing can be compared of what is drawn anew each time."""
        step = self.program.run.objects.hidden.training
        for text in draws_in_step(step):
            raise BadInput(f"task.train_step: {text}")
        for text in python_in_step(step):
            losses, _ = losses_and_gradients(self.program, self.task, first_stacks(self.program))
            if not close(one.losses, losses):
                raise BadInput(f"task.train_step gave another loss for the same batch and weights: {text}")
            self.ok("task.py train_step", f"the same loss twice, though {text}")
        if one.layers.still_random:
            names = ", ".join(one.layers.still_random)
            text = f"not compared, because {names} cannot be switched off: augment in task.prepare_example instead"
            self.ok("task.py train_step", text)

    def same_numbers(self, one: Measured, two: Measured) -> None:
        differing = differing_gradients(one, two)
        if not differing:
            self.ok("task.py train_step", f"the same gradients of {len(one.rounding)} variables")
        # Where the loss differs, gradients and metrics do so for the same reason.
        if not close(one.losses, two.losses):
            loss, other = one.losses[0], two.losses[0]
            where, why = self.why_losses_differ(loss, other)
            self.fix(f"task.py {where}", f"the loss is {loss:.6g} on one replica and {other:.6g} on two: {why}")
            return
        self.ok("task.py compute_loss", f"loss {one.losses[0]:.6g} on one replica and on two")
        if differing:
            text = f"the loss agrees, and the gradient of {differing[0]} differs: update with apply_gradients, without "
            text += "a sum of your own, and look for what depends on the replica or on the size of its share"
            self.fix("task.py train_step", text)
        differing = self.differing_metrics(one.metrics, two.metrics)
        for name in differing:
            text = f"{name} is {one.metrics[name]:.6g} on one replica and {two.metrics[name]:.6g} on two: "
            text += "feed it values per example, unscaled, with sample_weight=weights"
            self.fix(f"task.py {self.feeds_metrics(name.split('/')[0])}", text)
        if not differing:
            names = self.program.run.objects.names
            arrays = dict.fromkeys(names.arrays.values())
            self.ok("task.py create_metrics", f"the same {', '.join([*names.lines(one.metrics), *arrays])}")

    def differing_metrics(self, one: dict[str, float], other: dict[str, float]) -> list[str]:
        """Returns the names of the metrics that differ; of an array the first element that does."""
        arrays = self.program.run.objects.names.arrays
        differing: dict[str, str] = {}
        for name, value in one.items():
            if not close(value, other[name]):
                differing.setdefault(arrays.get(name, name), name)
        return list(differing.values())

    def why_losses_differ(self, one: float, two: float) -> tuple[str, str]:
        """Returns the hook to look at, and what the losses of one and two replicas say about how they came about."""
        weights, activities = self.losses_of_model()
        hidden = ", ".join(name.removeprefix("hidden/") for name in self.program.run.objects.hidden.changed())
        shape = self.shape_of_losses()
        if len(shape) != 1:  # The metrics differ for the same reason.
            raise BadInput(
                f"task.compute_loss returned a per-example loss of shape {shape}: return one value per example"
            )
        if weights and close(two - one, weights):
            why = "it adds model.losses once per replica; use tf.nn.scale_regularization_loss(model.losses)"
        elif activities and close(one - two, activities / 2):
            why = "a layer's add_loss adds up a replica's share; let it be the mean over the examples"
        elif close(two, 2 * one):
            why = "it is divided by a replica's share; divide by config.global_batch_size"
        elif close(two, one / 2):
            why = "it is divided by the number of replicas a second time; leave that division out"
        elif hidden:
            why = f"the steps change {hidden}, of which each replica has its own: if it is to be the same on all, "
            return "create_model", why + "assign what tf.distribute.get_replica_context().all_reduce returns"
        else:
            why = "by no factor that the replicas explain: look for what a replica computes over its share, as a mean"
        return "compute_loss", why

    def shape_of_losses(self) -> tuple[int, ...]:
        """Returns the shape of the per-example loss of the first batch."""
        features, labels, weights = self.first_batch()
        try:
            _, per_example_loss = self.task.compute_loss(labels, self.task.model(features), weights)
        except Exception:  # noqa: BLE001 - This task calls it in another way.
            return tuple(weights.shape)
        return tuple(per_example_loss.shape)

    def losses_of_model(self) -> tuple[float, float]:
        """Returns what is in model.losses for the first batch: of the weights, and of activities or by add_loss."""
        model = self.task.model
        if not isinstance(model, keras.Model) or not model.losses:
            return 0.0, 0.0
        features, *_ = self.first_batch()
        model(features, training=True)
        weights = sum(float(each.regularizer(each)) for each in model.trainable_variables if each.regularizer)
        return weights, float(sum(model.losses)) - weights

    def traces(self) -> None:
        steps = self.program.run_steps.items()
        retraced = [split for split, each in steps if each.trace_count() != 1]
        if retraced:
            text = f"the {', '.join(retraced)} steps were traced more than once: use batches[split].stacks.compile"
            self.fix("train.py compile_steps", text)
        else:
            self.ok("train.py compile_steps", "every compiled function was traced once")

    def evaluation(self) -> None:
        """Validation and test leave the model as it is, and count no padding."""
        # The same examples, with more padding in the last batch.
        size = self.settings.evaluation_batch_size or self.settings.global_batch_size
        self.build(1, evaluation_batch_size=BATCHES * size)
        padded = {**self.program.validate(), **self.program.test()}
        self.build(1)
        leaves_all = True
        for split, evaluate in (("validation", self.program.validate), ("test", self.program.test)):
            before, results = self.weights(), evaluate()
            if not results:  # There is no such split.
                continue
            changed = [name for name, value in self.weights().items() if not np.array_equal(before[name], value)]
            # Recurrent layers count their seeds on in evaluation too, and draw nothing.
            if changed and not (all(map(is_seed, changed)) and evaluate() == results):
                self.fix(f"task.py {split}_step", f"{split} changes {changed[0]}: call the model with training=False")
                leaves_all = False
            else:
                self.ok(f"task.py {split}_step", "changes nothing")
            for name in self.differing_metrics(results, padded) if leaves_all else ():
                text = f"{name} depends on how much padding the last batch has: pass sample_weight=weights to it"
                self.fix(f"task.py {self.feeds_metrics(split)}", text)

    def first_batch(self) -> Any:
        return next(self.program.batches["train"].one_by_one())

    def weights(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in model_variables(self.task.model).items()}

    def feeds_metrics(self, split: str) -> str:
        return "update_metrics" if hasattr(self.task, "update_metrics") else f"{split}_step"

    def training(self) -> None:
        """The real optimizers do the same on one replica and on two, and the loss falls; what is saved is restored."""
        # One cause does not show as several: what the steps do differently, the optimizer does too.
        compare = self.comparable and not self.to_fix
        epochs = math.ceil(REPEATED_STEPS / BATCHES)  # A schedule ends within these steps.
        self.build(2, epochs=epochs)
        two, _ = measure_updates(self.program, self.task)
        self.checkpoint()
        self.build(1, epochs=epochs)
        one, rounding = measure_updates(self.program, self.task)
        differing = differing_arrays(one, two, rounding)
        if compare and differing:
            text = f"the gradients agree, and two replicas change {differing[0]} by another amount than one: look for "
            text += "what the optimizer does to a replica's gradients, or counts in Python"
            self.fix("task.py create_optimizer", text)
        self.learning()

    def checkpoint(self) -> None:
        checkpoints = self.program.run.checkpoints
        saved = checkpoints.state.values()
        path = checkpoints.save(1, {})
        checkpoints.state.assign({name: np.zeros_like(value) for name, value in saved.items()})
        checkpoints.restore(path)
        restored = checkpoints.state.values()
        lost = [name for name, value in saved.items() if not np.array_equal(restored[name], value)]
        if lost:
            self.fix("checkpoint", f"{', '.join(lost)} is not what was saved")
        else:
            self.ok("checkpoint", f"{len(saved)} variables saved and restored")

    def learning(self) -> None:
        """The loss falls on one repeated batch; how long an epoch would take."""
        stack, first, _ = first_stacks(self.program)[0]
        losses, started = [], time.monotonic()
        for _ in range(REPEATED_STEPS):
            losses += self.program.run_steps["train"](stack, first, 1).numpy().tolist()
        steps_per_second = REPEATED_STEPS / (time.monotonic() - started)
        text = f"the loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in {REPEATED_STEPS} steps on one batch"
        several = len(by_name(self.task.optimizer, "optimizer")) > 1  # Which work against each other in a GAN.
        if several or np.mean(losses[-5:]) < losses[0]:
            self.ok("task.py create_optimizer", text)
        else:
            text += ": it has to fall; look at --learning-rate, and at what task.create_optimizer makes of it"
            self.fix("task.py create_optimizer", text)
        seconds = self.steps_per_epoch / steps_per_second
        text = f"about {seconds:.0f} s on one CPU device without input, {steps_per_second:.0f} steps/s"
        self.ok("one epoch", f"{text}{_peak_memory()}")


def _fingerprints(examples: Any) -> list[bytes]:
    """Returns the bytes of the first examples, or nothing where the engine will refuse what the hook returned."""
    if not isinstance(examples, tf.data.Dataset):
        return []
    first = examples.take(EXAMPLES_READ_TWICE).as_numpy_iterator()
    # Texts are objects, whose bytes are addresses; pickle takes any value.
    return [pickle.dumps([np.asarray(part).tolist() for part in tf.nest.flatten(example)]) for example in first]


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows has none.
        return ""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return f"; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB of memory at most so far"
