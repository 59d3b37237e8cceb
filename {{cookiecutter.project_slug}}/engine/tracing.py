"""What a traced hook draws, changes and calls; and AutoGraph for hooks.

A run can be repeated and resumed only if its random numbers and its state follow from its seed and its checkpoints.
"""

import dataclasses
import sysconfig
from collections.abc import Callable
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
LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
# Taken while nothing is being traced: within a trace it would hold what the functions around a hook ask for.
_STATUS = tf.__internal__.autograph.control_status_ctx()


def converted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that AutoGraph converts when it is traced, also where a function of the engine's calls it.

    The engine's own code has nothing to convert, and to find that out takes long. With --eager it stays as it is, so
    that a debugger shows its lines.
    """
    if tf.config.functions_run_eagerly():
        return hook
    return tf.__internal__.autograph.tf_convert(hook, _STATUS)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a traced function does. Operations are texts such as "RandomUniform (task.py:88 train_step)"."""

    used: frozenset[int]
    """The ids of the handles of the variables, of single replicas, that it reads or changes."""
    changed: dict[int, str]
    """Those of the variables that it changes, with their names; "" if the graph does not name the variable.

    Among these are the tokens by which TensorFlow keeps collective operations in their order.
    """
    random_operations: list[str]
    """Those that count their draws by themselves, from 0 in each process, whatever their seed is.

    Not the stateless ones, which take their seed as an input, nor those of a generator, which keeps it in a variable.
    """
    python_calls: list[str]
    """Python functions in tf.py_function or tf.numpy_function."""
    table_changes: list[str]
    """Changes of lookup tables."""


def look_at(graph: tf.Graph) -> Traced:
    """Returns what the function of this graph does; its tracing may still be under way."""
    # Of what is captured, only variables have such data: tables and iterators have none.
    captured = {id(handle): inside for handle, inside in graph.captures if getattr(handle, "_handle_data", None)}
    names = {id(variable.handle): variable.name for variable in graph.variables}
    operations = list(graph.get_operations())
    for function in graph._functions.values():  # All that it calls, as loops and branches do.
        operations += function.graph.get_operations()

    def described(is_wanted: Callable[[str], bool]) -> list[str]:
        """Returns each such operation's kind and place; equal ones once."""
        return list(dict.fromkeys(f"{each.type}{_place(each)}" for each in operations if is_wanted(each.type)))

    return Traced(
        used=frozenset(captured),
        changed={key: names.get(key, "") for key, inside in captured.items() if _is_changed(inside)},
        random_operations=described(_draws),
        python_calls=described(PYTHON_CALLS.__contains__),
        table_changes=described(TABLE_CHANGES.__contains__),
    )


def _is_changed(handle: tf.Tensor) -> bool:
    return any(handle in get_read_write_resource_inputs(operation)[1] for operation in handle.consumers())


def _draws(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful or kind.startswith(DRAW_NOTHING):
        return False
    return kind == "NonDeterministicInts" or any(attribute.name == "seed" for attribute in definition.attr)


def _place(operation: tf.Operation) -> str:
    """Returns the innermost place in the user's files that made an operation."""
    for frame in reversed(list(operation.traceback)):
        file = Path(frame.filename)
        is_ours = ENGINE in file.parents or file == ENGINE.parent / "train.py"
        if not is_ours and not frame.filename.startswith((*LIBRARIES, "<")):
            return f" ({file.name}:{frame.lineno} {frame.name}".rstrip() + ")"
    return ""


# --- What a resumed run would not repeat, each with what to do --------------------------------------------------------


def draws_in_preparation(traced: Traced) -> list[str]:
    """Returns the random operations of prepare_example, and the generators it draws from."""
    instead = "take the parameter `seed` and draw with tf.random.stateless_* or tf.image.stateless_random_*"
    found = [f"{each} draws other numbers after a resume: {instead}" for each in traced.random_operations]
    changed = [name or "of a tf.random.Generator" for name in traced.changed.values()]
    return found + [f"changes the variable {each}, which no checkpoint holds: {instead}" for each in changed]


def python_in_preparation(traced: Traced) -> list[str]:
    """Returns the Python functions of prepare_example, which may draw."""
    instead = (
        "draw from np.random.default_rng(np.abs(seed)), with `seed` given to the function, to have a resume repeat it"
    )
    return [f"{each} runs Python: {instead}" for each in traced.python_calls]


def draws_in_step(traced: Traced) -> list[str]:
    """Returns the random operations of a step."""
    instead = "use keras.layers.Dropout, or keras.random with a keras.random.SeedGenerator that a layer keeps"
    return [f"{each} draws other numbers after a resume: {instead}" for each in traced.random_operations]


def python_in_step(traced: Traced) -> list[str]:
    """Returns the Python functions of a step, which may draw or keep something."""
    instead = "no checkpoint holds what it keeps or draws from; let it depend on its arguments alone"
    return [f"{each} runs Python: {instead}" for each in traced.python_calls]
