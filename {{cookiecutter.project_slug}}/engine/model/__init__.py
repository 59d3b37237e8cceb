"""The objects that a step uses and changes: models, optimizers, metrics, variables. Imports no other subpackage.

build           builds and checks the objects that the hooks return, in order
rejections      rejects objects that would train wrongly without an error
variables       the variables of the objects by name; those that differ between replicas
metrics         builds and reads the metrics, and names their results
sums            adds up in float64 what metrics count
step            the step that is being traced: its batch, its micro-batch, its sums so far
gradients       micro-batches, the sum over replicas, clipping, the update
optimizers      makes Keras's optimizers clip and update the sum over the replicas
rows            embedding tables: reads and changes the rows that a step looks up, where that is enough
global_batch    sums over the global batch, the values of all its examples, and what would count its padding
waiting         how long the steps wait for other processes
averages        the moving average of the weights and statistics; a network that follows another
moments         the moments of BatchNormalization, over all replicas also with a mask
hidden_state    the variables that Keras does not list
"""

from engine.model.averages import follow
from engine.model.build import TaskObjects, build_models, finish_objects, set_up
from engine.model.global_batch import gather_batch, places_in_batch, sum_over_batch, sum_over_replicas
from engine.model.gradients import apply_gradients, in_micro_batches
from engine.model.hidden_state import HiddenState, recorded_variables
from engine.model.step import in_one_batch
from engine.model.waiting import measure_waiting

__all__ = [
    "HiddenState",
    "TaskObjects",
    "apply_gradients",
    "build_models",
    "finish_objects",
    "follow",
    "gather_batch",
    "in_micro_batches",
    "in_one_batch",
    "measure_waiting",
    "places_in_batch",
    "recorded_variables",
    "set_up",
    "sum_over_batch",
    "sum_over_replicas",
]
