"""--pad-to: pads sequences to the largest listed length, then cuts each batch to the smallest length that fits it.

A prepared example is padded with zeros to the largest length, so that nothing else of the input changes, and its own
length goes beside it. When a batch is taken out of its stack, on the replicas, it is cut: by the longest sequence of
the global batch, so that the results are the same for any number of replicas.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Padding:
    """How examples were padded."""

    lengths: Sequence[int]  # The lengths that a batch may have, in increasing order.
    sequences: Sequence[bool]  # Whether each tensor of the features and labels is a sequence.

    def pad(self, example: Any) -> Any:
        """Returns (features, labels, sample_weight, length), with sequences of the largest length.

        `length` (int32, scalar) is that of the longest sequence.
        """
        leaves, largest = tf.nest.flatten(example[:2]), max(self.lengths)
        lengths = [tf.shape(leaf)[0] for leaf, is_sequence in zip(leaves, self.sequences, strict=True) if is_sequence]
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

        leaves = [
            padded(leaf) if is_sequence else leaf for leaf, is_sequence in zip(leaves, self.sequences, strict=True)
        ]
        return *tf.nest.pack_sequence_as(example[:2], leaves), example[2], length

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
        leaves = zip(tf.nest.flatten(batch[:2]), self.sequences, strict=True)
        cut = [leaf[:, :length] if is_sequence else leaf for leaf, is_sequence in leaves]
        return *tf.nest.pack_sequence_as(batch[:2], cut), sample_weights

    def of_any_length(self, features: Any) -> Any:
        """Returns the element spec of an example's features, with sequences of unknown length."""
        # `sequences` continues with the labels.
        leaves = zip(tf.nest.flatten(features), self.sequences, strict=False)
        of_any = [
            tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if is_sequence else leaf for leaf, is_sequence in leaves
        ]
        return tf.nest.pack_sequence_as(features, of_any)


def of_largest_length(spec: Any, lengths: Sequence[int]) -> Any:
    """Returns an element spec of batches, [n, ...], with the largest length where Padding.of_any_length removed it."""

    def with_length(leaf: tf.TensorSpec) -> tf.TensorSpec:
        shape = [max(lengths) if size is None and axis == 1 else size for axis, size in enumerate(leaf.shape)]
        return tf.TensorSpec(shape, leaf.dtype)

    return tf.nest.map_structure(with_length, spec)


def are_sequences(spec: Any) -> list[bool]:
    """Returns which tensors of prepared features and labels are sequences: only their first size is unknown."""
    return [
        isinstance(leaf, tf.TensorSpec)
        and bool(leaf.shape.rank)
        and leaf.shape[0] is None
        and leaf.shape[1:].is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    ]
