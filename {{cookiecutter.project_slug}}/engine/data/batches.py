"""The batches of a dataset: complete ones on every replica, and which pass over the examples a step is in."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import batched, bytes_of, is_static, unbatched
from engine.data.examples import Examples, Shard, hook_of
from engine.data.pipeline import Pipeline
from engine.data.preparation import Preparation
from engine.data.stacks import StackIterator, Stacks, on_replicas, stack_sizes
from engine.errors import BadInput
from engine.settings import Settings

# Small batches are prepared several in one call, because a call takes longer than the work itself.
BATCHES_AT_ONCE = 16
BYTES_AT_ONCE = 2**20


class Batches:
    """The batches of a dataset. A split has one dataset, or several for validation and test.

    Every batch is full and has three parts: (features, labels, sample_weights).
    `sample_weights` is float32 [batch]: the example's own weight, 1 if it has none, 0 for padding. In training the
    examples that fill no batch are dropped, others in each pass. In evaluation, and in training with --keep-last-batch,
    the last batch is padded with copies of weight 0, so that each example counts exactly once.

    Attributes:
        split: "train", "validation" or "test".
        name: the split, or "<split>/<dataset>" if it has several.
        number_of_examples: the examples of the dataset, on all processes.
        global_batch_size, per_replica_batch_size: examples in a batch, and those of it on one replica.
        steps_per_pass: batches in one pass.
        steps_per_epoch: batches in an epoch or evaluation: a pass, without --steps-per-epoch and --limit-steps.
        dropped: examples that one pass drops.
        shards_by_file: whether each of several processes loads files of its own.
        element_spec: of a per-replica batch: static shapes [batch, ...].
        example_spec: the element spec of task.load_examples.
        fingerprint: of record files, which must be the same when a run is resumed; None for other examples.
        traced: what task.prepare_example does; None if it runs in Python, with --eager.
        stacks: how steps take batches out of the stacks that `iterator` yields.
    """

    def __init__(
        self,
        name: str,
        examples: Sequence[Examples],
        preparation: Preparation,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        context: tf.distribute.InputContext,
        *,
        shards_by_file: bool = False,
    ) -> None:
        """Traces task.prepare_example. Raises BadInput, naming the hook, for examples that cannot be batched.

        `examples` are all of the dataset; or, if each process of `context` loads files of its own, those of each.
        """
        self.name, self.split, self.shards_by_file = name, name.partition("/")[0], shards_by_file
        self._training, self._strategy = self.split == "train", strategy
        own = None if self._training else settings.evaluation_batch_size
        self.global_batch_size = size = own or settings.global_batch_size
        flag = "--evaluation-batch-size" if own else "--global-batch-size"
        self.per_replica_batch_size = per_replica_batch_size(size, strategy.num_replicas_in_sync, flag)
        self._count_steps([each.length for each in examples], settings)
        part = context.input_pipeline_id if len(examples) > 1 else 0
        self._examples, size_of_part = examples[part], size // len(examples)
        self.example_spec, self.fingerprint = self._examples.element_spec, self._examples.fingerprint
        prepared = preparation.trace(
            self.example_spec, hook_of(name), first_example=lambda: next(iter(self._examples.unshuffled()))[1]
        )
        self.traced = prepared.traced
        batch_spec = batched(unbatched(prepared.batch_spec), self.per_replica_batch_size)
        self.element_spec = batch_spec[:3]
        self.stacks = Stacks(strategy, batch_spec, prepared.padding)
        self._bytes_of_batch = strategy.num_replicas_in_sync * bytes_of(self.element_spec)
        bytes_read = size * bytes_of(self.example_spec) if is_static(self.example_spec) else 0
        size_of_process = size // context.num_input_pipelines
        first = context.input_pipeline_id * size_of_process % size_of_part  # 0 in files of its own.
        self._pipeline = Pipeline(
            examples=self._examples,
            preparation=preparation,
            prepared=prepared,
            seed=settings.seed,
            training=self._training,
            shard=Shard(size_of_part, slice(first, first + size_of_process), self.steps_per_pass * size_of_part),
            part=part,
            per_replica_batch_size=self.per_replica_batch_size,
            batches_at_once=max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // max(bytes_read, self._bytes_of_batch))),
            prefetches=not settings.eager,  # Otherwise task.prepare_example would run beside a debugger's prompt.
        )
        self._processes = context.num_input_pipelines
        self._iterator: StackIterator | None = None

    def _count_steps(self, lengths: list[int], settings: Settings) -> None:
        """Sets the numbers of examples and steps; processes with files of their own have `lengths` examples."""
        # Every process takes the same number of steps, however many examples it has.
        size = self.global_batch_size // len(lengths)
        if settings.keep_last_batch or not self._training:
            self.steps_per_pass = max(-(-length // size) for length in lengths)
        else:
            self.steps_per_pass = min(lengths) // size
        self.number_of_examples = sum(lengths)
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
        """The element spec of an example's prepared features; with --pad-to, sequences are of unknown length."""
        features, padding = unbatched(self.element_spec[0]), self.stacks.padding
        return padding.of_any_length(features) if padding else features

    def examples_in_epoch(self, epoch: int) -> int:
        """Returns how many examples, without padding, an epoch is over."""
        end, size = (epoch + 1) * self.steps_per_epoch, self.global_batch_size
        # Only the last batch of a pass has padding.
        last_batches = end // self.steps_per_pass - (end - self.steps_per_epoch) // self.steps_per_pass
        padding_of_pass = max(0, self.steps_per_pass * size - self.number_of_examples)
        return self.steps_per_epoch * size - last_batches * padding_of_pass

    def cache(self) -> None:
        """Reads the examples that this process caches in memory. Raises BadInput if they cannot be read."""
        self._examples.cache()

    def describe_shuffling(self) -> tuple[str, int]:
        """Returns how this process shuffles its training examples, as one line, and the bytes that this takes."""
        return self._examples.describe_shuffling(self._processes)

    def iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns an iterator over the global batches of an epoch, from number `first_step` on, and of later epochs.

        In evaluation all epochs have the same batches.
        """
        number, step = self._place(epoch, first_step)
        if self._iterator is None or not self._iterator.is_at(number if self._training else None, step):
            # Making one takes a good part of a second, so it serves one epoch after the other.
            self._iterator = self._new_iterator(number, step)
        return self._iterator

    def one_by_one(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """Yields the global batches of an epoch one by one, to look at; training takes them from `iterator`."""
        pick = tf.function(self.stacks.pick, autograph=False)
        iterator = self._new_iterator(*self._place(epoch, first_step))
        for stack, first, count in iterator.take(self.steps_per_epoch - first_step):
            yield from (pick(stack, tf.constant(first + index)) for index in range(count))

    def _place(self, epoch: int, step: int) -> tuple[int, int]:
        """Returns in which pass a step of an epoch is, and which of its batches it takes; both count from 0."""
        if not self._training:
            return epoch, step
        return divmod(epoch * self.steps_per_epoch + step, self.steps_per_pass)

    def _new_iterator(self, first_pass: int, first_step: int) -> StackIterator:
        sizes = stack_sizes(self.steps_per_pass, first_step, self._bytes_of_batch)
        stacks = on_replicas(self._strategy, iter(self._pipeline.stacks(first_pass, first_step, sizes)))
        return StackIterator(stacks, sizes, first_pass, first_step, rejection=self._rejection)

    def _rejection(self, problem: tf.errors.OpError, number: int, step: int) -> BadInput:
        """Returns the error for batches that cannot be read, from `step` of a pass on."""
        epoch, step = divmod(number * self.steps_per_pass + step, self.steps_per_epoch)
        return self._pipeline.rejection(problem, f"in the batches from step {step + 1} of epoch {epoch + 1} on")


def per_replica_batch_size(size: int, replicas: int, flag: str = "--global-batch-size") -> int:
    """Returns how many examples of a global batch one replica gets. Raises BadInput unless all get equally many."""
    if rest := size % replicas:
        below = size - rest
        use = " or ".join(str(each) for each in (below, below + replicas) if each)
        raise BadInput(f"{flag} {size} cannot be shared equally by {replicas} replicas: use {use}")
    return size // replicas
