"""Calls task.prepare_example: for a whole batch in one go where that is possible, else for one example at a time."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from engine.data.element_spec import as_text, is_static
from engine.data.examples import PARALLEL_CALLS, Examples
from engine.data.padding import LENGTHS, are_sequences, padded
from engine.data.sets import hook_of
from engine.errors import BadInput
from engine.tracing import Traced, converted, look_at
from engine.user_errors import first_line, where_raised


class Preparation:
    """Prepares examples, and gives each a weight: its own or 1, and 0 to the padding behind the last one.

    Attributes:
        pad_to: lengths for sequences; without any, sequences of several lengths stay as they are.
        depends_on_training: whether examples are prepared for training in another way than for evaluation.
        takes_batches: whether whole batches can be prepared in one go, as far as is known.
        traced: what prepare_example does, once `batch_spec` has been called.
    """

    def __init__(
        self, prepare_example: Callable[..., Any], *, training: bool, pad_to: Sequence[int] = (), eager: bool = False
    ) -> None:
        """With `eager`, the hook gets tensors that have values; but not with `pad_to`."""
        self._prepare_example = converted(prepare_example)
        self._is_eager = eager and not pad_to
        self._signature = inspect.signature(prepare_example)
        parameters = self._signature.parameters
        self.depends_on_training = "training" in parameters
        self._options = {"training": training} if self.depends_on_training else {}
        self.pad_to = pad_to
        self._takes_seed = "seed" in parameters
        of_example = [each for name, each in parameters.items() if name not in ("training", "seed")]
        self._takes_two = len(of_example) == 2 and not any(each.kind == each.VAR_POSITIONAL for each in of_example)
        # A seed is different for each example, and no operation that draws takes several.
        self.takes_batches = not self._takes_seed and not self._is_eager
        self.traced: Traced | None = None
        self._sequences: list[bool] = []  # Which features and labels were padded in the newest trace.
        # Traced once each, and not anew for each pass.
        self._one = tf.function(self._prepare_one, autograph=False)
        self._batch = tf.function(self._prepare_batch, autograph=False)
        self._batch_specs: dict[str, Any] = {}  # By the type of the examples, which the splits share.
        self._sequences_of: dict[str, list[bool]] = {}
        self._specs: dict[str, Any] = {}

    def _arguments(self, example: Any) -> tuple[tuple, Any]:
        """Returns what of an example task.prepare_example is given, and the weight behind these, or None."""
        parts = example if isinstance(example, tuple) else (example,)
        return (parts[:2], parts[2]) if len(parts) == 3 and self._takes_two else (parts, None)

    def batch_spec(self, examples: Examples) -> Any:
        """Returns the type of batches of prepared examples, [None, ...]; finds out how to prepare them."""
        kind = str(examples.element_spec)
        if kind not in self._batch_specs:
            self._batch_specs[kind] = self._find_batch_spec(examples)
            self._sequences_of[kind] = self._sequences
        return self._batch_specs[kind]

    def checked_batch_spec(self, examples: Examples, name: str) -> Any:
        """Returns the same. Raises BadInput, naming the set, if its examples cannot be prepared or not be batched."""
        self._check_arguments(examples.element_spec, hook_of(name))
        try:
            spec = self.batch_spec(examples)
        except BadInput:
            raise
        except Exception as problem:
            raise BadInput(
                f"{where_raised(problem)}: {first_line(problem)} (task.prepare_example gets examples one by one: of "
                f"{as_text(examples.element_spec)}, as {hook_of(name)} returned them)"
            ) from problem
        _check_static(name, spec, self.pad_to)
        return spec

    def _check_arguments(self, spec: Any, hook: str) -> None:
        """Raises BadInput, naming the hook that gave examples of a type, if task.prepare_example cannot take them."""
        arguments, weight = self._arguments(spec)
        if weight is not None and (not isinstance(weight, tf.TensorSpec) or weight.shape.rank != 0):
            raise BadInput(f"{hook} returned weights of {as_text(weight)}: each example has one number as its weight")
        try:
            self._signature.bind(*arguments, **self._options, **({"seed": None} if self._takes_seed else {}))
        except TypeError as problem:
            raise BadInput(
                f"{hook} returned elements of {as_text(spec)}, which do not fit task.prepare_example"
                f"({', '.join(self._signature.parameters)}) ({problem}): it is given the parts of a tuple, or anything "
                "else as one argument"
            ) from None

    def sequences(self, examples: Examples) -> list[bool]:
        """Returns which tensors of the features and labels are padded; call `batch_spec` first."""
        return self._sequences_of[str(examples.element_spec)]

    def _find_batch_spec(self, examples: Examples) -> Any:
        numbered = examples.in_order(0, 1)
        seed = tf.zeros([2], tf.int64)
        if examples.have_one_shape and self.takes_batches:
            # Any exception may mean that an operation cannot be vectorized. A mistake is raised again below.
            with contextlib.suppress(Exception), _silent():
                spec = numbered.batch(1).map(self.batch_function(0, seed)).element_spec
                if not any(self._sequences):  # Those would have to have one length.
                    return spec
            self.takes_batches = False
        return self.one_by_one(numbered, 0, seed).batch(1).element_spec

    def batch_function(self, length: int, seed: tf.Tensor) -> Callable[[tf.Tensor, Any], Any]:
        """Returns a function from places (int64, [n]) and examples ([n, ...]) to (features, labels, weights).

        Args:
            length: the first place that holds padding.
            seed: int64 [2]; each example's seed is made from it and its place.
        """
        return _bound(self._batch, length, seed)

    def one_by_one(self, numbered: tf.data.Dataset, length: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns prepared examples (features, label, weight) of (place, example); see `batch_function`."""
        if self._is_eager:
            return numbered.map(_bound(_in_python(self._prepare_one, self._spec_of(numbered)), length, seed))
        return numbered.map(_bound(self._one, length, seed), num_parallel_calls=PARALLEL_CALLS)

    def _spec_of(self, numbered: tf.data.Dataset) -> Any:
        """Returns the type of a prepared example, by having the hook prepare one; where nothing can run, as before."""
        kind = str(numbered.element_spec)
        if kind not in self._specs:
            place, example = next(iter(numbered))
            prepared = self._prepare_one(place, example, tf.constant(0, tf.int64), tf.zeros([2], tf.int64))
            self._specs[kind] = tf.nest.map_structure(tf.TensorSpec.from_tensor, prepared)
        return self._specs[kind]

    def features(self, examples: Examples, places: tf.Tensor, batch: Any, seed: tf.Tensor) -> Any:
        """Returns the prepared features of examples ([n, ...]), made in the graph that is being built.

        What only the labels need is not run, unless it has an effect of its own, as tf.debugging.Assert has.

        Args:
            examples: what `batch_spec` was called with; its type is that of the batch.
            places: the examples' numbers (int64, [n]).
            batch: n examples, [n, ...].
            seed: int64 [2], as in `batch_function`.
        """

        def prepare(each: Any) -> Any:
            return self._prepare_one(*each, tf.int64.max, seed)[0]

        if examples.have_one_shape and self.takes_batches:
            return tf.vectorized_map(prepare, (places, batch), fallback_to_while_loop=False)
        spec = self.batch_spec(examples)[0]
        one = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec)
        return tf.map_fn(prepare, (places, batch), fn_output_signature=one)

    def _prepare_batch(self, places: tf.Tensor, examples: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        # Without fallback, because an operation that cannot be vectorized would run for one example after the other.
        return tf.vectorized_map(
            lambda each: self._prepare_one(*each, length, seed), (places, examples), fallback_to_while_loop=False
        )

    def _prepare_one(self, place: tf.Tensor, example: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        options = dict(self._options)
        if self._takes_seed:
            # Made from the place in the epoch: the same after a resume and for any replicas.
            options["seed"] = tf.random.experimental.stateless_fold_in(seed, place)
        arguments, weight = self._arguments(example)
        prepared = self._prepare_example(*arguments, **options)
        if not tf.executing_eagerly():
            self.traced = look_at(tf.compat.v1.get_default_graph())
        if not isinstance(prepared, tuple) or len(prepared) not in (2, 3):
            raise BadInput(
                f"task.prepare_example returned {prepared!r}: return (features, labels) or (features, labels, weight)"
            )
        # To tf.data a list of numbers is one tensor.
        features, labels, *own = (tf.convert_to_tensor(each) if isinstance(each, list) else each for each in prepared)
        weight = tf.cast(own[0] if own else 1.0 if weight is None else weight, tf.float32)
        if weight.shape.rank != 0:
            raise BadInput(f"task.prepare_example returned weights of {weight.shape}: each example has one number")
        if self._is_eager:
            features, labels = tf.nest.map_structure(tf.convert_to_tensor, (features, labels))
        prepared = features, labels, tf.where(place < length, weight, 0.0)
        if not self.pad_to:
            return prepared
        self._sequences = are_sequences(prepared[:2])
        return padded(prepared, self.pad_to)


def _check_static(split: str, batch_spec: Any, pad_to: Sequence[int]) -> None:
    """Raises BadInput unless prepared examples are tensors of static shapes, or --pad-to has made them so."""
    example = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec,
        batch_spec[:2],
    )
    if not is_static(example):
        or_pad = ", or use --pad-to 64 128 256" if any(are_sequences(example)) else ""
        raise BadInput(
            f"task.prepare_example returned for {split!r} {as_text(example)}: each has to be a tensor, and every size "
            f"known and equal for all examples; resize or pad, then tf.ensure_shape{or_pad}"
        )
    if pad_to and len(batch_spec) == LENGTHS:
        raise BadInput(
            f"--pad-to {' '.join(map(str, pad_to))}: task.prepare_example returned for {split!r} {as_text(example)}, "
            "which has no tensor whose first size differs: leave --pad-to out, or do not pad in prepare_example"
        )


def _in_python(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """Returns a function for a graph that runs another one, whose results are of type `spec`, in Python."""

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
    """Keeps TensorFlow from logging what is tried and may fail."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)
