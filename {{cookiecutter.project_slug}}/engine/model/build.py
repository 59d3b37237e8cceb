"""Builds and checks the objects that the hooks of task.py return, in the order in which train.build() needs it."""

import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import engine
from engine.errors import BadInput, Diverged
from engine.exceptions import first_line
from engine.model import rejections, variables
from engine.model.averages import MovingAverage
from engine.model.metrics import ResultNames, build_metrics, metric_results, split_of, zeros
from engine.model.moments import replace_moments
from engine.model.optimizers import inner_optimizers, prepare_optimizer
from engine.model.rows import choose_lazy_rows, read_rows
from engine.model.sums import sum_in_float64
from engine.model.variables import by_name
from engine.protocols import Metrics, Task
from engine.settings import Settings

LOWEST_LOSS_SCALE = 2.0**-10  # Gradients that still overflow float16 here are too large for any scale.


def set_up(task: Task, settings: Settings) -> None:
    """Sets Keras and TensorFlow up for a build. Raises BadInput if task.py lacks a hook."""
    rejections.check_hooks(task, export=settings.export)
    if gc.get_threshold()[0] == engine.WHILE_IMPORTING:
        gc.freeze()
        gc.set_threshold(10_000)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.run_functions_eagerly(settings.eager)
    # The input pipeline stays a graph, in which task.prepare_example runs in Python.
    warnings.filterwarnings("ignore", "Even though the `tf.config.experimental_run_functions_eagerly`")
    # Names and random numbers start over, so that a second build in this process makes the same objects.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy(settings.precision)
    replace_moments()
    read_rows()
    sum_in_float64()


def build_models(model: Any, features_spec: Any) -> Any:
    """Returns the model, or the dict of models, with all variables made, also those of layers used in training only.

    A model that has all its variables need not accept the features: a step may call it on something made of them, and
    one of several models may take the outputs of another. Raises BadInput if one is not a keras.Model, or has no
    variables yet and does not accept such features.
    """
    for name, each in by_name(model, "model").items():
        if not isinstance(each, keras.Model):
            raise BadInput(f"task.create_model returned {each!r} as {name!r}: return a keras.Model, or a dict of them")
        if each.built and isinstance(model, Mapping):
            continue
        is_complete = each.built and all(layer.built for layer in variables.layers_of(each))
        try:
            with warnings.catch_warnings():
                # It warns about layers that the next call builds, or that no step calls.
                warnings.filterwarnings("ignore", message=r"`build\(\)` was called on layer")
                each(zeros(features_spec), training=False)
                if not all(layer.built for layer in variables.layers_of(each)):
                    # A symbolic call makes variables and assigns to none: seeds and statistics stay.
                    symbols = tf.nest.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype.name), features_spec)
                    each(symbols, training=True)
        except Exception as problem:
            if is_complete:
                continue
            shapes = tf.nest.map_structure(lambda spec: spec.shape.as_list(), features_spec)
            fact = f"which does not accept features of the shapes {shapes} ({first_line(problem)})"
            remedy = "make its first layer accept the features of task.prepare_example, or call the model once on what "
            remedy += "the steps give it"
            raise BadInput(f"task.create_model returned {name!r}, {fact}: {remedy}") from problem
    return model


def build_optimizers(optimizer: Any, model: Any, precision: str) -> Any:
    """Returns the optimizer or optimizers with all variables made; each trains the model of its name, or all models.

    Variables first made inside a compiled step fail on several replicas (keras#23085), so none may be missing.
    Raises BadInput if an optimizer is for no model, or clips, accumulates, averages or scales by itself.
    """
    models = by_name(model, "model")
    built = {}
    for name, each in by_name(optimizer, "optimizer").items():
        if isinstance(optimizer, Mapping) and name not in models:
            problem = f"an optimizer {name!r}, and task.create_model the models {sorted(models)}"
            raise BadInput(f"task.create_optimizer returned {problem}: name each optimizer after the model it trains")
        trained = [models[name]] if isinstance(optimizer, Mapping) else models.values()
        built[name] = prepare_optimizer(each, precision)
        built[name].build([variable for one in trained for variable in one.trainable_variables])
        for inner in inner_optimizers(built[name]):
            prepare_optimizer(inner, "float32")  # Rejects the same arguments.
    return built if isinstance(optimizer, Mapping) else built["optimizer"]


