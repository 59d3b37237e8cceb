"""Finishes the objects of a task: builds and checks them, and names every variable."""

import contextlib
import dataclasses
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

import engine
from engine.model import objects
from engine.model.averages import MovingAverage
from engine.model.gradients import check_loss_scale, watch_norms
from engine.model.hidden_state import HiddenState
from engine.model.metrics import ResultNames, build_metrics, metric_results, split_of
from engine.model.rejections import (
    check_hooks,
    check_loss_objects,
    check_monitor,
    check_scope,
    check_weight_decay,
    monitor_direction,
)
from engine.model.replicas import compile_averaging, is_seed, spread_seeds


@dataclasses.dataclass
class TaskObjects:
    """What training uses and changes. Made by `finish_objects`."""

    model: Any
    """The model, or a dict of models by name."""
    optimizer: Any
    """The optimizer, or a dict of them under the models' names."""
    metrics: objects.Metrics
    names: ResultNames
    """The names of the metrics' results."""
    weights: dict[str, tf.Variable]
    """Every variable of the models."""
    average: MovingAverage | None
    """The moving average of the weights, with --ema-decay."""
    average_statistics: Callable[[], None]
    """Gives all replicas the mean of the statistics that each has measured for itself."""
    hidden: HiddenState
    monitor_direction: str
    """"min" or "max": which --monitor is better."""
    norm_variables: dict[str, tf.Variable]
    """optimizer -> half the square of its latest gradients' norm. In no checkpoint."""
    on_report: Callable[..., None] | None = None
    """task.on_report, if there is one."""

    @tf.autograph.experimental.do_not_convert
    def update_average(self) -> None:
        """Moves the moving average of the weights by one step; outside the replicas, in the graph."""
        if self.average:
            self.average.update()

    def average_in_place(self) -> contextlib.AbstractContextManager[None]:
        """Puts the moving average of the weights in their place for a while, with --ema-decay."""
        return self.average.in_place() if self.average else contextlib.nullcontext()

    @property
    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        return objects.by_name(self.optimizer, "optimizer")

    def alike(self) -> dict[str, tf.Variable]:
        """Returns the variables that have one value on all replicas."""
        own = objects.own_variables(self.model)
        weights = {name: each for name, each in self.weights.items() if name not in own}
        averages = self.average.averages if self.average else {}
        averages = {f"average/{name}": each for name, each in averages.items()}
        return weights | objects.optimizer_variables(self.optimizer) | averages

    def own(self) -> dict[str, tf.Variable]:
        """Returns the variables of which each replica has a value of its own."""
        return objects.own_variables(self.model) | objects.metric_variables(self.metrics)

    def results(self, name: str) -> dict[str, float]:
        """Returns the metrics of a set as "<name>/<metric>", and resets them: the sets of a split share them."""
        results = metric_results(self.metrics, name)
        self.reset(name)
        return results

    def reset(self, name: str) -> None:
        """Resets the metrics of a set's split."""
        for metric in self.metrics[split_of(name)].values():
            metric.reset_state()

    def learning_rates(self) -> dict[str, float]:
        """Returns the learning rates of the next update, as columns of metrics.csv."""
        return objects.learning_rates(self.optimizer)

    def gradient_norms(self, strategy: tf.distribute.Strategy) -> dict[str, float]:
        """Returns the norm of each optimizer's latest gradients, as columns of steps.csv; not finite if there is none.

        They are those that engine.model.apply_gradients returned in this process's first replica.
        """
        names = {name: f"gradient_norm/{name}" for name in self.norm_variables}
        if len(names) == 1 and not isinstance(self.optimizer, Mapping):
            names = dict.fromkeys(names, "gradient_norm")
        first = {name: strategy.experimental_local_results(each)[0] for name, each in self.norm_variables.items()}
        return {names[name]: math.sqrt(2.0 * float(each)) for name, each in first.items()}

    def check_loss_scales(self, step: int) -> None:
        """Raises Diverged if the loss scale of an optimizer has fallen without end."""
        for optimizer in self.optimizers.values():
            check_loss_scale(optimizer, step)


def set_up(task: ModuleType, settings: Any) -> None:
    """Sets Keras and TensorFlow up for a build. Raises BadInput if task.py lacks a hook."""
    check_hooks(task, export=settings.export)
    if gc.get_threshold()[0] == engine.WHILE_IMPORTING:
        gc.freeze()
        gc.set_threshold(10_000)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
        tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.run_functions_eagerly(settings.eager)
    # The input's are graphs still, in which task.prepare_example runs in Python.
    warnings.filterwarnings("ignore", "Even though the `tf.config.experimental_run_functions_eagerly`")
    # ResultNames and random numbers start anew, so that one process can build the same objects twice.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy(settings.precision)


def finish_objects(
    task: ModuleType,
    settings: Any,
    batch_specs: dict[str, Any],
    made: list[weakref.ref],
    graph: Callable[[str], tf.Graph | None],
) -> TaskObjects:
    """Builds and checks what the hooks have made. Call it inside the strategy's scope.

    Args:
        task: the module task.py, with model, optimizer, loss_objects and metrics.
        settings: has precision, ema_decay, monitor and monitor_direction.
        batch_specs: set ("train", "validation" or "validation/<set>", ...) -> what one replica receives of it, as
            tf.TensorSpec.
        made: the variables that the hooks made, from `recorded_variables`.
        graph: returns the graph of a split's steps once they can be traced; None if other processes run them, or none
            does.

    Raises:
        BadInput: the objects cannot give the same numbers on any number of replicas.
    """
    strategy = tf.distribute.get_strategy()
    check_scope(strategy, task.model, "task.create_model")
    check_scope(strategy, task.optimizer, "task.create_optimizer")
    for each in task.metrics.values():
        check_scope(strategy, each, "task.create_metrics")
    check_loss_objects(task.loss_objects)
    task.optimizer = objects.build_optimizers(task.optimizer, task.model, settings.precision)
    check_weight_decay(task.optimizer, task.model)
    build_metrics(task, strategy, batch_specs, made)
    names = ResultNames(task.metrics, batch_specs)
    check_monitor(names, settings.monitor)
    weights = objects.model_variables(task.model)
    spread_seeds(strategy, [variable for name, variable in weights.items() if is_seed(name)])
    listed = weights | objects.optimizer_variables(task.optimizer) | objects.metric_variables(task.metrics)
    norms = watch_norms(objects.by_name(task.optimizer, "optimizer"))
    # The average's variables are not the hooks'.
    hidden = HiddenState(strategy, list(made), listed.values(), graph, unsaved=norms.values())
    average = None
    if settings.ema_decay:
        average = MovingAverage(objects.trainable_variables(task.model), settings.ema_decay)
    return TaskObjects(
        model=task.model,
        optimizer=task.optimizer,
        metrics=task.metrics,
        names=names,
        weights=weights,
        average=average,
        average_statistics=compile_averaging(strategy, objects.by_name(task.model, "model")),
        hidden=hidden,
        monitor_direction=monitor_direction(names, settings.monitor, settings.monitor_direction),
        norm_variables=norms,
        on_report=getattr(task, "on_report", None),
    )
