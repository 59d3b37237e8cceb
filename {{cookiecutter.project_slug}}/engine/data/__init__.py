"""From examples to batches on every replica. Imports nothing of the other subpackages.

splits           the batches of every split, by the names of its datasets; with parameter servers, of each worker's own
batches          the batches of a dataset, the same for any number of replicas
stacks           bring several batches at a time to the replicas, where compiled steps take them
examples         the examples of a dataset in their order, from memory or streamed; the options of every pipeline
records          TFRecord files, for task.load_examples to return, and the pass over them: blocks, segments, windows
record_index     where records of a file are, cached beside the run
preparation      calls task.prepare_example, for complete batches where possible; pads sequences and cuts batches
element_spec     element specs as text and JSON; tensors by name; memory and hashes of examples
"""

from engine.data.batches import Batches
from engine.data.records import Records
from engine.data.splits import Splits, load_splits
from engine.data.stacks import CompiledSteps

__all__ = ["Batches", "CompiledSteps", "Records", "Splits", "load_splits"]
