"""The objects that a step uses and changes: models, optimizers, metrics, variables. Imports no other subpackage.

objects         the objects that the hooks return, and their state
build           sets Keras up, and makes the variables of models and optimizers
rejections      rejects objects that would train wrongly without an error
variables       the variables that the hooks made, by name; those that differ between replicas
metrics         builds and reads the metrics, and names their results
traced_once     what the steps take from Python when they are traced
step            the step that is being traced: its batch, its micro-batch, its sums so far
gradients       micro-batches, the sum over replicas, clipping, the update
optimizers      makes Keras's optimizers clip and update the sum over the replicas
rows            embedding tables: reads and changes the rows that a step looks up, where that is enough
global_batch    sums over the global batch, the values of all its examples, and what would count its padding
averages        the moving average of the weights and statistics; a network that follows another
moments         the moments of BatchNormalization, over all replicas also with a mask
"""

import gc

from engine.model.averages import follow
from engine.model.global_batch import gather_batch, places_in_batch, sum_over_batch, sum_over_replicas
from engine.model.gradients import apply_gradients, replica_step
from engine.model.metrics import PythonMetric
from engine.model.objects import TaskObjects

__all__ = [
    "PythonMetric",
    "TaskObjects",
    "apply_gradients",
    "follow",
    "gather_batch",
    "places_in_batch",
    "replica_step",
    "sum_over_batch",
    "sum_over_replicas",
]

# The second half of what engine/__init__.py says about garbage.
gc.freeze()
gc.set_threshold(10_000)