@dataclasses.dataclass(frozen=True)
class TaskObjects:
    """The objects that the steps use and change; `finish_objects` makes them."""

    model: Any  # A keras.Model, or a dict of them by name.
    optimizer: Any  # An optimizer, or a dict of them under the models' names.
    metrics: Metrics
    names: ResultNames
    weights: dict[str, tf.Variable]  # Every variable of the models.
    statistics: dict[str, tf.Variable]  # Those of the weights that may differ between replicas, and their averages.
    average: MovingAverage  # It averages the weights and statistics, with --ema-decay.
    average_statistics: Callable[[], None]  # Gives all replicas the mean of the statistics that each has measured.
    monitor_direction: str  # "min" or "max".
    on_report: Callable[..., None] | None

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers, also inside a MultiOptimizer, as "learning_rate", or "learning_rate/<name>" if several."""
        optimizers = {}
        for name, each in by_name(self.optimizer, "").items():
            for inner_name, inner in ({one.name: one for one in inner_optimizers(each)} or {"": each}).items():
                optimizers["/".join(filter(None, ["learning_rate", name, inner_name]))] = inner
        return optimizers

    def mirrored(self) -> dict[str, tf.Variable]:
        """Returns the variables that have one value on all replicas."""
        averages = {f"average/{name}": each for name, each in self.average.state.items()}
        listed = self.weights | variables.named(by_name(self.optimizer, "optimizer")) | averages
        per_replica = self.per_replica()
        return {name: each for name, each in listed.items() if name not in per_replica}

    def per_replica(self) -> dict[str, tf.Variable]:
        """Returns the variables that may differ between replicas."""
        metrics = {f"metrics/{split}/{name}": each[name] for split, each in self.metrics.items() for name in each}
        return self.statistics | variables.named(metrics)

    def results(self, name: str) -> dict[str, float]:
        """Returns the metrics of a dataset as "<name>/<metric>", and resets them: datasets of a split share them."""
        results = metric_results(self.metrics, name)
        self.reset(name)
        return results

    def reset(self, name: str) -> None:
        """Resets the metrics of a dataset's split."""
        for metric in self.metrics[split_of(name)].values():
            metric.reset_state()

    def learning_rates(self) -> dict[str, float]:
        """Returns the learning rates of the next update, as columns of metrics.csv."""
        rates = {}
        for column, optimizer in self.optimizers.items():
            with contextlib.suppress(Exception):  # A task's own optimizer may raise anything.
                rates[column] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        return rates

    def check_loss_scales(self, step: int) -> None:
        """Raises Diverged if a loss scale of mixed_float16 is so low that every step was skipped for long."""
        for optimizer in by_name(self.optimizer, "").values():
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
                if scale < LOWEST_LOSS_SCALE:
                    fact = f"the loss scale at step {step} is down to {scale:g}"
                    raise Diverged(f"{fact}: no scale makes the gradients finite")


def finish_objects(
    task: Task, settings: Settings, batch_specs: dict[str, Any], recorded: list[weakref.ref]
) -> TaskObjects:
    """Builds and checks the objects that the hooks have made. Call it inside the strategy's scope.

    `batch_specs` are the element specs of per-replica batches by dataset ("train", "validation" or "validation/<name>",
    ...), and `recorded` the variables that the hooks made, from `recorded_variables`. Raises BadInput if the objects
    cannot give the same results on any number of replicas.
    """
    strategy = tf.distribute.get_strategy()
    rejections.check_scope(strategy, task.model, "task.create_model")
    rejections.check_scope(strategy, task.optimizer, "task.create_optimizer")
    for each in task.metrics.values():
        rejections.check_scope(strategy, each, "task.create_metrics")
    rejections.check_metrics(task.metrics)
    rejections.check_loss_objects(task.loss_objects)
    task.optimizer = build_optimizers(task.optimizer, task.model, settings.precision)
    if not (settings.evaluate_only or settings.evaluate_continuously):
        rejections.check_trainable(task.optimizer, task.model)
    choose_lazy_rows(task.model, settings.lazy_rows or ())
    rejections.check_weight_decay(task.optimizer, task.model)
    build_metrics(task, strategy, batch_specs, recorded)
    names = ResultNames(task.metrics, batch_specs)
    direction = rejections.monitor_direction(names, settings.monitor, settings.monitor_direction)
    weights = variables.model_variables(task.model)
    variables.spread_seeds(strategy, [variable for name, variable in weights.items() if variables.is_seed(name)])
    average = MovingAverage(
        variables.trainable_variables(task.model),
        # A frozen network's weights are not averaged either; it may follow another one, statistics and all.
        {name: (weights[name], layer) for name, layer in variables.statistics(task.model).items() if layer.trainable},
        settings.ema_decay,
    )
    statistics = variables.per_replica_variables(task.model)
    statistics |= {
        f"average/{name}": each for name, each in average.state.items() if name.removesuffix("/before") in statistics
    }
    return TaskObjects(
        model=task.model,
        optimizer=task.optimizer,
        metrics=task.metrics,
        names=names,
        weights=weights,
        statistics=statistics,
        average=average,
        average_statistics=variables.compile_averaging(strategy, statistics.values()),
        monitor_direction=direction,
        on_report=getattr(task, "on_report", None),
    )
