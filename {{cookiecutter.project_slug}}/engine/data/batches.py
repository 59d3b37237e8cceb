"""From a task's examples to full batches on every replica, the same for any number of replicas.

The order of the pipeline is what makes it so: examples -> shuffle by (seed, epoch) -> whole batches -> skip to the
position -> own share -> prepare -> several batches at a time -> prefetch. The k-th global batch of an epoch holds the
same examples however many replicas and processes share it. Of the batches that were skipped, at most a few small ones
are prepared, together with the first one.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data import padding
from engine.data.element_spec import bytes_of, is_static
from engine.data.examples import Examples, input_options
from engine.data.preparation import Preparation
from engine.data.records import RecordExamples, Records, examples_of
from engine.data.sets import hook_of
from engine.data.stacks import StackIterator, on_replicas, stack_sizes, stacked
from engine.errors import BadInput
from engine.tracing import Traced

# Small batches are prepared so many in one call, which costs more than the work itself does.
BATCHES_AT_ONCE = 16
BYTES_AT_ONCE = 2**20
# How many are ready before they are asked for.
STACKS_AHEAD = 2


class Batches:
    """The batches of one set of a split, which may have several.

    Every batch is full and has three parts: (features, labels, weights).
    `weights` is float32 [batch]: the example's own weight, 1 if it has none, 0 for padding. In training the examples
    that fill no batch are left out, others each epoch. In evaluation, and in training with `keep_last_batch`, the last
    batch is padded with copies of weight 0, so that each example counts exactly once.

    Attributes:
        split: "train", "validation" or "test".
        name: the split, or of several sets of it "<split>/<set>".
        number_of_examples: how many examples it has.
        size: examples in a batch.
        steps: batches in one pass.
        steps_per_epoch: those that an epoch, or an evaluation, takes: a pass, unless --steps-per-epoch or --limit-steps
            says otherwise.
        left_out: examples that one pass leaves out.
        shards_by_file: whether each of several processes loads files of its own.
        share: examples of a batch on one replica.
        element_spec: what one replica receives, as tf.TensorSpec: static shapes [share, ...].
    """

    def __init__(
        self,
        split: str,
        load_examples: Callable[..., tf.data.Dataset],
        preparation: Preparation,
        strategy: tf.distribute.Strategy,
        settings: Any,
        pipelines: int = 1,
        pipeline: int = 0,
        name: str | None = None,
    ) -> None:
        """Loads the split's examples and checks them. Raises BadInput, naming the hook, for what cannot be batched.

        Args:
            split: what to give to `load_examples`.
            load_examples: if it takes an `input_context`, each of several processes calls it with one and gets the
                examples of its own files only.
            preparation: the split's; it may be shared with other splits.
            strategy: its replicas share a batch.
            settings: has global_batch_size, evaluation_batch_size, steps_per_epoch, seed, shuffle_megabytes and
                limit_steps and keep_last_batch.
            pipelines: how many processes share a batch.
            pipeline: the number of this one.
            name: "<split>/<set>", if the split has several sets.
        """
        self.split, self.name = split, name or split
        self._training = split == "train"
        self._load_examples, self._preparation, self._strategy = load_examples, preparation, strategy
        self._settings, self._pipeline = settings, pipeline
        own = None if self._training else settings.evaluation_batch_size
        self.size = own or settings.global_batch_size
        flag = "--evaluation-batch-size" if own else "--global-batch-size"
        self.per_replica_batch_size = per_replica_batch_size(self.size, strategy.num_replicas_in_sync, flag)
        self._own_size = self.size // pipelines  # Examples of a batch that this process prepares.
        self.shards_by_file = "input_context" in inspect.signature(load_examples).parameters
        parts = self._load(pipelines)
        # The part of the split that this process reads, and how many examples of a batch are of it.
        self._part = pipeline if len(parts) > 1 else 0
        self._part_size = self.size // len(parts)
        self._examples = parts[self._part]

        # Every process takes the same number of steps, whatever there is in its part.
        lengths = [part.length for part in parts]
        if settings.keep_last_batch or not self._training:
            self.steps = max(-(-length // self._part_size) for length in lengths)
        else:
            self.steps = min(lengths) // self._part_size
        self.number_of_examples = sum(lengths)
        self.dropped = max(0, self.number_of_examples - self.steps * self.size)
        if not self.steps:
            raise BadInput(
                f"--global-batch-size {settings.global_batch_size} is larger than the {self.number_of_examples} "
                f"examples of {hook_of(self.name)}: use a smaller one, or --keep-last-batch"
            )
        self.steps_per_epoch = (self._training and settings.steps_per_epoch) or self.steps
        self.steps_per_epoch = min(self.steps_per_epoch, settings.limit_steps or self.steps_per_epoch)

        batch_spec = preparation.checked_batch_spec(self._examples, self.name)
        self._stack_spec = tf.nest.map_structure(  # Of one of its batches.
            lambda spec: tf.TensorSpec([self.per_replica_batch_size, *spec.shape[1:]], spec.dtype), batch_spec
        )
        self.element_spec = self._stack_spec[:3]
        self._bytes_of_batch = strategy.num_replicas_in_sync * bytes_of(self.element_spec)
        example_spec = self._examples.element_spec
        bytes_read = self.size * bytes_of(example_spec) if is_static(example_spec) else 0
        self._batches_at_once = max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // max(bytes_read, self._bytes_of_batch)))
        self._feed: StackIterator | None = None

    def _load(self, pipelines: int) -> list[Examples]:
        """Returns all examples of the split, or those of each process if it loads files of its own."""
        hook = hook_of(self.name)
        shuffle_bytes = self._settings.shuffle_megabytes * 2**20 if self._training else None
        if not self.shards_by_file or pipelines == 1:
            return [examples_of(self._load_examples(self.split), hook, shuffle_bytes)]
        parts = []
        for number in range(pipelines):
            context = tf.distribute.InputContext(num_input_pipelines=pipelines, input_pipeline_id=number)
            dataset = self._load_examples(self.split, input_context=context)
            if isinstance(dataset, Records):
                raise BadInput(
                    f"{hook} takes an input_context and returned Records: leave it out of load_examples, because each "
                    "worker reads its own share of the records anyway"
                )
            parts.append(Examples(dataset, f"{hook} for worker {number} of {pipelines}", shuffle_bytes))
        return parts

    @property
    def features_spec(self) -> Any:
        """The type of an example's prepared features; with --pad-to, the lengths of sequences are not in it."""
        features = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), self.element_spec[0])
        return padding.of_any_length(features, self._sequences_and_lengths[0]) if self._is_padded else features

    @property
    def example_spec(self) -> Any:
        """The type of an example as task.load_examples gives it."""
        return self._examples.element_spec

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """What a resumed run has to find again of record files; None for other examples."""
        return self._examples.fingerprint

    def examples_in_epoch(self, epoch: int) -> int:
        """Returns how many examples, without padding, an epoch is over."""
        end = (epoch + 1) * self.steps_per_epoch
        last_batches = end // self.steps - (end - self.steps_per_epoch) // self.steps  # Only those have padding.
        padding_of_pass = max(0, self.steps * self.size - self.number_of_examples)
        return self.steps_per_epoch * self.size - last_batches * padding_of_pass

    @property
    def traced(self) -> Traced | None:
        """What task.prepare_example does; None if that runs in Python, with --eager."""
        return self._preparation.traced

    def cache(self) -> None:
        """Reads the examples that this process keeps in memory. Raises BadInput if they cannot be read."""
        self._examples.keep()

    def describe_shuffling(self, *, streamed: bool = False) -> tuple[str, int]:
        """Returns how this process shuffles its training examples, as one line, and the bytes of its shuffle buffer.

        With `streamed`, those that would fit into memory are streamed too.
        """
        processes = 1 if streamed else self.size // self._own_size
        return self._examples.describe_shuffling(streamed=streamed, processes=processes)

    def iterator(self, epoch: int = 0, first_step: int = 0) -> StackIterator:
        """Returns an iterator over the global batches of an epoch, from number `first_step` on, and of later epochs.

        In evaluation all epochs have the same batches.
        """
        number, step = self._place(epoch, first_step)
        if self._feed is None or not self._feed.is_at(number if self._training else None, step):
            # Making one takes a good part of a second, so it goes on from epoch to epoch.
            self._feed = self._new_feed(number, step)
        return self._feed

    def one_by_one(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """Yields the global batches of an epoch one by one, to look at; training takes them from a StackIterator."""
        pick = tf.function(self.pick, autograph=False)
        feed = self._new_feed(*self._place(epoch, first_step))
        for stack, first, count in feed.take(self.steps_per_epoch - first_step):
            yield from (pick(stack, tf.constant(first + index)) for index in range(count))

    def _place(self, epoch: int, step: int) -> tuple[int, int]:
        """Returns in which pass a step of an epoch is, and which of its batches it takes; both count from 0."""
        if not self._training:
            return epoch, step
        return divmod(epoch * self.steps_per_epoch + step, self.steps)

    # --- In the graph of the steps ------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def pick(self, stack: Any, index: tf.Tensor) -> Any:
        """Returns batch number `index` of a stack."""
        return self._strategy.run(self._cut_batch_of if self._is_padded else batch_of, args=(stack, index))

    @tf.autograph.experimental.do_not_convert
    def _cut_batch_of(self, stack: Any, index: tf.Tensor) -> Any:
        context = tf.distribute.get_replica_context()
        with _where_stacks_are(context):
            return padding.cut(batch_of(stack, index), *self._sequences_and_lengths, context)

    @property
    def _sequences_and_lengths(self) -> tuple[list[bool], Sequence[int]]:
        return self._preparation.sequences(self._examples), self._preparation.pad_to

    @property
    def _is_padded(self) -> bool:
        return len(self._stack_spec) > len(self.element_spec)

    def compiled(self, steps: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Compiles a function of (stack, first, count): stacks of any size share one graph."""
        return tf.function(steps, input_signature=self._signature)

    def graph(self, compiled_steps: Callable[..., tf.Tensor]) -> tf.Graph:
        """Returns the graph of what `compiled` returned."""
        return compiled_steps.get_concrete_function(*self._signature).graph

    @functools.cached_property
    def _signature(self) -> tuple:
        stack = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self._stack_spec)
        if self._strategy.num_replicas_in_sync > 1:
            # Only a distributed dataset says what the type of a stack on several replicas is.
            stacks = tf.data.Dataset.range(0).map(self._empty_stack)
            stack = self._strategy.distribute_datasets_from_function(lambda _: stacks).element_spec
        scalar = tf.TensorSpec((), tf.int32)
        return stack, scalar, scalar

    @tf.autograph.experimental.do_not_convert
    def _empty_stack(self, zero: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda spec: tf.zeros([zero, *spec.shape], spec.dtype), self._stack_spec)

    # --- The pipeline -------------------------------------------------------------------------------------------------

    def _new_feed(self, first_pass: int, first_step: int) -> StackIterator:
        sizes = stack_sizes(self.steps, first_step, self._bytes_of_batch)
        stacks = on_replicas(self._strategy, iter(self._stacks(first_pass, first_step, sizes)))
        return StackIterator(stacks, sizes, first_pass, first_step, refusal=self._refusal)

    def _refusal(self, problem: tf.errors.OpError, number: int, step: int) -> BadInput:
        """Returns what to raise if some of the examples in the batches from `step` of a pass on cannot be had."""
        examples = self._examples
        epoch, step = divmod(number * self.steps + step, self.steps_per_epoch)
        numbered = examples.in_order(0, examples.length)
        prepared = self._preparation.one_by_one(numbered, examples.length, tf.zeros([2], tf.int64))
        return examples.refusal(problem, prepared, f"in the batches from step {step + 1} of epoch {epoch + 1} on")

    def _stacks(self, first_pass: int, first_step: int, sizes: tuple[list[int], list[int]]) -> tf.data.Dataset:
        """Returns this process's stacks of a pass and of later ones: tuples of one for each replica."""
        self.cache()
        sizes_of_first, sizes_of_others = (tf.constant(each, tf.int64) for each in sizes)

        @tf.autograph.experimental.do_not_convert
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            is_first = number == first_pass
            first = tf.where(is_first, tf.constant(first_step, tf.int64), 0)
            sizes_of_pass = tf.cond(is_first, lambda: sizes_of_first, lambda: sizes_of_others)
            size = self.per_replica_batch_size
            return stacked(self._prepared(number, first), sizes_of_pass, self._own_size // size, size)

        # Endless, so that the next pass's first batches are prepared while this one is validated.
        endless = tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(one_pass)
        if not self._settings.eager:  # Else task.prepare_example would run beside a debugger's prompt.
            endless = endless.prefetch(STACKS_AHEAD)
        return endless.with_options(input_options())

    def _prepared(self, epoch: tf.Tensor, first_step: tf.Tensor) -> tf.data.Dataset:
        """Returns what this process prepares of a pass's global batches, any number of examples in an element.

        `epoch` is the number of the pass; with --steps-per-epoch epochs are cut from the passes.
        """
        examples, preparation = self._examples, self._preparation
        # In evaluation every epoch is the same.
        seed = _epoch_seed(self._settings.seed, epoch if self._training else tf.zeros_like(epoch))
        order_seed = seed if self._training else None
        first, end = first_step * self._part_size, self.steps * self._part_size
        length_and_seed = examples.length, tf.stack([seed, self._part])
        # Each process takes its examples of a batch after the shuffle. So a batch holds the same examples for any
        # number of processes, and each replica the same ones as in one process.
        own_first = self._pipeline * self._own_size % self._part_size  # 0 in a part that is all its own.
        own = {"share": slice(own_first, own_first + self._own_size), "seed": order_seed}
        if examples.have_one_shape and preparation.takes_batches:
            prepare = preparation.batch_function(*length_and_seed)
            return examples.batches(prepare, self._part_size, first, end, at_once=self._batches_at_once, **own)
        numbered = examples.stream(self._part_size, first, end, **own)
        return preparation.one_by_one(numbered, *length_and_seed).batch(self._own_size, drop_remainder=True)

    def endless(self, epoch: int, first_step: int, pipelines: int, pipeline: tf.Tensor) -> tf.data.Dataset:
        """Returns batches of every `pipelines`-th example, again and again, for a process that takes its own steps."""
        # Loaded where they are used, because a dataset of the chief's cannot be sent to a worker.
        dataset = self._load_examples(self.split)
        seed = _epoch_seed(self._settings.seed, tf.constant(epoch, tf.int64))
        first, end = first_step * self._part_size, self.steps * self._part_size
        if isinstance(self._examples, RecordExamples):
            examples = self._examples
            numbered = examples.stream(self._part_size, first, end, slice(0, self._part_size), seed)
        else:
            length, buffer_size = self._examples.length, self._examples.buffer_size
            dataset = dataset.dataset() if isinstance(dataset, Records) else dataset
            examples = Examples(dataset, "task.load_examples", None, length, buffer_size)
            numbered = examples.in_order(first, end, seed)
        own = numbered.shard(pipelines, pipeline).repeat()
        prepared = self._preparation.one_by_one(own, examples.length, tf.stack([seed, 0]))
        batches = prepared.batch(self.per_replica_batch_size, drop_remainder=True)
        if self._is_padded:
            cut = tf.autograph.experimental.do_not_convert(padding.cut)
            batches = batches.map(lambda *batch: cut(batch, *self._sequences_and_lengths))
        return batches.prefetch(tf.data.AUTOTUNE).with_options(input_options())


@tf.autograph.experimental.do_not_convert
def batch_of(stack: Any, index: tf.Tensor) -> Any:
    """Returns batch number `index` of a stack, on one replica."""
    with _where_stacks_are(tf.distribute.get_replica_context()):
        return tf.nest.map_structure(lambda part: tf.gather(part, index), stack)


def _where_stacks_are(context: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns the device of a replica's stack: that of a single replica is in the host's memory."""
    # A GPU would fetch all of it for each batch.
    return tf.device("CPU:0") if context.num_replicas_in_sync == 1 else contextlib.nullcontext()


def evaluation_seed(seed: int) -> tf.Tensor:
    """Returns the seed (int64, [2]) from which, with its place, that of an example is made in an evaluation."""
    return tf.stack([_epoch_seed(seed, tf.zeros([], tf.int64)), 0])


def _epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Returns a seed (int64, 0 to 2**31 - 1) that differs for neighbouring seeds and epochs in every bit."""
    pair = tf.stack([tf.constant(seed, tf.int64), epoch])
    return tf.random.stateless_uniform([], pair, maxval=2**31 - 1, dtype=tf.int64)


def per_replica_batch_size(size: int, replicas: int, flag: str = "--global-batch-size") -> int:
    """Returns one replica's share of a global batch, in examples. Raises BadInput if the shares would differ."""
    if rest := size % replicas:
        below = size - rest
        use = " or ".join(str(each) for each in (below, below + replicas) if each)
        raise BadInput(f"{flag} {size} cannot be shared equally by {replicas} replicas: use {use}")
    return size // replicas
