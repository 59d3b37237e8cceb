"""What the hooks of task.py returned: checked, and built before anything is traced.

A task has one model and one optimizer, or dictionaries of them under the same names (a GAN's generator and
discriminator, say). `by_name` makes both the same to the rest of the engine.
"""

import contextlib
import numbers
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.mistakes import first_line
from engine.model import replicas
from engine.model.gradients import prepare_optimizer
from engine.tracing import Traced, converted, look_at

# metrics as task.py keeps them: split -> name -> metric.
Metrics = dict[str, dict[str, keras.metrics.Metric]]


def by_name(objects: Any, kind: str) -> dict[str, Any]:
    """Returns `objects` if it is a dictionary, else a dictionary that holds it under `kind`."""
    return dict(objects) if isinstance(objects, Mapping) else {kind: objects}


# What train.py and the steps use of task.py.
HOOKS = (
    "load_examples",
    "prepare_example",
    "create_model",
    "create_optimizer",
    "create_loss_objects",
    "create_metrics",
    "train_step",
    "validation_step",
    "test_step",
)


def check_hooks(task: ModuleType) -> None:
    """Raises BadInput if task.py lacks a hook."""
    missing = [name for name in HOOKS if not callable(getattr(task, name, None))]
    if missing:
        raise BadInput(f"task.py has no function {', '.join(missing)}: it needs every one of {', '.join(HOOKS)}")


def build_models(model: Any, features_spec: Any) -> None:
    """Creates the variables of every model that has none yet, by a call on zeros of the features' shape.

    A layer that the model calls in training only is built too.

    Raises:
        BadInput: the model does not accept such features, or is not a keras.Model.
    """
    for name, each in by_name(model, "model").items():
        if not isinstance(each, keras.Model):
            raise BadInput(f"task.create_model returned {each!r} as {name!r}: return a keras.Model, or a dict of them")
        if each.built and isinstance(model, Mapping):
            continue  # One of several models may take what another one makes.
        zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), features_spec)
        try:
            with warnings.catch_warnings():
                # Of the layers that the next call builds; one that is never called is no harm.
                warnings.filterwarnings("ignore", message=r"`build\(\)` was called on layer")
                each(zeros, training=False)
                if not all(layer.built for layer in replicas.layers_of(each)):
                    # A symbolic call makes variables, and assigns to none: seeds and statistics stay.
                    each(tf.nest.map_structure(_symbolic, features_spec), training=True)
        except Exception as problem:
            raise BadInput(
                f"task.create_model returned {name!r}, which does not accept features of the shapes "
                f"{tf.nest.map_structure(lambda spec: spec.shape.as_list(), features_spec)} ({first_line(problem)}): "
                "let its first layer take what task.prepare_example returns"
            ) from problem


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def check_scope(strategy: tf.distribute.Strategy, objects: Any, hook: str) -> None:
    """Raises BadInput if the models, optimizers or metrics are none, or made outside the strategy's scope."""
    for each in by_name(objects, hook).values():
        if not hasattr(each, "variables"):
            raise BadInput(f"{hook} returned {each!r}: return what its docstring says")
        for variable in each.variables:
            inner = _inner_variable(variable)
            if strategy.num_replicas_in_sync > 1 and not strategy.extended.variable_created_in_scope(inner):
                raise BadInput(
                    f"{hook} returned the variable {_path(variable)}, which was made outside the strategy's scope: "
                    "make it inside the hook, not when the file is imported"
                )


def build_optimizers(optimizer: Any, model: Any, precision: str) -> Any:
    """Returns the optimizer or optimizers, with variables made for the trainable variables of the models they are for.

    Variables first made inside a compiled step fail on several replicas (keras#23085), so none may be left.

    Raises:
        BadInput: an optimizer is for no model, or does what `gradients` does.
    """
    models = by_name(model, "model")
    built = {}
    for name, each in by_name(optimizer, "optimizer").items():
        if not isinstance(optimizer, Mapping):
            trained = list(models.values())
        elif name in models:
            trained = [models[name]]
        else:
            raise BadInput(
                f"task.create_optimizer returned an optimizer {name!r}, and task.create_model the models "
                f"{sorted(models)}: name each optimizer after the model it trains"
            )
        built[name] = prepare_optimizer(each, precision)
        built[name].build([variable for one in trained for variable in one.trainable_variables])
        for inner in _inner_optimizers(built[name]):
            prepare_optimizer(inner, "float32")  # Refused for what is refused of one alone.
    return built if isinstance(optimizer, Mapping) else built["optimizer"]


