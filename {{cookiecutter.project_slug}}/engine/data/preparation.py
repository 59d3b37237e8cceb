"""What task.prepare_example makes of the examples: a whole batch in one go where that is possible, else one by one."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from engine.data.examples import PARALLEL_CALLS, Examples
from engine.errors import BadInput
from engine.tracing import Traced, converted, look_at


class Preparation:
    """Prepares examples, and gives each a weight: its own or 1, and 0 to the padding behind the last one.

    Attributes:
        traced: what prepare_example does, once `batch_spec` has been called.
    """

    def __init__(self, prepare_example: Callable[..., Any], *, training: bool) -> None:
        self._prepare_example = converted(prepare_example)
        self._training = training
        self._takes = {"training", "seed"} & set(inspect.signature(prepare_example).parameters)
        # Traced once each, and not anew for each pass.
        self._one = tf.function(self._prepare_one, autograph=False)
        self._batch = tf.function(self._prepare_batch, autograph=False)
        self._batch_specs: dict[str, Any] = {}  # By the type of the examples, which the splits share.
        # A seed is different for each example, and no operation that draws takes several.
        self._vectorizes = "seed" not in self._takes
        self.traced: Traced | None = None

    @property
    def depends_on_training(self) -> bool:
        """Whether examples are prepared for training in another way than for evaluation."""
        return "training" in self._takes

    def batch_spec(self, examples: Examples) -> Any:
        """Returns the type of batches of prepared examples, [None, ...]; finds out how to prepare them."""
        of = str(examples.element_spec)
        if of not in self._batch_specs:
            self._batch_specs[of] = self._find_batch_spec(examples)
        return self._batch_specs[of]

    def _find_batch_spec(self, examples: Examples) -> Any:
        numbered = examples.in_order(0, 1, seed=None, shuffle_buffer_size=1)
        seed = tf.zeros([2], tf.int64)
        if examples.have_one_shape and self._vectorizes:
            # Whatever an operation says that cannot be vectorized: the other way works, or tells what is wrong.
            with contextlib.suppress(Exception), _silent():
                return numbered.batch(1).map(self.of_batch(0, seed)).element_spec
            self._vectorizes = False
        return self.one_by_one(numbered, 0, seed).batch(1).element_spec

    @property
    def is_of_batches(self) -> bool:
        """Whether a whole batch can be prepared in one go."""
        return self._vectorizes

    def of_batch(self, length: int, seed: tf.Tensor) -> Callable[[tf.Tensor, Any], Any]:
        """Returns a function from places (int64, [n]) and examples ([n, ...]) to (features, labels, weights).

        Args:
            length: the first place that holds padding.
            seed: int64 [2]; each example's seed is made from it and its place.
        """
        length = tf.constant(length, tf.int64)
        return tf.autograph.experimental.do_not_convert(
            lambda places, examples: self._batch(places, examples, length, seed)
        )

    def one_by_one(self, numbered: tf.data.Dataset, length: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns single prepared examples (features, label, weight) of single ones (place, example)."""
        length = tf.constant(length, tf.int64)
        prepare = tf.autograph.experimental.do_not_convert(
            lambda place, example: self._one(place, example, length, seed)
        )
        return numbered.map(prepare, num_parallel_calls=PARALLEL_CALLS)

    def _prepare_batch(self, places: tf.Tensor, examples: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        # Without fallback, because an operation that cannot be vectorized would run for one example after the other.
        return tf.vectorized_map(
            lambda each: self._prepare_one(*each, length, seed), (places, examples), fallback_to_while_loop=False
        )

    def _prepare_one(self, place: tf.Tensor, example: Any, length: tf.Tensor, seed: tf.Tensor) -> Any:
        prepared = self._prepare_example(*example[:2], **self._options(place, seed))
        self.traced = look_at(tf.compat.v1.get_default_graph())
        return self._weighted(prepared, place, example, length)

    def _options(self, place: tf.Tensor, seed: tf.Tensor) -> dict[str, Any]:
        options = {"training": self._training} if "training" in self._takes else {}
        if "seed" in self._takes:
            # Made from the place in the epoch: the same after a resume and for any replicas.
            options["seed"] = tf.random.experimental.stateless_fold_in(seed, place)
        return options

    def _weighted(self, prepared: Any, place: tf.Tensor, example: Any, length: tf.Tensor) -> Any:
        if not isinstance(prepared, tuple) or len(prepared) != 2:
            raise BadInput(f"task.prepare_example returned {prepared!r}: return (features, labels)")
        # A list of numbers is one tensor to tf.data.
        features, labels = (tf.convert_to_tensor(each) if isinstance(each, list) else each for each in prepared)
        weight = tf.cast(example[2], tf.float32) if len(example) == 3 else tf.constant(1.0)
        return features, labels, tf.where(place < length, weight, 0.0)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps TensorFlow from telling of what is tried and may fail."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)
