"""What the graphs of the steps show without being run: the metrics they update, and where their gradients jump."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import keras
import tensorflow as tf

from engine.check.results import Check, hook_of_step
from engine.model.variables import inner_variable
from engine.protocols import Task
from engine.run.evaluation import Program
from engine.tracing import look_at, operations_of, place

KERAS = Path(keras.__file__).parent
# Operations whose gradient jumps, by an operation that only their gradient contains, of the same input.
JUMPS = {"Sign": "Abs", "GreaterEqual": "Maximum", "LessEqual": "Minimum"}
OTHERS = {"layers", "models", "metrics", "optimizers"}  # Folders of Keras.
SMOOTH = {"huber", "log_cosh"}  # Losses that contain such an operation, and whose gradient does not jump.


def check_updated_metrics(program: Program, task: Task) -> Iterator[Check]:
    """Checks that the steps of each split update all metrics of the split, and no others."""
    local = program.strategy.experimental_local_results

    def handles(split: str, name: str) -> set[int]:
        variables = (inner_variable(each) for each in task.metrics[split][name].variables)
        return {id(one.handle) for each in variables for one in local(each)}

    for split, steps in program.run_steps.items():
        graph, where = steps.graph(), hook_of_step(task, "update_metrics", split)
        assert graph is not None  # It is None only in other processes.
        changed = look_at(graph).changed.keys()
        own = {name: handles(split, name) for name in task.metrics[split]}
        all_own = set().union(*own.values())
        others = [(each, name) for each in task.metrics if each != split for name in task.metrics[each]]
        if wrong := [pair for pair in others if (handles(*pair) - all_own) & changed]:
            text = (
                f"the {split} steps update metrics[{wrong[0][0]!r}][{wrong[0][1]!r}]: update metrics[{split!r}] there"
            )
            yield Check(False, where, text)
            continue
        for name, of_metric in own.items():
            if of_metric and not of_metric & changed:
                yield Check(False, where, f"{split}/{name} is never updated: update it, or remove it in create_metrics")


def jumps(graph: tf.Graph) -> str:
    """Returns the places of operations in the loss whose gradient jumps; "" without any."""
    # Such an operation and its gradient's share their first input.
    found = ((each, JUMPS[each.type]) for each in operations_of(graph) if each.type in JUMPS)
    return _places(each for one, kind in found for each in one.inputs[0].consumers() if each.type == kind)


def draws(graph: tf.Graph) -> str:
    """Returns the places of random operations that hooks call themselves; "" without any."""
    return _places(each for each in operations_of(graph) if each.type.startswith("StatelessRandom"))


def _places(operations: Iterable[tf.Operation]) -> str:
    return "".join(dict.fromkeys(place(each) for each in operations if _is_of_hook(each)))


def _is_of_hook(operation: tf.Operation) -> bool:
    """Returns whether a hook, or a Keras loss, calls an operation, and not a layer or an optimizer."""
    frames = [each for each in operation.traceback if KERAS in Path(each.filename).parents]
    folders = {folder for each in frames for folder in Path(each.filename).relative_to(KERAS).parts[1:2]}
    return folders.isdisjoint(OTHERS) and SMOOTH.isdisjoint(each.name for each in frames)
