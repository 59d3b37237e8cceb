"""One run: which steps come next, what is due between them, which weights are best, and when it ends."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.cluster.strategy import strategy_info
from engine.cluster.workers import Workers
from engine.console import LiveLine, console
from engine.data.batches import Batches
from engine.data.splits import Splits
from engine.data.stacks import CompiledSteps
from engine.errors import BadInput, InterruptedStep, user_errors_named
from engine.model.metrics import split_of
from engine.model.objects import TaskObjects
from engine.model.rejections import check_changes, traced
from engine.model.variables import Variables, is_of_metrics
from engine.report.report import Goodput, Report, start_time
from engine.run.agreement import same_data
from engine.run.checkpoints import Checkpoints, Writer
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.passes import Executions, Pass
from engine.run.progress import Progress
from engine.run.state import State
from engine.signals import signals
from engine.tracing import Traced


class Run:
    """How far a run has come, and what it keeps on disk.

    Attributes:
        objects: the task's objects, which the steps use and change.
        batches: dataset -> its batches.
        traced: what the steps of each split do; empty until `trace`, and with --eager.
        checkpoints: the complete state, after each epoch and every --checkpoint-every-steps.
        best: the weights with the best --monitor.
        passes: those that have not ended: a validation may be inside an epoch.
        prepares_epoch: whether `starts_epoch` was true and the epoch has no step yet.
        report: lines, tables and curves; the chief has one once the run has started, and its goodput.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, workers: Workers, objects: TaskObjects, batches: Splits
    ) -> None:
        """Writes nothing."""
        self.strategy, self.workers, self.objects, self.batches = strategy, workers, objects, batches
        self.settings = settings = objects.settings
        self.progress = Progress(user_state=objects.user_state)
        self.traced: dict[str, Traced] = {}
        self.report: Report | None = None
        self.goodput: Goodput | None = None
        self.began = start_time()
        writer, keep = Writer(), settings.keep_checkpoints

        def checkpoints(folder: str, keep: int, mirrored: Variables, per_replica: Variables) -> Checkpoints:
            state = State(strategy, workers, mirrored, per_replica, objects.finalize_layers)
            return Checkpoints(settings.run_dir / folder, state, keep=keep, writer=writer)

        self.checkpoints = checkpoints(CHECKPOINTS, keep, objects.mirrored, objects.per_replica)
        # One more than the checkpoints, because each of them may name other weights as the best.
        self.best = checkpoints(BEST, keep + 1, objects.mirrored_weights, objects.per_replica_weights)
        self.live = LiveLine(settings.epochs, can_be_drawn=not settings.eager)
        self.executions = Executions(settings, workers, strategy_info(strategy).all_reduce)
        self.passes: list[Pass] = []
        self._changed_by_evaluation: list[tf.Variable] = []
        self.prepares_epoch, self._examples = False, 0  # `_examples` are those in an epoch of training.
        self._saved_step: int | None = None

    def start(self, progress: Progress) -> None:
        """Continues from the progress whose state is in the variables."""
        progress.user_state = self.user_state
        self.progress, self._saved_step = progress, progress.step
        for checkpoints in (self.checkpoints, self.best):
            checkpoints.accept_infinite()
        if "train" not in progress.metrics:  # Otherwise the training of the epoch ended before the stop.
            progress.rates_of_epoch = self.objects.learning_rates()

    def reload(self, split: str) -> None:
        """Calls task.load_examples for a split again: passes that start afterwards take its present examples.

        Every worker must call it, between passes over the split. Raises BadInput if the examples have other shapes or
        dtypes than before, or differ between workers.
        """
        self.workers.check_all_do(f"run.reload({split!r})")
        if open_passes := [one_pass.name for one_pass in self.passes if one_pass.split == split]:
            raise BadInput(f"run.reload({split!r}) within a pass over {open_passes[0]!r}: call it before or after it")
        self.progress.data |= same_data(self.workers, self.batches.reload(split), self.objects.data_files)
        self.progress.reloaded = sorted({*self.progress.reloaded, split})

    def trace(self, steps: Mapping[str, CompiledSteps]) -> None:
        """Traces the `steps` of splits, and looks at what they change.

        Call it when the state is in the variables, because layers make constants of what they compute from them. Raises
        BadInput if a step changes anything besides the variables of the state.
        """
        self.traced = {split: step for split in steps if (step := traced(steps[split]))}
        self.objects.note_tracing(has_graphs=bool(self.traced))
        check_changes(self.traced, self.strategy, self.checkpoints.state.variables())
        # Without a graph, as with --eager, everything that an evaluation may change is given back.
        mirrored, per_replica = self.objects.mirrored if self.traced else {}, self.objects.per_replica
        kept = [variable for name, variable in (mirrored | per_replica).items() if not is_of_metrics(name)]
        parts = [part for variable in kept for part in self.strategy.experimental_local_results(variable)]
        changed = {handle for split, step in self.traced.items() if split != "train" for handle in step.changed}
        self._changed_by_evaluation = [part for part in parts if not self.traced or id(part.handle) in changed]

    def start_pass(self, batches: Batches, epoch: int | None) -> Pass:
        """Returns the steps that are left of a pass over a dataset. `epoch` counts from 0; None outside epochs."""
        if batches.split == "train":
            self._examples = batches.examples_in(epoch or 0)
        changed = [] if batches.split == "train" else self._changed_by_evaluation
        one_pass = Pass(batches, epoch, self.progress, self.executions, changed)
        one_pass.waits = self.validation_is_due(one_pass)  # The run was stopped before or in that validation.
        if not one_pass.has_ended:
            self.passes.append(one_pass)
            if one_pass.split == "train":
                self.progress.report_changes(self.objects.learning_rates())
                self.objects.report_changes_of_python()
            self.live.begin(one_pass.name, one_pass.epoch, one_pass.done, one_pass.steps)
        return one_pass

    def record_losses(self, one_pass: Pass, losses: Sequence[Any]) -> None:
        """Counts the steps of an execution by their losses, one tensor ([count]) for each stack.

        Raises Diverged if a loss is not finite, or no loss scale of float16 makes the gradients finite.
        """
        if not losses:
            return
        taken = one_pass.record(losses)
        self.prepares_epoch &= one_pass.split != "train"
        self.live.took(*taken[:2])
        if one_pass.split == "train" and self.report:
            self.report.steps(self.progress.step, self.epoch + 1, *taken, self.objects.learning_rates)
        self.write_goodput()
        self.objects.check_loss_scales(self.progress.step)

    def save_is_due(self, training: Pass) -> bool:
        """Returns whether --checkpoint-every-steps asks for a checkpoint now, before the epoch ends."""
        every = self.settings.checkpoint_every_steps
        return bool(every and training.steps_left and self.progress.step % every == 0 and not self.is_saved)

    def validation_is_due(self, training: Pass) -> bool:
        """Returns whether --validate-every-steps asks for a validation now, before the epoch ends."""
        every, step = self.settings.validate_every_steps, self.progress.step
        is_within = training.split == "train" and 0 < training.done < training.steps
        return bool(every and is_within and step % every == 0 and step != self.progress.validated_step)

    def on_any_worker(self, condition: bool) -> bool:
        """Returns, on all workers, whether the condition is true on one of them. All of them must call it."""
        return bool(self.workers.names_where(condition))

    def stop_if_asked(self) -> None:
        """Raises Stopped, on all workers, if one of them got a signal."""
        signals.check(self.workers.names_where)

    def end_pass(self, one_pass: Pass) -> dict[str, float]:
        """Returns the metrics of a pass whose steps are all taken, as "<dataset>/<metric>", and resets them."""
        if not one_pass.has_ended:
            results = self.objects.results(one_pass.name)
            # Machines of several kinds may round the last steps of a metric differently, and the results decide.
            self.progress.end_pass(one_pass.name, self.workers.from_chief(lambda: results))
            one_pass.has_ended = True
            one_pass.give_back()
            self.passes.remove(one_pass)
            if one_pass.split == "train":  # Afterwards train.py may change them for the next epoch.
                self.progress.rates_of_epoch = self.objects.learning_rates()
        return self.progress.metrics[one_pass.name]

    def results(self, split: str) -> dict[str, float]:
        """Returns the metrics of an evaluation's datasets, and forgets them, so that the next one starts over."""
        names = [name for name in self.progress.metrics if split_of(name) == split]
        return {metric: value for name in names for metric, value in self.progress.metrics.pop(name).items()}

    @property
    def user_state(self) -> dict[str, Any]:
        """JSON values and NumPy arrays that every checkpoint keeps; task.user_state is the same dictionary."""
        return self.objects.user_state

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.progress.epoch

    @property
    def starts_epoch(self) -> bool:
        """Whether nothing of the epoch has been done: not if the run was resumed within it."""
        # If so, a stop saves nothing until a step is taken: what comes before may be half done, or would be done twice.
        self.prepares_epoch = self.progress.epochs_started() == self.epoch
        return self.prepares_epoch

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint has the weights of this step."""
        return self._saved_step == self.progress.step

    def should_continue(self) -> bool:
        """Returns whether another epoch is due: neither --epochs nor --patience is used up."""
        return self.epoch < self.settings.epochs and not self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        return self.progress.epochs_without_improvement() >= (self.settings.patience or math.inf)

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Puts the weights to evaluate in the place of those that are trained; see `TaskObjects.evaluated`."""
        self.workers.check_all_do("a validation")
        with self.objects.evaluated():
            try:
                yield
            finally:
                for evaluation in self.passes:  # One that was stopped gives back before the weights are restored.
                    evaluation.give_back()

    def save_if_best(self, metrics: Mapping[str, float]) -> None:
        """Saves the weights if --monitor has never been better. Call it within `evaluation_weights`."""
        score = {**self.progress.metrics.get("train", {}), **metrics}.get(monitor := self.settings.monitor)
        if score is not None and math.isnan(score):
            console.print(f"{monitor} is NaN, so these weights cannot be the best: use tf.math.divide_no_nan for 0 / 0")
        elif score is not None and self.progress.consider(score, self.objects.monitor_direction):
            self._save_to(self.best)

    def end_validation(self, metrics: dict[str, float]) -> None:
        """Reports a validation within an epoch."""
        self.progress.validated_step = self.progress.step
        step, is_best = self.progress.step, self.progress.is_best()
        self.report_on_chief(lambda report: report.validation(step, metrics, is_best=is_best))
        if is_best:  # In best/ there is room for only one set of weights that no checkpoint names.
            self.save()
        for training in self.passes[-1:]:
            self.live.begin(training.name, training.epoch, training.done, training.steps)

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Counts an epoch and reports it. `metrics`, as "<dataset>/<name>", go to metrics.csv."""
        seconds, train_seconds, waited = self.progress.end_epoch()
        row = {
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "seconds": seconds,
            "examples_per_second": self._examples / train_seconds,
            **self.progress.rates_of_epoch,
            **metrics,
        }
        is_best = self.progress.is_best()
        self.report_on_chief(lambda report: report.epoch(row, is_best=is_best, waited=waited / train_seconds))
        self.progress.report_changes(self.objects.learning_rates())
        if on_report := self.objects.on_report:
            with self.objects.evaluated():
                self.report_on_chief(lambda report: report.call_hook(on_report, row, self.strategy))
        if not self.should_continue():
            self.report_on_chief(lambda report: report.end())

    def report_on_chief(self, write: Callable[[Report], None]) -> None:
        self.workers.from_chief(lambda: self.report and write(self.report))

    def save(self) -> Path:
        """Saves the state as a checkpoint; returns where. An evaluation that has changed weights will start over."""
        for one_pass in self.passes:
            if one_pass.must_start_over:
                one_pass.start_over()
                self.objects.reset(one_pass.name)
        self._saved_step = self.progress.step
        return self._save_to(self.checkpoints)

    def _save_to(self, checkpoints: Checkpoints) -> Path:
        started = time.monotonic()
        # From best/ only the weights are restored.
        record = self.progress.record() | ({"user_state": {}} if checkpoints is self.best else {})
        path = checkpoints.save(self.progress.step, record)
        self.progress.spend("saving", time.monotonic() - started)
        self.write_goodput(is_due=True)
        return path

    def write_goodput(self, *, is_due: bool = False) -> None:
        """Writes goodput.json, if it `is_due` or was written too long ago."""
        if self.goodput:
            self.goodput.write(self.progress.spent, is_due=is_due)

    @contextlib.contextmanager
    def steps_named(self) -> Iterator[None]:
        """Turns an exception of the user's code into BadInput with its place and the steps."""
        try:
            with user_errors_named(lambda: str(self.passes[-1] if self.passes else "")), contextlib.closing(self.live):
                yield
        except InterruptedStep as problem:
            one_pass = self.passes[-1] if self.passes else None
            if one_pass is None or one_pass.split == "train" or self.workers.count > 1:
                raise
            # An evaluation changes its metrics only. It starts over, so that the training before it can be saved.
            one_pass.start_over()
            self.objects.reset(one_pass.name)
            raise BadInput(str(problem)) from problem
        finally:
            for one_pass in self.passes:
                one_pass.watch.close()
