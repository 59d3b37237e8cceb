"""From a task's examples to full batches on every replica, the same for any number of replicas.

The order of the pipeline is what makes it so: examples -> shuffle by (seed, epoch) -> whole batches -> skip to the
position -> share -> prepare -> several batches at a time -> prefetch. The k-th global batch of an epoch holds the same
examples however many replicas and input pipelines share it, and of what was skipped at most a few small batches, which
are prepared together with the first one, are prepared at all.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from engine.data.examples import Examples, as_text, bytes_of, input_options
from engine.data.feed import Feed, empty_stack, on_replicas, stack_sizes, stacked
from engine.data.preparation import Preparation
from engine.errors import BadInput
from engine.mistakes import first_line
from engine.tracing import Traced

# Small batches are prepared so many in one call, which costs more than the work itself does.
BATCHES_AT_ONCE = 16
BYTES_AT_ONCE = 2**20
# How many are ready before they are asked for.
STACKS_AHEAD = 2


def per_replica_batch_size(global_batch_size: int, replicas: int) -> int:
    """Returns one replica's share of a global batch, in examples. Raises BadInput if the shares would differ."""
    if global_batch_size < replicas or global_batch_size % replicas:
        below = global_batch_size - global_batch_size % replicas
        use = " or ".join(str(size) for size in (below, below + replicas) if size)
        raise BadInput(
            f"--global-batch-size {global_batch_size} cannot be shared equally by {replicas} replicas: use {use}"
        )
    return global_batch_size // replicas


def is_by_files(load_examples: Callable[..., tf.data.Dataset]) -> bool:
    """Returns whether each of several workers loads examples of its own, by an `input_context`."""
    return "input_context" in inspect.signature(load_examples).parameters


