"""The steps of a pass over a dataset, and how they are cut into executions: --steps-per-execution, --profile."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.console import console
from engine.data.batches import Batches
from engine.data.stacks import StackIterator
from engine.errors import BadInput, Diverged
from engine.report.report import TENSORBOARD
from engine.run.progress import Progress
from engine.settings import Settings

# The fourth execution of training steps is profiled, because the first ones compile or are short.
PROFILED, PROFILED_STEPS = 3, 30
# How long an execution takes with --steps-per-execution auto, if a stack of batches is as long. Several workers agree
# before and after each one, and for that TensorFlow keeps some KB for ever.
SECONDS_ALONE, SECONDS_TOGETHER = 1.0, 5.0
SECONDS_WITHOUT_AN_END = 600.0  # The first steps are compiled, which takes minutes for large models.


class Executions:
    """How many steps each split's next call of a compiled function runs: with "auto", some seconds of steps."""

    def __init__(self, settings: Settings, workers: Workers, all_reduce: str = "") -> None:
        """`all_reduce` names how the strategy sums over its devices; "" if it does not."""
        self._settings, self._all_reduce, self.workers = settings, all_reduce, workers
        self._is_measured = settings.steps_per_execution == "auto" and not settings.eager
        self._every = [steps for steps in (settings.checkpoint_every_steps, settings.validate_every_steps) if steps]
        self._lengths: dict[str, int] = {}
        self._trained = 0  # Executions of training steps so far.
        self._called: set[str] = set()  # The splits whose compiled function was called.

    def length(self, split: str, *, left: int, step: int) -> int:
        """Returns how many steps to run now, when `left` steps of the pass remain, after training step `step`."""
        chosen = self._settings.steps_per_execution
        count = min(self._lengths.setdefault(split, 1 if chosen == "auto" else chosen), left)
        if split == "train":
            # Up to the next multiple, counted from the first epoch, so that a resume does not move it.
            count = min([count, *(every - step % every for every in self._every)])
            count = min(count, PROFILED_STEPS) if self._profiles_next else count
        return count

    @contextlib.contextmanager
    def watched(self, split: str, stacks: StackIterator) -> Iterator[None]:
        """Prints a line if an execution takes very long; profiles it if it is the one to profile."""
        with self._reported_if_long(split, stacks), contextlib.ExitStack() as profile:
            if split == "train" and self._profiles_next and self.workers.is_chief:
                folder = self._settings.run_dir / TENSORBOARD
                profile.callback(console.print, f"Profiled: pip install xprof, then xprof --logdir {folder}")
                tf.profiler.experimental.start(str(folder))
                profile.callback(tf.profiler.experimental.stop)
            yield
        self._trained += split == "train"

    @contextlib.contextmanager
    def _reported_if_long(self, split: str, stacks: StackIterator) -> Iterator[None]:
        def report() -> None:
            name, seconds = self.workers.names[self.workers.index], f"{SECONDS_WITHOUT_AN_END:g} s"
            line = f"{name} has waited {seconds} for examples of {split!r}, and the other processes wait for it"
            if not stacks.is_waiting:
                line = f"No step has ended for {seconds} on {name}. Another process may wait for its examples"
                if self._all_reduce.startswith("nccl"):
                    line += ". If NCCL hangs, set NCCL_DEBUG=INFO to see where"
                    line += "; on one machine --all-reduce one_device does without it"
            print(line, file=sys.stderr, flush=True)  # Every process prints its own.

        timer = threading.Timer(SECONDS_WITHOUT_AN_END, report)
        timer.daemon = True
        # Where steps wait for others, they may do so for ever.
        if self.workers.count > 1 or self._all_reduce.startswith("nccl"):
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def _profiles_next(self) -> bool:
        return self._settings.profile and self._trained == PROFILED

    def took(self, split: str, count: int, seconds: float) -> bool:
        """Adjusts the length to the time that an execution took; returns whether it was the split's first one.

        Every worker must call it.
        """
        is_first = split not in self._called
        self._called.add(split)
        if self._is_measured and count == self._lengths[split]:
            # The first call compiles and so looks slow; from its one step the length at most doubles each time.
            fitting = int(count / seconds * (SECONDS_ALONE if self.workers.count == 1 else SECONDS_TOGETHER))
            self._lengths[split] = self.workers.from_chief(lambda: max(1, min(2 * count, fitting)))
        return is_first

    def report_missing_profile(self) -> None:
        if self._settings.profile and self._trained <= PROFILED:
            console.print(f"--profile: the run had {self._trained} executions of training steps, and a profile needs 4")


