"""Reads from its graph what a traced hook draws, changes and calls; AutoGraph for hooks, and what a step must return.

A run can be repeated and resumed only if its random numbers and its state follow from its seed and its checkpoints.
"""

import os
import pickle
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
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


class Traced:
    """What the function of a graph does; its tracing may still be under way.

    Operations are texts such as "RandomUniform (task.py:88 train_step)".
    """

    def __init__(self, graph: tf.Graph) -> None:
        # Only variables have such data, tables and iterators do not.
        captured = {id(handle): inside for handle, inside in graph.captures if getattr(handle, "_handle_data", None)}
        names = {id(variable.handle): variable.name for variable in graph.variables}
        operations = operations_of(graph)

        def described(is_wanted: Callable[[str], bool]) -> list[str]:
            texts = (f"{operation.type}{place(operation)}" for operation in operations if is_wanted(operation.type))
            return list(dict.fromkeys(texts))

        # The ids of the handles of the variables, each of a single replica, that it reads or changes.
        self.used = frozenset(captured)
        # The ids of the handles that it changes, with the variables' names; "" if the graph names none, as of the
        # tokens by which TensorFlow keeps collective operations in order.
        self.changed = {
            key: names.get(key, "")
            for key, inside in captured.items()
            if any(inside in get_read_write_resource_inputs(operation)[1] for operation in inside.consumers())
        }
        # Operations that count their draws by themselves, from 0 in each process, whatever their seed is: not stateless
        # ones, nor operations of a generator, which keeps its state in a variable.
        kinds = {operation.type: operation for operation in operations}
        drawing = {kind for kind, operation in kinds.items() if _draws(operation)}
        self.random_operations = described(drawing.__contains__)
        self.python_calls = described(PYTHON_CALLS.__contains__)
        self.table_changes = described(TABLE_CHANGES.__contains__)
        # Values that Python draws while the function is traced: each call uses the same ones.
        drawn = (name for part in _graphs(graph) for name in part.get_collection(DRAWN_ONCE))
        self.drawn_once = list(dict.fromkeys(drawn))
        self.shared_seeds = _shared_seeds(operations)
        self.writes_summaries = any(kind.startswith("Write") and kind.endswith("Summary") for kind in kinds)


def differing_value(one: tf.Graph, again: tf.Graph) -> list[str]:
    """Returns the first value that differs between two traces of a function, such as a clock's; none if all agree."""

    def described(operation: tf.Operation) -> tuple[str, bytes]:
        # Texts may contain addresses.
        is_number = operation.type == "Const" and operation.outputs[0].dtype != tf.string
        return operation.type, operation.get_attr("value").SerializeToString() if is_number else b""

    pairs = zip(operations_of(one), operations_of(again), strict=False)
    return [f"a value{place(first)}" for first, second in pairs if described(first) != described(second)][:1]


def operations_of(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a graph and of its functions, which also are the bodies of loops and branches."""
    return [operation for part in _graphs(graph) for operation in part.get_operations()]


def _graphs(graph: tf.Graph) -> list[tf.Graph]:
    # A function that TensorFlow defines by itself, as for the CTC loss, has no graph.
    return [graph, *(function.graph for function in graph._functions.values() if hasattr(function, "graph"))]


def _draws(operation: tf.Operation) -> bool:
    kind, definition = operation.type, operation.op_def
    if not definition.is_stateful or kind.startswith(DRAW_NOTHING):
        return False
    names = {attribute.name for attribute in definition.attr}
    return "seed" in names or kind in ("NonDeterministicInts", "Timestamp")  # A clock repeats no more than a draw does.


def _shared_seeds(operations: list[tf.Operation]) -> list[str]:
    """Returns a text for each seed from which several stateless operations draw: their numbers are correlated."""
    places: dict[Any, list[str]] = {}
    for operation in operations:
        inputs = dict(zip((part.name for part in operation.op_def.input_arg), operation.inputs, strict=False))
        if not operation.type.startswith("Stateless") or "seed" not in inputs:
            continue
        uses = {use.type for output in operation.outputs for use in output.consumers()}
        is_of_keras = any(f"{os.sep}keras{os.sep}" in frame.filename for frame in operation.traceback)
        # All bits of an integer, as tf.random.split draws them, are another seed.
        if uses != {"StatelessRandomUniformFullIntV2"} and not is_of_keras:
            places.setdefault(inputs["seed"].ref(), []).append(place(operation))
    return [
        f"two draws from one seed{','.join(found[:2])} depend on each other: give each a seed of "
        "tf.random.split(seed), unless they must be equal, as for an image and its mask"
        for found in places.values()
        if len(found) > 1
    ]


def place(operation: tf.Operation) -> str:
    """Returns the innermost place in the user's files that made an operation."""
    for frame in reversed(list(operation.traceback)):
        if not frame.filename.startswith(NOT_OF_THE_USER):
            return f" ({Path(frame.filename).name}:{frame.lineno} {frame.name}".rstrip() + ")"
    return ""


def unrepeatable(traced: Traced, hook: str) -> tuple[list[str], list[str]]:
    """Returns what of prepare_example or train_step a resumed run would not repeat: draws, and Python functions.

    Python functions may draw or keep state, too. Every text contains advice.
    """
    if hook == "prepare_example":
        instead = "take the parameter `seed` and draw with tf.random.stateless_* or tf.image.stateless_random_*"
        in_python = (
            "draw from np.random.default_rng(np.abs(seed)), with `seed` as its argument, so that a resume repeats it"
        )
        changed, calls = [name or "of a tf.random.Generator" for name in traced.changed.values()], "examples"
    else:
        instead = "use keras.layers.Dropout, or draw from a seed of each example that prepare_example returns, see "
        instead += "docs/reproducibility.md"
        in_python = "no checkpoint contains its state or its random numbers; let it depend on its arguments alone"
        changed, calls = [], "steps"
    return [
        *(f"{draw} draws different numbers after a resume: {instead}" for draw in traced.random_operations),
        *(
            f"{value} comes from Python, once for all {calls}, because the hook runs as a graph: {instead}"
            for value in traced.drawn_once
        ),
        *(f"changes the variable {name}, which no checkpoint contains: {instead}" for name in changed),
    ], [f"{call} runs Python: {in_python}" for call in traced.python_calls]
