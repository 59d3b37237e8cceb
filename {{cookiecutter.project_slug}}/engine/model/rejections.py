"""Rejects hooks whose objects would train wrongly without an error."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model.metrics import Metrics, ResultNames, split_of
from engine.model.optimizers import inner_optimizers
from engine.model.variables import by_name, inner_variable, trainable_variables, variable_path
from engine.tracing import Traced

CREATE_HOOKS = ("create_model", "create_optimizer", "create_loss_objects", "create_metrics")
HOOKS = ("load_examples", "prepare_example", *CREATE_HOOKS, "train_step", "evaluation_step")
# On several replicas an unseeded generator fails, because Keras makes one in each replica's thread.
UNSEEDED = (
    "task.train_step draws from keras.random without a seed, which fails on several replicas: draw from a seed of each "
    "example, see docs/reproducibility.md, or give a layer a keras.random.SeedGenerator and pass it as seed"
)


def check_hooks(task: Any, *, export: bool) -> None:
    """Raises BadInput if task.py lacks a hook; an export needs predict_step."""
    needed = (*HOOKS, "predict_step") if export else HOOKS
    if missing := [name for name in needed if not callable(getattr(task, name, None))]:
        raise BadInput(f"task.py has no function {', '.join(missing)}: it needs {', '.join(needed)}")


def check_floatx() -> None:
    """Raises BadInput if Keras was set to another dtype than float32."""
    if (floatx := keras.config.floatx()) != "float32":
        raise BadInput(
            f"keras.config.floatx() is {floatx}, and the engine computes in float32: remove that from task.py and "
            "~/.keras/keras.json, and use --precision"
        )


def check_scope(strategy: tf.distribute.Strategy, objects: Any, hook: str) -> None:
    """Raises BadInput unless models, optimizers or metrics were made inside the strategy's scope."""
    for made in by_name(objects, hook).values():
        if not hasattr(made, "variables"):
            raise BadInput(f"{hook} returned {made!r}: return the objects that its docstring names")
        if strategy.num_replicas_in_sync == 1:
            continue
        for variable in made.variables:
            if not strategy.extended.variable_created_in_scope(inner_variable(variable)):
                raise BadInput(
                    f"{hook} returned the variable {variable_path(variable)}, which was made outside the strategy's "
                    "scope: make it inside the hook, not when the file is imported"
                )


def check_shapes(made: Mapping[str, tf.Variable]) -> None:
    """Raises BadInput for a variable whose size may change: a checkpoint would not fit it."""
    for name, variable in made.items():
        if not variable.shape.is_fully_defined():
            raise BadInput(f"the variable {name} has the shape {variable.shape}: make it with a shape that is known")


def check_metrics(metrics: Metrics) -> None:
    """Raises BadInput if two splits share a metric, which would count the examples of both."""
    splits: dict[int, str] = {}
    for split, by_metric in metrics.items():
        for name, metric in by_metric.items():
            if (other := splits.setdefault(id(metric), split)) != split:
                raise BadInput(
                    f"task.create_metrics({split!r}) returned {name!r}, which it also returned for {other!r}: make new "
                    "metrics in each call"
                )


def check_kept_tensors(metrics: Metrics) -> None:
    """Raises BadInput if a metric keeps a tensor of a traced step in Python, which no later step changes."""
    for split, by_metric in metrics.items():
        for name, metric in by_metric.items():
            for attribute, value in vars(metric).items():
                kept = value if isinstance(value, list | tuple) else [value]
                if any(map(tf.is_symbolic_tensor, kept)):
                    raise BadInput(
                        f"task.create_metrics({split!r}) returned {name!r}, which keeps tensors in {attribute!r}: keep "
                        "them in variables, which self.add_variable makes"
                    )


def check_loss_objects(loss_objects: dict[str, keras.losses.Loss]) -> None:
    """Raises BadInput for a loss that is one value for all examples; Keras also divides means by the replicas."""
    if not isinstance(loss_objects, Mapping):
        raise BadInput(f"task.create_loss_objects returned {loss_objects!r}: return a dict of losses by name")
    for name, loss in loss_objects.items():
        reduction = getattr(loss, "reduction", None)
        if reduction not in (None, "none"):
            raise BadInput(
                f"task.create_loss_objects returned {name!r} with reduction={reduction!r}, which is one value for all "
                "examples of a replica: use reduction='none'; task.compute_loss averages"
            )


