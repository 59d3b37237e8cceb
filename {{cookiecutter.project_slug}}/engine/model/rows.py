"""Embedding tables by row: a step reads the rows that its batch uses, and changes those only where that is enough.

Keras reads a table as one tensor and changes every row in every step, which takes time in proportion to its rows.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from engine.errors import OUTSIDE_TABLE, BadInput
from engine.model.step import Gradient, current_step
from engine.model.variables import layers_of

KERAS_CALL = keras.layers.Embedding.call
LARGE = 10_000  # The run summary describes tables of at least as many rows.

# Their update of a row depends on nothing but this row of the gradient, the weights and the optimizer's variables.
BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")


# --- Reading ----------------------------------------------------------------------------------------------------------


def look_up(layer: keras.layers.Embedding, inputs: Any) -> Any:
    """Does what Keras's call of an Embedding does, and reads the rows of its ids only.

    While a tensor of the table lives, each change of it copies the table.
    """
    is_plain = isinstance(inputs, tf.Tensor) and not (layer.lora_enabled or layer.quantization_mode)
    table = layer.embeddings.value if is_plain else None
    if not isinstance(table, tf.Variable):
        return KERAS_CALL(layer, inputs)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    if current_step().batch is not None:
        with tf.control_dependencies(list(filter(None, [_check_ids(layer, ids)]))):  # In eager mode it is None.
            ids = tf.identity(ids)
    else:
        # Keras, and so a prediction or an export, counts negative ids from the last row.
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    return tf.cast(tf.gather(_on_this_replica(table), ids), layer.compute_dtype)


def _check_ids(layer: keras.layers.Embedding, ids: tf.Tensor) -> tf.Operation | None:
    """Fails if an id has no row: XLA and GPUs would read another row or zeros, and Keras the last row for -1."""
    is_row = (ids >= 0) & (ids < layer.input_dim)
    text = (
        f"{OUTSIDE_TABLE} {layer.embeddings.path}, whose ids are 0 to {layer.input_dim - 1}: fix task.prepare_example; "
        "it is"
    )
    # XLA drops assertions.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.xla.experimental.jit_scope(compile_ops=False):
        return tf.debugging.Assert(tf.reduce_all(is_row), [text, ids[~is_row]], summarize=1)


def _on_this_replica(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's variable, because tf.gather would read every row of one that all replicas share."""
    try:
        handle = variable.handle
    except ValueError:  # Outside the replicas.
        return variable
    local_variables = tf.distribute.get_strategy().experimental_local_results(variable)
    return next(local for local in local_variables if local.handle is handle)


# --- Choosing ---------------------------------------------------------------------------------------------------------


def choose_lazy_rows(model: Any, names: tuple[str, ...]) -> None:
    """Marks the tables whose names contain one of `names`. Raises BadInput if one is in no table's name.

    A table is a variable of two dimensions of an Embedding; its name is the path of the variable.
    """
    for name in names:
        if not (chosen := [table for table in tables(model) if name in table.path]):
            listed = ", ".join(table.path for table in tables(model)) or "none: use keras.layers.Embedding"
            raise BadInput(f"--lazy-rows {name} is in the name of no table: the tables are {listed}")
        for table in chosen:
            table.has_lazy_rows = True


def tables(model: Any) -> list[keras.Variable]:
    """Returns the trainable tables of all Embedding layers, in model order."""
    return [
        variable
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Embedding)
        for variable in layer.trainable_weights
        if variable.path.endswith("/embeddings")
    ]


def describe_tables(model: Any) -> str:
    """Returns which rows of each large table a step changes, as `slices_or_dense` has decided; "" without one."""
    by_way: dict[str, list[str]] = {}
    for table in tables(model):
        if hasattr(table, "updated") and (table.shape[0] >= LARGE or hasattr(table, "has_lazy_rows")):
            by_way.setdefault(table.updated, []).append(f"{table.path} ({table.shape[0]:,} x {table.shape[1]})")
    return "; ".join(f"a step changes {way}: {', '.join(names)}" for way, names in by_way.items())