class Pass:
    """The steps of one pass over a dataset: an epoch of training, or an evaluation. Its position is in `Progress`.

    Attributes:
        name: the dataset's: "train", "validation" or "validation/<name>", ...
        epoch: counted from 0; None where there are no epochs.
        steps: the steps of the complete pass.
        has_ended: whether its metrics have been read.
        unrecorded: steps taken but not yet recorded.
        watch: context held open while an execution runs; close it if the execution fails.
        waits: the resumed run must validate before its next step, so the next execution is empty.
    """

    def __init__(
        self,
        batches: Batches,
        epoch: int | None,
        progress: Progress,
        executions: Executions,
        changed: Sequence[tf.Variable] = (),
    ) -> None:
        """Continues at the position in `progress`.

        `changed` are the variables, one replica's each, that an evaluation changes besides metrics: it gives them back.
        """
        self.name, self.split, self.steps = batches.name, batches.split, batches.steps_per_epoch
        self.epoch, self._batches, self._progress, self._executions = epoch, batches, progress, executions
        self._epoch_text = "" if epoch is None else f" of epoch {epoch + 1}"
        # A pass that ended before a stop keeps its metrics until the evaluation or the epoch ends.
        self.has_ended = self.name in progress.metrics and (self.split != "train" or epoch == progress.epoch)
        if not self.has_ended:
            progress.steps_of_pass.setdefault(self.name, 0)
        self.unrecorded, self.waits = 0, False
        self._iterator = batches.iterator(epoch or 0, first_step=self.done) if self.steps_left else None
        self._count = 0  # Steps of the current execution.
        self._kept = [(variable, tf.identity(variable)) for variable in changed]
        self.watch = contextlib.ExitStack()

    @property
    def done(self) -> int:
        """The steps that are taken and recorded."""
        return self.steps if self.has_ended else self._progress.steps_of_pass[self.name]

    @property
    def steps_left(self) -> int:
        return max(0, self.steps - self.done)  # A resumed run may have fewer examples than before.

    def next_execution(self) -> Iterator[tuple[Any, int, int]]:
        """Yields the batches of the next execution: a stack, the index of the first batch in it, and their number.

        Pass the losses of all of them to `Run.record_losses`. The first execution is empty if a resumed run still owes
        a validation. Raises BadInput if examples cannot be read; in a single process earlier steps are recorded first.
        """
        if self.waits or self._iterator is None:
            self.waits = False
            return
        self._count = self._executions.length(self.split, left=self.steps_left, step=self._progress.step)
        if self._executions.workers.count > 1:
            # Workers that take other steps would wait for each other for ever.
            self._executions.workers.check_all_do(str(self))
        self._started, self._waited = time.monotonic(), self._iterator.seconds_waited
        self.watch.enter_context(self._executions.watched(self.split, self._iterator))
        try:
            for stack, first, count in self._iterator.take(self._count):
                yield stack, first, count
                self.unrecorded += count
        except BadInput:
            # With several processes the others wait in a step, so this one must end at once.
            if not self.unrecorded or self._executions.workers.count > 1:
                raise

    def record(self, losses: Sequence[Any]) -> tuple[np.ndarray, float, float]:
        """Records the steps of an execution by their losses, one tensor ([count]) for each stack.

        Returns the losses ([steps]), how many full batches the steps' examples without padding would make, and the
        seconds that the steps took. Raises Diverged if a loss is not finite.
        """
        # They are read after all steps have been started, so that a GPU continues meanwhile.
        values = np.concatenate([np.asarray(of_stack) for of_stack in losses])
        self.watch.close()
        infinite = np.flatnonzero(~np.isfinite(values))
        if len(infinite):
            step = f"{self.name} step {self.done + infinite[0] + 1}{self._epoch_text}"
            raise Diverged(f"the loss of {step} is {values[infinite[0]]}")
        seconds = time.monotonic() - self._started
        # compute_loss divides by the global batch size, so the loss of a padded batch is smaller.
        examples = self._batches.examples_in(self.epoch or 0, self.done, len(values))
        is_first = self._executions.took(self.split, len(values), seconds)
        self.unrecorded = self._count = 0
        waited = self._iterator.seconds_waited - self._waited if self._iterator else 0.0
        self._progress.add(self.name, len(values), seconds, waited, is_first=is_first)
        return values, examples / self._batches.global_batch_size, seconds

    def give_back(self) -> None:
        """Undoes what an evaluation has changed, or training would depend on how often a run validates."""
        for variable, value in self._kept:
            variable.assign(value)

    @property
    def must_start_over(self) -> bool:
        """Whether the pass cannot continue after a stop, because it gives back what its steps have changed."""
        return bool(self._kept) and not self.has_ended

    def start_over(self) -> None:
        """Undoes the steps of an evaluation, but for its metrics."""
        self.give_back()
        self._progress.steps_of_pass[self.name] = self.unrecorded = 0

    def __str__(self) -> str:
        """Returns the steps of the current execution for messages: "in train steps 3 to 5 of epoch 1"; "" without."""
        if not self._count:
            return ""
        first, last = self.done + 1, self.done + self._count
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"in {self.name} {steps}{self._epoch_text}"
