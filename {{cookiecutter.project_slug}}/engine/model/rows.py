"""Embedding tables by row: a step reads the rows that its batch uses, and changes those only where that is enough.

Keras reads a table as one tensor and changes every row in every step, which takes time in proportion to its rows.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.memory import memory_of_machine
from engine.model.step import Gradient, current_step
from engine.model.variables import by_name, layers_of
from engine.tracing import Traced, place
from engine.user_errors import OUTSIDE_TABLE

KERAS_CALL, KERAS_BUILD = keras.layers.Embedding.call, keras.layers.Embedding.build
_rows: dict[int, tf.Tensor] = {}  # The rows that `given_by_row` names, by the id of the table's handle.
LARGE = 10_000  # The run summary describes tables of at least as many rows.

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
    """Makes keras.layers.Embedding read the rows of its ids only, and reject a table that does not fit into memory."""
    keras.layers.Embedding.call, keras.layers.Embedding.build = _call, _build


def _build(layer: keras.layers.Embedding, input_shape: Any = None) -> None:
    strategy, memory = tf.distribute.get_strategy(), memory_of_machine()
    elsewhere = isinstance(strategy, tf.distribute.ParameterServerStrategy) or tf.config.list_logical_devices("GPU")
    if memory is not None and not elsewhere:
        size = layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
        # Each replica of this process has a table. TensorFlow's default strategy names no devices.
        size *= len(strategy.extended.worker_devices) if strategy.num_replicas_in_sync > 1 else 1
        if size > memory:
            fact = f"{layer.input_dim:,} rows of {layer.output_dim} take {size / 2**30:,.1f} GB in this process"
            remedy = "use fewer rows (docs/tables.md), a smaller width, or --strategy parameter_server"
            known = f"this machine has {memory / 2**30:,.1f} GB"
            raise BadInput(f"task.create_model: the table {layer.name} does not fit: {fact}, {known}: {remedy}")
    KERAS_BUILD(layer, input_shape)


def _call(layer: keras.layers.Embedding, inputs: Any) -> Any:
    """Does what Keras's own call does. While a tensor of the table lives, each change of it copies the table."""
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
    return tf.cast(tf.gather(on_this_replica(table), ids), layer.compute_dtype)


def _check_ids(layer: keras.layers.Embedding, ids: tf.Tensor) -> tf.Operation | None:
    """Fails if an id has no row: XLA and GPUs would read another row or zeros, and Keras the last row for -1."""
    is_row = (ids >= 0) & (ids < layer.input_dim)
    table = f"{layer.embeddings.path}, whose ids are 0 to {layer.input_dim - 1}"
    what = f"{OUTSIDE_TABLE} {table}: fix task.prepare_example; it is"
    # XLA drops assertions.
    with contextlib.nullcontext() if tf.executing_eagerly() else tf.xla.experimental.jit_scope(compile_ops=False):
        return tf.debugging.Assert(tf.reduce_all(is_row), [what, ids[~is_row]], summarize=1)


