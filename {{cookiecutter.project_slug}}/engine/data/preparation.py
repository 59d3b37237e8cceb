"""Calls task.prepare_example, for a complete batch in one go where possible, else for one example at a time.

With --pad-to, a prepared example is padded with zeros to the largest length, so that nothing else of the input changes,
and its own length goes beside it. When a batch is taken out of its stack, on the replicas, it is cut to the smallest
listed length that fits the longest sequence of the global batch, so that the results are the same for any number of
replicas.
"""

import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, is_static, unbatched
from engine.errors import BadInput, first_line, where_raised
from engine.tracing import Traced, converted, differing_value


@dataclasses.dataclass(frozen=True)
class Padding:
    """How examples were padded."""

    lengths: Sequence[int]  # The lengths that a batch may have, in increasing order.
    sequences: Sequence[bool]  # Whether each tensor of the features and labels is a sequence.

    def _change(self, parts: Any, change: Callable[[Any], Any]) -> Any:
        """Returns the features, or features and labels, with all sequences in them changed."""
        leaves = zip(tf.nest.flatten(parts), self.sequences, strict=False)
        return tf.nest.pack_sequence_as(parts, [change(leaf) if is_sequence else leaf for leaf, is_sequence in leaves])

    def pad(self, example: Any) -> Any:
        """Returns (features, labels, sample_weight, length), with sequences of the largest length.

        `length` (int32, scalar) is that of the longest sequence.
        """
        largest, lengths = max(self.lengths), []
        self._change(example[:2], lambda leaf: lengths.append(tf.shape(leaf)[0]))
        length = tf.reduce_max(lengths)
        message = (
            f"a sequence is longer than {largest}, the largest --pad-to: cut it, or add a larger one; its length is"
        )
        with tf.control_dependencies([tf.debugging.Assert(length <= largest, [message, length])]):
            length = tf.identity(length)

        def padded(leaf: tf.Tensor) -> tf.Tensor:
            rest = leaf.shape[1:]
            # tf.pad does not support strings.
            zeros = tf.zeros([tf.maximum(length, largest) - tf.shape(leaf)[0], *rest], leaf.dtype)
            return tf.ensure_shape(tf.concat([leaf, zeros], axis=0), [largest, *rest])

        return *self._change(example[:2], padded), example[2], length

    def cut(self, batch: Any, context: tf.distribute.ReplicaContext | None = None) -> Any:
        """Returns (features, labels, sample_weights) of a replica's padded batch, cut to the length that it needs.

        In a `context`, all replicas cut to the same length. A padded batch has the examples' lengths as its last part.
        """
        *_, sample_weights, lengths_of_examples = batch
        # An example of weight 0 may be padding, of which there is more in larger batches.
        longest = tf.reduce_max(tf.where(sample_weights == 0, 0, lengths_of_examples))
        lengths, count = tf.constant(self.lengths), len(self.lengths)
        number = tf.searchsorted(lengths, longest[tf.newaxis])[0]
        if context and context.num_replicas_in_sync > 1:
            counts = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.one_hot(number, count))
            number = tf.reduce_max(tf.where(counts > 0, tf.range(count), 0))
        length = tf.gather(lengths, number)
        return *self._change(batch[:2], lambda leaf: leaf[:, :length]), sample_weights

    def of_any_length(self, features: Any) -> Any:
        """Returns the element spec of an example's features, with sequences of unknown length."""
        return self._change(features, lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """How examples of one element spec are prepared.

    Both functions get places (int64), examples, the number of examples (int64, scalar), behind which padding starts,
    and a seed (int64, [2]), from which, with its place, each example's own seed is made. They return (features, labels,
    sample_weights); with --pad-to, also the lengths of the examples.
    """

    spec: Any  # It describes one prepared example.
    one: Callable[..., Any]  # It prepares one example.
    batch: Callable[..., Any] | None  # It prepares examples ([n, ...]) in one go; None where that is impossible.
    padding: Padding | None  # None where no sequences are padded.
    traced: Traced | None  # What the hook does; None if it runs in Python, with --eager.

    def features(self, places: tf.Tensor, examples: Any, seed: tf.Tensor) -> Any:
        """Returns the prepared features of examples ([n, ...]), in the graph that is being built.

        Operations that only the labels need do not run, unless they have an effect, as tf.debugging.Assert has.
        """
        length = tf.constant(tf.int64.max, tf.int64)
        if self.batch:
            return self.batch(places, examples, length, seed)[0]
        one = tf.autograph.experimental.do_not_convert(lambda element: self.one(*element, length, seed)[0])
        return tf.map_fn(one, (places, examples), fn_output_signature=self.spec[0])


class Preparation:
    """Prepares examples, and gives each a sample weight: its own or 1, and 0 to the padding behind the last one."""

    def __init__(
        self, prepare_example: Callable[..., Any], *, training: bool, pad_to: Sequence[int] = (), eager: bool = False
    ) -> None:
        """With `pad_to`, sequences are padded to these lengths; else, with `eager`, the hook runs in Python."""
        parameters = inspect.signature(prepare_example).parameters
        options = {"training": training} if "training" in parameters else {}
        self._prepare_example = functools.partial(converted(prepare_example), **options)
        self._pad_to, self.is_eager = pad_to, eager and not pad_to
        self._takes_seed = "seed" in parameters
        of_example = [parameter for name, parameter in parameters.items() if name not in ("training", "seed")]
        self._takes_two = len(of_example) == 2 and inspect.Parameter.VAR_POSITIONAL not in {p.kind for p in of_example}
        self._prepared: dict[str, Prepared] = {}  # By the element spec of the examples, which datasets share.

    def trace(
        self, example_spec: Any, hook: str = "task.load_examples", first_example: Callable[[], Any] | None = None
    ) -> Prepared:
        """Finds out how examples of an element spec can be prepared. Raises BadInput if they cannot, or not batched.

        `hook` is the call that loads the examples, for messages. With `eager`, the hook runs on the `first_example`.
        """
        if (key := str(example_spec)) not in self._prepared:
            try:
                self._prepared[key] = self._trace(example_spec, first_example)
            except BadInput:
                raise
            except Exception as problem:
                text = f"{where_raised(problem)}: {first_line(problem)}"
                if isinstance(problem, TypeError | ValueError | LookupError):  # As examples of another structure cause.
                    text += (
                        " (task.prepare_example gets examples one by one, the parts of a tuple as arguments: "
                        f"{as_text(example_spec)}, as {hook} returned them)"
                    )
                raise BadInput(text) from problem
        self._check_batches(self._prepared[key], hook)
        return self._prepared[key]

    def _trace(self, example_spec: Any, first_example: Callable[[], Any] | None) -> Prepared:
        zero, seed = tf.constant(0, tf.int64), tf.zeros([2], tf.int64)
        if self.is_eager and first_example:
            example = self._prepare_one(zero, first_example(), zero, seed)
            spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, example)
            return Prepared(spec, _in_python(self._prepare_one, spec), batch=None, padding=None, traced=None)
        place = tf.TensorSpec([], tf.int64)
        numbered = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(place, example_spec))  # Not read.

        def spec_of(function: Callable[..., Any], dataset: tf.data.Dataset) -> Any:
            call = tf.autograph.experimental.do_not_convert(lambda *element: function(*element, zero, seed))
            return dataset.map(call).element_spec

        one = tf.function(self._prepare_one, autograph=False)
        spec, signature = spec_of(one, numbered), (place, example_spec, place, tf.TensorSpec([2], tf.int64))
        traced = Traced(graph := one.get_concrete_function(*signature).graph)
        # Only another trace shows a clock, or a generator that is the hook's own.
        with _attempt():
            again = tf.function(self._prepare_one, autograph=False).get_concrete_function(*signature).graph
            traced.drawn_once[:] = differing_value(graph, again) or traced.drawn_once
        if self._pad_to and any(sequences := are_sequences(spec[:2])):
            padding = Padding(self._pad_to, sequences)

            # Errors of its operations contain its name, by which examples.py finds out where they are from.
            def _prepare_padded(*arguments: Any) -> Any:
                return padding.pad(self._prepare_one(*arguments))

            one = tf.function(_prepare_padded, autograph=False)
            return Prepared(spec_of(one, numbered), one, None, padding, traced)
        # A seed is different for each example, and operations that draw take only one.
        if is_static(example_spec) and not self._takes_seed:
            # Any exception may mean that an operation cannot be vectorized.
            with _attempt():
                batch = tf.function(self._prepare_batch, autograph=False)
                if unbatched(spec_of(batch, numbered.batch(1))) == spec:
                    return Prepared(spec, one, batch, None, traced)
        return Prepared(spec, one, None, None, traced)

    def _check_batches(self, prepared: Prepared, hook: str) -> None:
        """Raises BadInput unless prepared examples are tensors of static shapes, or --pad-to has made them so."""
        example = prepared.spec[:2]
        returned = f"task.prepare_example returned {as_text(example)} for {hook}"
        if not is_static(example):
            unknown = [leaf for leaf in tf.nest.flatten(example) if not is_static(leaf)]
            or_pad = ", or use --pad-to 64 128 256" if all(are_sequences(unknown)) else ""
            raise BadInput(
                f"{returned}: each must be a tensor of static shape, the same for all examples; resize or pad, then "
                f"tf.ensure_shape{or_pad}; if task.load_examples returns batches, unbatch() them"
            )
        if self._pad_to and not prepared.padding:
            raise BadInput(
                f"--pad-to {' '.join(map(str, self._pad_to))}: {returned}, where no tensor's first size differs: "
                "remove --pad-to, or do not pad in prepare_example"
            )

    def _prepare_batch(self, places: tf.Tensor, examples: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        # Without fallback, because an operation that cannot be vectorized would run for one example after the other.
        def prepare(element: tuple[tf.Tensor, Any]) -> Any:
            return self._prepare_one(*element, length, seed)

        return tf.vectorized_map(prepare, (places, examples), fallback_to_while_loop=False)

    def _prepare_one(self, place: tf.Tensor, example: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        # Made from the place in the pass: the same after a resume and for any replicas.
        options = {"seed": tf.random.experimental.stateless_fold_in(seed, place)} if self._takes_seed else {}
        arguments, weight = self._arguments(example)
        prepared = self._prepare_example(*arguments, **options)
        if not isinstance(prepared, tuple) or len(prepared) not in (2, 3):
            raise BadInput(
                f"task.prepare_example returned {prepared!r}: return (features, labels) or (features, labels, weight)"
            )
        # To tf.data a list of numbers is one tensor.
        features, labels, *weights = (
            tf.convert_to_tensor(part) if isinstance(part, list) else part for part in prepared
        )
        weight = weights[0] if weights else 1.0 if weight is None else weight
        if isinstance(weight, dict | tuple) or (weight := tf.cast(weight, tf.float32)).shape.rank != 0:
            kind = getattr(weight, "shape", f"a {type(weight).__name__}")
            raise BadInput(
                f"a hook returned sample weights of {kind}: each must be one number; return weights by output as a "
                "part of the labels (docs/from_keras_fit.md)"
            )
        if self.is_eager:
            features, labels = tf.nest.map_structure(tf.convert_to_tensor, (features, labels))
        return features, labels, tf.where(place < length, weight, 0.0)

    def _arguments(self, example: Any) -> tuple[tuple, Any]:
        """Returns an example's arguments for task.prepare_example, and the sample weight that follows them, or None."""
        parts = example if isinstance(example, tuple) else (example,)
        return (parts[:2], parts[2]) if len(parts) == 3 and self._takes_two else (parts, None)


def evaluation_seed(seed: int, dataset: str) -> tf.Tensor:
    """Returns the seed of every evaluation of a dataset, in place of a pass's; datasets have different ones."""
    return pass_seed(seed, tf.constant(-1 - zlib.crc32(dataset.encode()), tf.int64))


def pass_seed(seed: int, number: tf.Tensor) -> tf.Tensor:
    """Returns a seed (int64, 0 to 2**31 - 1) that differs for neighbouring seeds and passes in every bit."""
    pair = tf.stack([tf.constant(seed, tf.int64), number])
    return tf.random.stateless_uniform([], pair, maxval=2**31 - 1, dtype=tf.int64)


def _in_python(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """Returns a function for a graph that runs another one in Python, whose results have an element spec."""

    def call(*arguments: Any) -> Any:
        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            return tf.nest.flatten(function(*tf.nest.pack_sequence_as(arguments, tensors)))

        results = tf.py_function(run, tf.nest.flatten(arguments), [leaf.dtype for leaf in tf.nest.flatten(spec)])
        return tf.nest.map_structure(
            lambda result, leaf: tf.ensure_shape(result, leaf.shape), tf.nest.pack_sequence_as(spec, results), spec
        )

    return call


@contextlib.contextmanager
def _attempt() -> Iterator[None]:
    """Suppresses an exception, and what TensorFlow logs about it."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    with contextlib.suppress(Exception):
        yield
    logger.setLevel(level)


def of_largest_length(spec: Any, lengths: Sequence[int]) -> Any:
    """Returns an element spec of batches, [n, ...], with the largest length where Padding.of_any_length removed it."""

    def with_length(leaf: tf.TensorSpec) -> tf.TensorSpec:
        shape = [max(lengths) if size is None and axis == 1 else size for axis, size in enumerate(leaf.shape)]
        return tf.TensorSpec(shape, leaf.dtype)

    return tf.nest.map_structure(with_length, spec)


def are_sequences(spec: Any) -> list[bool]:
    """Returns which tensors of prepared features and labels are sequences: only their first size is unknown."""
    return [
        is_static(unbatched(leaf)) and bool(leaf.shape.rank) and leaf.shape[0] is None for leaf in tf.nest.flatten(spec)
    ]