class Batches:
    """The batches of one split. Every batch is full and has three parts: (features, labels, weights).

    `weights` is float32 [batch]: the example's own weight, 1 if it has none, 0 for padding. In training the examples
    that fill no batch are left out, others each epoch; in evaluation, and in training with `keep_last_batch`, the last
    batch is padded with copies of weight 0, so that each example counts exactly once.

    Attributes:
        number_of_examples: how many examples it has.
        steps: batches in one pass.
        left_out: examples that one pass leaves out.
        by_files: whether each of several workers loads examples of its own.
        element_spec: what one replica receives, as tf.TensorSpec: static shapes [share, ...].
    """

    def __init__(
        self,
        split: str,
        *,
        load_examples: Callable[[str], tf.data.Dataset],
        preparation: Preparation,
        strategy: tf.distribute.Strategy,
        global_batch_size: int,
        seed: int,
        shuffle_buffer_size: int,
        keep_last_batch: bool = False,
        pipelines: int = 1,
        pipeline: int = 0,
    ) -> None:
        """Loads the split's examples and checks them. Raises BadInput, naming the hook, for what cannot be batched.

        `pipelines` processes share a batch, and this one is number `pipeline`. If `load_examples` takes an
        `input_context`, it is called for each with a tf.distribute.InputContext, and returns that one's examples only.
        """
        replicas = strategy.num_replicas_in_sync
        self._strategy = strategy
        self._pipelines, self._pipeline = pipelines, pipeline
        self.split = split
        self.training = split == "train"
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle_buffer_size = shuffle_buffer_size
        self.share = per_replica_batch_size(global_batch_size, replicas)
        self.in_parts = pipelines > 1 and is_by_files(load_examples)
        of = f"task.load_examples({split!r})"
        if self.in_parts:
            self._parts = [
                Examples(
                    load_examples(split, input_context=_context(pipelines, number)),
                    f"{of} for worker {number} of {pipelines}",
                )
                for number in range(pipelines)
            ]
        else:
            self._parts = [Examples(load_examples(split), of)]
        lengths = [part.length for part in self._parts]
        self.number_of_examples = sum(lengths)
        self._load_examples = load_examples
        self._preparation = preparation

        # Every process takes the same number of steps, whatever there is in its part.
        self._of_part = global_batch_size // len(self._parts)
        self.steps = min(lengths) // self._of_part
        if keep_last_batch or not self.training:
            self.steps = max(-(-length // self._of_part) for length in lengths)
        self.left_out = max(0, self.number_of_examples - self.steps * global_batch_size)
        if not self.steps:
            raise BadInput(
                f"--global-batch-size {global_batch_size} is larger than the {self.number_of_examples} examples of "
                f"task.load_examples({split!r}): use a smaller one, or --keep-last-batch"
            )
        try:
            batch_spec = self._preparation.batch_spec(self._parts[0])
        except BadInput:
            raise
        except Exception as problem:
            raise BadInput(
                f"task.prepare_example failed on an example of {as_text(self._parts[0].element_spec)}, as "
                f"task.load_examples({split!r}) returned it ({first_line(problem)}): examples come one by one, not in "
                "batches"
            ) from problem
        _check_static(split, batch_spec)
        self.element_spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([self.share, *spec.shape[1:]], spec.dtype), batch_spec
        )
        self.by_files = is_by_files(load_examples)
        self._feed: Feed | None = None
        self._bytes_of_batch = replicas * bytes_of(self.element_spec)
        whole = self._parts[0]
        read = global_batch_size * bytes_of(whole.element_spec) if whole.have_one_shape else 0
        self._prepared_at_once = max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // max(read, self._bytes_of_batch)))

    @property
    def examples_of_pass(self) -> int:
        """Examples that one pass is over."""
        return self.number_of_examples - self.left_out

    @property
    def preparation(self) -> Traced:
        """What task.prepare_example does."""
        return self._preparation.traced

    def read(self) -> None:
        """Reads the examples that this process keeps in memory. Raises BadInput if they cannot be read."""
        self._parts[self._part].keep(self.shuffle_buffer_size if self.training else None)

    def feed(self, epoch: int = 0, first_step: int = 0) -> Feed:
        """Returns a Feed of the global batches of an epoch, from batch number `first_step` on, and of later epochs.

        In evaluation all epochs have the same batches.
        """
        if self._feed is None or not self._feed.is_at(epoch if self.training else None, first_step):
            # Making one takes a good part of a second, so it goes on from epoch to epoch.
            self._feed = self._new_feed(epoch, first_step)
        return self._feed

    def compiled(self, steps: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Compiles a function of (stack, first, count): stacks of any size share one graph."""
        return tf.function(steps, input_signature=self._signature)

    def graph(self, compiled_steps: Callable[..., tf.Tensor]) -> tf.Graph:
        """Returns the graph of what `compiled` returned."""
        return compiled_steps.get_concrete_function(*self._signature).graph

    @tf.autograph.experimental.do_not_convert
    def pick(self, stack: Any, index: tf.Tensor) -> Any:
        """Returns batch number `index` of a stack."""
        return self._strategy.run(batch_of, args=(stack, index))

    def one_by_one(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """Yields the global batches of an epoch one by one, to look at; training takes them from a Feed."""
        pick = tf.function(self.pick, autograph=False)
        for stack, first, count in self._new_feed(epoch, first_step).take(self.steps - first_step):
            yield from (pick(stack, tf.constant(first + index)) for index in range(count))

    @property
    def _part(self) -> int:
        return self._pipeline if self.in_parts else 0

    @functools.cached_property
    def _signature(self) -> tuple:
        stack = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.element_spec)
        if self._strategy.num_replicas_in_sync > 1:
            empty = tf.data.Dataset.range(1).map(functools.partial(empty_stack, self.element_spec))
            stack = self._strategy.distribute_datasets_from_function(lambda _: empty).element_spec
        scalar = tf.TensorSpec((), tf.int32)
        return stack, scalar, scalar

    def _new_feed(self, epoch: int, first_step: int) -> Feed:
        stacks = on_replicas(self._strategy, iter(self._stacks(epoch, first_step)))
        sizes = stack_sizes(self.steps, first_step, self._bytes_of_batch)
        return Feed(stacks, sizes, epoch, first_step, refusal=functools.partial(self._refusal, self._parts[self._part]))

    def _refusal(self, examples: Examples, problem: tf.errors.OpError, epoch: int, step: int) -> BadInput:
        """Returns what to raise if some of the examples in the batches from `step` of an epoch on cannot be had."""
        numbered = examples.in_order(0, examples.length, seed=None, shuffle_buffer_size=1)
        prepared = self._preparation.one_by_one(numbered, examples.length, tf.zeros([2], tf.int64))
        return examples.refusal(problem, prepared, f"in the batches from step {step + 1} of epoch {epoch + 1} on")

    def _stacks(self, epoch: int, first_step: int) -> tf.data.Dataset:
        """Returns this process's stacks of an epoch and of later ones: tuples of one for each replica."""
        self.read()
        replicas = self.global_batch_size // self._pipelines // self.share
        sizes_of_first, sizes_of_others = (
            tf.constant(sizes, tf.int64) for sizes in stack_sizes(self.steps, first_step, self._bytes_of_batch)
        )

        @tf.autograph.experimental.do_not_convert
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            is_first = number == epoch
            first = tf.where(is_first, tf.constant(first_step, tf.int64), 0)
            sizes = tf.cond(is_first, lambda: sizes_of_first, lambda: sizes_of_others)
            prepared = self._prepared(number, first)
            return stacked(prepared, sizes, replicas, self.share)

        # Endless, so that the next epoch's first batches are prepared while this one is validated.
        endless = tf.data.Dataset.range(epoch, tf.int64.max).flat_map(one_pass)
        return endless.prefetch(STACKS_AHEAD).with_options(input_options())

    def _prepared(self, epoch: tf.Tensor, first_step: tf.Tensor) -> tf.data.Dataset:
        """Returns this process's pieces of the global batches of an epoch, some of them in each element."""
        examples = self._parts[self._part]
        piece = self.global_batch_size // self._pipelines
        # In evaluation every epoch is the same.
        seed = _epoch_seed(self.seed, epoch if self.training else tf.zeros_like(epoch))
        order = {"seed": seed if self.training else None, "shuffle_buffer_size": self.shuffle_buffer_size}
        places = (first_step * self._of_part, self.steps * self._of_part)
        prepared = {"length": examples.length, "seed": tf.stack([seed, self._part])}
        # A piece of each batch, after the shuffle: so a batch holds the same examples for any number of pipelines, and
        # each replica the same ones as in one process.
        if examples.have_one_shape:
            first = 0 if self.in_parts else self._pipeline * piece
            picked = {"share": slice(first, first + piece), **order}
            if self._preparation.is_of_batches:
                prepare, at_once = self._preparation.of_batch(**prepared), self._prepared_at_once
                return examples.batches(prepare, self._of_part, *places, at_once=at_once, **picked)
            numbered = examples.batches(lambda *batch: batch, self._of_part, *places, at_once=1, **picked).unbatch()
        else:
            numbered = examples.in_order(*places, **order)
            if piece < self._of_part:
                numbered = numbered.filter(lambda place, _: place % self._of_part // piece == self._pipeline)
        return self._preparation.one_by_one(numbered, **prepared).batch(piece, drop_remainder=True)

    def endless(self, epoch: int, first_step: int, pipelines: int, pipeline: tf.Tensor) -> tf.data.Dataset:
        """Returns batches of every `pipelines`-th example, again and again, for a process that takes its own steps."""
        # Loaded where they are used, because a dataset of the chief's cannot be sent to a worker.
        examples = Examples(self._load_examples(self.split), "task.load_examples", self._parts[0].length)
        places = (first_step * self.global_batch_size, self.steps * self.global_batch_size)
        seed = _epoch_seed(self.seed, tf.constant(epoch, tf.int64))
        numbered = examples.in_order(*places, seed=seed, shuffle_buffer_size=self.shuffle_buffer_size)
        own = numbered.shard(pipelines, pipeline).repeat()
        prepared = self._preparation.one_by_one(own, examples.length, tf.stack([seed, 0]))
        return prepared.batch(self.share, drop_remainder=True).prefetch(tf.data.AUTOTUNE).with_options(input_options())


@tf.autograph.experimental.do_not_convert
def batch_of(stack: Any, index: tf.Tensor) -> Any:
    """Returns batch number `index` of a stack, on one replica."""
    # That of one replica is in the host's memory: a GPU would fetch all of it for each batch.
    one = tf.distribute.get_replica_context().num_replicas_in_sync == 1
    with tf.device("CPU:0") if one else contextlib.nullcontext():
        return tf.nest.map_structure(lambda part: tf.gather(part, index), stack)


def load_splits(
    splits: Sequence[str],
    task: ModuleType,
    settings: Any,
    strategy: tf.distribute.Strategy,
    pipelines: int = 1,
    pipeline: int = 0,
) -> dict[str, Batches]:
    """Returns the batches of every split. Raises BadInput if hooks, settings and replicas do not go together.

    Args:
        splits: names for task.load_examples, "train" among them.
        task: what has load_examples and prepare_example.
        settings: what has global_batch_size, micro_batches, seed, shuffle_buffer_size and keep_last_batch.
        strategy: its replicas share a global batch.
        pipelines: how many processes they are in.
        pipeline: the number of this one.
    """
    evaluating = Preparation(task.prepare_example, training=False)
    training = Preparation(task.prepare_example, training=True) if evaluating.depends_on_training else evaluating
    batches = {
        split: Batches(
            split,
            load_examples=task.load_examples,
            preparation=training if split == "train" else evaluating,
            strategy=strategy,
            global_batch_size=settings.global_batch_size,
            seed=settings.seed,
            shuffle_buffer_size=settings.shuffle_buffer_size,
            keep_last_batch=settings.keep_last_batch,
            pipelines=pipelines,
            pipeline=pipeline,
        )
        for split in splits
    }
    check_same_structure(batches)
    _check_micro_batches(settings.micro_batches, batches["train"].share)
    return batches


def _context(pipelines: int, number: int) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(num_input_pipelines=pipelines, input_pipeline_id=number)


def _epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Returns a seed (int64, 0 to 2**31 - 1) that differs for neighbouring seeds and epochs in every bit."""
    pair = tf.stack([tf.constant(seed, tf.int64), epoch])
    return tf.random.stateless_uniform([], pair, maxval=2**31 - 1, dtype=tf.int64)


def check_same_structure(splits: dict[str, Batches]) -> None:
    """Raises BadInput if an example of one split has another structure, shape or dtype than one of "train"."""
    for name, batches in splits.items():
        expected, found = (b.element_spec[:2] for b in (splits["train"], batches))
        if expected != found:
            raise BadInput(
                f"task.load_examples({name!r}) and task.prepare_example gave batches of {as_text(found)}, but those of "
                f"'train' are {as_text(expected)}: every split needs the same structure, shapes and dtypes"
            )


def _check_micro_batches(micro_batches: int, share: int) -> None:
    """Raises BadInput unless a replica's share can be computed in `micro_batches` equal parts."""
    if share % micro_batches:
        divisors = [str(number) for number in range(1, share + 1) if share % number == 0]
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the {share} examples of a replica's share: "
            f"use one of {', '.join(divisors)}"
        )


def _check_static(split: str, batch_spec: Any) -> None:
    def of_one(spec: Any) -> Any:
        return tf.TensorSpec(spec.shape[1:], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec

    example = tf.nest.map_structure(of_one, batch_spec[:2])
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(example)):
        raise BadInput(
            f"task.prepare_example returned for {split!r} {as_text(example)}: each has to be a tensor, and every size "
            "known and equal for all examples; resize or pad, then tf.ensure_shape"
        )
