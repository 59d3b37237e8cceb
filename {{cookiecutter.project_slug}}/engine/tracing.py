"""Reads from its graph what a traced hook draws, changes and calls; AutoGraph for hooks, and what a step must return.

A run can be repeated and resumed only if its random numbers and its state follow from its seed and its checkpoints.
"""

import dataclasses
import os
import pickle
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from engine.errors import BadInput

PYTHON_CALLS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
TABLE_CHANGES = frozenset({"LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2"})
# These have a seed and draw nothing: cuDNN only uses it for a dropout of its own, which Keras does not use.
DRAW_NOTHING = ("CudnnRNN", "RandomShuffleQueue")

ENGINE = Path(__file__).parent
LIBRARIES = [sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")]
NOT_OF_THE_USER = (*LIBRARIES, "<", f"{ENGINE}{os.sep}", str(ENGINE.parent / "train.py"))  # How such file names begin.
DRAWN_ONCE = "drawn_once"  # A graph's collection of the generators of Python from which its hooks drew.
# Read while nothing is being traced: within a trace it would be the status of the functions around a hook.
_STATUS = tf.__internal__.autograph.control_status_ctx()


def converted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that AutoGraph converts when it is traced, also where the engine calls it.

    Its graph records from which global generators of Python it draws. The engine's own code needs no conversion, and
    finding that out takes long. With --eager the hook stays as it is, so that a debugger shows its lines.
    """
    if tf.config.functions_run_eagerly():
        return hook
    convert = tf.__internal__.autograph.tf_convert(hook, _STATUS)

    @tf.autograph.experimental.do_not_convert
    def call(*arguments: Any, **options: Any) -> Any:
        before = _global_generators()
        returned = convert(*arguments, **options)
        for name, state in _global_generators().items():
            if state != before[name]:
                tf.compat.v1.add_to_collection(DRAWN_ONCE, f"a value of {name}")
        return returned

    return call


def returning_loss(step: Callable[..., Any]) -> Callable[..., tf.Tensor]:
    """Returns a converted step of task.py that returns its loss as a float32 tensor (scalar).

    Calling it raises BadInput, naming the step, if that returns anything but a scalar tensor of a floating dtype.
    """
    call, name = converted(step), getattr(step, "__name__", "train_step")

    @tf.autograph.experimental.do_not_convert
    def checked(*arguments: Any) -> tf.Tensor:
        loss = call(*arguments)
        if not (tf.is_tensor(loss) and loss.dtype.is_floating and loss.shape.is_compatible_with([])):
            remedy = "return this replica's part of the batch's loss, a scalar float32 tensor"
            raise BadInput(f"task.{name} returned {loss!r:.200}: {remedy}")
        return tf.cast(loss, tf.float32)

    return checked


def _global_generators() -> dict[str, Any]:
    return {"np.random": pickle.dumps(np.random.get_state(legacy=False)), "random": random.getstate()}


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a traced function does. Operations are texts such as "RandomUniform (task.py:88 train_step)"."""

    used: frozenset[int]  # The ids of the handles of the variables, each of a single replica, that it reads or changes.
    changed: dict[int, str]
    """The ids of the handles that it changes, with the variables' names; "" if the graph names none, as of the tokens
    by which TensorFlow keeps collective operations in order."""
    random_operations: list[str]
    """Operations that count their draws by themselves, from 0 in each process, whatever their seed is: not stateless
    ones, nor operations of a generator, which keeps its state in a variable."""
    python_calls: list[str]  # Python functions in tf.py_function or tf.numpy_function.
    table_changes: list[str]  # Changes of lookup tables.
    complete_reads: dict[tuple[int | None, ...], tf.Operation]
    """The shapes of the variables that it reads as one tensor, and an operation that does."""
    drawn_once: list[str]  # Values that Python draws while the function is traced: each call uses the same ones.


def look_at(graph: tf.Graph) -> Traced:
    """Returns what the function of this graph does; its tracing may still be under way."""
    # Only variables have such data, tables and iterators do not.
    captured = {id(handle): inside for handle, inside in graph.captures if getattr(handle, "_handle_data", None)}
    names = {id(variable.handle): variable.name for variable in graph.variables}
    operations = operations_of(graph)

    changed = {key: names.get(key, "") for key, inside in captured.items() if _is_changed(inside)}

    def described(is_wanted: Callable[[str], bool]) -> list[str]:
        """Returns the kind and place of each such operation, equal ones once."""
        return list(dict.fromkeys(f"{each.type}{place(each)}" for each in operations if is_wanted(each.type)))

    return Traced(
        used=frozenset(captured),
        changed=changed,
        random_operations=described(_draws),
        python_calls=described(PYTHON_CALLS.__contains__),
        table_changes=described(TABLE_CHANGES.__contains__),
        complete_reads={
            tuple(each.outputs[0].shape): each
            for each in operations
            if each.type == "ReadVariableOp" and each.outputs[0].shape.rank is not None
        },
        drawn_once=list(dict.fromkeys(name for each in _graphs(graph) for name in each.get_collection(DRAWN_ONCE))),
    )


def differing_value(one: tf.Graph, other: tf.Graph) -> list[str]:
    """Returns the first value that differs between two traces of a function, such as a clock's; none if all agree."""

    def described(each: tf.Operation) -> tuple[str, bytes]:
        is_number = each.type == "Const" and each.outputs[0].dtype != tf.string  # Texts may contain addresses.
        return each.type, each.get_attr("value").SerializeToString() if is_number else b""

    pairs = zip(operations_of(one), operations_of(other), strict=False)
    return [f"a value{place(each)}" for each, again in pairs if described(each) != described(again)][:1]


def _graphs(graph: tf.Graph) -> list[tf.Graph]:
    """Returns the graph, and the graphs of its functions, which also are the bodies of loops and branches."""
    return [graph, *(function.graph for function in graph._functions.values())]


def operations_of(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a graph and of its functions."""
    return [operation for each in _graphs(graph) for operation in each.get_operations()]


def _is_changed(handle: tf.Tensor) -> bool:
    return any(handle in get_read_write_resource_inputs(operation)[1] for operation in handle.consumers())


def _draws(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful or kind.startswith(DRAW_NOTHING):
        return False
    names = {attribute.name for attribute in definition.attr}
    return "seed" in names or kind in ("NonDeterministicInts", "Timestamp")  # A clock repeats no more than a draw does.


def place(operation: tf.Operation) -> str:
    """Returns the innermost place in the user's files that made an operation."""
    for frame in reversed(list(operation.traceback)):
        if not frame.filename.startswith(NOT_OF_THE_USER):
            return f" ({Path(frame.filename).name}:{frame.lineno} {frame.name}".rstrip() + ")"
    return ""


# --- Operations that a resumed run would not repeat, each with advice: random ones, and Python functions --------------


def unrepeatable_in_preparation(traced: Traced) -> tuple[list[str], list[str]]:
    """Returns the random operations of prepare_example with the generators it draws from, and its Python functions."""
    instead = "take the parameter `seed` and draw with tf.random.stateless_* or tf.image.stateless_random_*"
    draws = _draws_with(traced, instead, "examples")
    changed = [name or "of a tf.random.Generator" for name in traced.changed.values()]
    draws += [f"changes the variable {each}, which no checkpoint contains: {instead}" for each in changed]
    instead = "draw from np.random.default_rng(np.abs(seed)), with `seed` as its argument, so that a resume repeats it"
    return draws, [f"{each} runs Python: {instead}" for each in traced.python_calls]


def unrepeatable_in_step(traced: Traced) -> tuple[list[str], list[str]]:
    """Returns the random operations of a step, and its Python functions, which may draw too, or keep state."""
    instead = "use keras.layers.Dropout, or draw from a seed of each example that prepare_example returns, see "
    instead += "docs/steps.md"
    draws = _draws_with(traced, instead, "steps")
    instead = "no checkpoint contains its state or its random numbers; let it depend on its arguments alone"
    return draws, [f"{each} runs Python: {instead}" for each in traced.python_calls]


def _draws_with(traced: Traced, instead: str, calls: str) -> list[str]:
    draws = [f"{each} draws different numbers after a resume: {instead}" for each in traced.random_operations]
    once = f"comes from Python, once for all {calls}, because the hook runs as a graph: {instead}"
    return draws + [f"{each} {once}" for each in traced.drawn_once]
