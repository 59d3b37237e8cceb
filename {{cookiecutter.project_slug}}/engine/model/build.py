"""Sets Keras up, and makes the variables of models and optimizers that do not have all of them yet."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from engine.errors import BadInput, first_line
from engine.model import rejections
from engine.model.metrics import zeros
from engine.model.moments import moments_of_all
from engine.model.optimizers import inner_optimizers, prepare_optimizer
from engine.model.rows import look_up
from engine.model.variables import by_name, layers_of
from engine.settings import Settings

# Names of variables in a checkpoint start with these, or with the name of a model.
RESERVED = {"average", "hidden", "metrics", "optimizer"}


def set_up(task: Any, settings: Settings) -> None:
    """Sets Keras and TensorFlow up for a build. Raises BadInput if task.py lacks a hook."""
    rejections.check_hooks(task, export=settings.export)
    rejections.check_floatx()
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
    keras.layers.BatchNormalization._moments = moments_of_all
    keras.layers.Embedding.call = look_up


def build_models(model: Any, features_spec: Any) -> Any:
    """Returns the model, or the dict of models, with all variables made, also those of layers used in training only.

    A model that has all its variables need not accept the features: a step may call it on something made of them, and
    one of several models may take the outputs of another. Raises BadInput if one is not a keras.Model, or has no
    variables yet and does not accept such features.
    """
    if isinstance(model, Mapping) and (reserved := RESERVED & model.keys()):
        raise BadInput(f"task.create_model returned a model {reserved.pop()!r}: call it otherwise; checkpoints use it")
    for name, network in by_name(model, "model").items():
        if not isinstance(network, keras.Model):
            raise BadInput(
                f"task.create_model returned {network!r} as {name!r}: return a keras.Model, or a dict of them"
            )
        if network.built and isinstance(model, Mapping):
            continue
        is_complete = network.built and all(layer.built for layer in layers_of(network))
        try:
            with warnings.catch_warnings():
                # It warns about layers that the next call builds, or that no step calls.
                warnings.filterwarnings("ignore", message=r"`build\(\)` was called on layer")
                network(zeros(features_spec), training=False)
                if not all(layer.built for layer in layers_of(network)):
                    # A symbolic call makes variables and assigns to none: seeds and statistics stay.
                    symbols = tf.nest.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype.name), features_spec)
                    network(symbols, training=True)
        except Exception as problem:
            if is_complete:
                continue
            shapes = tf.nest.map_structure(lambda spec: spec.shape.as_list(), features_spec)
            raise BadInput(
                f"task.create_model returned {name!r}, which does not accept features of the shapes {shapes} "
                f"({first_line(problem)}): make its first layer accept the features of task.prepare_example, or call "
                "the model once on what the steps give it"
            ) from problem
    return model


def build_optimizers(optimizer: Any, model: Any, precision: str) -> Any:
    """Returns the optimizer or optimizers with all variables made; each trains the model of its name, or all models.

    Variables first made inside a compiled step fail on several replicas (keras#23085), so none may be missing.
    Raises BadInput if an optimizer is for no model, or clips, accumulates, averages or scales by itself.
    """
    models = by_name(model, "model")
    built = {}
    for name, made in by_name(optimizer, "optimizer").items():
        if isinstance(optimizer, Mapping) and name not in models:
            raise BadInput(
                f"task.create_optimizer returned an optimizer {name!r}, and task.create_model the models "
                f"{sorted(models)}: name each optimizer after its model, or use one keras.optimizers.MultiOptimizer"
            )
        trained = [models[name]] if isinstance(optimizer, Mapping) else models.values()
        built[name] = prepare_optimizer(made, precision)
        built[name].build([variable for network in trained for variable in network.trainable_variables])
        for inner in inner_optimizers(built[name]):
            prepare_optimizer(inner, "float32")  # Rejects the same arguments.
    return built if isinstance(optimizer, Mapping) else built["optimizer"]