def check_float8(model: Any) -> None:
    """Raises BadInput if a variable takes its gradient, a maximum that nothing may sum, as its value."""
    for network in by_name(model, "model").values():
        for variable in network.trainable_variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise BadInput(
                    f"task.create_model returned {variable.path}, which training in float8 makes, and which is wrong "
                    "on several replicas: train in 16 or 32 bits, and quantize afterwards"
                )


def check_weight_decay(optimizer: Any, model: Any) -> None:
    """Raises BadInput if an optimizer excludes variables from weight decay by names that match no variable."""
    names = [variable.name for variable in trainable_variables(model).values()]
    for outer in by_name(optimizer, "optimizer").values():
        for inner in inner_optimizers(outer) or [getattr(outer, "inner_optimizer", outer)]:
            pattern = getattr(getattr(inner, "_exclude_from_weight_decay_pattern", None), "pattern", "")
            # A list of names for many models may match only in part; a name with "$" is meant for this model.
            parts = [] if "(" in pattern else [part for part in pattern.split("|") if part.endswith("$")]
            for part in parts or [pattern]:
                if part and not any(re.search(part, name) for name in names):
                    raise BadInput(
                        f"task.create_optimizer: exclude_from_weight_decay(var_names=[{part!r}]) excludes nothing, "
                        f"because Keras compares it with TensorFlow's names, such as {names[0]!r}: pass the variables "
                        "themselves, as var_list"
                    )


def monitor_direction(names: ResultNames, monitor: str, setting: str) -> str:
    """Returns "min" or "max": the setting, or with "auto" the metric's direction as Keras knows it; "min" for a loss.

    Raises BadInput if `monitor` is not a result of training or validation, or its direction is unknown.
    """
    if monitor not in names.metrics or split_of(monitor) not in ("train", "validation"):
        raise BadInput(
            f"--monitor {monitor} is not a result of task.create_metrics for the datasets of task.load_examples: use "
            f"one of {', '.join(names.to_monitor()) or '(none)'}"
        )
    if setting != "auto":
        return setting
    metric, name = names.metrics[monitor]
    known = {"up": "max", "down": "min"}.get(getattr(metric, "_direction", ""))
    if known is None and not name.endswith("loss"):
        raise BadInput(
            f"--monitor {monitor}: whether lower or higher is better is unknown: pass --monitor-direction min or max"
        )
    return known or "min"


def check_outputs(outputs: Any, count: int | None = None) -> None:
    """Raises BadInput unless task.predict_step returned tensors by name with `count` rows; None while it is traced."""
    if not isinstance(outputs, dict) or not outputs or not all(isinstance(name, str) for name in outputs):
        raise BadInput(f"task.predict_step returned {outputs!r}: return a dict of tensors by name, [n, ...] each")
    for name, output in outputs.items():
        has_rows = isinstance(output, tf.Tensor) and (
            output.shape.rank is None or output.shape[:1].as_list() == [count]
        )
        if not has_rows:
            shape = getattr(output, "shape", "unknown")
            raise BadInput(
                f"task.predict_step returned {name!r} as {type(output).__name__} of shape {shape} for {count or 'n'} "
                "examples: return a tensor [n, ...], a row per example"
            )


def traced(steps: Any) -> Traced | None:
    """Returns what compiled steps do, traced now if they were not before; None if no graph runs in this process."""
    try:
        graph = steps.graph()
    except Exception as problem:
        if "seed_generator_state" in str(problem):
            raise BadInput(UNSEEDED) from problem
        raise
    return None if graph is None else Traced(graph)


def check_changes(
    steps: Mapping[str, Traced], strategy: tf.distribute.Strategy, saved: Collection[tf.Variable]
) -> None:
    """Raises BadInput if steps change anything besides the `saved` variables."""
    handles = {id(part.handle) for variable in saved for part in strategy.experimental_local_results(variable)}
    for split, step in steps.items():
        hook = "train_step" if split == "train" else "evaluation_step"
        lost = [name for handle, name in step.changed.items() if name and handle not in handles]
        if lost:
            raise BadInput(
                f"task.{hook} changes the variable {lost[0]}, which no checkpoint contains: make it in a create_* "
                "hook, not elsewhere"
            )
        if step.table_changes:
            raise BadInput(
                f"task.{hook} changes a lookup table, which no checkpoint contains: {step.table_changes[0]}: fill it "
                "in a create_* hook, or use a tf.Variable instead"
            )