def build_metrics(task: ModuleType, strategy: tf.distribute.Strategy, batch_spec: Any) -> None:
    """Creates the variables of metrics that would make them with their first update, such as F1Score.

    In a compiled step that fails on several replicas, so such a split's step runs once before, on zeros; what it did
    to anything else is undone.
    """
    steps = {"train": task.train_step, "validation": task.validation_step, "test": task.test_step}
    for split, step in steps.items():
        # Keras notes it as `_built`, because some, such as R2Score, have one of their variables from the start.
        if all(metric.variables and getattr(metric, "_built", True) for metric in task.metrics[split].values()):
            continue
        changed = [*model_variables(task.model).values(), *optimizer_variables(task.optimizer).values()]
        of_replicas = [each for variable in changed for each in strategy.experimental_local_results(variable)]
        before = [tf.identity(each) for each in of_replicas]
        zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), batch_spec)
        strategy.run(step, args=(zeros,))
        for each, value in zip(of_replicas, before, strict=True):
            each.assign(value)
        for metric in task.metrics[split].values():
            metric.reset_state()


def model_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns every variable of every model, trained or not, seed states too, under a unique name, in model order."""
    return _variables(by_name(model, "model"))


def optimizer_variables(optimizer: Any) -> dict[str, tf.Variable]:
    """Returns every variable of every optimizer under a unique name."""
    return _variables(by_name(optimizer, "optimizer"))


def trainable_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns the variables of every model that training changes, under the names of `model_variables`."""
    trained = {id(variable.value) for each in by_name(model, "model").values() for variable in each.trainable_variables}
    return {name: variable for name, variable in model_variables(model).items() if id(variable) in trained}


def own_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns the variables of every model that may differ between replicas, under the names of `model_variables`."""
    own = {id(variable.value) for variable in replicas.own_variables(by_name(model, "model"))}
    return {name: variable for name, variable in model_variables(model).items() if id(variable) in own}


def metric_variables(metrics: Metrics) -> dict[str, tf.Variable]:
    """Returns every variable of the metrics under a unique name."""
    named = {f"metrics/{split}/{name}": metric for split in metrics for name, metric in metrics[split].items()}
    return _variables(named)


def listed_variables(task: ModuleType) -> list[tf.Variable]:
    """Returns all variables that the task's models, optimizers and metrics list."""
    named = (model_variables(task.model), optimizer_variables(task.optimizer), metric_variables(task.metrics))
    return [variable for of_kind in named for variable in of_kind.values()]


def _variables(objects: dict[str, Any]) -> dict[str, tf.Variable]:
    named: dict[str, tf.Variable] = {}
    for kind, each in objects.items():
        for variable in each.variables:
            name = unique = f"{kind}/{_path(variable)}"
            number = 2
            while unique in named:
                unique, number = f"{name}#{number}", number + 1
            named[unique] = _inner_variable(variable)
    return named


def _inner_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    # An optimizer or metric of the user's own may name TensorFlow's among its variables.
    return variable.value if isinstance(variable, keras.Variable) else variable


def _path(variable: keras.Variable | tf.Variable) -> str:
    return variable.path if isinstance(variable, keras.Variable) else variable.name.removesuffix(":0")


def _inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns those that an optimizer such as keras.optimizers.MultiOptimizer hands the variables to; usually none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    return list(getattr(optimizer, "optimizers", []))


def learning_rates(optimizer: Any) -> dict[str, float]:
    """Returns the learning rates of the next update, as columns of metrics.csv.

    They are "learning_rate" of one optimizer, "learning_rate/<name>" of several, and nothing of one that has none.
    """
    named: dict[str, Any] = {}
    for name, each in by_name(optimizer, "").items():
        inner = _inner_optimizers(each)
        for one in inner or [each]:
            named["/".join(filter(None, ["learning_rate", name, one.name if inner else ""]))] = one
    rates = {}
    for name, each in named.items():
        # One that hands its work to others may refuse to say, with whatever exception.
        with contextlib.suppress(Exception):
            rates[name] = float(keras.ops.convert_to_numpy(each.learning_rate))
    return rates


def metric_results(metrics: Metrics, split: str) -> dict[str, float]:
    """Returns the results of a split's metrics as "<split>/<name>". Raises BadInput if one is not a single number."""
    results = {}
    for name, metric in metrics[split].items():
        result = metric.result()
        if isinstance(result, keras.Variable | tf.Variable):
            result = _read(_inner_variable(result), split, name)
        if getattr(result, "shape", None) != () and not isinstance(result, numbers.Real):
            found = getattr(result, "shape", type(result).__name__)
            raise BadInput(
                f"task.create_metrics({split!r}) returned {name!r}, whose result is of shape {found}: it has to be one "
                "number; average it"
            )
        results[f"{split}/{name}"] = float(result)
    return results


def _read(variable: tf.Variable, split: str, metric: str) -> tf.Tensor:
    """Returns what the replicas' values of a metric's variable come to together."""
    if isinstance(variable, tf.distribute.DistributedValues) and variable.aggregation == tf.VariableAggregation.NONE:
        raise BadInput(
            f"task.create_metrics({split!r}) returned {metric!r}, whose variable {variable.name} does not say what the "
            "replicas' values come to together: make it with self.add_variable(shape=..., initializer=...), which sums"
        )
    return tf.convert_to_tensor(variable)


