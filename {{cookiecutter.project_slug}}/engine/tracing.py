"""Tracing of the user's hooks: converts them by AutoGraph, and finds what a traced graph draws, changes and calls.

A run can be repeated and resumed only if its random numbers and its state follow from its seed and its checkpoints.
"""

import dataclasses
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

PYTHON_CALLS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
TABLE_CHANGES = frozenset({"LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2"})
# Of these, cuDNN's draw only for a dropout of their own, which Keras does not use.
DRAW_NOTHING = ("CudnnRNN", "RandomShuffleQueue")

ENGINE = Path(__file__).parent
# Taken here, where nothing is being traced: within a trace it would say what the functions around a hook ask for.
_STATUS = tf.__internal__.autograph.control_status_ctx()
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))


def converted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that AutoGraph converts when it is traced, also where a function of the engine's calls it.

    The engine's own code has nothing to convert, and to find that out takes long.
    """
    return tf.__internal__.autograph.tf_convert(hook, _STATUS)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a traced function does. Operations are texts such as "RandomUniform (task.py:88 train_step)"."""

    used: frozenset[int]
    """The ids of the handles of the variables, of single replicas, that it reads or changes."""
    changed: dict[int, str]
    """Those of the variables that it changes, with their names; "" if the graph does not say which one it is.

    Among these are the tokens by which TensorFlow keeps collective operations in their order.
    """
    random_operations: list[str]
    """Those that count their draws by themselves, from 0 in each process, whatever their seed is.

    The stateless ones take their seed as an input, and those of a keras.random.SeedGenerator or a tf.random.Generator
    keep it in a variable.
    """
    python_calls: list[str]
    """Python functions in tf.py_function or tf.numpy_function."""
    table_changes: list[str]
    """Changes of lookup tables."""


def look_at(graph: tf.Graph) -> Traced:
    """Returns what the function does whose graph this is; it may be in the middle of its tracing."""
    # Of what is captured, only variables have such data: tables and iterators have none.
    captured = {id(handle): inside for handle, inside in graph.captures if getattr(handle, "_handle_data", None)}
    names = {id(variable.handle): variable.name for variable in graph.variables}
    operations = list(_operations(graph))
    return Traced(
        used=frozenset(captured),
        changed={key: names.get(key, "") for key, inside in captured.items() if _is_changed(inside)},
        random_operations=_described(each for each in operations if _draws(each.type)),
        python_calls=_described(each for each in operations if each.type in PYTHON_CALLS),
        table_changes=_described(each for each in operations if each.type in TABLE_CHANGES),
    )


def draws_in_preparation(traced: Traced) -> list[str]:
    """Returns what prepare_example draws that a resumed run does not draw again, each with what to do."""
    instead = "take the parameter `seed` and draw with tf.random.stateless_* or tf.image.stateless_random_*"
    found = [f"{each} draws other numbers after a resume: {instead}" for each in traced.random_operations]
    changed = [name or "of a tf.random.Generator" for name in traced.changed.values()]
    return found + [f"changes the variable {each}, which no checkpoint holds: {instead}" for each in changed]


def python_in_preparation(traced: Traced) -> list[str]:
    """Returns where prepare_example runs Python, which may draw, each with what to do."""
    instead = (
        "a resume repeats what it draws from np.random.default_rng(np.abs(seed)), with `seed` handed to the function"
    )
    return [f"{each} runs Python: {instead}" for each in traced.python_calls]


def draws_in_step(traced: Traced) -> list[str]:
    """Returns what a step draws that a resumed run does not draw again, each with what to do."""
    instead = "use keras.layers.Dropout, or keras.random with a keras.random.SeedGenerator that a layer keeps"
    return [f"{each} draws other numbers after a resume: {instead}" for each in traced.random_operations]


def python_in_step(traced: Traced) -> list[str]:
    """Returns where a step runs Python, which may draw or keep something, each with what to do."""
    instead = "no checkpoint holds what it keeps or draws from; let it depend on its arguments alone"
    return [f"{each} runs Python: {instead}" for each in traced.python_calls]


def _is_changed(handle: tf.Tensor) -> bool:
    return any(handle in get_read_write_resource_inputs(operation)[1] for operation in handle.consumers())


def _draws(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful or kind.startswith(DRAW_NOTHING):
        return False
    return kind == "NonDeterministicInts" or any(attribute.name == "seed" for attribute in definition.attr)


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations of a graph and of all functions that it calls, as loops and branches do."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from function.graph.get_operations()


def _described(operations: Iterable[tf.Operation]) -> list[str]:
    """Returns each operation's kind and the innermost place in the user's files that made it; equal ones once."""
    return list(dict.fromkeys(f"{each.type}{_place(each)}" for each in operations))


def _place(operation: tf.Operation) -> str:
    for frame in reversed(list(operation.traceback)):
        file = Path(frame.filename)
        is_ours = ENGINE in file.parents or file == ENGINE.parent / "train.py"
        if not is_ours and not frame.filename.startswith((*LIBRARIES, "<")):
            return f" ({file.name}:{frame.lineno} {frame.name}".rstrip() + ")"
    return ""