def on_this_replica(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's variable, because tf.gather would read every row of one that all replicas share."""
    try:
        handle = variable.handle
    except ValueError:  # Outside the replicas.
        return variable
    local = tf.distribute.get_strategy().experimental_local_results(variable)
    return next(each for each in local if each.handle is handle)


# --- Choosing ---------------------------------------------------------------------------------------------------------


def choose_lazy_rows(model: Any, names: tuple[str, ...]) -> None:
    """Marks the tables whose names contain one of `names`. Raises BadInput if one is in no table's name.

    A table is a variable of two dimensions of an Embedding; its name is the path of the variable.
    """
    for name in names:
        if not (chosen := [each for each in tables(model) if name in each.path]):
            listed = ", ".join(each.path for each in tables(model)) or "none: use keras.layers.Embedding"
            raise BadInput(f"--lazy-rows {name} is in the name of no table: the tables are {listed}")
        for each in chosen:
            each.has_lazy_rows = True


def tables(model: Any) -> list[keras.Variable]:
    """Returns the trainable tables of all Embedding layers, in model order."""
    layers = [layer for one in by_name(model, "model").values() for layer in layers_of(one)]
    found = [each for layer in layers if isinstance(layer, keras.layers.Embedding) for each in layer.trainable_weights]
    return [each for each in found if each.path.endswith("/embeddings")]


def describe_tables(model: Any) -> str:
    """Returns which rows of each large table a step changes, as `slices_or_dense` has decided; "" without one."""
    by_way: dict[str, list[str]] = {}
    for each in tables(model):
        if hasattr(each, "updated") and (each.shape[0] >= LARGE or hasattr(each, "has_lazy_rows")):
            by_way.setdefault(each.updated, []).append(f"{each.path} ({each.shape[0]:,} x {each.shape[1]})")
    return "; ".join(f"a step changes {way}: {', '.join(names)}" for way, names in by_way.items())


def slow_reads(model: Any, step: Traced) -> list[str]:
    """Returns a text for each large table that is updated by row, but that a step reads as one tensor."""
    reads, reason = step.complete_reads, "which takes time in proportion to its rows: see docs/tables.md"
    return [
        f"the step reads the table {each.path} as one tensor{place(reads[tuple(each.shape)])}, {reason}"
        for each in tables(model)
        if each.shape[0] >= LARGE and tuple(each.shape) in reads and getattr(each, "updated", "").startswith("the rows")
    ]


def changes_used_rows_only(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether a row without a gradient stays as it is, and the optimizer's variables of it too."""
    return type(optimizer) is keras.optimizers.Adagrad or (
        type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    )


def updates_by_element(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the update of a row depends on this row alone. A formula that Keras has not is unknown."""
    known = type(optimizer).update_step in {each.update_step for each in BY_ELEMENT}
    return known or getattr(optimizer, "updates_by_element", False)


def slices_or_dense(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable, gradient: Any, parts: int
) -> tf.Tensor | tf.IndexedSlices:
    """Returns the gradient as slices if the update is by row, else as a tensor of all rows.

    `parts` is the number of such gradients in a step: replicas times micro-batches. Raises BadInput if --lazy-rows
    names the table, and its update cannot be by row.
    """
    several_processes = isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy)
    is_lazy, kind = getattr(variable, "has_lazy_rows", False), type(optimizer).__name__
    why_not = ""
    if not isinstance(gradient, tf.IndexedSlices):
        why_not = "its gradient has every row"
    else:
        # Some gradients have no shape.
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(list(variable.shape), tf.int32))
        number = gradient.indices.shape[0]
        if number is None and several_processes:
            # TensorFlow cannot gather them in a loop if the processes have different numbers of slices.
            why_not = "the number of ids that a process looks up is unknown before"
        elif is_lazy and not updates_by_element(optimizer):
            why_not = f"{kind} does not update row by row (use {', '.join(each.__name__ for each in BY_ELEMENT)})"
        elif not is_lazy and not changes_used_rows_only(optimizer):
            why_not = f"{kind} changes every row (see --lazy-rows)"
        elif not is_lazy and number is not None and number * parts > variable.shape[0]:
            why_not = f"a step looks up {number * parts:,} ids"
    if is_lazy and why_not:
        raise BadInput(f"--lazy-rows names {variable.path}, but {why_not}: remove it from --lazy-rows")
    if why_not:
        variable.updated = f"every row, because {why_not}"
        return tf.convert_to_tensor(gradient)
    decays = optimizer.weight_decay and optimizer._use_weight_decay(variable)
    variable.updated = "the rows that it looks up" + (", and all by weight decay" if decays else "")
    return gradient


# --- Updating ---------------------------------------------------------------------------------------------------------


def sum_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices in which each row occurs once, with the sum of its values in their order."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


@contextlib.contextmanager
def given_by_row(
    variables: Sequence[keras.Variable], gradients: Sequence[Gradient]
) -> Iterator[list[tuple[tf.Tensor, keras.Variable]]]:
    """Yields what an optimizer that is called inside gets: of slices only the values, so that it clips these.

    Its `update_step` then changes the rows of the slices only. Each row may occur once.
    """
    pairs = list(zip(variables, gradients, strict=True))
    rows = {
        id(variable.handle): gradient.indices for variable, gradient in pairs if isinstance(gradient, tf.IndexedSlices)
    }
    _rows.update(rows)
    try:
        yield [
            (gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient, variable)
            for variable, gradient in pairs
        ]
    finally:
        for handle in rows:
            del _rows[handle]


class Rows:
    """Some rows of a variable, which an optimizer reads and changes in place of the variable."""

    def __init__(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        self.variable, self.dtype, self._rows = on_this_replica(variable), variable.dtype, rows
        self._change: tuple[Any, tf.Tensor] | None = None  # A method of the variable, and what it writes.

    @functools.cached_property
    def _values(self) -> tf.Tensor:
        return tf.gather(self.variable, self._rows)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._values, dtype, name=name)

    def __rmul__(self, factor: Any) -> tf.Tensor:  # Adadelta has it.
        return factor * self._values

    def assign(self, values: tf.Tensor) -> None:
        self._values, self._change = values, (self.variable.scatter_update, values)

    def assign_add(self, values: tf.Tensor) -> None:
        self._add(self._values + values, self.variable.scatter_add, values)

    def assign_sub(self, values: tf.Tensor) -> None:
        self._add(self._values - values, self.variable.scatter_sub, values)

    def _add(self, values: tf.Tensor, method: Any, change: tf.Tensor) -> None:
        # Workers of parameter servers add at the same time, and writing the sum would undo what others have added.
        self._change = (method, change) if self._change is None else (self.variable.scatter_update, values)
        self._values = values

    def write(self) -> None:
        """Changes the rows of the variable if they were assigned."""
        if self._change:
            method, values = self._change
            method(tf.IndexedSlices(values, self._rows))


def update_by_row(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the optimizer update only the rows that `given_by_row` names, by its own formula.

    The formula gets these rows of the variable, and of the optimizer's variables of this shape, instead of all rows.
    """
    formula = type(optimizer).update_step

    def update_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        rows = _rows.get(id(variable.handle))
        if rows is None:
            formula(optimizer, gradient, variable, learning_rate)
            return
        index = optimizer._get_variable_index(variable)
        changed = [Rows(variable, rows)]
        on_rows = object.__new__(type(optimizer))
        vars(on_rows).update(vars(optimizer), _get_variable_index=lambda _: index)
        for name, values in vars(optimizer).items():
            own = values[index] if isinstance(values, list) and len(values) > index else None
            if isinstance(own, keras.Variable) and own.shape == variable.shape:
                changed.append(Rows(own.value, rows))
                vars(on_rows)[name] = {index: changed[-1]}
        formula(on_rows, gradient, changed[0], learning_rate)
        for part in changed:
            part.write()

    optimizer.update_step = update_step
