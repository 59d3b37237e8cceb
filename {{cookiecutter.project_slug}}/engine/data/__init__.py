"""From examples to batches on every replica. Imports nothing of the other rooms.

examples      the examples of a split in their order, from memory or streamed
records       examples in TFRecord files, read in any order
record_index  where the records of a file are, cached beside it
padding       pads sequences of several lengths, and cuts each batch to what it needs
preparation   calls task.prepare_example, for whole batches where possible
sets          what task.load_examples returns for a split: one set, several, or none
batches       the batches of a set, the same for any number of replicas
splits        the batches of every split, which have to go together
stacks        brings several batches at a time to the replicas
element_spec  element specs as text and JSON, tensors by name, the memory of an example
"""

from engine.data.batches import Batches
from engine.data.records import Records
from engine.data.splits import load_splits

__all__ = [
    "Batches",
    "Records",
    "load_splits",
]
