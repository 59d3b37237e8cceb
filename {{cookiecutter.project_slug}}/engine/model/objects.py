"""The objects that the hooks of task.py return, in the order in which train.build() makes them, and their state."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from engine.console import console
from engine.errors import Diverged
from engine.model import rejections, variables
from engine.model.averages import MovingAverage
from engine.model.build import build_models, build_optimizers, set_up
from engine.model.metrics import Metrics, ResultNames, build_metrics, in_float64, metric_results, split_of
from engine.model.optimizers import inner_optimizers
from engine.model.rows import choose_lazy_rows
from engine.model.traced_once import TakenFromPython, code_of_steps
from engine.model.variables import Recorder, Variables, by_name, inner_variable, is_random_state, is_seed
from engine.settings import Settings

LOWEST_LOSS_SCALE = 2.0**-10  # Gradients that still overflow float16 here are too large for any scale.


class TaskObjects:
    """The objects that the steps use and change. train.build() makes them one after the other.

    Attributes:
        recording: returns a context that records the variables that hooks make: all of them belong to the state.
        model: a keras.Model, or a dict of them by name.
        optimizer: an optimizer, or a dict of them under the models' names.
        metrics: split -> name -> metric.
        names: the names of the metrics' results.
        names_in_steps: all names in the code of the steps, also those of attributes.
        weights: every variable of the models that Keras lists, by name.
        mirrored: the variables of the state that have one value on all replicas, by name.
        per_replica: the variables of the state that may differ between replicas.
        average: averages the weights and statistics, with --ema-decay.
        monitor_direction: "min" or "max".
        on_report: task.on_report, or None.
        data_files: task.data_files, or a function that returns no files.
        source: which weights the models start with.
        user_state: JSON values and NumPy arrays that checkpoints keep; task.user_state is the same dictionary.
    """

    names: ResultNames
    names_in_steps: set[str]
    mirrored: Variables
    per_replica: Variables
    average: MovingAverage
    monitor_direction: str

    def __init__(self, task: Any, settings: Settings) -> None:
        """Sets Keras and TensorFlow up for a build. Raises BadInput if task.py lacks a hook."""
        set_up(task, settings)
        self._task, self.settings, self._recorder = task, settings, Recorder()
        self.recording = self._recorder.recording
        self.model = self.optimizer = None
        self.metrics: Metrics = {}
        self.weights: Variables = {}
        self._from_python: TakenFromPython | None = None
        self.on_report, self.data_files = getattr(task, "on_report", None), getattr(task, "data_files", list)
        self.source = "with new weights"  # Or which weights were loaded.
        self.user_state: dict[str, Any] = {}
        task.user_state = self.user_state

    # --- How they are made: inside `recording`, in this order, in the strategy's scope --------------------------------

    def build_models(self, model: Any, features_spec: Any) -> Any:
        """Returns the model, or the dict of models, with all variables made. Raises BadInput as `build_models` does."""
        self._strategy = tf.distribute.get_strategy()
        self.model = build_models(model, features_spec)
        self.weights = variables.model_variables(model)
        self._recorder.kind = "optimizer"
        return model

    def initial_weights(self) -> tuple[Variables, Variables]:
        """Returns the variables that task.create_model made, but for random states: those Keras lists, and others."""
        unlisted = self._recorder.unlisted(self.weights.values(), "model")
        listed, others = (
            {name: variable for name, variable in found.items() if not is_random_state(name)}
            for found in (self.weights, unlisted)
        )
        return listed, others

    def build_optimizers(self, optimizer: Any) -> Any:
        """Returns the optimizer or optimizers with all variables made; some of them copy the weights.

        Raises BadInput as `build_optimizers` does, or if models or optimizers were made outside the strategy's scope.
        """
        for objects, hook in ((self.model, "task.create_model"), (optimizer, "task.create_optimizer")):
            rejections.check_scope(self._strategy, objects, hook)
        self.optimizer = build_optimizers(optimizer, self.model, self.settings.precision)
        self._recorder.kind = "loss"
        return self.optimizer

    @contextlib.contextmanager
    def counting_in_float64(self) -> Iterator[None]:
        """Lets the metrics that are made inside count in float64, in which sums of millions of examples are right."""
        self._recorder.kind = "metrics"
        with in_float64():
            yield

    def finish(self, batch_specs: Mapping[str, Any]) -> None:
        """Checks the objects, makes the variables that are missing, and spreads random states over the replicas.

        `batch_specs` are the element specs of per-replica batches by dataset ("train", "validation" or
        "validation/<name>", ...). Raises BadInput if the results would depend on the number of replicas.
        """
        self.metrics = self._task.metrics
        self._check()
        self._complete_metrics(batch_specs)
        setting = self.settings.monitor, self.settings.monitor_direction
        self.monitor_direction = rejections.monitor_direction(self.names, *setting)
        self._name_others()
        rejections.check_shapes({**self.mirrored_weights, **self.per_replica_weights, **self._of_steps})
        self._spread()
        averaged = variables.trainable_variables(self.model) | variables.statistics(self.model)
        self.average = MovingAverage(averaged, self.settings.ema_decay)
        self.mirrored = self.mirrored_weights | self._of_optimizers
        self.per_replica = self.per_replica_weights | self._of_steps
        for name, average in self.average.state.items():
            state = self.per_replica if name in self.per_replica_weights else self.mirrored
            state[f"average/{name}"] = average

    def _check(self) -> None:
        """Raises BadInput for objects that would train wrongly; chooses the tables that --lazy-rows names."""
        for metrics in self.metrics.values():
            rejections.check_scope(self._strategy, metrics, "task.create_metrics")
        rejections.check_floatx()  # Again, because a hook may have changed it.
        rejections.check_metrics(self.metrics)
        self.names_in_steps = {name for code in code_of_steps(self._task) for name in code.co_names}
        rejections.check_loss_objects(self._task.loss_objects)
        if not self.settings.evaluates:
            rejections.check_float8(self.model)
        choose_lazy_rows(self.model, self.settings.lazy_rows or ())
        rejections.check_weight_decay(self.optimizer, self.model)

    def _complete_metrics(self, batch_specs: Mapping[str, Any]) -> None:
        """Makes the metrics' missing variables; lets metrics and optimizers count in one operation; names results."""
        optimizers = by_name(self.optimizer, "optimizer")
        # A model or an optimizer may be older than this build: task.py keeps it.
        listed = [*self.weights.values(), *variables.named(optimizers).values()]
        build_metrics(self._task, self._strategy, batch_specs, [*listed, *self._recorder.variables()])
        metrics = [metric for of_split in self.metrics.values() for metric in of_split.values()]
        for owner in (*metrics, *optimizers.values()):
            variables.add_in_one_operation(owner.variables)
        self.names = ResultNames(self.metrics, batch_specs)

    def _spread(self) -> None:
        """Gives each replica its own seeds; compiles the mean of what the replicas change, which evaluations use."""
        own = self.per_replica_weights
        variables.spread_seeds(self._strategy, [variable for name, variable in own.items() if is_seed(name)])
        has_replicas = self._strategy.num_replicas_in_sync > 1
        self._averaged = [variable for variable in own.values() if has_replicas and variable.dtype.is_floating]
        self._average_over_replicas = variables.compile_averaging(self._strategy, self._averaged)

    def name_weights(self, *listed: Variables) -> None:
        """Names every variable of the weights, and says which may differ between replicas.

        Optimizers change trainable weights equally on all replicas. Other weights a layer or a step may change on its
        replica. `listed` are the variables of other objects that Keras lists.
        """
        self.mirrored_weights = {name: variable for name, variable in self.weights.items() if variable.trainable}
        others = {name: variable for name, variable in self.weights.items() if name not in self.mirrored_weights}
        known = [variable for variables in (self.weights, *listed) for variable in variables.values()]
        self.per_replica_weights = others | self._recorder.unlisted(known, "model", "loss")

    def _name_others(self) -> None:
        metrics = {
            f"metrics/{split}/{name}": metric
            for split, by_metric in self.metrics.items()
            for name, metric in by_metric.items()
        }
        self._of_optimizers = variables.named(by_name(self.optimizer, "optimizer"))
        self._of_steps = variables.named(metrics)
        self.name_weights(self._of_optimizers, self._of_steps)
        known = [*self._of_optimizers.values(), *self._of_steps.values()]
        self._of_steps |= self._recorder.unlisted(known, "optimizer", "metrics")

    def finalize_layers(self) -> None:
        """Makes again what layers compute from their variables, such as the mean of a Normalization.

        Call it after the variables were assigned, and before a step is traced, which makes constants of such values.
        """
        for layer in variables.layers_of(self.model):
            own = (kind for kind in type(layer).__mro__ if not kind.__module__.startswith("keras."))
            if callable(finalize := getattr(layer, "finalize_state", None)):
                finalize()
            elif any("load_own_variables" in vars(kind) for kind in own):
                # It gives all replicas one value, and they may differ.
                with variables.given_back(self._strategy, map(inner_variable, layer.variables)):
                    store: dict[str, Any] = {}
                    layer.save_own_variables(store)
                    layer.load_own_variables(store)

    # --- How they are used --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """Gives all replicas the mean of their weights, or with --ema-decay of the averages of their weights.

        At the end all weights are as they were.
        """
        local, averages = self._strategy.experimental_local_results, self.average.averages
        with variables.given_back(self._strategy, [*self.average.variables.values(), *self._averaged]):
            for name, variable in self.average.variables.items():
                for part, average in zip(local(variable), local(averages[name]), strict=True):
                    part.assign(tf.cast(average, part.dtype))
            self._average_over_replicas()
            yield

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers, also inside a MultiOptimizer, as "learning_rate", or "learning_rate/<name>" if several."""
        optimizers = {}
        for name, outer in by_name(self.optimizer, "").items():
            for inner_name, inner in ({inner.name: inner for inner in inner_optimizers(outer)} or {"": outer}).items():
                optimizers["/".join(filter(None, ["learning_rate", name, inner_name]))] = inner
        return optimizers

    def note_tracing(self, *, has_graphs: bool) -> None:
        """Call it when the steps have been traced. Raises BadInput if a metric keeps a tensor of a graph."""
        rejections.check_kept_tensors(self.metrics)
        self._from_python = TakenFromPython(self._task) if has_graphs else None

    def report_changes_of_python(self) -> None:
        """Prints what has changed in Python since the steps were traced, or since the last call."""
        for text in self._from_python.changes() if self._from_python else ():
            console.print(text)

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
                    raise Diverged(
                        f"the loss scale at step {step} is down to {scale:g}: no scale makes the gradients finite"
                    )