def check_objects(task: ModuleType, settings: Any, strategy: tf.distribute.Strategy, batch_spec: Any) -> Traced:
    """Raises BadInput if the objects of task.py cannot give the same numbers on any number of replicas.

    Args:
        task: what has the global objects, and the hooks that made them.
        settings: what has monitor.
        strategy: the strategy in whose scope they were made.
        batch_spec: what one replica receives, as tf.TensorSpec.

    Returns:
        What validation_step does on one replica; it is traced to look at the loss.
    """
    _check_loss_objects(task.loss_objects)
    _check_metrics(task.metrics, settings.monitor)
    return _check_loss(task, strategy, batch_spec)


def _check_metrics(metrics: Metrics, monitor: str) -> None:
    """Raises BadInput if a metric's result is not one number, or `monitor` names none of those there are."""
    for split in metrics:
        # Some metrics make their variables, and so a result, with their first update.
        with contextlib.suppress(AttributeError):
            metric_results(metrics, split)
    names = [f"{split}/{name}" for split in ("train", "validation") for name in metrics[split]]
    if monitor not in names:
        raise BadInput(f"--monitor {monitor} names no metric: use one of {', '.join(names)}")


def check_jit(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raises BadInput if a layer needs the other replicas in the middle of what --jit compiles."""
    layers = [layer for each in by_name(model, "model").values() for layer in replicas.layers_of(each)]
    synchronized = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
    if synchronized and strategy.num_replicas_in_sync > 1:
        raise BadInput(
            f"--jit with the layer {synchronized[0]!r}, which is synchronized over {strategy.num_replicas_in_sync} "
            "replicas inside the forward pass: leave --jit out, or use synchronized=False or another normalization"
        )


def _check_loss_objects(loss_objects: dict[str, keras.losses.Loss]) -> None:
    """Raises BadInput for a loss that averages by itself: Keras divides it by the number of replicas as well."""
    if not isinstance(loss_objects, Mapping):
        raise BadInput(f"task.create_loss_objects returned {loss_objects!r}: return a dict of losses by name")
    for name, loss in loss_objects.items():
        reduction = getattr(loss, "reduction", None)
        if reduction not in (None, "none"):
            raise BadInput(
                f"task.create_loss_objects returned {name!r} with reduction={reduction!r}, which Keras divides by the "
                "number of replicas as well: use reduction='none'; task.compute_loss averages"
            )


class _TracedEnough(Exception):
    """A step has been traced as far as is needed."""


def _check_loss(task: ModuleType, strategy: tf.distribute.Strategy, batch_spec: Any) -> Traced:
    """Raises BadInput unless compute_loss gives one scalar and one value per example.

    A loss of shape [share, share] (labels [share] against predictions [share, 1]) or one that is already a mean
    trains without an error, and wrongly; so this traces validation_step once and looks at what compute_loss returns in
    it. A task without a compute_loss, or with one that returns something else, is left alone.
    """
    compute_loss = getattr(task, "compute_loss", None)
    losses: list[Any] = []
    looked_at: list[Traced] = []
    share = batch_spec[2].shape[0]
    rule = (
        f"one value per example, shape ({share},), is needed: average over any other axes, and let the losses of "
        "task.create_loss_objects have reduction='none'"
    )

    @tf.autograph.experimental.do_not_convert
    def noted(*arguments: Any, **options: Any) -> Any:
        losses.append(converted(compute_loss)(*arguments, **options))
        return losses[-1]

    step = converted(task.validation_step)

    @tf.autograph.experimental.do_not_convert
    def step_of_one_replica(batch: Any) -> None:
        step(batch)
        looked_at.append(look_at(tf.compat.v1.get_default_graph()))
        raise _TracedEnough  # The other replicas would be traced next, and say the same.

    traced = tf.function(lambda batch: strategy.run(step_of_one_replica, args=(batch,)), autograph=False)
    if callable(compute_loss):
        task.compute_loss = noted
    try:
        with contextlib.suppress(_TracedEnough):
            traced.get_concrete_function(batch_spec)
    except ValueError as problem:
        # What tf.nn.compute_average_loss says of a scalar.
        if "Invalid value passed for `per_example_loss`" not in str(problem):
            raise
        raise BadInput(
            f"task.compute_loss was given a loss that is one number for the whole batch: {rule}"
        ) from problem
    except Exception:
        if not any(isinstance(each, tf.Tensor) for each in losses):
            raise
    finally:
        if callable(compute_loss):
            task.compute_loss = compute_loss
    for each in losses:
        if isinstance(each, tf.Tensor):
            raise BadInput(f"task.compute_loss returned one tensor {each.shape}: return (loss, per_example_loss)")
        if not isinstance(each, tuple) or len(each) != 2 or not all(isinstance(part, tf.Tensor) for part in each):
            continue
        loss, per_example_loss = each
        if tuple(per_example_loss.shape) != (share,):
            shape = tuple(per_example_loss.shape)
            raise BadInput(f"task.compute_loss returned a per-example loss of shape {shape}: {rule}")
        if loss.shape.rank != 0:
            raise BadInput(f"task.compute_loss returned a loss of shape {tuple(loss.shape)}: one number is needed")
    return looked_at[0]
