"""The batches of a dataset: complete ones on every replica, and which pass over the examples a step is in.

The order of the operations makes batches the same for any number of replicas: examples -> shuffle by (seed, pass) ->
complete batches -> this process's shard -> prepare -> stacks of batches -> prefetch. Batches before the position are
skipped and not prepared, except those in the stack that contains it.
"""

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, batched, bytes_of, is_static, megabytes
from engine.data.examples import CORES, PARALLEL_CALLS, Examples, Shard, hook_of, input_options, parallel_calls
from engine.data.preparation import Preparation, evaluation_seed, pass_seed
from engine.data.stacks import StackIterator, Stacks, on_replicas, stack_size, stacked
from engine.errors import BadInput
from engine.files import until_read
from engine.machine import memory_of_machine
from engine.settings import Settings

# Several small batches are prepared in one call, because a call takes longer than the work itself.
BATCHES_AT_ONCE = 16
BYTES_AT_ONCE = 2**20
STACKS_AHEAD = 2  # Stacks that are ready before they are asked for.
BYTES_KEPT = 2**26  # Batches of up to this size stay ready between two evaluations.


class Batches:
    """The batches of a dataset. A split has one dataset, or several for validation and test.

    Every batch is full and has three parts: (features, labels, sample_weights). `sample_weights` is float32 [batch]:
    the example's own sample weight, 1 if it has none, 0 for padding. In training the examples that fill no batch are
    dropped, others in each pass. In evaluation, and in training with --keep-last-batch, the last batch is padded with
    copies of weight 0, so that each example counts exactly once. If the replicas, or their micro-batches, cannot share
    a batch equally, some per-replica batches are padded in the same way.

    Attributes:
        name: the split, or "<split>/<dataset>" if it has several.
        examples: the examples in their order.
        number_of_examples: how many the dataset has.
        global_batch_size: examples in a batch.
        per_replica_batch_size: examples of a batch on one replica, padding included.
        steps_per_pass: batches in one pass.
        steps_per_epoch: batches in an epoch or evaluation: a pass, without --steps-per-epoch and --limit-steps.
        traced: what task.prepare_example does; None if it runs in Python, with --eager.
        stacks: how steps take batches out of the stacks that `iterator` yields.
        stack_size: batches in a stack.
        bytes_ahead: about how much this process prepares before it is asked for.
        is_kept: whether batches stay ready at the end of a pass.
    """

    def __init__(
        self,
        name: str,
        examples: Examples,
        preparation: Preparation,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        context: tf.distribute.InputContext,
    ) -> None:
        """Traces task.prepare_example. Raises BadInput, naming the hook, for examples that cannot be batched."""
        self.name, self.examples, self.number_of_examples = name, examples, examples.length
        self._seed = settings.seed
        self._is_training, self._is_eager = self.split == "train", preparation.is_eager
        evaluation_size = None if self._is_training else settings.evaluation_batch_size
        self.global_batch_size = size = evaluation_size or settings.global_batch_size
        flag = "--evaluation-batch-size" if evaluation_size else "--global-batch-size"
        micro_batches = settings.micro_batches if self._is_training else 1
        replicas, unit = strategy.num_replicas_in_sync, strategy.num_replicas_in_sync * micro_batches
        if size < unit:  # A micro-batch would be padding only.
            parts = f", in {micro_batches} micro-batches each" if micro_batches > 1 else ""
            raise BadInput(f"{flag} {size} is too small for {replicas} replica(s){parts}: use {unit} or more")
        self.per_replica_batch_size = micro_batches * -(-size // unit)
        self._count_steps(settings)
        self._prepared = preparation.trace(
            examples.element_spec, hook_of(name), lambda: next(iter(examples.unshuffled()))[1]
        )
        self.traced = self._prepared.traced
        batch_spec = batched(self._prepared.spec, self.per_replica_batch_size)
        self.stacks = Stacks(strategy, batch_spec, self._prepared.padding)
        self._shard_batches(context)
        self._plan_memory(context.num_input_pipelines)
        # It calls a function again after faults that pass.
        self.read = functools.partial(until_read, name=hook_of(name), obeys_signals=context.num_input_pipelines == 1)
        self._iterator: StackIterator | None = None

    def _count_steps(self, settings: Settings) -> None:
        size, keeps_last = self.global_batch_size, settings.keep_last_batch or not self._is_training
        self.steps_per_pass = (self.number_of_examples + keeps_last * (size - 1)) // size
        if not self.steps_per_pass:
            raise BadInput(
                f"--global-batch-size {size} is larger than the {self.number_of_examples} examples of "
                f"{hook_of(self.name)}: use a smaller one, or --keep-last-batch; if these are batches, unbatch() them"
            )
        self.steps_per_epoch = (self._is_training and settings.steps_per_epoch) or self.steps_per_pass
        self.steps_per_epoch = min(self.steps_per_epoch, settings.limit_steps or self.steps_per_epoch)
        if not self._is_training:  # An evaluation ends where a pass does, so that its iterator serves the next.
            self.steps_per_pass = self.steps_per_epoch

    def _shard_batches(self, context: tf.distribute.InputContext) -> None:
        """Finds the examples of each batch that this process loads for its replicas."""
        size, replicas = self.global_batch_size, self.stacks.strategy.num_replicas_in_sync
        # The first replicas may get one example more, and the others padding.
        of_replicas = [size // replicas + (replica < size % replicas) for replica in range(replicas)]
        of_process = replicas // context.num_input_pipelines
        first_replica = context.input_pipeline_id * of_process
        self._of_replicas = of_replicas[first_replica : first_replica + of_process]
        first = sum(of_replicas[:first_replica])
        self._shard = Shard(size, slice(first, first + sum(self._of_replicas)), self.steps_per_pass * size)

    def _plan_memory(self, processes: int) -> None:
        """Chooses how much is prepared at once and ahead."""
        example_spec, shard_size = self.examples.element_spec, self._shard.size
        bytes_read = self.global_batch_size * bytes_of(example_spec) if is_static(example_spec) else 0
        bytes_of_batch = self.stacks.strategy.num_replicas_in_sync * bytes_of(self.element_spec)
        self._batches_at_once = max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // max(bytes_read, bytes_of_batch)))
        bytes_of_share = bytes_of_batch // processes
        if bytes_of_share > (memory_of_machine() or math.inf):
            raise BadInput(
                f"a batch of {self.global_batch_size} examples takes {megabytes(bytes_of_share)}, more than the memory "
                "of this machine: use a smaller --global-batch-size or --evaluation-batch-size"
            )
        self.stack_size = stack_size(self.steps_per_epoch, bytes_of_share, self._batches_at_once)
        if self._is_eager:  # Otherwise task.prepare_example would run for many steps before the first one.
            self.stack_size = 1
        prepared = shard_size * bytes_of(self._prepared.spec[:3])
        of_call, ahead = bytes_read // processes + prepared, (STACKS_AHEAD + 1) * prepared
        # A call prepares several batches, or one example.
        of_call = of_call * self._batches_at_once if self._prepared.batch else of_call // shard_size
        self._calls = parallel_calls(CORES if self._prepared.batch else PARALLEL_CALLS, of_call, ahead)
        self.bytes_ahead = self._calls * of_call + ahead
        self.is_kept = self._is_training or self.bytes_ahead <= BYTES_KEPT

    @property
    def split(self) -> str:
        """The split: "train", "validation" or "test"."""
        return self.name.partition("/")[0]

    @property
    def dropped(self) -> int:
        """The number of examples that one pass drops."""
        return max(0, self.number_of_examples - self.steps_per_pass * self.global_batch_size)

    @property
    def element_spec(self) -> Any:
        """Element spec of a per-replica batch: static shapes [batch, ...]."""
        return self.stacks.batch_spec[:3]

    @property
    def features_spec(self) -> Any:
        """Element spec of an example's prepared features; with --pad-to, sequences are of unknown length."""
        features, padding = self._prepared.spec[0], self._prepared.padding
        return padding.of_any_length(features) if padding else features

    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON values by which a resumed run, or another process, notices other examples."""
        return {
            "examples": self.number_of_examples,
            "element_spec": as_text(self.examples.element_spec),
            "sha256": self.examples.sha256,
            "steps_per_epoch": self.steps_per_epoch,
            "steps_per_pass": self.steps_per_pass,
        }

    def examples_in(self, epoch: int, first_step: int = 0, steps: int | None = None) -> int:
        """Returns how many examples, without padding, an epoch takes, or these `steps` of it."""

        def examples_before(step: int) -> int:
            passes, steps_of_pass = divmod(step, self.steps_per_pass)
            of_pass = self.number_of_examples - self.dropped
            return passes * of_pass + min(of_pass, steps_of_pass * self.global_batch_size)

        first = epoch * self.steps_per_epoch + first_step
        end = first + (self.steps_per_epoch - first_step if steps is None else steps)
        return examples_before(end) - examples_before(first)

    def iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns an iterator over the global batches from a step of an epoch on. Evaluations have the same batches."""
        step = epoch * self.steps_per_epoch + first_step
        period = sys.maxsize if self._is_training else self.steps_per_pass
        if self._iterator is None or (self._iterator.next_step - step) % period:
            # To make one takes a few tenths of a second, so it serves one epoch after the other.
            self._iterator = self.new_iterator(epoch, first_step)
        return self._iterator

    def new_iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns another iterator than those of `iterator`."""
        return StackIterator(self, epoch * self.steps_per_epoch + first_step)

    def one_by_one(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """Yields the global batches of an epoch one by one, to look at."""
        pick = tf.function(self.stacks.pick, autograph=False)
        for stack, first, count in self.new_iterator(epoch, first_step).take(self.steps_per_epoch - first_step):
            yield from (pick(stack, tf.constant(first + index)) for index in range(count))

    def stacks_from(self, step: int) -> Iterator[Any]:
        """Returns the stacks from the one that contains a step on, as strategy.run takes them."""
        return on_replicas(self.stacks.strategy, iter(self._stacks_of_process(step)))

    def _stacks_of_process(self, step: int) -> tf.data.Dataset:
        self.examples.cache()
        first_pass, step_of_pass = divmod(step, self.steps_per_pass)
        first_step = tf.constant(step_of_pass - step_of_pass % self.stack_size, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            prepared = self._pass(number, tf.where(number == first_pass, first_step, 0))
            return stacked(prepared, self.stack_size, self._of_replicas, self.per_replica_batch_size)

        # Endless, so that the next pass's first batches are prepared while this one is validated.
        endless = tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass)
        if not self._is_eager:  # Otherwise task.prepare_example would run beside a debugger's prompt.
            endless = endless.prefetch(STACKS_AHEAD)
        return endless.with_options(input_options())

    def _pass(self, number: tf.Tensor, first_step: tf.Tensor) -> tf.data.Dataset:
        """Returns the prepared examples of this process in a pass, any number [n, ...] in an element.

        `first_step` is the first one of a stack.
        """
        # In evaluation every pass is the same.
        seed = pass_seed(self._seed, number) if self._is_training else evaluation_seed(self._seed, self.name)
        order_seed, first = seed if self._is_training else None, first_step * self._shard.examples_per_batch
        if not self._prepared.batch:
            examples = self.examples.one_by_one(self._shard, first, order_seed)
            return self._prepare_one_by_one(examples, seed).batch(self._shard.size, drop_remainder=True)
        # Counted from batch 0, so that after a resume a batch is prepared with the same others, and rounded alike.
        elements, pick = self.examples.batches(self._shard, first, order_seed, self._batches_at_once)
        prepare, arguments = self._prepared.batch, self._numbers(seed)
        return elements.map(lambda *element: prepare(*pick(*element), *arguments), num_parallel_calls=self._calls)

    def _prepare_one_by_one(self, examples: tf.data.Dataset, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the prepared examples of (place, example)."""
        prepare, arguments = self._prepared.one, self._numbers(seed)
        call = tf.autograph.experimental.do_not_convert(lambda place, example: prepare(place, example, *arguments))
        return examples.map(call, num_parallel_calls=None if self._is_eager else self._calls)

    def _numbers(self, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The number of examples, and a seed of two numbers.
        return tf.constant(self.number_of_examples, tf.int64), tf.stack([seed, 0])

    def rejection(self, problem: tf.errors.OpError, step: int) -> BadInput:
        """Returns the error for batches that cannot be read or prepared, from a step on, counted over all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        one_by_one = self._prepare_one_by_one(self.examples.unshuffled(), tf.constant(0, tf.int64))
        during = f"in the batches from step {step + 1} of epoch {epoch + 1} on"
        return self.examples.rejection(problem, one_by_one, during)
