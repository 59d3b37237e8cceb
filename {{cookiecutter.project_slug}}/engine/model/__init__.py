"""What a step uses and changes: models, optimizers, metrics and their variables. Imports nothing of the other rooms.

objects       builds what the hooks return, and names every variable
metrics       builds and reads the metrics, and names their results
finish        builds, checks and gathers all of it
rejections    refuses what would train wrongly without an error
gradients     micro-batches, the sum over replicas, clipping, the update
averages      the moving average of the weights
replicas      what differs between replicas: seeds and statistics
hidden_state  the variables that Keras does not list
"""

from engine.model.finish import finish_objects, set_up
from engine.model.gradients import apply_gradients, in_micro_batches
from engine.model.hidden_state import recorded_variables
from engine.model.objects import build_models

__all__ = [
    "apply_gradients",
    "build_models",
    "finish_objects",
    "in_micro_batches",
    "recorded_variables",
    "set_up",
]
