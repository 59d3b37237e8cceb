"""What the hooks of task.py returned: built before anything is traced, every variable under a name.

A task has one model and one optimizer, or dictionaries of them under the same names, such as a GAN's generator and
discriminator. `by_name` makes both the same to the rest of the engine.
"""

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput
from engine.model import replicas
from engine.model.gradients import prepare_optimizer
from engine.user_errors import first_line

# metrics as task.py keeps them: split -> name -> metric.
Metrics = dict[str, dict[str, keras.metrics.Metric]]


def by_name(objects: Any, kind: str) -> dict[str, Any]:
    """Returns `objects` if it is a dictionary, else a dictionary that holds it under `kind`."""
    return dict(objects) if isinstance(objects, Mapping) else {kind: objects}


# --- Built ------------------------------------------------------------------------------------------------------------


def build_models(model: Any, features_spec: Any) -> Any:
    """Returns the model, or the dict of models, with all variables made, those of layers used in training only too.

    Raises:
        BadInput: the model does not accept such features, or is not a keras.Model.
    """
    for name, each in by_name(model, "model").items():
        if not isinstance(each, keras.Model):
            raise BadInput(f"task.create_model returned {each!r} as {name!r}: return a keras.Model, or a dict of them")
        if each.built and isinstance(model, Mapping):
            continue  # One of several models may take what another one makes.
        try:
            with warnings.catch_warnings():
                # About layers that the next call builds. One that is never called is no harm.
                warnings.filterwarnings("ignore", message=r"`build\(\)` was called on layer")
                each(zeros(features_spec), training=False)
                if not all(layer.built for layer in replicas.layers_of(each)):
                    # A symbolic call makes variables, and assigns to none: seeds and statistics stay.
                    symbols = tf.nest.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype.name), features_spec)
                    each(symbols, training=True)
        except Exception as problem:
            raise BadInput(
                f"task.create_model returned {name!r}, which does not accept features of the shapes "
                f"{tf.nest.map_structure(lambda spec: spec.shape.as_list(), features_spec)} ({first_line(problem)}): "
                "let its first layer take what task.prepare_example returns"
            ) from problem
    return model


def build_optimizers(optimizer: Any, model: Any, precision: str) -> Any:
    """Returns the optimizer or optimizers, with variables made for what they train: the model of their name, or all.

    Variables first made inside a compiled step fail on several replicas (keras#23085), so none may be left.

    Raises:
        BadInput: an optimizer is for no model, or does what `gradients` does.
    """
    models = by_name(model, "model")
    built = {}
    for name, each in by_name(optimizer, "optimizer").items():
        if isinstance(optimizer, Mapping) and name not in models:
            raise BadInput(
                f"task.create_optimizer returned an optimizer {name!r}, and task.create_model the models "
                f"{sorted(models)}: name each optimizer after the model it trains"
            )
        trained = [models[name]] if isinstance(optimizer, Mapping) else models.values()
        built[name] = prepare_optimizer(each, precision)
        built[name].build([variable for one in trained for variable in one.trainable_variables])
        for inner in inner_optimizers(built[name]):
            prepare_optimizer(inner, "float32")  # To refuse what is refused of one alone.
    return built if isinstance(optimizer, Mapping) else built["optimizer"]


def zeros(spec: Any) -> Any:
    """Returns tensors of zeros of the shapes and dtypes of an element spec."""
    return tf.nest.map_structure(lambda leaf: tf.zeros(leaf.shape, leaf.dtype), spec)


# --- Variables by name: unique ones, in a fixed order -----------------------------------------------------------------


def model_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns every variable of every model, trained or not, seed states too, in model order."""
    return _named(by_name(model, "model"))


def optimizer_variables(optimizer: Any) -> dict[str, tf.Variable]:
    """Returns every variable of every optimizer."""
    return _named(by_name(optimizer, "optimizer"))


def metric_variables(metrics: Metrics) -> dict[str, tf.Variable]:
    """Returns every variable of the metrics."""
    return _named({f"metrics/{split}/{name}": each for split in metrics for name, each in metrics[split].items()})


def trainable_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns those of `model_variables` that training changes."""
    return _chosen(model, (each for one in by_name(model, "model").values() for each in one.trainable_variables))


def own_variables(model: Any) -> dict[str, tf.Variable]:
    """Returns those of `model_variables` that may differ between replicas."""
    return _chosen(model, replicas.own_variables(by_name(model, "model")))


def _chosen(model: Any, variables: Iterable[keras.Variable]) -> dict[str, tf.Variable]:
    chosen = {id(variable.value) for variable in variables}
    return {name: variable for name, variable in model_variables(model).items() if id(variable) in chosen}


def _named(objects: dict[str, Any]) -> dict[str, tf.Variable]:
    named: dict[str, tf.Variable] = {}
    for kind, each in objects.items():
        for variable in each.variables:
            name = unique = f"{kind}/{variable_path(variable)}"
            number = 2
            while unique in named:
                unique, number = f"{name}#{number}", number + 1
            named[unique] = inner_variable(variable)
    return named


def inner_variable(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns TensorFlow's variable; an optimizer or metric of the user's own may list such ones itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def variable_path(variable: keras.Variable | tf.Variable) -> str:
    """Returns a variable's name with those of the layers around it."""
    return variable.path if isinstance(variable, keras.Variable) else variable.name.removesuffix(":0")


# --- Numbers to report ------------------------------------------------------------------------------------------------


def learning_rates(optimizer: Any) -> dict[str, float]:
    """Returns the learning rates of the next update, as columns of metrics.csv.

    The column is "learning_rate" for one optimizer, "learning_rate/<name>" for each of several.
    """
    rates = {}
    for name, each in by_name(optimizer, "").items():
        inner = {one.name: one for one in inner_optimizers(each)} or {"": each}
        for inner_name, one in inner.items():
            # An optimizer of the user's own may refuse to say, with whatever exception.
            with contextlib.suppress(Exception):
                rate = float(keras.ops.convert_to_numpy(one.learning_rate))
                rates["/".join(filter(None, ["learning_rate", name, inner_name]))] = rate
    return rates


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns those that an optimizer such as keras.optimizers.MultiOptimizer hands the variables to; usually none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Inside a LossScaleOptimizer.
    return list(getattr(optimizer, "optimizers", []))
