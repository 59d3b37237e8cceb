"""Embedding tables by row: a step reads the rows that its batch uses, and changes those only where that is enough.

Keras reads a table as one tensor and changes every row in every step, which takes time in proportion to its rows.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

KERAS_CALL = keras.layers.Embedding.call

# Their update of a row depends on nothing but this row of the gradient, the weights and the optimizer's variables.
BY_ELEMENT = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_rows() -> None:
    """Makes keras.layers.Embedding read the rows of its ids only, where it would read the table."""
    keras.layers.Embedding.call = _call


def _call(layer: keras.layers.Embedding, inputs: Any) -> Any:
    """Does what Keras's own call does. While a tensor of the table lives, each change of it copies the table."""
    is_plain = isinstance(inputs, tf.Tensor) and not (layer.lora_enabled or layer.quantization_mode)
    table = layer._embeddings.value if is_plain else None
    if not isinstance(table, tf.Variable):
        return KERAS_CALL(layer, inputs)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # In Keras, -1 is the last row.
    return tf.cast(tf.gather(on_this_replica(table), ids), layer.compute_dtype)


def on_this_replica(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's variable, because tf.gather would read every row of one that all replicas share."""
    try:
        handle = variable.handle
    except ValueError:  # Outside the replicas.
        return variable
    local = tf.distribute.get_strategy().experimental_local_results(variable)
    return next(each for each in local if each.handle is handle)


# --- Choosing ---------------------------------------------------------------------------------------------------------


def changes_used_rows_only(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether a row without a gradient stays as it is, weights and optimizer's variables, up to weight decay."""
    return type(optimizer) is keras.optimizers.Adagrad or (
        type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    )


def slices_to_update(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, gradient: tf.IndexedSlices, parts: int
) -> tf.IndexedSlices | None:
    """Returns the slices if the update is to be by row, else None: the gradient is to be a tensor of all rows.

    `parts` is the number of such gradients in a step: replicas times micro-batches.
    """
    number = gradient.indices.shape[0]
    if not changes_used_rows_only(optimizer) and not getattr(variable, "is_updated_lazily", False):
        variable.is_updated = f"every row, because {type(optimizer).__name__} changes every row (see --lazy-rows)"
    elif number is not None and number * parts > variable.shape[0]:
        variable.is_updated = f"every row, because a step uses {number * parts:,} of {variable.shape[0]:,} rows"
    else:
        variable.is_updated = "by row"
        return gradient
    return None


# --- Updating ---------------------------------------------------------------------------------------------------------


def sum_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices in which each row occurs once, with the sum of its values in their order."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def in_values(function: Callable[[list[tf.Tensor]], list[tf.Tensor]], gradients: list[Any]) -> list[Any]:
    """Returns what the function makes of gradients, of whose slices it gets the values; each row occurs once."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    return [
        tf.IndexedSlices(value, each.indices, each.dense_shape) if isinstance(each, tf.IndexedSlices) else value
        for value, each in zip(function(values), gradients, strict=True)
    ]


class Rows:
    """Some rows of a variable, which an optimizer reads and changes in place of the variable."""

    def __init__(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        self.variable, self.dtype, self._rows = on_this_replica(variable), variable.dtype, rows
        self._values = self._before = tf.gather(self.variable, rows)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._values, dtype, name=name)

    def assign(self, values: tf.Tensor) -> None:
        self._values = values

    def assign_add(self, values: tf.Tensor) -> None:
        self._values += values

    def assign_sub(self, values: tf.Tensor) -> None:
        self._values -= values

    def write(self) -> None:
        """Writes the rows into the variable if they were assigned."""
        if self._values is not self._before:
            self.variable.scatter_update(tf.IndexedSlices(self._values, self._rows))


def update_by_row(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer update the rows of slices only, by its own formula; each row may occur once.

    The formula gets these rows of the variable, and of the optimizer's variables of this shape, instead of all rows.
    """
    update = optimizer.update_step

    def update_step(gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            return update(gradient, variable, learning_rate)
        index = optimizer._get_variable_index(variable)
        rows = Rows(variable, gradient.indices)
        changed = [rows]
        on_rows = object.__new__(type(optimizer))
        vars(on_rows).update(vars(optimizer), _get_variable_index=lambda _: index)
        for name, each in vars(optimizer).items():
            if name in ("_variables", "_trainable_variables") or not isinstance(each, list) or len(each) <= index:
                continue
            if isinstance(each[index], keras.Variable) and each[index].shape == variable.shape:
                changed.append(Rows(each[index].value, gradient.indices))
                vars(on_rows)[name] = {index: changed[-1]}
        type(optimizer).update_step(on_rows, gradient.values, rows, learning_rate)
        for each in changed:
            each.write()

    optimizer.update_step = update_step
