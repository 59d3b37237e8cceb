"""The batches of a dataset: complete ones on every replica, and which pass over the examples a step is in.

The order of the operations makes batches the same for any number of replicas: examples -> shuffle by (seed, pass) ->
complete batches -> this process's shard -> prepare -> stacks of batches -> prefetch. Batches before the position are
skipped and not prepared, except those in the stack that contains it.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, batched, bytes_of, is_static, unbatched
from engine.data.examples import Examples, Shard, hook_of
from engine.data.pipelines import CORES, PARALLEL_CALLS, input_options, parallel_calls
from engine.data.preparation import Preparation, evaluation_seed, pass_seed
from engine.data.stacks import StackIterator, Stacks, on_replicas, stack_size, stacked
from engine.errors import BadInput
from engine.retries import until_read
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
        split: "train", "validation" or "test".
        name: the split, or "<split>/<dataset>" if it has several.
        number_of_examples: the examples of the dataset, on all processes.
        global_batch_size: examples in a batch.
        per_replica_batch_size: examples of a batch on one replica, padding included.
        steps_per_pass: batches in one pass.
        steps_per_epoch: batches in an epoch or evaluation: a pass, without --steps-per-epoch and --limit-steps.
        dropped: examples that one pass drops.
        shards_by_file: whether each of several processes loads files of its own.
        element_spec: of a per-replica batch: static shapes [batch, ...].
        examples: the examples that this process loads, in their order.
        bytes_ahead: about how much this process prepares before it is asked for.
        traced: what task.prepare_example does; None if it runs in Python, with --eager.
        stacks: how steps take batches out of the stacks that `iterator` yields.
    """

    def __init__(
        self,
        name: str,
        examples: Examples,
        lengths: Sequence[int],
        preparation: Preparation,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        context: tf.distribute.InputContext,
        *,
        shards_by_file: bool = False,
    ) -> None:
        """Traces task.prepare_example. Raises BadInput, naming the hook, for examples that cannot be batched.

        `examples` are those that this process loads. `lengths` has their number; or, if each process of `context` loads
        files of its own, the numbers of all processes.
        """
        self.name, self.split, self.shards_by_file = name, name.partition("/")[0], shards_by_file
        self._training, self._strategy, self._seed = self.split == "train", strategy, settings.seed
        evaluation_size = None if self._training else settings.evaluation_batch_size
        self.global_batch_size = size = evaluation_size or settings.global_batch_size
        flag = "--evaluation-batch-size" if evaluation_size else "--global-batch-size"
        loaders = len(lengths)  # The processes, if each loads files of its own; else 1.
        replicas, processes = strategy.num_replicas_in_sync, context.num_input_pipelines
        micro_batches = settings.micro_batches if self._training else 1
        self.per_replica_batch_size = per_replica_batch_size(size, replicas, micro_batches, flag)
        if size % loaders:
            remedy = "with input_context each takes its part from files of its own; use a multiple of that"
            raise BadInput(f"{flag} {size} cannot be shared equally by {loaders} workers: {remedy}")
        self._lengths = list(lengths)
        self._count_steps(settings)
        self._is_alone = context.num_input_pipelines == 1
        self._loader = context.input_pipeline_id % loaders
        self.examples, self._preparation = examples, preparation
        example_spec = self.examples.element_spec
        self._prepared = preparation.trace(
            example_spec, hook_of(name), first_example=lambda: until_read(self._first_example, hook_of(name))
        )
        self.traced = self._prepared.traced
        batch_spec = batched(unbatched(self._prepared.batch_spec), self.per_replica_batch_size)
        self.element_spec = batch_spec[:3]
        self.stacks = Stacks(strategy, batch_spec, self._prepared.padding)
        bytes_of_batch = replicas * bytes_of(self.element_spec)
        bytes_read = size * bytes_of(example_spec) if is_static(example_spec) else 0
        self._batches_at_once = max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // max(bytes_read, bytes_of_batch)))
        from_loader, of_process = size // loaders, replicas // processes
        of_replicas = examples_of_replicas(from_loader, replicas // loaders)
        first_replica = context.input_pipeline_id * of_process % len(of_replicas)
        first = sum(of_replicas[:first_replica])
        self._of_replicas = of_replicas[first_replica : first_replica + of_process]
        places = slice(first, first + sum(self._of_replicas))
        self._shard = Shard(from_loader, places, self.steps_per_pass * from_loader)
        bytes_of_share = bytes_of_batch // processes
        self._stack_size = stack_size(self.steps_per_pass, self.steps_per_epoch, bytes_of_share, self._batches_at_once)
        if preparation.is_eager:  # Otherwise task.prepare_example would run for many steps before the first one.
            self._stack_size = 1
        self._iterator: StackIterator | None = None
        self._limit_bytes_ahead(bytes_read // processes)

    def _limit_bytes_ahead(self, bytes_read: int) -> None:
        prepared = self._shard.size * bytes_of(unbatched(self.element_spec))
        takes_batches, besides = self._prepared.takes_batches, (STACKS_AHEAD + 1) * prepared
        of_call = self._batches_at_once * (bytes_read + prepared)
        if not takes_batches:  # Each call prepares one example.
            of_call = (bytes_read + prepared) // self._shard.size
        self._calls = parallel_calls(CORES if takes_batches else PARALLEL_CALLS, of_call, besides)
        self.bytes_ahead = self._calls * of_call + besides

    def _count_steps(self, settings: Settings) -> None:
        # Every process takes the same number of steps, however many examples it has.
        size = self.global_batch_size // len(self._lengths)
        if settings.keep_last_batch or not self._training:
            self.steps_per_pass = max(-(-length // size) for length in self._lengths)
        else:
            self.steps_per_pass = min(self._lengths) // size
        self.number_of_examples = sum(self._lengths)
        self.dropped = max(0, self.number_of_examples - self.steps_per_pass * self.global_batch_size)
        if not self.steps_per_pass:
            raise BadInput(
                f"--global-batch-size {self.global_batch_size} is larger than the {self.number_of_examples} "
                f"examples of {hook_of(self.name)}: use a smaller one, or --keep-last-batch"
            )
        self.steps_per_epoch = (self._training and settings.steps_per_epoch) or self.steps_per_pass
        self.steps_per_epoch = min(self.steps_per_epoch, settings.limit_steps or self.steps_per_epoch)
        if not self._training:  # An evaluation always ends where a pass does, so that its iterator serves the next.
            self.steps_per_pass = self.steps_per_epoch

    @property
    def features_spec(self) -> Any:
        """Element spec of an example's prepared features; with --pad-to, sequences are of unknown length."""
        features, padding = unbatched(self.element_spec[0]), self.stacks.padding
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
        first = epoch * self.steps_per_epoch + first_step
        end = first + (self.steps_per_epoch - first_step if steps is None else steps)
        return self._examples_before(end) - self._examples_before(first)

    def _examples_before(self, step: int) -> int:
        """Returns how many examples, without padding, all passes take before a step."""
        passes, steps = divmod(step, self.steps_per_pass)
        size = self._shard.examples_per_batch
        of_pass = sum(min(length, self.steps_per_pass * size) for length in self._lengths)
        return passes * of_pass + sum(min(length, steps * size) for length in self._lengths)

    def iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns an iterator over the global batches from a step of an epoch on. Evaluations have the same batches."""
        step, period = epoch * self.steps_per_epoch + first_step, sys.maxsize if self._training else self.steps_per_pass
        if self._iterator is None or (self._iterator.next_step - step) % period:
            # To make one takes a few tenths of a second, so it serves one epoch after the other.
            self._iterator = self.new_iterator(epoch, first_step)
        return self._iterator

    def new_iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns another iterator than those of `iterator`."""
        return StackIterator(
            self._stacks_from,
            epoch * self.steps_per_epoch + first_step,
            steps_per_pass=self.steps_per_pass,
            stack_size=self._stack_size,
            read=functools.partial(until_read, name=hook_of(self.name), obeys_signals=self._is_alone),
            rejection=self._rejection,
            is_kept=self._training or self.bytes_ahead <= BYTES_KEPT,
        )

    def one_by_one(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """Yields the global batches of an epoch one by one, to look at."""
        pick = tf.function(self.stacks.pick, autograph=False)
        for stack, first, count in self.new_iterator(epoch, first_step).take(self.steps_per_epoch - first_step):
            yield from (pick(stack, tf.constant(first + index)) for index in range(count))

    def _first_example(self) -> Any:
        return next(iter(self.examples.unshuffled()))[1]

    def _stacks_from(self, step: int) -> Iterator[Any]:
        """Returns the stacks from the one that contains a step on, as strategy.run takes them."""
        return on_replicas(self._strategy, iter(self._stacks_of_process(step)))

    def _stacks_of_process(self, step: int) -> tf.data.Dataset:
        """Returns the stacks from the one that contains a step on: tuples of one for each replica of this process."""
        self.examples.cache()
        first_pass, step_of_pass = divmod(step, self.steps_per_pass)
        first_step = tf.constant(step_of_pass - step_of_pass % self._stack_size, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            prepared = self._pass(number, tf.where(number == first_pass, first_step, 0))
            return stacked(prepared, self._stack_size, self._of_replicas, self.per_replica_batch_size)

        # Endless, so that the next pass's first batches are prepared while this one is validated.
        endless = tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass)
        if not self._preparation.is_eager:  # Otherwise task.prepare_example would run beside a debugger's prompt.
            endless = endless.prefetch(STACKS_AHEAD)
        return endless.with_options(input_options())

    def _pass(self, number: tf.Tensor, first_step: tf.Tensor) -> tf.data.Dataset:
        """Returns the prepared examples of this process in a pass, any number [n, ...] in an element.

        `first_step` is the first one of a stack.
        """
        # In evaluation every pass is the same.
        seed = pass_seed(self._seed, number) if self._training else evaluation_seed(self._seed, self.name)
        length_and_seed = self.examples.length, tf.stack([seed, self._loader])
        order_seed = seed if self._training else None
        shard, size = self._shard, self._shard.examples_per_batch
        if not self._prepared.takes_batches:
            numbered = self.examples.one_by_one(shard, first_step * size, order_seed)
            prepared = self._preparation.one_by_one(numbered, self._prepared, *length_and_seed, calls=self._calls)
            return prepared.batch(shard.size, drop_remainder=True)
        # Counted from batch 0, so that after a resume a batch is prepared with the same others, and rounded alike.
        elements, pick = self.examples.batches(shard, first_step * size, order_seed, self._batches_at_once)
        prepare = self._preparation.batch_function(*length_and_seed)
        return elements.map(lambda *element: prepare(*pick(*element)), num_parallel_calls=self._calls)

    def _rejection(self, problem: tf.errors.OpError, step: int) -> BadInput:
        """Returns the error for batches that cannot be read or prepared, from a step on, counted over all epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        examples, seed = self.examples, tf.zeros([2], tf.int64)
        one_by_one = self._preparation.one_by_one(examples.unshuffled(), self._prepared, examples.length, seed)
        return examples.rejection(problem, one_by_one, f"in the batches from step {step + 1} of epoch {epoch + 1} on")


def per_replica_batch_size(size: int, replicas: int, micro_batches: int = 1, flag: str = "--global-batch-size") -> int:
    """Returns how many examples of a global batch are on one replica, padding included, for equal micro-batches.

    Raises BadInput if a micro-batch would be padding only.
    """
    unit = replicas * micro_batches
    if size < unit:
        each = f", in {micro_batches} micro-batches each" if micro_batches > 1 else ""
        raise BadInput(f"{flag} {size} is too small for {replicas} replica(s){each}: use {unit} or more")
    return micro_batches * -(-size // unit)


def examples_of_replicas(size: int, replicas: int) -> list[int]:
    """Returns how many examples of a batch each replica gets, without padding; the first ones may get one more."""
    return [size // replicas + (replica < size % replicas) for replica in range(replicas)]
