"""Calls task.prepare_example, for a complete batch in one go where possible, else for one example at a time."""

import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, batched, is_static, unbatched
from engine.data.padding import Padding, are_sequences, padded
from engine.data.pipelines import PARALLEL_CALLS
from engine.errors import BadInput
from engine.messages import first_line, where_raised
from engine.tracing import Traced, converted, differing_value, look_at

# What the hook may raise because it expects other examples.
OF_OTHER_EXAMPLES = (AttributeError, LookupError, TypeError, ValueError, tf.errors.InvalidArgumentError)
ONE_WEIGHT = "each must be one number; return weights by output as a part of the labels (docs/from_keras_fit.md)"


@dataclasses.dataclass(frozen=True)
class PreparedSpec:
    """What task.prepare_example makes of examples of one element spec."""

    batch_spec: Any  # (features, labels, sample_weights), [None, ...]; with padding, also the examples' lengths.
    takes_batches: bool  # Whether complete batches can be prepared in one go.
    padding: Padding | None  # None where no sequences are padded.
    traced: Traced | None  # What the hook does; None if it runs in Python, with --eager.


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
        of_example = [each for name, each in parameters.items() if name not in ("training", "seed")]
        self._takes_two = len(of_example) == 2 and not any(each.kind == each.VAR_POSITIONAL for each in of_example)
        # tf.function traces each of them once for all passes and datasets.
        self._one = tf.function(self._prepare_one, autograph=False)
        self._batch = tf.function(self._prepare_batch, autograph=False)
        self._newest: tuple[Padding | None, Traced | None] = None, None  # What the newest trace found.
        self._prepared: dict[str, PreparedSpec] = {}  # By the element spec of the examples, which datasets share.

    def trace(
        self, example_spec: Any, hook: str = "task.load_examples", first_example: Callable[[], Any] | None = None
    ) -> PreparedSpec:
        """Finds out how examples of an element spec can be prepared. Raises BadInput if they cannot, or not batched.

        `hook` is the call that loads the examples, for messages. With `eager`, the hook runs on the `first_example`.
        """
        if (key := str(example_spec)) not in self._prepared:
            _, weight = self._arguments(example_spec)
            if weight is not None and (not isinstance(weight, tf.TensorSpec) or weight.shape.rank != 0):
                raise BadInput(f"{hook} returned sample weights of {as_text(weight)}: {ONE_WEIGHT}")
            try:
                self._prepared[key] = prepared = self._trace(example_spec, first_example)
                if prepared.traced and (found := self._differing_value(example_spec)):
                    prepared.traced.drawn_once[:] = found
            except BadInput:
                raise
            except Exception as problem:
                text = f"{where_raised(problem)}: {first_line(problem)}"
                if isinstance(problem, OF_OTHER_EXAMPLES):
                    text += " (task.prepare_example gets examples one by one, the parts of a tuple as arguments: "
                    text += f"{as_text(example_spec)}, as {hook} returned them)"
                raise BadInput(text) from problem
        self._check_batches(self._prepared[key], hook)
        return self._prepared[key]

    def _trace(self, example_spec: Any, first_example: Callable[[], Any] | None) -> PreparedSpec:
        seed = tf.zeros([2], tf.int64)
        if self.is_eager and first_example:
            zero = tf.constant(0, tf.int64)
            prepared = self._prepare_one(zero, first_example(), zero, seed)
            return PreparedSpec(batched(tf.nest.map_structure(tf.TensorSpec.from_tensor, prepared)), False, None, None)
        # A dataset of (place, example) that is never read.
        spec = tf.TensorSpec([], tf.int64), example_spec
        numbered = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
        # A seed is different for each example, and operations that draw take only one.
        if is_static(example_spec) and not self._takes_seed:
            # Any exception may mean that an operation cannot be vectorized. A user error is raised again below.
            with contextlib.suppress(Exception), _silent():
                batch_spec = numbered.batch(1).map(self.batch_function(0, seed)).element_spec
                if not self._newest[0]:  # Sequences would need to have one length.
                    return PreparedSpec(batch_spec, True, *self._newest)
        batch_spec = numbered.map(_bound(self._one, 0, seed)).batch(1).element_spec
        return PreparedSpec(batch_spec, False, *self._newest)

    def _differing_value(self, example_spec: Any) -> list[str]:
        """Traces the hook two more times, because only that shows a clock, or a generator that is the hook's own."""
        place = tf.TensorSpec([], tf.int64)
        with contextlib.suppress(Exception), _silent():
            functions = (tf.function(self._prepare_one, autograph=False) for _ in range(2))
            seed = tf.TensorSpec([2], tf.int64)
            traces = (each.get_concrete_function(place, example_spec, place, seed) for each in functions)
            return differing_value(*(each.graph for each in traces))
        return []

    def _check_batches(self, prepared: PreparedSpec, hook: str) -> None:
        """Raises BadInput unless prepared examples are tensors of static shapes, or --pad-to has made them so."""
        example = unbatched(prepared.batch_spec[:2])
        returned = f"task.prepare_example returned {as_text(example)} for {hook}"
        if not is_static(example):
            or_pad = ", or use --pad-to 64 128 256" if any(are_sequences(example)) else ""
            raise BadInput(
                f"{returned}: each must be a tensor of static shape, the same for all examples; resize or pad, then "
                f"tf.ensure_shape{or_pad}"
            )
        if self._pad_to and not prepared.padding:
            raise BadInput(
                f"--pad-to {' '.join(map(str, self._pad_to))}: {returned}, where no tensor's first size differs: "
                "remove --pad-to, or do not pad in prepare_example"
            )

    def batch_function(self, length: int, seed: tf.Tensor) -> Callable[[tf.Tensor, Any], Any]:
        """Returns a function from places (int64, [n]) and examples ([n, ...]) to (features, labels, sample_weights).

        Padding starts at place `length`. Each example's seed is made from `seed` (int64, [2]) and its place.
        """
        return _bound(self._batch, length, seed)

    def one_by_one(
        self,
        numbered: tf.data.Dataset,
        prepared: PreparedSpec,
        length: int,
        seed: tf.Tensor,
        *,
        calls: int = PARALLEL_CALLS,
    ) -> tf.data.Dataset:
        """Returns prepared examples (features, labels, sample_weight) of (place, example); see `batch_function`."""
        if self.is_eager:
            in_python = _in_python(self._prepare_one, unbatched(prepared.batch_spec))
            return numbered.map(_bound(in_python, length, seed))
        return numbered.map(_bound(self._one, length, seed), num_parallel_calls=calls)

    def features(self, prepared: PreparedSpec, places: tf.Tensor, batch: Any, seed: tf.Tensor) -> Any:
        """Returns the prepared features of a batch of examples ([n, ...]), in the graph that is being built.

        Operations that only the labels need do not run, unless they have an effect, as tf.debugging.Assert has.
        `places` (int64, [n]) and `seed` are as in `batch_function`.
        """

        def prepare(each: tuple[tf.Tensor, Any]) -> Any:
            return self._prepare_one(*each, tf.int64.max, seed)[0]

        if prepared.takes_batches:
            return tf.vectorized_map(prepare, (places, batch), fallback_to_while_loop=False)
        return tf.map_fn(prepare, (places, batch), fn_output_signature=unbatched(prepared.batch_spec[0]))

    def _prepare_batch(self, places: tf.Tensor, examples: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        def prepare(each: tuple[tf.Tensor, Any]) -> Any:
            return self._prepare_one(*each, length, seed)

        # Without fallback, because an operation that cannot be vectorized would run for one example after the other.
        return tf.vectorized_map(prepare, (places, examples), fallback_to_while_loop=False)

    def _prepare_one(self, place: tf.Tensor, example: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        # Made from the place in the pass: the same after a resume and for any replicas.
        options = {"seed": tf.random.experimental.stateless_fold_in(seed, place)} if self._takes_seed else {}
        arguments, weight = self._arguments(example)
        prepared = self._prepare_example(*arguments, **options)
        traced = None if tf.executing_eagerly() else look_at(tf.compat.v1.get_default_graph())
        if not isinstance(prepared, tuple) or len(prepared) not in (2, 3):
            raise BadInput(
                f"task.prepare_example returned {prepared!r}: return (features, labels) or (features, labels, weight)"
            )
        # To tf.data a list of numbers is one tensor.
        features, labels, *given = (tf.convert_to_tensor(each) if isinstance(each, list) else each for each in prepared)
        weight = given[0] if given else 1.0 if weight is None else weight
        if isinstance(weight, dict | tuple) or (weight := tf.cast(weight, tf.float32)).shape.rank != 0:
            kind = getattr(weight, "shape", f"a {type(weight).__name__}")
            raise BadInput(f"task.prepare_example returned sample weights of {kind}: {ONE_WEIGHT}")
        if self.is_eager:
            features, labels = tf.nest.map_structure(tf.convert_to_tensor, (features, labels))
        prepared, padding = (features, labels, tf.where(place < length, weight, 0.0)), None
        if self._pad_to:
            prepared, padding = padded(prepared, self._pad_to)
        self._newest = padding, traced
        return prepared

    def _arguments(self, example: Any) -> tuple[tuple, Any]:
        """Returns an example's arguments for task.prepare_example, and the sample weight that follows them, or None."""
        parts = example if isinstance(example, tuple) else (example,)
        return (parts[:2], parts[2]) if len(parts) == 3 and self._takes_two else (parts, None)


def evaluation_seed(seed: int, dataset: str) -> tf.Tensor:
    """Returns the seed, as of a pass, of every evaluation of a dataset: another one for each, and than in training."""
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

        leaves = tf.nest.flatten(spec)
        results = tf.py_function(run, tf.nest.flatten(arguments), [leaf.dtype for leaf in leaves])
        shaped = [tf.ensure_shape(each, leaf.shape) for each, leaf in zip(results, leaves, strict=True)]
        return tf.nest.pack_sequence_as(spec, shaped)

    return call


def _bound(function: Callable[..., Any], length: int, seed: tf.Tensor) -> Callable[[tf.Tensor, Any], Any]:
    """Returns a function for Dataset.map that gives another one two more arguments."""
    length = tf.constant(length, tf.int64)  # As a tensor, so that all lengths share one trace.
    return tf.autograph.experimental.do_not_convert(lambda place, example: function(place, example, length, seed))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps TensorFlow from logging an attempt that may fail."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)
