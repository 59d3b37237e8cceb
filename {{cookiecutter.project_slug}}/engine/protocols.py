"""What the engine uses of task.py, which train.py and predict.py hand over: the module itself.

The optional hooks predict_step, read_inputs and on_report are looked up where they are used.
"""

from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

Metrics = dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


class Task(Protocol):
    """The hooks of task.py, and the global objects that train.build() puts there."""

    config: Any
    model: Any  # A keras.Model, or a dict of them by name.
    optimizer: Any  # A keras.optimizers.Optimizer, or a dict of them under the models' names.
    loss_objects: dict[str, keras.losses.Loss]
    metrics: Metrics

    load_examples: Callable[..., Any]
    prepare_example: Callable[..., Any]

    def create_model(self) -> Any: ...
    def create_loss_objects(self) -> dict[str, keras.losses.Loss]: ...
    def create_optimizer(self, total_steps: int) -> Any: ...
    def train_step(self, batch: Any) -> tf.Tensor: ...
    def evaluation_step(self, split: str, batch: Any) -> tf.Tensor: ...
