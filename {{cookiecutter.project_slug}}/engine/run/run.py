"""One run: which steps come next, what is due between them, what is best, and when it ends.

It holds no graph and no user code, so all of that can be tested with batches and losses that are made up.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.devices import long_sums_reported
from engine.cluster.strategy import strategy_info
from engine.cluster.workers import Workers
from engine.console import LiveLine, console, print_result
from engine.data.batches import Batches
from engine.errors import BadInput, Damaged, Diverged, InterruptedStep, Stopped
from engine.files import write_json
from engine.model.finish import TaskObjects
from engine.model.metrics import split_of
from engine.report.report import Report
from engine.report.summaries import TENSORBOARD
from engine.run.checkpoints import Checkpoints, Writer, weights_sha256
from engine.run.chunks import Chunks
from engine.run.directory import BEST, CHECKPOINTS, RESULT
from engine.run.profile import Profile
from engine.run.progress import Progress
from engine.run.signals import signals
from engine.run.state import State
from engine.user_errors import user_errors_named

Scores = dict[str, float]


@dataclasses.dataclass
class Chunk:
    """Steps that are taken between two turns of Python."""

    name: str
    """That of the set."""
    epoch: int | None
    """None where there are no epochs."""
    first: int
    count: int
    losses: list[Any] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        steps = f"step {self.first + 1}" if self.count == 1 else f"steps {self.first + 1} to {self.first + self.count}"
        return f"in {self.name} {steps}{self._epoch_text}"

    @property
    def _epoch_text(self) -> str:
        return "" if self.epoch is None else f" of epoch {self.epoch + 1}"

    def read(self) -> np.ndarray:
        """Returns the losses of all its steps, which are counted now. Raises Diverged if one is not finite."""
        # Read when all are under way: a GPU goes on meanwhile.
        losses, self.losses = np.concatenate([np.asarray(each) for each in self.losses]), []
        infinite = np.flatnonzero(~np.isfinite(losses))
        if len(infinite):
            step = f"{self.name} step {self.first + infinite[0] + 1}{self._epoch_text}"
            raise Diverged(f"the loss of {step} is {losses[infinite[0]]}")
        return losses


class Run:
    """How far a run has come, and what it keeps on disk.

    Attributes:
        progress: its counts and scores.
        strategy: what the steps are distributed by.
        objects: the task's objects, which the steps use and change.
        workers: the processes that train together: usually one, this one.
        checkpoints: the whole state, at the end of each epoch and every --checkpoint-every-steps.
        best: the weights that --monitor says are the best.
        report: the console's lines and the files to read; None until the run has begun.
        live: the console's line of the pass that is under way.
    """

    def __init__(self, settings: Any, strategy: tf.distribute.Strategy, objects: TaskObjects) -> None:
        """Writes nothing."""
        self.settings = settings
        self.strategy = strategy
        self.objects = objects
        self.workers = Workers(strategy)
        self.progress = Progress()
        self.report: Report | None = None
        self.profile = Profile(
            settings.run_dir / TENSORBOARD if settings.profile else None, records=self.workers.is_chief
        )
        hidden = objects.hidden
        state = State(strategy, objects.alike(), objects.own(), hidden.changed)
        weights = State(strategy, objects.weights, hidden=hidden.used_in_validation)
        writer, keep = Writer(in_thread=settings.async_checkpoints), settings.keep_checkpoints
        self.checkpoints = Checkpoints(settings.run_dir / CHECKPOINTS, state, keep=keep, writer=writer)
        # One more than there are checkpoints, because each of them may name another one as the best.
        self.best = Checkpoints(settings.run_dir / BEST, weights, keep=keep + 1, writer=writer)
        self.live = LiveLine(settings.epochs, can_be_drawn=not settings.eager)
        self._chunks = Chunks(settings, self.workers)
        self._examples = 0  # In an epoch of training.
        self._chunk: Chunk | None = None

    # --- Steps --------------------------------------------------------------------------------------------------------

    def chunks(self, batches: Batches, epoch: int = 0) -> Iterator[tuple[Any, int, int]]:
        """Yields the batches of a set that are left in this pass: a stack, the first one's number in it, how many.

        Take all that it yields, and hand the losses of each to `note`: steps are counted at the end of a chunk. Then,
        about once a second, the run saves what is due, or stops. Training pauses where a validation is due. At the end
        the metrics are read and reset; `results` returns them.

        Raises:
            Diverged: a loss is not finite.
            Stopped: a signal has come. What was done so far is in `progress` and in the metrics.
            BadInput: examples cannot be read.
        """
        name, split, steps, progress = batches.name, batches.split, batches.steps_per_epoch, self.progress
        if split == "train":
            self._examples = batches.examples_in_epoch(epoch)
        if name in progress.metrics and (split != "train" or epoch == progress.epoch):
            return  # It was stopped in an evaluation after this pass.
        done = progress.steps_of_pass.setdefault(name, 0)
        self.live.begin(name, epoch if split == "train" or self.report else None, done, steps)
        feed = batches.iterator(epoch, first_step=done) if done < steps else None
        while done < steps and not (split == "train" and self.validation_is_due(batches)):
            signals.check(self.workers)
            count = self._chunks.next(split, left=steps - done, step=progress.step)
            count = self.profile.steps_at_most(split, count)
            self._chunk = Chunk(name, epoch if split == "train" or self.report else None, done, count)
            started, waited = time.monotonic(), feed.seconds_waited
            with self.profile.chunk(split), long_sums_reported(strategy_info(self.strategy).all_reduce):
                try:
                    yield from feed.take(count)
                except BadInput:
                    # Steps before the unreadable examples count. With several workers the others wait in a step, so
                    # it ends here.
                    if not self._chunk.losses or self.workers.count > 1:
                        raise
                losses = self._chunk.read()
            count, seconds = len(losses), time.monotonic() - started
            done += count
            progress.add(name, count, seconds, feed.seconds_waited - waited)
            self.live.took(losses)
            self._chunks.took(split, count, seconds)
            if split == "train" and self.report and self.workers.is_chief:
                self.report.steps(progress.step, epoch + 1, losses, seconds, self._latest)
            self.objects.check_loss_scales(progress.step)
            if split == "train" and done < steps and self._is_multiple(self.settings.checkpoint_every_steps):
                self.save()
        if done >= steps:
            progress.end_pass(name, self.objects.results(name))
            self._chunk = None

    def _latest(self) -> dict[str, float]:
        """Returns the learning rates and the gradients' norms, which take a moment to read."""
        return {**self.objects.learning_rates(), **self.objects.gradient_norms(self.strategy)}

    def note(self, losses: Any) -> None:
        """Records the losses ([count]) of the steps just taken."""
        self._chunk.losses.append(losses)

    def validation_is_due(self, batches: Batches) -> bool:
        """Returns whether --validate-every-steps asks for a validation now, before the epoch ends."""
        done = self.progress.steps_of_pass.get("train", 0)
        is_due = 0 < done < batches.steps_per_epoch and self._is_multiple(self.settings.validate_every_steps)
        return is_due and self.progress.validated_step != self.progress.step

    def results(self, split: str) -> Scores:
        """Returns the metrics of a split, "<split>/<metric>" or "<split>/<set>/<metric>", whose passes are done.

        Those of an evaluation are forgotten with that, so that the next one measures anew.
        """
        metrics = self.progress.metrics
        results: Scores = {}
        for name in [name for name in metrics if split_of(name) == split]:
            results |= metrics[name] if split == "train" else metrics.pop(name)
        return results

    def _is_multiple(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    # --- Epochs -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is under way, counted from 0."""
        return self.progress.epoch

    def goes_on(self) -> bool:
        """Returns whether there is an epoch to train: not after --epochs, nor after --patience without a better one."""
        return self.epoch < self.settings.epochs and not self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        patience = self.settings.patience
        return patience is not None and self.progress.epochs_without_improvement() >= patience

    @contextlib.contextmanager
    def weights_to_keep(self) -> Iterator[None]:
        """Puts in place, for a while, the weights that are validated, tested and kept: with --ema-decay the average.

        Before, all replicas get the mean of their statistics.
        """
        if not self.progress.is_evaluating():  # Else it was stopped in an evaluation, after the mean.
            self.objects.average_statistics()
        with self.objects.average_in_place():
            yield

    def keep_if_best(self, metrics: Scores) -> None:
        """Saves the weights if --monitor has never been better. Call it within `weights_to_keep`."""
        score = metrics.get(self.settings.monitor)
        if score is not None and self.progress.consider(score, self.objects.monitor_direction):
            self.best.save(self.progress.step, self.progress.record())

    @property
    def _is_best(self) -> bool:
        return self.progress.best_step == self.progress.step

    def end_validation(self, metrics: Scores) -> None:
        """Reports a validation in the middle of an epoch."""
        self.progress.validated_step = self.progress.step
        self._report(lambda report: report.validation(self.progress.step, metrics, is_best=self._is_best))
        if self._is_best:  # Every checkpoint's best weights are kept, and there is room for one more.
            self.save()

    def end_epoch(self, metrics: Scores) -> None:
        """Counts an epoch, reports it and saves the state. `metrics`, as "<split>/<name>", go to metrics.csv."""
        seconds, train_seconds, waited = self.progress.end_epoch()
        row = {
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "seconds": seconds,
            "examples_per_second": self._examples / train_seconds,
            **self.objects.learning_rates(),
            **metrics,
        }
        self._report(lambda report: report.epoch(row, is_best=self._is_best, waited=waited / train_seconds))
        if on_report := self.objects.on_report:
            with self.objects.average_in_place():
                self._report(lambda report: report.call_hook(on_report, row, self.settings, self.strategy))
        self.save()
        if not self.goes_on():
            self._report(lambda report: report.end())
        if self._is_out_of_patience():
            epochs = self.progress.epochs_without_improvement()
            console.print(f"No better {self.settings.monitor} for {epochs} epochs: stopped.")

    def _report(self, write: Callable[[Report], None]) -> None:
        if self.report:  # On all workers, or on none.
            self.workers.from_chief(lambda: write(self.report))

    # --- The end; how a run begins is in start.py -----------------------------------------------------------------

    def save(self) -> Path:
        """Saves the state as a checkpoint; returns where."""
        return self.checkpoints.save(self.progress.step, self.progress.record())

    def finish(self, test: Callable[[], Scores]) -> dict[str, Any]:
        """Tests the best weights; writes and returns what result.json holds."""
        progress = self.progress
        fingerprint = weights_sha256(self.objects.weights)
        if progress.best_step is None:
            monitor = self.settings.monitor
            raise BadInput(f"--monitor {monitor} was never measured: call run.keep_if_best in train.run_epochs")
        try:
            self.best.restore(self.best.path(progress.best_step))
        except Damaged as problem:
            goes_on = "the same command, without --fresh, goes on from an older checkpoint"
            raise BadInput(f"{problem}: {goes_on}") from problem
        with self.steps_named():
            metrics = test()
        result = {
            **(metrics or {"test": None}),
            "epochs": progress.epoch,
            "step": progress.step,
            "best_epoch": progress.best_epoch,
            f"best_{self.settings.monitor}": progress.best_score,
            "epochs_without_improvement": progress.epochs_without_improvement(),
            "seconds": progress.seconds,
            "weights_sha256": fingerprint,
        }
        self._report(lambda report: report.result(progress.step, metrics, progress.best_score))
        self.workers.from_chief(lambda: write_json(self.settings.run_dir / RESULT, result))
        print_result(result, self.settings)
        return result

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Saves the state if a signal or bad input stops what is inside; returns when all files are written.

        Raises:
            BadInput, Diverged, Stopped: what is inside did; from where it can go on is added to the message.
        """
        began = self._position()
        try:
            with contextlib.closing(self.profile), self.steps_named():
                yield
                self.workers.from_chief(self.checkpoints.writer.wait)
        except Stopped as problem:
            saved = self.save()
            self.workers.from_chief(self.checkpoints.writer.wait)
            raise Stopped(f"{problem}, the state is in {saved}") from problem
        except Diverged as problem:
            self.workers.from_chief(self.checkpoints.writer.wait)
            paths = self.checkpoints.paths()
            last = f"the last good state is {paths[-1]}, " if paths else ""
            begin = "--init-from it, or weights from before, and a new --run-dir," if paths else "--fresh"
            raise Diverged(
                f"{problem}; {last}and nothing after it was saved: use {begin} with a smaller --learning-rate or "
                "--global-clipnorm, or look for what is not finite with --check"
            ) from problem
        except BadInput as problem:
            # A step that failed may be half done, and steps that were not counted cannot be saved. Other workers may
            # not know of the failure, so nothing is asked of them.
            is_counted = not isinstance(problem, InterruptedStep) and not (self._chunk and self._chunk.losses)
            if is_counted and self.workers.count == 1 and self._position() != began:
                self.save()
            self.checkpoints.writer.wait()
            paths = self.checkpoints.paths()
            kept = f"the same command, without --fresh, goes on from {paths[-1]}" if paths else "nothing was saved yet"
            raise type(problem)(f"{problem}; {kept}") from problem
        except BaseException:
            self.checkpoints.writer.wait()  # The other workers may not know of it.
            raise

    @contextlib.contextmanager
    def steps_named(self) -> Iterator[None]:
        """Turns what the user's code raises into BadInput, which names the place and the steps."""
        try:
            with user_errors_named(lambda: str(self._chunk or "")), self.live.shown():
                yield
        except InterruptedStep as problem:
            name = self._chunk.name if self._chunk else "train"
            if name == "train" or name not in self.progress.steps_of_pass or self.workers.count > 1:
                raise
            # Evaluation changes its metrics only. The set begins anew, so that the training before it can be saved.
            self.progress.steps_of_pass[name] = 0
            self._chunk.losses.clear()
            self.objects.reset(name)
            raise BadInput(str(problem)) from problem

    def _position(self) -> tuple[int, int, list[str]]:
        """Returns the run's steps, those of passes that have not ended, and the passes that have."""
        return self.progress.step, sum(self.progress.steps_of_pass.values()), list(self.progress.metrics)