def changes_used_rows_only(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether a row without a gradient stays as it is, and the optimizer's variables of it too."""
    return type(optimizer) is keras.optimizers.Adagrad or (
        type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    )


def updates_by_element(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the update of a row depends on this row alone. A formula that Keras has not is unknown."""
    known = {getattr(keras.optimizers, name).update_step for name in BY_ELEMENT}
    return type(optimizer).update_step in known or getattr(optimizer, "updates_by_element", False)


def slices_or_dense(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, gradient: Gradient, parts: int
) -> Gradient:
    """Returns the gradient as slices if the update is by row, else as a tensor of all rows.

    `parts` is the number of such gradients in a step: replicas times micro-batches. Raises BadInput if --lazy-rows
    names the table, and its update cannot be by row.
    """
    is_lazy = getattr(variable, "has_lazy_rows", False)
    why_not = _why_not_by_row(optimizer, variable, gradient, parts, is_lazy=is_lazy)
    if is_lazy and why_not:
        raise BadInput(f"--lazy-rows names {variable.path}, but {why_not}: remove it from --lazy-rows")
    if not why_not:
        decays = optimizer.weight_decay and optimizer._use_weight_decay(variable)
        variable.updated = f"the rows that it looks up{', and all by weight decay' if decays else ''}"
    else:
        variable.updated = f"every row, because {why_not}"
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # Some gradients have no shape.
    slices = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(list(variable.shape), tf.int32))
    return tf.convert_to_tensor(slices) if why_not else slices


def _why_not_by_row(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, gradient: Gradient, parts: int, *, is_lazy: bool
) -> str:
    """Returns why the update cannot be by row, or takes longer than one of every row; "" if it is by row."""
    if not isinstance(gradient, tf.IndexedSlices):
        return "its gradient has every row"
    number, kind = gradient.indices.shape[0], type(optimizer).__name__
    if number is None and isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy):
        # TensorFlow cannot gather them in a loop if the processes have different numbers of slices.
        return "the number of ids that a process looks up is unknown before"
    if is_lazy and not updates_by_element(optimizer):
        return f"{kind} does not update row by row (use {', '.join(BY_ELEMENT)})"
    if not is_lazy and not changes_used_rows_only(optimizer):
        return f"{kind} changes every row (see --lazy-rows)"
    if not is_lazy and number is not None and number * parts > variable.shape[0]:
        return f"a step looks up {number * parts:,} ids"
    return ""


# --- Updating ---------------------------------------------------------------------------------------------------------


def sum_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices in which each row occurs once, with the sum of its values in their order."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


class Rows:
    """Some rows of a variable, which an optimizer reads and changes in place of the variable."""

    def __init__(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        self.variable, self.dtype, self._rows = _on_this_replica(variable), variable.dtype, rows

    @functools.cached_property
    def _values(self) -> tf.Tensor:
        return tf.gather(self.variable, self._rows)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._values, dtype, name=name)

    def __rmul__(self, factor: Any) -> tf.Tensor:  # Adadelta has it.
        return factor * self._values

    def assign(self, values: tf.Tensor) -> None:
        self._change(self.variable.scatter_update, values, values)

    # Workers of parameter servers add at the same time, and writing the sum would undo what others have added.
    def assign_add(self, values: tf.Tensor) -> None:
        self._change(self.variable.scatter_add, values, self._values + values)

    def assign_sub(self, values: tf.Tensor) -> None:
        self._change(self.variable.scatter_sub, values, self._values - values)

    def _change(self, method: Callable[[tf.IndexedSlices], Any], values: tf.Tensor, after: tf.Tensor) -> None:
        method(tf.IndexedSlices(values, self._rows))
        self._values = after


def update_rows(
    optimizer: keras.optimizers.Optimizer,
    values: tf.Tensor,
    rows: tf.Tensor,
    variable: tf.Variable,
    learning_rate: tf.Tensor,
) -> None:
    """Updates these rows of a variable with the values of their gradient, by the optimizer's own formula.

    Each row occurs once. The formula gets these rows of the variable, and of the optimizer's variables of this shape,
    instead of all rows.
    """
    index = optimizer._get_variable_index(variable)
    on_rows = object.__new__(type(optimizer))
    vars(on_rows).update(vars(optimizer), _get_variable_index=lambda _: index)
    for name, variables in vars(optimizer).items():
        own = variables[index] if isinstance(variables, list) and len(variables) > index else None
        if isinstance(own, keras.Variable) and own.shape == variable.shape:
            vars(on_rows)[name] = {index: Rows(own.value, rows)}
    type(optimizer).update_step(on_rows, values, Rows(variable, rows), learning_rate)
