"""From a task's examples to full batches on every replica, the same for any number of replicas.

The order of the pipeline is what makes it so: examples -> shuffle by (seed, epoch) -> whole batches -> skip to the
position -> shard -> prepare -> batch per replica -> prefetch. The k-th global batch of an epoch holds the same
examples however many replicas and input pipelines share it, and whatever was skipped was never prepared.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from engine.errors import BadInput, first_line
from engine.parameter_server import is_asynchronous, per_worker

PREPARED_BATCHES = tf.data.AUTOTUNE


def per_replica_batch_size(global_batch_size: int, replicas: int) -> int:
    """Returns one replica's share of a global batch, in examples. Raises BadInput if the shares would differ."""
    if global_batch_size < replicas or global_batch_size % replicas:
        below = global_batch_size - global_batch_size % replicas
        use = " or ".join(str(size) for size in (below, below + replicas) if size)
        raise BadInput(
            f"--global-batch-size {global_batch_size} cannot be shared equally by {replicas} replicas: use {use}"
        )
    return global_batch_size // replicas


class Batches:
    """The batches of one split. Every batch is full and has three parts: (features, labels, weights).

    `weights` is float32 [batch]: the example's own weight, 1 if it has none, 0 for padding. In training the examples
    that fill no batch are left out, others each epoch; in evaluation, and in training with `keep_last_batch`, the last
    batch is padded with copies of weight 0, so that each example counts exactly once.

    Attributes:
        examples: the user's tf.data.Dataset of single examples.
        number_of_examples: how many it holds.
        steps: batches in one pass.
        left_out: examples that one pass leaves out.
        element_spec: what one replica receives, as tf.TensorSpec: static shapes [share, ...].
    """

    def __init__(
        self,
        split: str,
        *,
        load_examples: Callable[[str], tf.data.Dataset],
        prepare_example: Callable[..., Any],
        replicas: int,
        global_batch_size: int,
        seed: int,
        shuffle_buffer_size: int,
        keep_last_batch: bool = False,
        pipelines: int = 1,
    ) -> None:
        """Loads the split's examples and checks them. Raises BadInput, naming the hook, for what cannot be batched.

        `pipelines` is how many processes share a batch. If `load_examples` takes an `input_context`, it is called for
        each with a tf.distribute.InputContext, and returns that one's examples only.
        """
        self.split = split
        self.training = split == "train"
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle_buffer_size = shuffle_buffer_size
        self.share = per_replica_batch_size(global_batch_size, replicas)
        self.in_parts = pipelines > 1 and "input_context" in inspect.signature(load_examples).parameters
        self._parts = (
            [load_examples(split, input_context=_context(pipelines, number)) for number in range(pipelines)]
            if self.in_parts
            else [load_examples(split)]
        )
        self.examples = self._parts[0]
        of = f"task.load_examples({split!r})"
        names = [f"{of} for worker {number} of {pipelines}" if self.in_parts else of for number in range(pipelines)]
        self._lengths = [_checked_length(name, part) for name, part in zip(names, self._parts, strict=False)]
        self.number_of_examples = sum(self._lengths)
        self._load_examples = load_examples
        self._prepare_example = prepare_example
        self._options = {"training", "seed"} & set(inspect.signature(prepare_example).parameters)

        # Every process takes the same number of steps, whatever there is in its part.
        self._of_part = global_batch_size // len(self._parts)
        self.steps = min(self._lengths) // self._of_part
        if keep_last_batch or not self.training:
            self.steps = max(-(-length // self._of_part) for length in self._lengths)
        self.left_out = max(0, self.number_of_examples - self.steps * global_batch_size)
        if not self.steps:
            raise BadInput(
                f"--global-batch-size {global_batch_size} is larger than the {self.number_of_examples} examples of "
                f"task.load_examples({split!r}): use a smaller one, or --keep-last-batch"
            )
        try:
            batched = self._batched(epoch=0, first_step=0)
        except BadInput:
            raise
        except Exception as problem:
            raise BadInput(
                f"task.prepare_example failed on an example of {_short(self.examples.element_spec)}, as "
                f"task.load_examples({split!r}) returned it ({first_line(problem)}): examples come one by one, not in "
                "batches"
            ) from problem
        self.element_spec = batched.element_spec
        _check_static(split, self.element_spec)

    def distribute(self, strategy: tf.distribute.Strategy, *, epoch: int = 0, first_step: int = 0) -> Any:
        """Returns an iterator over the global batches of an epoch, from batch number `first_step` on.

        With parameter servers it is an endless one in training, of each worker's own batches, and in evaluation one
        for the chief alone.
        """
        if is_asynchronous(strategy):
            if self.training:
                return per_worker(strategy, functools.partial(self._endless, epoch, first_step))
            return iter(self._batched(epoch, first_step))
        return iter(
            strategy.distribute_datasets_from_function(
                lambda context: self._batched(epoch, first_step, context.num_input_pipelines, context.input_pipeline_id)
            )
        )

    def _batched(self, epoch: int, first_step: int, pipelines: int = 1, pipeline: int = 0) -> tf.data.Dataset:
        """Returns one input pipeline's batches, each one replica's share."""
        part = pipeline if self.in_parts else 0
        examples = self._numbered(epoch, first_step, part)
        if pipelines > 1 and not self.in_parts:
            # After the shuffle, so that a global batch holds the same examples for any number of input pipelines; and
            # as one piece of it, so that each replica has the same ones as in one process.
            piece = self.global_batch_size // pipelines
            examples = examples.filter(lambda position, _: position % self.global_batch_size // piece == pipeline)
        return self._prepared(examples, epoch, part)

    def _endless(self, epoch: int, first_step: int, pipelines: int, pipeline: tf.Tensor) -> tf.data.Dataset:
        """Returns batches of every so many-th example, again and again."""
        # Loaded where they are used, because a dataset of the chief's cannot be sent to a worker.
        examples = self._numbered(epoch, first_step, 0, self._load_examples(self.split))
        return self._prepared(examples.shard(pipelines, pipeline).repeat(), epoch, 0)

    def _numbered(
        self, epoch: int, first_step: int, part: int, examples: tf.data.Dataset | None = None
    ) -> tf.data.Dataset:
        """Returns the whole batches of one part from `first_step` on, as (place in the epoch, example)."""
        length, total = self._lengths[part], self.steps * self._of_part
        examples = first = self._parts[part] if examples is None else examples
        if self.training:
            buffer_size = min(length, self.shuffle_buffer_size)
            seed = _epoch_seed(self.seed, epoch)
            examples = examples.shuffle(buffer_size, seed=seed, reshuffle_each_iteration=False)
        if total > length:
            examples = examples.concatenate(first.take(1).repeat(total - length))
        skipped = first_step * self._of_part
        return examples.take(total).skip(skipped).enumerate(start=skipped)

    def _prepared(self, examples: tf.data.Dataset, epoch: int, part: int) -> tf.data.Dataset:
        """Returns the batches of numbered examples."""
        seed = _epoch_seed(self.seed, epoch)

        def prepare(position, example):
            features, labels, *own_weight = example
            # The seed is made from the place in the epoch: it is the same after a resume and for any replicas.
            options = {
                "training": self.training,
                "seed": tf.random.experimental.stateless_fold_in([seed, part], position),
            }
            prepared = self._prepare_example(features, labels, **{name: options[name] for name in self._options})
            if not isinstance(prepared, tuple) or len(prepared) != 2:
                raise BadInput(f"task.prepare_example returned {prepared!r}: return (features, labels)")
            features, labels = prepared
            weight = tf.cast(own_weight[0], tf.float32) if own_weight else tf.constant(1.0)
            return features, labels, tf.where(position < self._lengths[part], weight, 0.0)

        prepared = examples.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        batches = prepared.batch(self.share, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return batches.with_options(options)


def load_splits(
    splits: Sequence[str], task: ModuleType, settings: Any, replicas: int, pipelines: int = 1
) -> dict[str, Batches]:
    """Returns the batches of every split. Raises BadInput if hooks, settings and replicas do not go together.

    Args:
        splits: names for task.load_examples, "train" among them.
        task: what has load_examples and prepare_example.
        settings: what has global_batch_size, micro_batches, seed, shuffle_buffer_size and keep_last_batch.
        replicas: how many share a global batch.
        pipelines: how many processes they are in.
    """
    batches = {
        split: Batches(
            split,
            load_examples=task.load_examples,
            prepare_example=task.prepare_example,
            replicas=replicas,
            global_batch_size=settings.global_batch_size,
            seed=settings.seed,
            shuffle_buffer_size=settings.shuffle_buffer_size,
            keep_last_batch=settings.keep_last_batch,
            pipelines=pipelines,
        )
        for split in splits
    }
    check_same_structure(batches)
    _check_micro_batches(settings.micro_batches, batches["train"].share)
    return batches


def _context(pipelines: int, number: int) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(num_input_pipelines=pipelines, input_pipeline_id=number)


def _epoch_seed(seed: int, epoch: int) -> int:
    """Returns a seed (0 to 2**31 - 1) that differs for neighbouring seeds and epochs in every bit."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0] >> 1)


def _checked_length(hook: str, examples: tf.data.Dataset) -> int:
    """Returns the number of examples. Raises BadInput if the hook returned anything but a finite set of examples."""
    if not isinstance(examples, tf.data.Dataset):
        raise BadInput(f"{hook} returned a {type(examples).__name__}: return a tf.data.Dataset of single examples")
    spec = examples.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise BadInput(
            f"{hook} returned elements of {_short(spec)}: each has to be a tuple (features, labels) or "
            "(features, labels, weight)"
        )
    if len(spec) == 3 and (not isinstance(spec[2], tf.TensorSpec) or spec[2].shape.rank != 0):
        raise BadInput(f"{hook} returned weights of {_short(spec[2])}: each example has one number as its weight")
    length = int(examples.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise BadInput(f"{hook} returned endless examples: leave out repeat(); the epochs are counted for you")
    if length == tf.data.UNKNOWN_CARDINALITY:
        raise BadInput(
            f"{hook} returned examples of unknown number: end it with "
            ".apply(tf.data.experimental.assert_cardinality(<number of examples>))"
        )
    if length == 0:
        raise BadInput(f"{hook} returned no examples: each needs at least one")
    return length


def check_same_structure(splits: dict[str, Batches]) -> None:
    """Raises BadInput if an example of one split has another structure, shape or dtype than one of "train"."""
    for name, batches in splits.items():
        expected, found = (b.element_spec[:2] for b in (splits["train"], batches))
        if expected != found:
            raise BadInput(
                f"task.load_examples({name!r}) and task.prepare_example gave batches of {_short(found)}, but those of "
                f"'train' are {_short(expected)}: every split needs the same structure, shapes and dtypes"
            )


def _check_micro_batches(micro_batches: int, share: int) -> None:
    """Raises BadInput unless a replica's share can be computed in `micro_batches` equal parts."""
    if share % micro_batches:
        divisors = [str(number) for number in range(1, share + 1) if share % number == 0]
        raise BadInput(
            f"--micro-batches {micro_batches} does not divide the {share} examples of a replica's share: "
            f"use one of {', '.join(divisors)}"
        )


def _check_static(split: str, spec: Any) -> None:
    if not all(leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec)):
        raise BadInput(
            f"task.prepare_example returned for {split!r} batches of {_short(spec)}: every size has to be known and "
            "equal for all examples; resize or pad, then tf.ensure_shape"
        )


def _short(spec: Any) -> str:
    """Returns an element spec as one short line: shapes and dtypes in their structure."""

    def leaf_text(leaf: Any) -> str:
        return f"{leaf.dtype.name}{list(leaf.shape)}" if isinstance(leaf, tf.TensorSpec) else type(leaf).__name__

    return str(tf.nest.map_structure(leaf_text, spec)).replace("'", "")
